"""Windows of micro-batches that are short, at the end of an epoch, and what is counted by windows.

An epoch ends with an optimizer step. Of data without a length, or with fewer batches than the
accumulation, that step may be of fewer micro-batches than the others. Lightning counts by
micro-batches when schedulers and validation are due, and would pass over such a step.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl

from lightning_elastic_zero.data_progress.batches import ceil_div
from lightning_elastic_zero.trainer.lightning import (
    data_fetcher,
    fetch,
    prefetches,
    training_loaders,
)
from lightning_elastic_zero.trainer.loaders import length_of


def optimizer_steps_in(batches: float, accumulate: int) -> int:
    """Return the optimizer steps that so many micro-batches of an epoch make, to its end."""
    return ceil_div(int(batches), accumulate)


def pending_micro_batches(trainer: pl.Trainer) -> int:
    """Return how many micro-batches were trained on since the last optimizer step."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    ends = progress.is_last_batch or done == trainer.num_training_batches
    is_over = ends and done == progress.current.ready
    return 0 if is_over else int(done % trainer.accumulate_grad_batches)


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


def _set_validation_interval(trainer: pl.Trainer, *, is_planned: bool) -> None:
    """Set after how many micro-batches to validate, where Lightning has set it for its own units.

    A fraction of an epoch is aligned with an optimizer step; with a global batch an integer counts
    such batches. ``trainer.val_check_interval`` stays as it is: callbacks decide by it.

    Raises:
        ValueError: an epoch has fewer steps.
    """
    # Where validation is a matter of time, there is no such attribute.
    interval = getattr(trainer, "val_check_interval", None)
    accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    is_endless = batches == float("inf")
    if isinstance(interval, int) and is_planned:
        is_by_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
        if is_by_epoch and not is_endless and interval > optimizer_steps_in(batches, accumulate):
            msg = (
                f"`val_check_interval` ({interval}) must be less than or equal to the number of "
                f"the optimizer steps of an epoch ({optimizer_steps_in(batches, accumulate)}). If "
                "you want to disable validation set `limit_val_batches` to 0.0 instead. If you "
                "want to validate based on all optimizer steps, set `check_val_every_n_epoch=None`."
            )
            raise ValueError(msg)
        trainer.val_check_batch = interval * accumulate
    elif isinstance(interval, float) and not is_endless:
        steps = max(1, int(optimizer_steps_in(batches, accumulate) * interval))
        trainer.val_check_batch = steps * accumulate


class StepIntervals:
    """Lets schedulers and validation be due at optimizer steps, also where a window is short.

    What Lightning compares with its count of micro-batches is another number then, for that batch.
    """

    def __init__(self) -> None:
        self._is_planned = False
        self._frequencies: list[tuple[Any, int]] = []
        self._interval: int | float | None = None
        self._validated = range(0)
        """Micro-batches of the run, counted from 1, whose validations are not to take place."""

    def begin_fit(self, trainer: pl.Trainer, *, is_planned: bool) -> None:
        """Begin a fit whose loaders are made; of a planned global batch integers count batches."""
        self._is_planned = is_planned
        self._frequencies, self._interval, self._validated = [], None, range(0)
        _set_validation_interval(trainer, is_planned=is_planned)

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Compute what is due after the batch that is about to be trained on."""
        self.restore(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready == 1:
            # Lightning sets it anew where it makes loaders anew.
            _set_validation_interval(trainer, is_planned=self._is_planned)
        self._apply(trainer, is_last=progress.is_last_batch, steps=trainer.global_step + 1)

    def resume_at(self, trainer: pl.Trainer, *, is_last: bool) -> None:
        """Compute what is due after the batch that was the last one when the run was saved."""
        self.restore(trainer)
        self._apply(trainer, is_last=is_last, steps=trainer.global_step)

    def skip_validations(self, trainer: pl.Trainer, batches: int) -> None:
        """Skip the validations after the next batches: callbacks have counted them already."""
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._validated = range(done + 1, done + batches + 1)

    def suspend_plateau_steps(self, trainer: pl.Trainer) -> None:
        """Keep plateau schedulers from being due when Lightning ends the last batch again."""
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step":
                # Does not divide the batches so far.
                self._set_frequency(config, trainer.fit_loop.epoch_loop.batch_idx + 2)

    def _set_frequency(self, config: Any, frequency: int) -> None:
        self._frequencies.append((config, config.frequency))
        config.frequency = frequency

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore what had another number for the batch before, also where the next one is None."""
        while self._frequencies:
            config, frequency = self._frequencies.pop()
            config.frequency = frequency
        if self._interval is not None:
            trainer.val_check_batch, self._interval = self._interval, None

    def _apply(self, trainer: pl.Trainer, *, is_last: bool, steps: int) -> None:
        """Compute what is due after a batch.

        Args:
            trainer: its counters include the batch.
            is_last: the data ends with it.
            steps: of the whole run, where a window ends with it.
        """
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        is_last = is_last or ready == trainer.num_training_batches
        if is_last and ready % trainer.accumulate_grad_batches:
            self._settle_schedulers(trainer, ready)
        self._settle_validation(trainer, ready, steps, is_last=is_last)

    def _settle_schedulers(self, trainer: pl.Trainer, ready: int) -> None:
        """Make those schedulers step that are due at the end of a short window."""
        accumulate = trainer.accumulate_grad_batches
        for config in trainer.lr_scheduler_configs:
            if config.interval != "step":
                continue
            every = max(1, config.frequency // accumulate)
            is_due = optimizer_steps_in(ready, accumulate) % every == 0
            self._set_frequency(config, _interval_for(ready, divides=is_due))

    def _settle_validation(
        self, trainer: pl.Trainer, ready: int, steps: int, *, is_last: bool
    ) -> None:
        """Make validation due where it is by steps; where Lightning's number does so, it stays.

        An integer without a global batch counts micro-batches, as in Lightning.
        """
        interval = getattr(trainer, "val_check_interval", None)
        live = trainer.val_check_batch
        if not isinstance(live, int) or interval is None:
            return  # by the clock, or at the end of data of which nothing is known
        accumulate, counted = trainer.accumulate_grad_batches, ready
        total = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        is_end = is_last or ready % accumulate == 0
        if total in self._validated:
            counted = total if trainer.check_val_every_n_epoch is None else ready
            is_due = False
        elif isinstance(interval, float):
            every = live // accumulate
            at_steps = optimizer_steps_in(ready, accumulate) % max(1, every) == 0
            is_due = is_last if interval == 1.0 else is_end and at_steps
        elif not self._is_planned or not trainer.lightning_module.automatic_optimization:
            return  # a module that optimizes by itself has no windows
        elif trainer.check_val_every_n_epoch is None:
            counted = total
            is_due = is_end and steps % interval == 0
        else:
            is_due = is_end and optimizer_steps_in(ready, accumulate) % interval == 0
        if is_due != (counted % live == 0):
            self._interval = live
            trainer.val_check_batch = _interval_for(counted, divides=is_due)


def _interval_for(count: int, *, divides: bool) -> int:
    """Return a number that divides a count, or one that divides none that can be reached."""
    return count if divides else sys.maxsize
