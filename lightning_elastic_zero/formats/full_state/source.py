"""Reads single files of ``torch.save``: Lightning's (DDP, FSDP full, consolidated), or weights.

The file's tree is ``{"state_dict": {name: tensor}, "optimizer_states": [...], ...}``, or names and
tensors alone. All tensors are whole; they are read by ranges, so that no rank reads the others'
parts. Who reads what of them is worked out with the live model (``whole``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed.constants import OPTIMIZER
from lightning_elastic_zero.formats.full_state.binding import (
    AVERAGING,
    CURRENT,
    NO_STATE,
    BoundState,
    FullState,
    bind,
    progress_of,
    refuse_untied,
    same_bits,
    unbound,
    writer_of,
)
from lightning_elastic_zero.formats.full_state.torch_optimizer import is_optimizer
from lightning_elastic_zero.formats.open_files import foreign_files
from lightning_elastic_zero.formats.reader import WEIGHT, SharedState, SourceInfo
from lightning_elastic_zero.formats.shared_tensors import storage_location
from lightning_elastic_zero.formats.source import (
    COMPARED_ELEMENTS,
    NamedRun,
    file_list_digest,
)
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Fragment, Layout, Transfer, spans
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.partition import frozen_partition
from lightning_elastic_zero.storage import ignore_progress
from lightning_elastic_zero.tensor_state import Scalar

WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"


class SingleFileSource:
    """A file of ``torch.save`` that holds a whole model (``Source``)."""

    def __init__(
        self,
        path: Path,
        *,
        allow_pickle: bool = False,
        on_progress: Callable[[], None] = ignore_progress,
    ) -> None:
        """Understand a file from its index.

        Raises:
            CheckpointFormatError: it is not of ``torch.save``, is damaged, or holds no model.
            UnsupportedError: it needs a class that is not allowed, or holds tensors of which no
                ranges can be read.
        """
        self.files = foreign_files(path.parent, allow_pickle=allow_pickle, on_progress=on_progress)
        self._path = path
        tree = self.files.tree(path.name)
        weights, self._rest = _parts(tree, path)
        self._weights = _checked(weights, path)
        self._average = _checked(tree[WEIGHTS], path) if CURRENT in self._rest else None
        self._scalars: dict[str, Mapping[str, Scalar]] | None = None
        self._full_state = FullState(
            weights=self._weights,
            optimizers=self._optimizers(tree),
            save_id=file_list_digest(path.parent, [path.name]),
            progress=progress_of(self._rest),
            writer=writer_of(self._rest),
        )
        self._take(unbound(self._full_state))

    def _optimizers(self, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the optimizers' state dicts: hyperparameters with values, states without."""
        found = tree.get(OPTIMIZERS) if WEIGHTS in tree else None
        return [
            {
                "state": saved["state"],
                "param_groups": self.files.load(self._path.name, list(saved["param_groups"])),
            }
            for saved in found or ()
            if is_optimizer(saved)
        ]

    def _take(self, bound: BoundState) -> None:
        self._bound = bound
        self.manifest: Manifest = bound.manifest
        lacks = ["RNG states", *([NO_STATE] if bound.manifest.weights_only else [])]
        kind = "single file of torch.save"
        if self._average is not None:
            taken = "the average" if self._weights is self._average else "the trained weights"
            kind += f" with averaged weights (taken: {taken})"
        self.found = SourceInfo(
            kind=kind,
            lacks=tuple(lacks),
            hyperparameters=any(g.hyperparameters for g in bound.manifest.groups),
            progress="global_step" in self._rest,
            unmatched=bound.unmatched,
        )
        self._frozen = frozen_partition(((p.name, p.numel) for p in bound.manifest.frozen), 1)

    def names(self) -> Sequence[str]:
        """Return the one file."""
        return [self._path.name]

    def layout(self) -> Layout:
        """Which parameters are in it whole: one holder has all."""
        return self.manifest.layout()

    def frozen_layout(self) -> Layout:
        """Which weights that no optimizer owns are in it whole."""
        return self._frozen

    def check_all(self) -> None:
        """Do nothing more: there is one file, and it has been understood."""

    def bind(self, live: Manifest) -> None:
        """Find out what is a weight, a buffer, an alias, and whose each optimizer state is.

        An evaluation is of the average, where there is one, as with Lightning's own strategies.

        Raises:
            CheckpointMismatchError: a weight that is tied here has two values in the file.
            UnsupportedError: a hyperparameter is no plain data.
        """
        if self._average is not None and not live.groups:
            self._weights = self._average
            self._full_state = replace(self._full_state, weights=self._weights)
        bound = bind(self._full_state, live)
        for first, other in bound.ties:
            if not self._same(self._weights[first], self._weights[other]):
                refuse_untied(self._path, first, other)
        self._take(bound)

    def _same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors hold the same, a bounded part at a time."""
        if storage_location(one) == storage_location(other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        file = self.files.get(self._path.name)
        flats = one.view(-1), other.view(-1)
        for start, stop in spans(0, one.numel(), COMPARED_ELEMENTS):
            parts = [file.load(flat[start:stop]) for flat in flats]
            if not same_bits(*parts):
                return False
        return True

    def locate(self, key: str, transfer: Transfer) -> NamedRun:
        """Return where a run of a weight or of a state lies."""
        if key == WEIGHT:
            tensor = self._weights[self._bound.weight_of[transfer.name]]
        else:
            tensor = self._bound.states[transfer.name][key]
        run = StoredRun(tensor.detach().view(-1), transfer.start, transfer.stop)
        return self._path.name, run

    def locate_rounded(self, transfer: Transfer) -> NamedRun | None:
        """Return None: there are no other weights beside these."""
        del transfer
        return None

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of a parameter."""
        if self._scalars is None:
            # All at once: each by itself would read a chunk of the file for a few bytes.
            kinds = {k.name: k.kind for g in self.manifest.groups for k in g.state}
            self._scalars = self.files.load(
                self._path.name,
                {
                    name: {k: v for k, v in state.items() if kinds.get(k) == "scalar"}
                    for name, state in self._bound.states.items()
                },
            )
        return self._scalars.get(at.name, {})

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return buffers, and all that is neither weights nor optimizer state."""
        del rank, world_size
        held = {name: self._weights[name] for name in self.manifest.module_buffers}
        return SharedState(
            buffers=self.files.load(self._path.name, held),
            client_state=self.files.load(self._path.name, self._rest),
            loss_scaler={},
            lr_scheduler=None,
        )


def _parts(tree: object, path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Part a tree into the weights, and all that is neither weights nor optimizer state.

    Raises:
        CheckpointFormatError: it holds no weights.
    """
    if not isinstance(tree, Mapping):
        _refuse(path, f"holds a {type(tree).__name__}, not a dict with a `{WEIGHTS}`")
    weights = tree.get(WEIGHTS)
    if isinstance(weights, Mapping):
        if not weights:
            _refuse(path, f"has an empty `{WEIGHTS}`: its weights were saved elsewhere, or not")
        if isinstance(current := tree.get(CURRENT), Mapping) and AVERAGING in tree:
            # The optimizer's state is that of the trained weights; the average, and what else it
            # keeps, is the callback's, which looks for all three.
            rest = {k: v for k, v in tree.items() if k not in (CURRENT, OPTIMIZERS)}
            return current, {**rest, CURRENT: {}}
        return weights, {k: v for k, v in tree.items() if k not in (WEIGHTS, OPTIMIZERS)}
    if OPTIMIZER in tree or "param_shapes" in tree:
        _refuse(path, "is one file of DeepSpeed's: pass the checkpoint's directory")
    if tree and all(isinstance(tensor, torch.Tensor) for tensor in tree.values()):
        return tree, {}
    entries = ", ".join(sorted(map(repr, tree))[:10])
    return _refuse(path, f"has no `{WEIGHTS}` with the model's weights; its entries are {entries}")


def _refuse(path: Path, what: str) -> NoReturn:
    msg = (
        f"{path} {what}. A single file has to be Lightning's, or a dict of names and tensors: "
        "resume from another checkpoint"
    )
    raise CheckpointFormatError(msg)


def _checked(weights: Mapping[Any, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the weights, if each is a tensor of which ranges can be read.

    Raises:
        UnsupportedError: one is not.
    """
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            what = f"a {type(tensor).__name__}"
        elif tensor.layout != torch.strided or not tensor.is_contiguous():
            what = f"a tensor of layout {tensor.layout} that is not contiguous"
        elif not isinstance(name, str):
            what = "a tensor that is named by no string"
        else:
            continue
        msg = (
            f"{path}: {name!r} is {what}, and only contiguous tensors are read: save the model "
            "again without it, or call .contiguous() on it before"
        )
        raise UnsupportedError(msg)
    return {name: tensor.detach() for name, tensor in weights.items()}
