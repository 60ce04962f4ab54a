"""Reads single files of ``torch.save``: Lightning's (DDP, FSDP full, consolidated), or weights.

The file's tree is ``{"state_dict": {name: tensor}, "optimizer_states": [...], ...}``, or a dict of
names and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import FP32_STAGE_3, OPTIMIZER, OURS
from lightning_elastic_zero.formats.full_state import AVERAGING, CURRENT, FullState, FullStateReader
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import file_list_digest, is_extra_state
from lightning_elastic_zero.formats.torch_optimizer import (
    by_position,
    is_optimizer,
)
from lightning_elastic_zero.formats.torch_read import is_dense

KIND = "single file of torch.save"

WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"

# Files of other software may also have an entry ``optimizer_state_dict``.
_OF_A_SHARD = {"ds_version", "ds_config", FP32_STAGE_3, OURS}


class SingleFileReader(FullStateReader):
    """A file of ``torch.save`` with a whole model."""

    def __init__(self, path: Path, files: ForeignFiles) -> None:
        self._file = files.get(path.name)
        super().__init__(path, files, self._file)
        tree = self._file.tree
        weights, trainer = _parts(tree, path)
        self._extra_states = {n: state for n, state in weights.items() if is_extra_state(str(n))}
        weights = _checked(weights, path)
        self._average = _checked(tree[WEIGHTS], path) if CURRENT in trainer else None
        averaged = " with averaged weights (taken: the trained weights)"
        self._full_state = FullState(
            weights=weights,
            optimizers=self._optimizers(tree),
            save_id=file_list_digest(path.parent, [path.name]),
            trainer=trainer,
            kind=f"{KIND}{'' if self._average is None else averaged}",
        )
        self._take(self._full_state)

    def _optimizers(self, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = tree.get(OPTIMIZERS) if WEIGHTS in tree else None
        return [
            {
                "state": saved["state"],
                "param_groups": self._file.load_tree(list(saved["param_groups"])),
            }
            for saved in found or ()
            if is_optimizer(saved)
        ]

    def names(self) -> Sequence[str]:
        return [self._path.name]

    def bind(self, live: Manifest) -> None:
        """Match the file with a live model.

        An evaluation uses averaged weights if the file has them, as with Lightning's strategies.
        """
        if self._average is not None and not live.groups:
            kind = f"{KIND} with averaged weights (taken: the average)"
            self._full_state = replace(self._full_state, weights=self._average, kind=kind)
        self._take(self._full_state, live)

    def load_client_state(self) -> dict[str, Any]:
        """Return the trainer's state."""
        found: dict[str, Any] = self._file.load_tree(self._full_state.trainer)
        return found

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        optimizers = self._full_state.optimizers
        if len(optimizers) != 1 or not by_position(optimizers[0]):
            return None
        state = optimizers[0]["state"]
        held = {key: value for key, value in state.items() if not isinstance(key, int)}
        found: dict[Any, Any] = self._file.load_tree(held)
        return found

    def load_extra_states(self) -> dict[str, Any]:
        """Return the results of modules' ``get_extra_state``."""
        found: dict[str, Any] = self._file.load_tree(self._extra_states)
        return found


def _parts(tree: object, path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Split a tree into the weights and the trainer's state."""
    if not isinstance(tree, Mapping):
        _refuse(path, f"holds a {type(tree).__name__}, not a dict with a `{WEIGHTS}`")
    weights = tree.get(WEIGHTS)
    if isinstance(weights, Mapping):
        if not weights:
            _refuse(path, f"has an empty `{WEIGHTS}`: its weights were saved elsewhere, or not")
        if isinstance(current := tree.get(CURRENT), Mapping) and AVERAGING in tree:
            # The optimizer state belongs to the trained weights. The callback reads the average
            # and looks for all three entries.
            rest = {k: v for k, v in tree.items() if k not in (CURRENT, OPTIMIZERS)}
            return current, {**rest, CURRENT: {}}
        return weights, {k: v for k, v in tree.items() if k not in (WEIGHTS, OPTIMIZERS)}
    if "param_shapes" in tree or (OPTIMIZER in tree and _OF_A_SHARD & tree.keys()):
        _refuse(path, "is one file of DeepSpeed's: pass the checkpoint's directory")
    if tree and all(isinstance(tensor, torch.Tensor) for tensor in tree.values()):
        return tree, {}
    entries = ", ".join(sorted(map(repr, tree))[:10]) or "none"
    what = f"has no `{WEIGHTS}` with the model's weights; its entries are {entries}"
    if names := [name for name, value in tree.items() if _is_weights(value)]:
        what += (
            f", of which {names[0]!r} holds names and tensors: torch.save(torch.load({path.name!r})"
            f"[{names[0]!r}], 'weights.pt') writes them as a file that is read"
        )
    return _refuse(path, what)


def _is_weights(value: object) -> bool:
    if not (isinstance(value, Mapping) and value):
        return False
    return all(isinstance(tensor, torch.Tensor) for tensor in value.values())


def _refuse(path: Path, what: str) -> NoReturn:
    msg = (
        f"{path} {what}. A single file has to be Lightning's, or a dict of names and tensors: "
        "resume from another checkpoint"
    )
    raise CheckpointFormatError(msg)


def _checked(weights: Mapping[Any, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return weights and buffers."""
    weights = {name: tensor for name, tensor in weights.items() if not is_extra_state(str(name))}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            what = f"a {type(tensor).__name__}"
        elif not is_dense(tensor):
            what = f"a tensor of layout {tensor.layout} with gaps, or elements that share a place"
        elif not isinstance(name, str):
            what = "a tensor that is named by no string"
        else:
            continue
        msg = (
            f"{path}: {name!r} is {what}, and only tensors without gaps are read: save the model "
            "again without it, or call .contiguous() on it before"
        )
        raise UnsupportedError(msg)
    return {name: tensor.detach() for name, tensor in weights.items()}
