"""The reader that single files and directories of chunks share: one holder of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.full_state.binding import FullState, bind, unbound
from lightning_elastic_zero.formats.full_state.self_description import Members, describe_alone
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import (
    COMPARED_ELEMENTS,
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    StoredTensors,
)
from lightning_elastic_zero.formats.shared_tensors import storage_location
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Fragment, Transfer, spans
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import Scalar

NO_STATE = "optimizer state"
"""What ``SourceInfo.lacks`` says of weights alone."""


class FullStateReader(CheckpointReader):
    """A checkpoint of whole tensors by name, read by ranges: no rank reads the others' parts."""

    def __init__(self, path: Path, files: ForeignFiles, tensors: StoredTensors) -> None:
        """Keep the files.

        Args:
            path: the checkpoint's, for messages.
            files: of ``torch.save``.
            tensors: what has the tensors of ``FullState``.
        """
        self.files = files
        self._path = path
        self._tensors = tensors

    def _take(self, full_state: FullState, live: Manifest | None = None) -> None:
        """Describe what was found, in the words of a live model where there is one.

        Raises:
            CheckpointMismatchError: a weight that is tied here has two values.
            UnsupportedError: a hyperparameter is no plain data.
        """
        bound = unbound(full_state) if live is None else bind(full_state, live)
        for first, other in bound.ties:
            if not self._is_same(full_state.weights[first], full_state.weights[other]):
                msg = (
                    f"{self._path}: {first} and {other} are one tied weight here, and have "
                    "different values in the checkpoint: untie them, or resume from a checkpoint "
                    "of this model"
                )
                raise CheckpointMismatchError(msg)
        self._weights = full_state.weights
        self._bound = bound
        self._scalars: Mapping[str, dict[str, Scalar]] | None = None
        self.manifest = bound.manifest
        without_state = (NO_STATE,) if bound.manifest.weights_only else ()
        self.info = SourceInfo(
            kind=full_state.kind,
            lacks=("RNG states", *without_state, *full_state.lacks),
            hyperparameters=any(g.hyperparameters for g in bound.manifest.groups),
            has_counters="global_step" in full_state.trainer,
            unmatched=bound.unmatched,
            incomplete=full_state.incomplete,
        )

    def bind_alone(self) -> None:
        """Match the checkpoint with its own weights; positions where their shapes tell."""
        members, why = self._members_alone()
        self.bind(describe_alone(self._weights, members))
        if why:
            self.info = replace(self.info, unmatched=why)

    def _members_alone(self) -> tuple[Members, str]:
        """Return the members of the optimizer's groups, or none, and why."""
        raise NotImplementedError

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors hold the same bits, compared a bounded part at a time."""
        if storage_location(one) == storage_location(other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return all(
            torch.equal(self._bits(one, start, stop), self._bits(other, start, stop))
            for start, stop in spans(0, one.numel(), COMPARED_ELEMENTS)
        )

    def _bits(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        found = torch.empty(stop - start, dtype=tensor.dtype)
        self._tensors.read_into([(found, StoredRun(tensor, start, stop))])
        return found.view(torch.uint8)

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of a weight or of a state lies."""
        if key == WEIGHT:
            tensor = self._weights[self._bound.weight_of[transfer.name]]
        else:
            tensor = self._bound.states[transfer.name][key]
        return self._tensors, StoredRun(tensor, transfer.start, transfer.stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of a parameter."""
        if self._scalars is None:
            # All at once: each by itself would read a chunk of the file for a few bytes.
            kinds = {k.name: k.kind for g in self.manifest.groups for k in g.state}
            self._scalars = self._tensors.load_tree(
                {
                    name: {k: v for k, v in state.items() if kinds.get(k) == "scalar"}
                    for name, state in self._bound.states.items()
                }
            )
            for group in self.manifest.groups:
                held = group.hyperparameters.keys()
                if held >= FUSED_ADAM_KEYS and "amsgrad" not in held:
                    share_last_step([self._scalars[n] for n in group.names if n in self._scalars])
        return self._scalars.get(at.name, {})

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return buffers, and all that is neither weights nor optimizer state."""
        del rank, world_size
        return SharedState(
            buffers=self.module_buffers(),
            client_state=self.load_client_state(),
            loss_scaler={},
            lr_scheduler=None,
            extra_states=self.load_extra_states(),
        )

    def load_extra_states(self) -> dict[str, Any]:
        """Return what modules had beside weights and buffers, where the format is known to."""
        return {}

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers."""
        held = {name: self._weights[name] for name in self.manifest.module_buffers}
        return self._tensors.load_tree(held)  # type: ignore[no-any-return]

    def load_client_state(self) -> dict[str, Any]:
        """Return all that is neither weights nor optimizer state."""
        raise NotImplementedError


FUSED_ADAM_KEYS = frozenset({"betas", "bias_correction", "step"})
"""What a parameter group of DeepSpeed's FusedAdam has. Others that have all of these (its
DeepSpeedCPUAdam) have ``amsgrad`` too."""


def share_last_step(scalars: Sequence[dict[str, Scalar]]) -> None:
    """Set one step count for the parameters of a group, where only the last one has counted.

    So does DeepSpeed's FusedAdam without ZeRO, which goes by that one for all of them
    (``deepspeed/ops/adam/fused_adam.py``). Its counts are Python's, torch's are tensors.

    Args:
        scalars: of each parameter in the optimizer's order; changed in place.
    """
    counted = [state for state in scalars if type(state.get("step")) is int]
    if len(counted) < len(scalars) or not counted:
        return
    *others, last = [int(state["step"] or 0) for state in counted]
    if len(set(others)) == 1 and others[0] < last:
        for state in counted:
            state["step"] = last
