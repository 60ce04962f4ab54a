"""Loaders that keep their own state: which state a save holds, and where it is restored."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.trainer.dataloaders import (
    Stateful,
    describe_loader,
    elastic_sampler_of,
    length_of,
)
from lightning_elastic_zero.trainer.lightning_internals import (
    data_fetcher,
    drop_iterator,
    ends_by_one_loader,
    is_mid_pass,
    loader_state_dicts,
    training_loaders,
)


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


def load_state_at_epoch_end(
    loader: Stateful, state: Mapping[str, Any], *, ends_before_data: bool
) -> None:
    """Move a loader's next iteration to the epoch after the one that its state ends.

    The state at an epoch's end is that end with some loaders, from which the next iteration gives
    nothing more, and the next epoch's beginning with others. Lightning makes one iterator from here
    on: the next epoch's.

    Args:
        loader: one that keeps its own state.
        state: as saved at an epoch's end.
        ends_before_data: a limit or another loader ended the epoch, before this one's data did.
    """
    loader.load_state_dict(dict(state))
    iterator = iter(loader)  # type: ignore[call-overload]
    if ends_before_data:
        # As in the run that was not stopped: an iterator was under way, and another one is made.
        if not type(loader).__module__.startswith("torchdata."):
            rank_zero_warn(
                f"A limit ended the epoch before the data of the {describe_loader(loader)} did. "
                "Its next epoch is what its second iterator after load_state_dict gives, which may "
                "differ from that of a run that was not stopped"
            )
        return
    try:
        next(iterator)
    except StopIteration:
        return  # the old epoch's end: the next iterator is the next epoch's
    drop_iterator(loader)
    loader.load_state_dict(dict(state))


def ends_before_data(combined: CombinedLoader, index: int, state: Mapping[str, Any] | None) -> bool:
    """Whether a limit, or another loader, ends an epoch before the data of a loader do.

    Args:
        combined: the training loaders.
        index: of the loader.
        state: as it was at an epoch's end; that of torchdata's loader says whether the data ended.
    """
    limit = (combined.limits or [])[index : index + 1]
    length = length_of(combined.flattened[index])
    if limit and limit[0] < (float("inf") if length is None else length):
        return True
    return ends_by_one_loader(combined) and is_mid_pass(state)


def warn_state_not_restored(loader: object, saved: int, world_size: int) -> None:
    """Warn of a loader that begins as a new one, though it may count its epochs."""
    why = (
        f"it has one state per rank of {saved}, and there are {world_size} now"
        if saved != world_size
        else "the checkpoint holds no state of it"
    )
    rank_zero_warn(
        f"The {describe_loader(loader)} begins as a new one, and the next epoch may be another "
        f"than in a run that was not stopped: {why}"
    )
