"""The steps that restore a loaded run when training is about to begin.

Lightning has restored the counters of ``RunResumer.resume_from`` and has created the training
loaders. Each step states what it needs from earlier ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.data_progress.counters import validation_counters_at
from lightning_elastic_zero.data_progress.position import Consumed, RunSettings
from lightning_elastic_zero.data_progress.sampler import seed_rng_streams, set_rng_states
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.trainer.accumulation import StepIntervals
from lightning_elastic_zero.trainer.batches import BatchController
from lightning_elastic_zero.trainer.data_position import (
    UnresumableDataPolicy,
    check_data,
    position_loaders,
    restart_data,
)
from lightning_elastic_zero.trainer.fit_warnings import (
    warn_of_changes,
    warn_of_epoch_hooks,
    warn_of_late_loaders,
    warn_of_workers,
)
from lightning_elastic_zero.trainer.lightning import (
    can_stop_early,
    combined_loader,
    data_fetcher,
    early_stopping_of,
    reload_interval,
    run_seed,
    set_logged_steps,
    training_loaders,
)
from lightning_elastic_zero.trainer.loaded_run import LoadedRun
from lightning_elastic_zero.trainer.loaders import samples_per_step, set_generator_states
from lightning_elastic_zero.trainer.metrics import EpochMetrics, SavedMetrics
from lightning_elastic_zero.trainer.prepared_loaders import PreparedLoaders
from lightning_elastic_zero.trainer.recorder import RunRecorder, validation_batches
from lightning_elastic_zero.trainer.tensor_parallel import data_rank_of, grid_of


@dataclass(frozen=True, slots=True)
class ResumeSteps:
    """Restores a loaded run, in numbered steps."""

    batches: BatchController
    loaders: PreparedLoaders
    recorder: RunRecorder
    intervals: StepIntervals
    policy: UnresumableDataPolicy
    device: torch.device

    def run(self, loaded: LoadedRun, metrics: EpochMetrics) -> list[Any]:
        """Take all steps; return the states that were loaded into stateful loaders."""
        self._check_steps_are_counted(loaded)
        settings = self._compare_settings(loaded)
        loaded = self._find_position(loaded, settings)
        consumed = self._position_loaders(loaded)
        self._restart_loops(loaded)
        self._restore_metrics(loaded, metrics)
        self._step_pending_plateaus(loaded)
        self._restart_data(loaded, consumed)
        self._enter_epoch(loaded)
        self._stop_as_requested(loaded)
        self._restore_random(loaded)
        return loaded.loader_states

    def _check_steps_are_counted(self, loaded: LoadedRun) -> None:
        """Step 1: refuse a run that would count from 0. Needs the counters of ``resume_from``."""
        trainer = loaded.trainer
        loop = trainer.fit_loop.epoch_loop
        manual = loop.manual_optimization.optim_step_progress.total.completed
        automatic = loop.automatic_optimization.optim_progress.optimizer_steps
        # Both are 0 if on_load_checkpoint dropped the loops to count from 0.
        if trainer.global_step == 0 < manual + automatic:
            msg = (
                f"{loaded.where}: saved after {loaded.saved.global_step} optimizer steps, and this "
                "run would count from 0, because Lightning counts the steps of manual and "
                "automatic optimization separately. Set automatic_optimization of the module as in "
                "the saved run, or pass load_optimizer_state=False with a checkpoint of weights "
                "alone"
            )
            raise CheckpointMismatchError(msg)

    def _compare_settings(self, loaded: LoadedRun) -> RunSettings:
        """Step 2: return this run's settings; warn of differences. Needs the training loaders."""
        trainer, is_given = loaded.trainer, self.batches.plan is not None
        settings = self.recorder.settings(trainer, grid_of(trainer))
        foreign_path = "" if loaded.is_own_format else loaded.where
        planned = settings
        if not trainer.lr_scheduler_configs:
            planned = replace(settings, planned_steps=None)
        was = loaded.saved.settings
        warn_of_changes(was, planned, is_given=is_given, foreign_path=foreign_path)
        return settings

    def _find_position(self, loaded: LoadedRun, settings: RunSettings) -> LoadedRun:
        """Step 3: fit position and counters to the loaders, which ``resume_from`` cannot know.

        ``train_dataloader`` may now return another batch size or an epoch of another length, or
        data that cannot continue inside the epoch. Needs the counters of ``resume_from``.
        """
        trainer, before = loaded.trainer, loaded.position
        position = loaded.saved.at_batch_size(settings.global_batch_size)
        more = (position.steps - before.steps) * settings.accumulate
        loaded = replace(loaded, position=position)
        loaders = training_loaders(trainer)
        sizes = samples_per_step(self.batches.current, loaders)
        loaded = check_data(loaded, loaders, sizes, self.policy)
        is_shortened = _end_shortened_epoch(loaded)
        if is_shortened:
            loaded = replace(loaded, position=replace(loaded.position, is_over=True))
        progress, length = trainer.fit_loop.epoch_loop.batch_progress, trainer.fit_loop.max_batches
        has_changed = is_shortened or settings.accumulate != loaded.saved.settings.accumulate
        if loaded.position.is_over and has_changed and length != float("inf"):
            more = int(length) - progress.current.ready
        for counts in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, getattr(counts, name) + more)
        return loaded

    def _position_loaders(self, loaded: LoadedRun) -> tuple[Consumed | None, ...]:
        """Step 4: set the loaders to the position of step 3; return their consumed samples."""
        combined: Any = combined_loader(loaded.trainer)
        if loaded.is_own_format:
            self.loaders.continue_seeds(loaded.saved)
        sizes = samples_per_step(self.batches.current, training_loaders(loaded.trainer))
        consumed = position_loaders(loaded, combined, sizes)
        self.recorder.begin_at(loaded.position, consumed)
        return consumed

    def _restart_loops(self, loaded: LoadedRun) -> None:
        """Step 5: set the state that only live loops have. Needs the counters of step 3."""
        trainer, position = loaded.trainer, loaded.position
        self.intervals.resume_at(trainer, is_last=position.is_over)
        _restart_fit_loop(loaded)
        if every := reload_interval(trainer):
            created = position.epoch - position.epoch % every
            trainer.fit_loop._last_train_dl_reload_epoch = created
            warn_of_late_loaders(position, every)
        if position.is_validated:
            self.recorder.mark_validated(trainer)
        _restore_validation_counters(loaded)

    def _restore_metrics(self, loaded: LoadedRun, metrics: EpochMetrics) -> None:
        """Step 6: restore the values that callbacks read, and those of the epoch of step 3."""
        trainer, state, position = loaded.trainer, loaded.state, loaded.position
        known = {name: value.to(self.device) for name, value in state.metrics.items()}
        trainer.callback_metrics.update(known)
        saved = SavedMetrics(state.results, state.plateau_epoch_pending, loaded.is_same_world)
        starts_over = loaded.saved.position.steps > 0 == position.steps and not position.is_over
        metrics.resume_from(saved, trainer, position, starts_over=starts_over)

    def _step_pending_plateaus(self, loaded: LoadedRun) -> None:
        """Step 7: make the pending updates of ``ReduceLROnPlateau``, each exactly once.

        Needs the loops of step 5 and the metrics of step 6.
        """
        trainer, state = loaded.trainer, loaded.state
        ends_batch, is_pending = _will_end_batch(trainer), state.plateau_step_pending
        if is_pending and not ends_batch:
            _step_plateaus(trainer, "step", trainer.fit_loop.epoch_loop.batch_idx + 1)
        if state.plateau_epoch_pending:
            _step_plateaus(trainer, "epoch", loaded.position.epoch)
        if ends_batch:
            is_updated = is_pending is False
            self.recorder.expect_end_of_batch(updates_plateaus=not is_updated)
            if is_updated:
                self.intervals.suspend_plateau_steps(trainer)

    def _restart_data(self, loaded: LoadedRun, consumed: Sequence[Consumed | None]) -> None:
        """Step 8: recreate the iterators. Needs the loaders of step 4 and the loops of step 5."""
        trainer = loaded.trainer
        combined: Any = combined_loader(trainer)
        if not loaded.position.epoch:  # its iterator is recreated here
            self.loaders.restore_new_generators(trainer)
        if loaded.is_same_world and (before := loaded.state.random_before_fetch):
            self.recorder.random_before_fetch = before
            set_rng_states(before, self.device)
        restart_data(loaded, combined, consumed)

    def _enter_epoch(self, loaded: LoadedRun) -> None:
        """Step 9: make up for ``on_train_epoch_start``, which Lightning calls once per epoch.

        An epoch that starts over counts as not entered, so that Lightning calls the hook. Step 7
        needs the counters of its batches before that.
        """
        trainer, position = loaded.trainer, loaded.position
        if position.steps == 0 and not position.is_over:
            fit: Any = trainer.fit_loop
            fit.reset_restart_stage()
            fit.epoch_loop.batch_progress.reset_on_run()
            for counts in (fit.epoch_progress.current, fit.epoch_progress.total):
                counts.ready = counts.started = counts.processed
            return
        if loaded.is_inside_epoch:
            warn_of_epoch_hooks(trainer, position.epoch)
        if (bar := trainer.progress_bar_callback) is not None:
            bar.on_train_epoch_start(trainer, trainer.lightning_module)

    def _stop_as_requested(self, loaded: LoadedRun) -> None:
        """Step 10: request a stop that was requested before the save."""
        trainer = loaded.trainer
        if not loaded.state.waits_to_stop:
            return
        where = "at min_epochs/min_steps"
        if can_stop_early(trainer):
            if not early_stopping_of(trainer):
                return  # The user has removed it, to train on.
            where = f"here, at step {trainer.global_step}. To train on, remove EarlyStopping"
        trainer.should_stop = True
        rank_zero_info(f"A callback requested a stop before the save: training ends {where}")

    def _restore_random(self, loaded: LoadedRun) -> None:
        """Step 11: restore random states: last, because all other steps may draw numbers."""
        trainer, state = loaded.trainer, loaded.state
        if state.random is None:
            return
        loaders = training_loaders(trainer)
        kinds = ("workers", "order") if loaded.is_same_world else ("order",)
        saved = () if loaded.makes_loaders else state.generators
        for loader, states in zip(loaders, saved, strict=False):
            set_generator_states(loader, states, *kinds)
        if loaded.is_same_world:
            warn_of_workers(loaders, loaded.position)
            set_rng_states(state.random, self.device)
            return
        seed_rng_streams(run_seed(), trainer.global_step, data_rank_of(trainer))
        rank_zero_info(
            f"Random numbers: saved on {loaded.saved_grid}, so each rank starts a new stream from "
            f"seed {run_seed()}, step {trainer.global_step} and its rank"
        )


