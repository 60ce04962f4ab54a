"""Lightning's live loops, set to go on at a position.

The counters were written when the checkpoint was loaded. What is set here is what only live loops
have.
"""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.data_progress import Position, validation_counters_at
from lightning_elastic_zero.trainer.dataloader_resume import PendingResume
from lightning_elastic_zero.trainer.lightning_internals import (
    combined_loader,
    data_fetcher,
    defer_save,
    end_restart,
    forget_loader_states,
    is_validation_due,
    make_next_iterator,
    save_intervals,
    set_last_saved_step,
    set_logged_steps,
    step_scheduler,
    training_loaders,
)
from lightning_elastic_zero.trainer.step_intervals import StepIntervals, prefetch_next_batch

SAVES = "saves"
"""Entry of this library's part of the checkpoint dictionary: each ModelCheckpoint's saves."""


class LoopRestorer:
    """The loops of a fit that is about to take its first batch after a resume."""

    def __init__(self, trainer: pl.Trainer, pending: PendingResume) -> None:
        self._trainer = trainer
        self._pending = pending
        self._state = pending.state
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop

    def at_batch_size(self, global_batch_size: int | None) -> PendingResume:
        """Return what was loaded, at its position in steps of the loaders that there are now.

        It was known as the checkpoint was loaded, unless ``train_dataloader`` gives another batch
        size in each epoch.
        """
        pending = self._pending
        position = pending.record.at_batch_size(global_batch_size)
        if (more := position.steps - pending.position.steps) != 0:
            self._count(more * self._trainer.accumulate_grad_batches)
        self._pending = replace(pending, position=position)
        return self._pending

    def _count(self, more: int) -> None:
        """Count more micro-batches of the epoch as done, or fewer."""
        progress = self._epoch.batch_progress
        for counts in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, getattr(counts, name) + more)

    def restart_at(self, position: Position) -> None:
        """Set the loops to begin there.

        Three things that Lightning would do otherwise: enter a finished epoch again for one more
        batch (with ``max_steps``), count the logger's steps by whether it thinks that a batch was
        interrupted, and leave out the next update of ``ReduceLROnPlateau``.
        """
        epoch = self._epoch
        # Also where the loops were told to begin at a step of an epoch that starts over.
        if position.steps == 0 and not position.is_over:
            epoch.restarting = False
            make_next_iterator(self._trainer)
        end_restart(self._trainer)
        axis: int | None = self._state.get("axis")
        if self._trainer.lightning_module.automatic_optimization:
            axis = self._trainer.global_step  # the loggers' axis counts optimizer steps then
        if axis is not None:
            set_logged_steps(self._trainer, axis - self._will_end_batch())

    def within_limit(self, position: Position) -> Position:
        """Return an epoch as over that is shorter now than what was trained of it."""
        reached = position.steps * self._trainer.accumulate_grad_batches
        if position.is_over or not position.steps or reached < self._fit.max_batches:
            return position
        rank_zero_warn(
            f"{position.steps} optimizer steps of epoch {position.epoch} were taken, and an epoch "
            "has no more of them now: it ends here"
        )
        self._epoch.batch_progress.is_last_batch = True
        return replace(position, is_over=True)

    def restore_stop(self) -> None:
        """Stop as soon as min_epochs and min_steps allow, where a callback had asked for it."""
        if self._state.get("waits_to_stop"):
            self._trainer.should_stop = True
            rank_zero_info("A callback had asked to stop; training goes on to min_epochs/min_steps")

    def start_progress_bar(self, position: Position) -> None:
        """Begin the progress bar's epoch in its middle; else it does not know its length.

        Lightning does not call ``on_train_epoch_start`` for an epoch that had begun before.
        """
        bar = self._trainer.progress_bar_callback
        if bar is not None and (position.steps or position.is_over):
            bar.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    def skip_repeated_saves(self) -> None:
        """Keep each ``ModelCheckpoint`` from saving a step again that it had saved.

        It does not keep that step; inside the next window of micro-batches it would write the same
        state once more, over the checkpoint that the run was resumed from. A save that waited for
        a validation is made then.
        """
        step, saves = self._trainer.global_step, self._state.get(SAVES, {})
        for callback in self._trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            saved = saves.get(callback.state_key, {"step": -1, "deferred": False})
            every, _ = save_intervals(callback)
            if saved["deferred"]:
                defer_save(callback)
            elif saved["step"] == step or (every >= 1 and step % every == 0):
                set_last_saved_step(callback, step)

    def complete_counters(self, position: Position) -> None:
        """Show an epoch that is over as full, where its length is not what it was."""
        if not position.is_over or self._fit.max_batches == float("inf"):
            return
        self._count(int(self._fit.max_batches) - self._epoch.batch_progress.current.ready)

    def _will_end_batch(self) -> bool:
        """Whether the loop, restarted, first ends the last batch, with or without validation.

        Then it counts that batch for the loggers itself.
        """
        return bool(self._epoch.restarting and is_validation_due(self._trainer))

    def restore_validation_counters(self) -> None:
        """Count the validation's batches as the run that was not stopped had counted them here.

        Lightning has looked at its counters by now, to decide whether to validate first.
        """
        loop = self._epoch.val_loop
        counters = validation_counters_at(
            self._pending.validation,
            began=bool(self._state.get("validation_began")),
            was=int(self._state.get("validation_batches", 0)),
            now=validation_batches(self._trainer),
        )
        loop.batch_progress.load_state_dict(counters)
        loop.restarting = False

    def restore_metrics(self) -> None:
        """Restore what callbacks and plateau schedulers look at."""
        device = self._trainer.strategy.root_device
        saved = self._state.get("metrics", {}).items()
        self._trainer.callback_metrics.update({name: value.to(device) for name, value in saved})

    def step_plateaus(self, position: Position, intervals: StepIntervals) -> None:
        """Make the updates of plateau schedulers that were about to be made, and no other twice."""
        ends_batch, is_pending = self._will_end_batch(), self._state.get("plateau_step_pending")
        if is_pending and not ends_batch:
            self._step_plateaus("step", self._epoch.batch_idx + 1)
        if self._state.get("plateau_epoch_pending"):
            self._step_plateaus("epoch", position.epoch)
        if ends_batch and is_pending is False:  # Lightning ends a batch that had ended before
            intervals.suspend_plateau_steps(self._trainer)

    def _step_plateaus(self, interval: str, done: int) -> None:
        """Update the ``ReduceLROnPlateau`` schedulers that were about to be, when it was saved."""
        trainer = self._trainer
        for config in trainer.lr_scheduler_configs:
            if not config.reduce_on_plateau or config.interval != interval:
                continue
            metric = trainer.callback_metrics.get(config.monitor or "")
            if done % config.frequency == 0 and metric is not None:
                self._epoch.scheduler_progress.increment_ready()
                step_scheduler(trainer, config.scheduler, metric)
                self._epoch.scheduler_progress.increment_completed()

    def restart_data(self, position: Position) -> None:
        """Make the iterator anew: its samplers begin elsewhere now, and are of another epoch."""
        if combined_loader(self._trainer) is None:
            return
        forget_loader_states(self._trainer)
        for loader in training_loaders(self._trainer):
            for sampler in (
                getattr(loader, "sampler", None),
                getattr(getattr(loader, "batch_sampler", None), "sampler", None),
            ):
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(position.epoch)
        self._make_iterator(position)

    def _make_iterator(self, position: Position) -> None:
        """Make the iterator that is used from here on, and none that nobody would use."""
        if (fetcher := data_fetcher(self._trainer)) is None:
            return
        if position.is_over:
            # Lightning ends such an epoch by asking for one more batch, which is not to be drawn;
            # and the iteration after that is the next epoch's, also of data that count them.
            fetcher.reset()
            fetcher.iterator, fetcher.done = iter(()), True
        elif self._begins_epoch():
            fetcher.reset()
        else:
            iter(fetcher)
            if position.steps:
                prefetch_next_batch(self._trainer)  # as the uninterrupted run did a batch before

    def _begins_epoch(self) -> bool:
        """Whether Lightning makes the iterator itself, as at each epoch's start but the first."""
        return self._trainer.current_epoch > 0 and not self._epoch.restarting


def validation_batches(trainer: pl.Trainer) -> int:
    """Return the batches of a validation on this rank; 0 where that is not known."""
    batches = trainer.fit_loop.epoch_loop.val_loop.max_batches
    return 0 if float("inf") in batches else int(sum(batches))
