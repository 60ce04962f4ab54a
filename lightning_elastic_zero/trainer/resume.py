"""Resume a run from a recorded position.

Lightning restores its loops from counters, when the loaders may not exist yet. So a resume has two
parts. ``RunResumer.resume_from`` converts the saved samples to counters of this number of devices
when a checkpoint is loaded. ``ResumeSteps`` restores data, random states and what only live loops
have when training is about to begin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import lightning.pytorch as pl
import torch

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.options import check_choice
from lightning_elastic_zero.data_progress.counters import LOADER_STATES, VALIDATION, fit_loop_at
from lightning_elastic_zero.trainer.accumulation import StepIntervals, check_one_batch_per_step
from lightning_elastic_zero.trainer.batches import BatchController
from lightning_elastic_zero.trainer.data_position import UnresumableDataPolicy
from lightning_elastic_zero.trainer.fit_warnings import warn_of_shuffling, warn_of_unresumable_data
from lightning_elastic_zero.trainer.lightning import reload_interval, training_loaders
from lightning_elastic_zero.trainer.loaded_run import LoadedRun, counted_loops, saved_position
from lightning_elastic_zero.trainer.loaders import samples_per_step
from lightning_elastic_zero.trainer.metrics import EpochMetrics
from lightning_elastic_zero.trainer.prepared_loaders import PreparedLoaders
from lightning_elastic_zero.trainer.recorder import RunRecorder
from lightning_elastic_zero.trainer.resume_steps import ResumeSteps
from lightning_elastic_zero.trainer.run_state import RunState
from lightning_elastic_zero.trainer.tensor_parallel import data_rank_of, grid_of


class RunResumer:
    """Makes a resumed run take the same steps as an uninterrupted one."""

    def __init__(
        self, batches: BatchController, on_unresumable_data: UnresumableDataPolicy
    ) -> None:
        self._batches = batches
        self._on_unresumable_data: UnresumableDataPolicy = check_choice(
            "on_unresumable_data", on_unresumable_data, get_args(UnresumableDataPolicy)
        )
        self.loaders = PreparedLoaders(batches)
        self.recorder = RunRecorder(batches, self.loaders)
        self._step_intervals = StepIntervals()
        self._loaded: LoadedRun | None = None
        self.has_begun = False
        """Whether the fit has begun to train; before, a loaded run is restored in part only."""

    def begin(self) -> None:
        """Begin a fit."""
        self._loaded, self.has_begun = None, False
        self.loaders.begin()
        self.recorder = RunRecorder(self._batches, self.loaders)

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint is loaded, but data and random states are not restored yet."""
        return self._loaded is not None

    def resume_from(
        self,
        state: dict[str, Any],
        run_state: RunState,
        manifest: Manifest,
        trainer: pl.Trainer,
        where: str,
    ) -> None:
        """Convert a loaded checkpoint's loop counters to this number of devices, in place."""
        if (loops := counted_loops(state)) is None:
            return
        saved = saved_position(state, manifest, where)
        is_own_format = bool(manifest.progress.sampler)
        if not is_own_format and manifest.progress.global_samples:  # so its ranks are known
            size = self._batches.samples_per_step_of(saved.settings)
            saved = replace(saved, settings=replace(saved.settings, global_batch_size=size))
        batches = self._batches.current
        size = batches.global_batch_size if batches is not None else None
        if reload_interval(trainer) and self._batches.plan is None:
            size = None  # the loaders of that epoch may have another batch size
        loaded = self._loaded = LoadedRun(
            trainer,
            where,
            saved,
            saved.at_batch_size(size),
            is_own_format=is_own_format,
            state=run_state,
            all_loader_states=tuple(loops.get("state_dict", {}).get(LOADER_STATES, [])),
            validation=loops.get(VALIDATION, {}),
        )
        was, now = saved.settings.accumulate, trainer.accumulate_grad_batches
        counters = fit_loop_at(loops, loaded.position, was=was, now=now)
        # Inside an epoch, it is not known yet whether the states are at the position.
        if (states := loaded.loader_states) and not loaded.was_inside_epoch:
            counters["state_dict"][LOADER_STATES] = states
        state["loops"]["fit_loop"] = counters
        state["epoch"] = loaded.position.epoch

    def on_train_start(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Restore everything before the first batch."""
        self._step_intervals.begin_fit(trainer, is_planned=self._batches.plan is not None)
        self.recorder.epoch_metrics = metrics = EpochMetrics(trainer)
        loader_states: list[Any] = []
        if self._loaded is not None:
            steps = ResumeSteps(
                self._batches,
                self.loaders,
                self.recorder,
                self._step_intervals,
                self._on_unresumable_data,
                device,
            )
            loader_states = steps.run(self._loaded, metrics)
        loaders = training_loaders(trainer)
        warn_of_shuffling(self._batches.overruled_orders or (), loaders)
        self._batches.overruled_orders = None
        if self._on_unresumable_data == "refuse":
            sizes = samples_per_step(self._batches.current, loaders)
            warn_of_unresumable_data(loaders, grid_of(trainer), sizes)
        self.recorder.begin_training(trainer, loader_states, device)
        self.loaders.seed_validation(trainer)
        self._loaded, self.has_begun = None, True

    def weight(self, trainer: pl.Trainer) -> float:
        """Return the weight of the current micro-batch's loss, in addition to 1 / accumulation."""
        if (plan := self._batches.plan) is None:
            return 1.0
        micro_batch = trainer.fit_loop.batch_idx % plan.accumulate
        return plan.loss_weight(data_rank_of(trainer), micro_batch)

    def before_batch_transfer(self, trainer: pl.Trainer) -> None:
        """Prepare for the hooks of a batch that was fetched."""
        self._step_intervals.restore(trainer)
        self.recorder.begin_batch(trainer)

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Determine whether schedulers and validation are due after the next batch."""
        if self._batches.current is not None:
            self._batches.current.check_accumulation(trainer)
        check_one_batch_per_step(trainer)
        self.recorder.before_batch(trainer, batch_idx)
        self._step_intervals.begin_batch(trainer)
        self.loaders.seed_validation(trainer)