def _end_shortened_epoch(loaded: LoadedRun) -> bool:
    """End an epoch that is now shorter than its progress; return whether it is."""
    fit, position = loaded.trainer.fit_loop, loaded.position
    reached = position.steps * loaded.trainer.accumulate_grad_batches
    if not loaded.is_inside_epoch or reached < fit.max_batches:
        return False
    rank_zero_warn(
        f"Epoch {position.epoch} ends here: {position.steps} of its optimizer steps were "
        "taken, and an epoch is now shorter than that."
    )
    fit.epoch_loop.batch_progress.is_last_batch = True
    with warnings.catch_warnings():
        # The saved optimizer has stepped, of which this process does not know.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
        # Lightning makes this step after an epoch's last batch, and the saved run had more to come.
        fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    return True


def _restart_fit_loop(loaded: LoadedRun) -> None:
    """Set the fit loop to start at a position.

    Otherwise Lightning would enter a finished epoch again for one more batch (with ``max_steps``),
    count the loggers' steps as if a batch had been interrupted, and omit the next update of
    ``ReduceLROnPlateau``.
    """
    trainer, position = loaded.trainer, loaded.position
    fit: Any = trainer.fit_loop
    # Also if the counters are inside an epoch that starts over.
    if position.steps == 0 and not position.is_over:
        # Lightning creates the iterator, as in a run that is not resumed, after the random states
        # were restored, so what the iterator draws on creation is the same.
        fit.epoch_loop.restarting = fit._resuming_from_checkpoint = False
    fit._restarting = False
    # Of an earlier fit of this Trainer, which would end the epoch without the validation.
    fit.epoch_loop.val_loop._has_run = False
    axis = loaded.state.axis
    if trainer.lightning_module.automatic_optimization:
        axis = trainer.global_step  # the loggers count optimizer steps then
    if axis is not None:
        set_logged_steps(trainer, axis - _will_end_batch(trainer))


