"""Accumulation windows: the micro-batches of an optimizer step, and what follows the step.

An epoch ends with an optimizer step, which can have fewer micro-batches than the others. Lightning
decides by micro-batches whether schedulers and validation are due, and would miss such a step.
DeepSpeed would count micro-batches across epochs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import fetchers
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.core.requirements import DEEPSPEED
from lightning_elastic_zero.data_progress.batches import ceil_div
from lightning_elastic_zero.engine.loss_scale import ensure_scaled, loss_scale
from lightning_elastic_zero.engine.restore import drop_accumulation_window
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.lightning import data_fetcher, training_loaders
from lightning_elastic_zero.trainer.loaders import length_of

TOLERANCE = 0.02
"""Relative. A bf16 gradient has 8 bits; the smallest error to detect is a factor of 2."""


class LossScalingCheck:
    """Checks the gradient of the loss once, in the first backward pass with accumulation.

    Lightning divides the loss by the accumulation ``A``, so DeepSpeed is called with
    ``scale_wrt_gas=False``. Release 0.18.3 ignored that and divided again, so each step silently
    had 1/A of its correct size. Future releases may do the same.
    """

    def __init__(self) -> None:
        self.is_done = False

    @contextmanager
    def watch(self, loss: torch.Tensor, factor: float, accumulate: int) -> Iterator[None]:
        """Check the first backward pass that runs inside this context.

        ``loss`` is the module's loss divided by the accumulation; ``factor`` is the product of this
        library's weight and DeepSpeed's fp16 loss scale.
        """
        # The graph node of the module's own loss, before Lightning's division.
        division: Any = loss.grad_fn
        returned = division.next_functions[0][0] if division and division.next_functions else None
        if self.is_done or accumulate == 1 or factor == 0.0 or returned is None:
            yield
            return
        seen: list[torch.Tensor] = []
        handle = returned.register_hook(
            lambda _, received: seen.extend(g for g in received if g is not None)
        )
        try:
            yield
        finally:
            handle.remove()
        if not seen:
            return
        self.is_done = True
        ratio = float(seen[0]) * accumulate / factor
        if math.isfinite(ratio) and abs(ratio - 1.0) > TOLERANCE:  # fp16 may overflow
            msg = (
                f"accumulate_grad_batches={accumulate}: gradients are {ratio:g} times their "
                "correct value, because the installed DeepSpeed scales the loss in spite of "
                f"scale_wrt_gas=False (as 0.18.3 does). Install {DEEPSPEED} (newest tested: "
                f"{DEEPSPEED.newest_tested})"
            )
            raise UnsupportedError(msg)


class GradientAccumulation:
    """Marks the end of each window for DeepSpeed, and drops a window that an epoch leaves open.

    If ``on_train_batch_start`` returns -1, the epoch ends at once. DeepSpeed would keep the
    gradients of the open window and add them to the first step of the next epoch.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._pending, self._epoch = 0, 0
        self._loss_scaling_check = LossScalingCheck()
        self._manual_backwards = 0
        """Calls of ``manual_backward`` since the last optimizer step."""
        self._earlier_backwards = 0
        """Those before the current batch."""
        self._is_warned = False

    @contextmanager
    def scaled(
        self, loss: torch.Tensor, weight: float, trainer: pl.Trainer
    ) -> Iterator[torch.Tensor]:
        """Yield the weighted loss for a backward pass inside this context.

        ``weight``: that of the micro-batch, in addition to the division by the accumulation.
        """
        check = self._loss_scaling_check
        scale = 1.0 if check.is_done else loss_scale(self._engine)  # other than 1 in fp16
        weighted = loss * weight if weight != 1.0 else loss
        with (
            check.watch(loss, weight * scale, trainer.accumulate_grad_batches),
            ensure_scaled(self._engine, weighted),
        ):
            yield weighted

    @contextmanager
    def manual(self, loss: torch.Tensor) -> Iterator[None]:
        """Warn if manual optimization accumulates: ZeRO drops earlier gradients."""
        self._manual_backwards += 1
        stage = self._engine.zero_optimization_stage()
        if self._manual_backwards > 1 and stage and not self._is_warned:
            self._is_warned = True
            rank_zero_warn(
                "manual_backward was called more than once before optimizer.step(). DeepSpeed's "
                f"ZeRO-{stage} does not add up the gradients of these calls. Add up the losses "
                "and call manual_backward once, or use automatic optimization with "
                "global_batch_size or accumulate_grad_batches."
            )
        with ensure_scaled(self._engine, loss):
            yield

    def begin_step(self, trainer: pl.Trainer) -> bool:
        """Set whether a micro-batch ends a window, and return it."""
        self._manual_backwards = 0
        if trainer.accumulate_grad_batches == 1:
            return True
        steps = not trainer.fit_loop._should_accumulate()
        self._engine.set_gradient_accumulation_boundary(steps)
        self._pending, self._epoch = 0 if steps else self._pending + 1, trainer.current_epoch
        return steps

    def warn_of_lost_gradients(self, trainer: pl.Trainer) -> None:
        """Warn if a save loses gradients of manual optimization, of batches before this one."""
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        is_inside = current.ready != current.processed
        lost = self._earlier_backwards if is_inside else self._manual_backwards
        if lost and not self._engine.zero_optimization_stage():
            rank_zero_warn(
                f"This checkpoint lacks the gradients of {lost} manual_backward calls since the "
                "last optimizer step, so the next step of a run resumed from it differs. Save "
                "after optimizer.step() only, or use automatic optimization, which repeats these "
                "batches."
            )

    def before_batch(self, epoch: int) -> None:
        """Drop the open window of an earlier epoch."""
        self._earlier_backwards = self._manual_backwards
        if not self._pending or epoch == self._epoch:
            return
        drop_accumulation_window(self._engine)
        rank_zero_warn(
            f"Epoch {self._epoch} ended within an accumulation window, because "
            "on_train_batch_start returned -1: the gradients of its last "
            f"{self._pending} micro-batches are dropped, without an optimizer step."
        )
        self._pending = 0


