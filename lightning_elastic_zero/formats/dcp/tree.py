"""The model and the optimizer in a directory's tree: recognised by content, not by names.

The metadata lists leaves with their paths. A subtree with ``param_groups`` is an optimizer; one
with tensors right below it may be a model. Which of several is the model, the live one tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointMismatchError
from lightning_elastic_zero.formats.tree_path import TreePath, format_tree_path
from lightning_elastic_zero.manifest import Manifest

GROUPS, STATE = "param_groups", "state"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry of a directory."""

    key: str
    """Its name in the metadata."""
    path: TreePath
    """Where it was in the tree that was saved."""
    tensor: torch.Tensor | None
    """Shape and type, without values; None: it is an object."""


@dataclass(frozen=True, slots=True)
class OptimizerLeaves:
    """An optimizer's leaves, by their paths below ``state`` and ``param_groups``."""

    state: list[tuple[TreePath, Leaf]] = field(default_factory=list)
    groups: list[tuple[TreePath, Leaf]] = field(default_factory=list)
    flattened: bool = False
    """Paths are strings with dots, and hyperparameters are kept by parameter
    (``flatten_optimizer_state_dict``)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory's leaves, sorted."""

    models: Mapping[TreePath, Mapping[str, torch.Tensor]]
    """Subtrees with tensors right below them, by their names."""
    optimizers: Mapping[TreePath, OptimizerLeaves]
    rest: tuple[Leaf, ...]
    """All that is in no optimizer: the models' leaves too."""


def leaves_of(metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> list[Leaf]:
    """List the leaves, in the order in which they were saved where that is known.

    The entries themselves are in the order of writing, which ranks share out by load. What the
    planner noted is in the order of the tree.
    """
    paths: Mapping[str, Any] = metadata.planner_data or {}
    entries = metadata.state_dict_metadata
    keys = [key for key in paths if key in entries]
    keys += [key for key in entries if key not in paths]
    return [Leaf(key, tuple(paths.get(key, (key,))), tensors.get(key)) for key in keys]


def knows_order(metadata: Metadata) -> bool:
    """Whether the order in which the leaves were saved is known."""
    return set(metadata.state_dict_metadata) <= set(metadata.planner_data or {})


def sort_leaves(leaves: Iterable[Leaf]) -> Tree:
    """Find the optimizers, and what may be models."""
    leaves = list(leaves)
    optimizers: dict[TreePath, OptimizerLeaves] = {}
    for leaf in leaves:
        if (found := _groups_prefix(leaf.path)) is not None:
            prefix, flattened = found
            optimizers.setdefault(prefix, OptimizerLeaves(flattened=flattened))
    models: dict[TreePath, dict[str, torch.Tensor]] = {}
    rest = []
    for leaf in leaves:
        if not _put_into(optimizers, leaf):
            rest.append(leaf)
            if leaf.tensor is not None and isinstance(leaf.path[-1], str):
                models.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = leaf.tensor
    return Tree(models, optimizers, tuple(rest))


def _groups_prefix(path: TreePath) -> tuple[TreePath, bool] | None:
    """Return the optimizer's place, if a leaf is one of its hyperparameters, and its manner."""
    for index, part in enumerate(path[:-1]):
        if part == GROUPS and isinstance(path[index + 1], int):
            return path[:index], False
    if str(path[-1]).startswith(f"{GROUPS}."):
        return path[:-1], True
    return None


def _put_into(optimizers: Mapping[TreePath, OptimizerLeaves], leaf: Leaf) -> bool:
    """Add a leaf to its optimizer's, if it has one."""
    for length in range(len(leaf.path)):
        prefix, below = leaf.path[:length], leaf.path[length:]
        if (optimizer := optimizers.get(prefix)) is None:
            continue
        if optimizer.flattened:
            kind, _, name = str(below[0]).partition(".")
            below = (kind, name)
        if below[0] in (STATE, GROUPS):
            into = optimizer.state if below[0] == STATE else optimizer.groups
            into.append((below[1:], leaf))
            return True
    return False


def choose_model(tree: Tree, live: Manifest, where: Path) -> TreePath:
    """Return the subtree that holds the live model's parameters.

    Raises:
        CheckpointFormatError: there are no tensors.
        CheckpointMismatchError: several subtrees hold them all; or none does, and there are
            several.
    """
    if not tree.models:
        msg = f"{where} holds no tensors: it is no checkpoint of a model"
        raise CheckpointFormatError(msg)
    wanted = [{p.name, *p.aliases} for p in live.parameters]
    held = {
        path: sum(not names.isdisjoint(leaves) for names in wanted)
        for path, leaves in tree.models.items()
    }
    fitting = [path for path, count in held.items() if count == len(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    if len(held) == 1:
        return next(iter(held))
    listed = ", ".join(
        f"{format_tree_path(path)} ({count} of {len(wanted)})" for path, count in held.items()
    )
    what = "several of them hold" if fitting else "none of them holds"
    msg = (
        f"{where} has tensors in {listed}, and {what} all parameters of this model: resume from a "
        "checkpoint of one model"
    )
    raise CheckpointMismatchError(msg)


def largest_model(tree: Tree) -> TreePath:
    """Return the subtree with the most tensors; the top where there is none."""
    return max(tree.models, key=lambda path: len(tree.models[path]), default=())