def _will_end_batch(trainer: pl.Trainer) -> bool:
    """Whether the restarted loop first ends the last batch, and counts it for the loggers."""
    loop, fetcher = trainer.fit_loop.epoch_loop, data_fetcher(trainer)
    return bool(loop.restarting and fetcher is not None and loop._should_check_val_fx(fetcher))


def _restore_validation_counters(loaded: LoadedRun) -> None:
    """Set the validation's batch counters to those of the uninterrupted run.

    Lightning has already used its counters to decide whether to validate first.
    """
    loop = loaded.trainer.fit_loop.epoch_loop.val_loop
    counters = validation_counters_at(
        loaded.validation,
        began=loaded.state.validation_began,
        was=loaded.state.validation_batches,
        now=validation_batches(loaded.trainer),
    )
    loop.batch_progress.load_state_dict(counters)
    loop.restarting = False


def _step_plateaus(trainer: pl.Trainer, interval: str, done: int) -> None:
    progress = trainer.fit_loop.epoch_loop.scheduler_progress
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau or config.interval != interval:
            continue
        metric = trainer.callback_metrics.get(config.monitor or "")
        if done % config.frequency == 0 and metric is not None:
            progress.increment_ready()
            # As Lightning updates it.
            call._call_lightning_module_hook(trainer, "lr_scheduler_step", config.scheduler, metric)
            progress.increment_completed()
