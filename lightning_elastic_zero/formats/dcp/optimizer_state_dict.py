"""A directory's optimizer as a torch state dict: hyperparameters with values, states without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.dcp.chunks import Chunks
from lightning_elastic_zero.formats.dcp.tree import Leaf, OptimizerLeaves
from lightning_elastic_zero.formats.full_state.self_description import (
    Members,
    describe_alone,
    members_of,
)
from lightning_elastic_zero.formats.full_state.torch_optimizer import MEMBERS
from lightning_elastic_zero.formats.reader import FRESH_OPTIMIZER_HINT
from lightning_elastic_zero.formats.tree_path import TreePath
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import canonical_repr

StateDict = dict[str, Any]


def state_dict_of(
    leaves: OptimizerLeaves, chunks: Chunks, live: Manifest, names: Iterable[str]
) -> StateDict:
    """Return the state dict that was saved.

    Args:
        leaves: the optimizer's.
        chunks: the directory's data; objects, which are small, are read.
        live: what it is to be loaded into.
        names: the saved model's.

    Raises:
        CheckpointMismatchError: hyperparameters were kept by parameter, and differ within a group.
    """
    values = chunks.values_of(leaf for _, leaf in leaves.groups)
    states = chunks.values_of(leaf for _, leaf in leaves.state if leaf.tensor is None)
    if leaves.flattened:
        named = _by_name(leaves.state, states, names)
        groups = _groups_by_name(_by_name(leaves.groups, values, names), named, live)
        return {"state": named, "param_groups": groups}
    state: dict[Any, StateDict] = {}
    for path, leaf in leaves.state:
        if len(path) > 1:
            key = ".".join(map(str, path[1:]))
            state.setdefault(path[0], {})[key] = states.get(leaf.key, leaf.tensor)
    numbered: dict[Any, StateDict] = {}
    for path, leaf in leaves.groups:
        numbered.setdefault(path[0], {})[".".join(map(str, path[1:]))] = values[leaf.key]
    groups = [{"params": [], **numbered[index]} for index in sorted(numbered)]
    return {"state": _as_the_groups_say(state, groups), "param_groups": groups}


def members_alone(
    leaves: OptimizerLeaves, chunks: Chunks, weights: Mapping[str, torch.Tensor]
) -> Members:
    """Return the members of the groups, where no live model has them.

    Where hyperparameters are kept by parameter, those that have the same ones make a group.

    Raises:
        CheckpointMismatchError: positions, or names, could mean several parameters, or none.
    """
    if not leaves.flattened:
        nobody = describe_alone({}, ())
        return members_of(state_dict_of(leaves, chunks, nobody, weights), weights)
    values = chunks.values_of(leaf for _, leaf in leaves.groups)
    alike: dict[str, list[str]] = {}
    for name, its_fields in _by_name(leaves.groups, values, weights).items():
        fields = {key: value for key, value in its_fields.items() if key not in MEMBERS}
        alike.setdefault(canonical_repr(fields, name), []).append(name)
    return tuple(map(tuple, alike.values()))


def _as_the_groups_say(state: Mapping[Any, Any], groups: list[StateDict]) -> dict[Any, Any]:
    """Return positions as the numbers that they were: torch writes each key of a dict as text."""
    numbers = {str(key): key for g in groups for key in g["params"] if isinstance(key, int)}
    return {numbers.get(key, key): value for key, value in state.items()}


def _by_name(
    leaves: list[tuple[TreePath, Leaf]], values: Mapping[str, Any], names: Iterable[str]
) -> dict[str, StateDict]:
    """Split ``<parameter>.<key>``: no parameter's name, with a dot, begins another one's."""
    known = set(names)
    found: dict[str, StateDict] = {}
    for path, leaf in leaves:
        parts = str(path[0]).split(".")
        for length in range(1, len(parts)):
            name, key = ".".join(parts[:length]), ".".join(parts[length:])
            if name in known:
                break
        else:
            name, _, key = str(path[0]).rpartition(".")
        found.setdefault(name, {})[key] = values.get(leaf.key, leaf.tensor)
    return found


def _groups_by_name(
    held: Mapping[str, StateDict], state: Mapping[str, StateDict], live: Manifest
) -> list[StateDict]:
    """Return the live groups, with the hyperparameters that all their members were saved with.

    Raises:
        CheckpointMismatchError: members of a group were saved with different ones.
    """
    canonical = {n: p.name for p in live.parameters for n in (p.name, *p.aliases)}
    index_of = {name: index for index, g in enumerate(live.groups) for name in g.names}
    groups: list[StateDict] = [{"params": []} for _ in live.groups]
    for name, its_fields in held.items():
        index = index_of.get(canonical.get(name, name))
        if index is None:
            if name in state:  # trained when it was saved: it has to be told of as such
                groups[0]["params"].append(name)
            continue
        fields = {key: value for key, value in its_fields.items() if key not in MEMBERS}
        group = groups[index]
        have = {key: value for key, value in group.items() if key != "params"}
        if group["params"] and canonical_repr(have, name) != canonical_repr(fields, name):
            msg = (
                f"{name} and {group['params'][0]} are in one parameter group here, and were saved "
                f"with the hyperparameters {fields} and {have}: configure the groups of the run "
                f"that was saved, or {FRESH_OPTIMIZER_HINT}"
            )
            raise CheckpointMismatchError(msg)
        group.update(fields)
        group["params"].append(name)
    return groups
