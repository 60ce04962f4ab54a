"""What belongs to the last optimizer step, while a window of micro-batches is under way.

Weights change at optimizer steps; buffers, random numbers and loaders at every micro-batch. A
checkpoint taken inside a window goes back to the last step, so it needs theirs of that moment.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_elastic_zero.data_progress import collect_rng_states
from lightning_elastic_zero.trainer.dataloaders import Stateful, elastic_sampler_of
from lightning_elastic_zero.trainer.lightning_internals import (
    data_fetcher,
    loader_state_dicts,
    training_loaders,
)


@dataclass(frozen=True, slots=True)
class StepState:
    """Random numbers and buffers, as they were between two steps."""

    random: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor]
    """Copies, by the names that the module's ``named_buffers`` gives."""
    loaders: list[Any]
    """States of the training loaders that keep their own."""

    @classmethod
    def of(cls, module: nn.Module, loaders: list[Any], device: torch.device) -> StepState:
        """Copy what is there now."""
        buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        return cls(collect_rng_states(device), buffers, loaders)


class LoaderStates:
    """The states of loaders that keep their own, as of the batches that were trained on.

    Of data without a length Lightning fetches a batch ahead, to know the last one; the loader's
    state is ahead then too, and a run that went on from it would never see that batch.
    """

    def __init__(self) -> None:
        self._latest: list[Any] | None = None
        self._before: list[Any] | None = None
        self._is_new = False

    def begin(self, trainer: pl.Trainer, given: list[Any]) -> None:
        """Begin a fit whose loaders were given these states, and may be a batch ahead already."""
        self._before = copy.deepcopy(given)
        self._latest = copy.deepcopy(loader_state_dicts(trainer)) if _keeping(trainer) else None
        self._is_new = True

    def before_batch(self, trainer: pl.Trainer, *, is_first: bool) -> None:
        """Note the states, after a batch was fetched and before it is trained on."""
        if _keeping(trainer):
            # In later epochs nobody saw the state before the batch that is fetched ahead.
            self._before = None if is_first and not self._is_new else self._latest
            self._is_new = False
            self._latest = copy.deepcopy(loader_state_dicts(trainer))

    def now(self, trainer: pl.Trainer) -> list[Any]:
        """Return the states for the batches so far; none where they are not known."""
        if not _keeping(trainer):
            return []
        ahead = getattr(data_fetcher(trainer), "batches", [])
        return (self._before or []) if ahead else copy.deepcopy(loader_state_dicts(trainer))


def _keeping(trainer: pl.Trainer) -> bool:
    """Whether a training loader keeps a state of its own."""
    return any(
        isinstance(loader, Stateful) and elastic_sampler_of(loader) is None
        for loader in training_loaders(trainer)
    )