def pending_micro_batches(trainer: pl.Trainer) -> int:
    """Return the number of micro-batches since the last optimizer step."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    ends = progress.is_last_batch or done == trainer.num_training_batches
    is_over = ends and done == progress.current.ready
    return 0 if is_over else int(done % trainer.accumulate_grad_batches)


def prefetch_next_batch(trainer: pl.Trainer) -> bool:
    """Fetch the next batch before this one is trained on, if data have a limit but no length.

    Lightning takes ``limit_train_batches`` for the length, and notices data that end earlier only
    when it requests one more batch: too late to take the step of the open window, or to validate.
    No batch beyond the limit is fetched, because a continuing stream would lose it.

    Returns:
        Whether this was the first attempt in the epoch.
    """
    fit: Any = trainer.fit_loop
    fetcher, limit = data_fetcher(trainer), fit.max_batches
    progress = fit.epoch_loop.batch_progress
    at = progress.current.ready
    if (
        limit == float("inf")
        or at >= limit
        or not isinstance(fetcher, fetchers._PrefetchDataFetcher)
    ):
        return False
    if all(length_of(loader) is not None for loader in training_loaders(trainer)):
        return False
    is_first = fetcher.length is not None
    if is_first:
        fetcher.length = None
        try:
            fetcher.batches.append(fetchers._DataFetcher.__next__(fetcher))
        except StopIteration:
            progress.is_last_batch = True
    if at + 1 == limit:
        fetcher.iterator = iter(())
    return is_first


def check_one_batch_per_step(trainer: pl.Trainer) -> None:
    """Refuse a ``training_step(dataloader_iter)`` whose steps have several batches.

    Positions in the data are computed from the number of calls; one batch may be taken ahead.
    Lightning clears gradients by the number of the batch, which in such a call is that of the
    previous one: within a window, and ZeRO-3 and stage 0 then lose what was accumulated.
    """
    fetcher = data_fetcher(trainer)
    if isinstance(fetcher, fetchers._PrefetchDataFetcher):
        return
    if trainer.accumulate_grad_batches > 1:
        msg = (
            f"training_step(dataloader_iter) with accumulate_grad_batches="
            f"{trainer.accumulate_grad_batches}: Lightning would clear gradients within a step. "
            "Use one batch per step (a larger batch_size, or more devices), or training_step(batch)"
        )
        raise UnsupportedError(msg)
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    if fetcher.fetched > done + 1:
        msg = (
            f"training_step has taken {fetcher.fetched} batches from dataloader_iter in {done} "
            "calls, expected one in each call (and at most one ahead), because a checkpoint counts "
            "calls. Use a larger batch_size"
        )
        raise UnsupportedError(msg)


def _set_validation_interval(trainer: pl.Trainer, *, is_planned: bool) -> None:
    """Set the number of micro-batches between validations.

    A fraction of an epoch is aligned with an optimizer step. With a global batch, an integer counts
    global batches. ``trainer.val_check_interval`` is not changed, because callbacks use it.
    """
    # The attribute is missing if the interval is a time.
    interval = getattr(trainer, "val_check_interval", None)
    accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    is_endless = batches == float("inf")
    if isinstance(interval, int) and is_planned:
        is_by_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
        if is_by_epoch and not is_endless and interval > ceil_div(int(batches), accumulate):
            msg = (
                f"`val_check_interval` ({interval}) must be less than or equal to the number of "
                f"optimizer steps of an epoch ({ceil_div(int(batches), accumulate)}). To "
                "disable validation, set `limit_val_batches=0.0`. To count steps across epochs, "
                "set `check_val_every_n_epoch=None`."
            )
            raise ValueError(msg)
        trainer.val_check_batch = interval * accumulate
    elif isinstance(interval, float) and not is_endless:
        steps = max(1, int(ceil_div(int(batches), accumulate) * interval))
        trainer.val_check_batch = steps * accumulate


class StepIntervals:
    """Makes schedulers and validation due at optimizer steps, even after a short window.

    For one batch at a time, this replaces the numbers that Lightning compares with its count of
    micro-batches.
    """

    def __init__(self) -> None:
        self._is_planned = False
        self._frequencies: list[tuple[Any, int]] = []
        self._interval: int | float | None = None

    def begin_fit(self, trainer: pl.Trainer, *, is_planned: bool) -> None:
        """Begin a fit whose loaders exist. ``is_planned``: there is a ``global_batch_size``."""
        self._is_planned = is_planned
        self._frequencies, self._interval = [], None
        _set_validation_interval(trainer, is_planned=is_planned)

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Set whether schedulers and validation are due after the next batch."""
        self.restore(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready == 1:
            # Lightning resets it when it recreates loaders.
            _set_validation_interval(trainer, is_planned=self._is_planned)
        self._apply(trainer, is_last=progress.is_last_batch, steps=trainer.global_step + 1)

    def resume_at(self, trainer: pl.Trainer, *, is_last: bool) -> None:
        """Set whether they are due after the last batch before the save."""
        self.restore(trainer)
        self._apply(trainer, is_last=is_last, steps=trainer.global_step)

    def suspend_plateau_steps(self, trainer: pl.Trainer) -> None:
        """Keep ``ReduceLROnPlateau`` from being due when Lightning ends the last batch again."""
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step":
                # does not divide the number of batches so far
                self._set_frequency(config, trainer.fit_loop.epoch_loop.batch_idx + 2)

    def _set_frequency(self, config: Any, frequency: int) -> None:
        self._frequencies.append((config, config.frequency))
        config.frequency = frequency

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore the numbers that were replaced for the last batch."""
        while self._frequencies:
            config, frequency = self._frequencies.pop()
            config.frequency = frequency
        if self._interval is not None:
            trainer.val_check_batch, self._interval = self._interval, None

    def _apply(self, trainer: pl.Trainer, *, is_last: bool, steps: int) -> None:
        """Set whether they are due after a batch that the trainer's counters include.

        ``is_last``: the data ends with it. ``steps``: optimizer steps of the whole run, if a window
        ends with it.
        """
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        accumulate = trainer.accumulate_grad_batches
        is_last = is_last or ready == trainer.num_training_batches
        for config in trainer.lr_scheduler_configs:
            # Make schedulers due, or not, at the end of a short window.
            if is_last and ready % accumulate and config.interval == "step":
                every = max(1, config.frequency // accumulate)
                is_due = ceil_div(ready, accumulate) % every == 0
                self._set_frequency(config, ready if is_due else sys.maxsize)
        self._settle_validation(trainer, ready, steps, is_last=is_last)

    def _settle_validation(
        self, trainer: pl.Trainer, ready: int, steps: int, *, is_last: bool
    ) -> None:
        """Make validation due, or not, if Lightning's own number would decide otherwise.

        Without a global batch, an integer interval counts micro-batches, as in Lightning.
        """
        interval = getattr(trainer, "val_check_interval", None)
        live = trainer.val_check_batch
        if not isinstance(live, int) or interval is None:
            return  # by time, or at the end of data without a known length
        accumulate, counted = trainer.accumulate_grad_batches, ready
        is_end = is_last or ready % accumulate == 0
        if isinstance(interval, float):
            every = live // accumulate
            at_steps = ceil_div(ready, accumulate) % max(1, every) == 0
            is_due = is_last if interval == 1.0 else is_end and at_steps
        elif not self._is_planned or not trainer.lightning_module.automatic_optimization:
            return  # manual optimization has no windows
        elif trainer.check_val_every_n_epoch is None:
            counted = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            is_due = is_end and steps % interval == 0
        else:
            is_due = is_end and ceil_div(ready, accumulate) % interval == 0
        if is_due != (counted % live == 0):
            self._interval = live
            trainer.val_check_batch = counted if is_due else sys.maxsize
