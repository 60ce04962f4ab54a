"""The number of an epoch's micro-batches, so that it ends with a step, and its last one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.trainer.batch_settings import BatchSettings, UserSettings
from lightning_elastic_zero.trainer.dataloaders import elastic_sampler_of, length_of
from lightning_elastic_zero.trainer.lightning_internals import (
    data_fetcher,
    fetch,
    prefetches,
    training_loaders,
)
from lightning_elastic_zero.trainer.step_intervals import optimizer_steps_in


class EpochLength:
    """The lengths of a fit's training loaders, and the trainer's settings that follow from them."""

    def __init__(self, settings: UserSettings, trainer: pl.Trainer, batches: BatchSettings) -> None:
        """Begin a fit; with a global batch, an integer limit counts such batches."""
        self._user_settings = settings
        self._batches = batches
        self._known: list[int] = []
        limit = settings.get(trainer, "limit_train_batches")
        is_count = type(limit) is int and batches.plan is not None
        self._limit: int | float = limit * (batches.accumulate if is_count else 1)
        settings.make(trainer, "limit_train_batches", self._limit)

    def forget(self) -> None:
        """Discard the lengths of the loaders, which are made anew."""
        self._known = []

    def round_to_whole_steps(self, loader: object, trainer: pl.Trainer) -> None:
        """Set ``limit_train_batches`` so that an epoch ends between two optimizer steps.

        Lightning begins a new window with each epoch and DeepSpeed does not: gradients of a window
        that an epoch cuts off would flow into the next one's.
        """
        given, length, accumulate = self._limit, length_of(loader), self._batches.accumulate
        if given == 0 or length is None:
            return
        self._known.append(length)
        # Of several loaders the longest one ends the epoch; shorter ones begin again.
        longest = max(self._known)
        batches = min(longest, given) if isinstance(given, int) else int(longest * given)
        limit = max(1, batches // accumulate) * accumulate
        if limit == batches or limit > longest:
            self._user_settings.make(trainer, "limit_train_batches", given)
            self._round_validation_interval(trainer, batches)
            return
        if elastic_sampler_of(loader) is None or isinstance(given, int):
            rank_zero_warn(
                f"{batches} batches per epoch are no multiple of the accumulation ({accumulate}): "
                f"an epoch has {limit}, so that it ends with an optimizer step"
            )
        self._user_settings.make(trainer, "limit_train_batches", limit)
        self._round_validation_interval(trainer, limit)

    def _round_validation_interval(self, trainer: pl.Trainer, batches: int) -> None:
        """Set ``val_check_interval`` for an epoch whose last window is short.

        Lightning refuses an interval of more micro-batches than an epoch has.
        """
        interval = self._user_settings.get(trainer, "val_check_interval")
        if self._batches.plan is None or type(interval) is not int:
            return
        accumulate = self._batches.accumulate
        whole, steps = interval * accumulate, optimizer_steps_in(batches, accumulate)
        if trainer.check_val_every_n_epoch is not None and interval == steps:
            whole = min(whole, batches)
        self._user_settings.make(trainer, "val_check_interval", whole)


def prefetch_next_batch(trainer: pl.Trainer) -> bool:
    """Fetch the next batch before this one is trained on, as of data without a limit.

    Of data that have a limit and no length, Lightning takes ``limit_train_batches`` for the length,
    and learns of data that end before it when it asks for one batch more: too late to take a step
    of the window that is open, or to validate. No batch beyond the limit is fetched: it would be
    lost to a stream that goes on.

    Returns:
        Whether a batch was fetched, or tried to be, just now: the first time in an epoch.
    """
    fit: Any = trainer.fit_loop
    fetcher, limit = data_fetcher(trainer), fit.max_batches
    progress = fit.epoch_loop.batch_progress
    at = progress.current.ready
    if limit == float("inf") or at >= limit or not prefetches(fetcher):
        return False
    if all(length_of(loader) is not None for loader in training_loaders(trainer)):
        return False
    is_first = fetcher.length is not None
    if is_first:
        fetcher.length = None
        try:
            fetcher.batches.append(fetch(fetcher))
        except StopIteration:
            progress.is_last_batch = True
    if at + 1 == limit:
        fetcher.iterator = iter(())
    return is_first
