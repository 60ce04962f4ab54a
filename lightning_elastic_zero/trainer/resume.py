"""Resume of a run: numbers rewritten as they are loaded, state restored before training.

Lightning restores its loops from numbers, when the loaders may not exist yet. So this happens at
two moments: ``resume_from`` rewrites the numbers for this number of devices as they are loaded, and
``on_train_start`` restores samplers, iterators and random numbers when training is about to begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.data_progress import (
    EPOCHS,
    LOADER_STATES,
    VALIDATION,
    DataProgress,
    ElasticSampler,
    Position,
    fit_loop_at,
    infer_progress,
    seed_rng_streams,
    set_rng_states,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.option_checks import check_choice
from lightning_elastic_zero.trainer.batch_settings import BatchSettings, UserSettings, batch_size_of
from lightning_elastic_zero.trainer.dataloader_resume import (
    PendingResume,
    UnresumableDataPolicy,
    finish_placement,
    position_dataloaders,
)
from lightning_elastic_zero.trainer.dataloaders import (
    elastic_loader,
    elastic_sampler_of,
    generator_states,
    samples_per_step,
    set_generator_states,
    with_own_generator,
)
from lightning_elastic_zero.trainer.epoch_metrics import SavedMetrics
from lightning_elastic_zero.trainer.lightning_internals import (
    combined_loader,
    reload_interval,
    run_seed,
    set_last_reload,
    training_loaders,
)
from lightning_elastic_zero.trainer.loop_restore import LoopRestorer
from lightning_elastic_zero.trainer.run_record import (
    STATE_KEY,
    VALIDATED_IN_WINDOW,
    RunRecorder,
)
from lightning_elastic_zero.trainer.start_warnings import (
    change_warnings,
    late_loader_warnings,
    shuffle_warnings,
    unresumable_warnings,
    worker_warnings,
)
from lightning_elastic_zero.trainer.step_intervals import StepIntervals


class RunResumer:
    """The part of the strategy that makes a resumed run take the steps of an uninterrupted one."""

    def __init__(self, on_unresumable_data: UnresumableDataPolicy) -> None:
        """Begin without a fit.

        Raises:
            ValueError: ``on_unresumable_data`` is no word that is known.
        """
        self._on_unresumable_data: UnresumableDataPolicy = check_choice(
            "on_unresumable_data", on_unresumable_data, get_args(UnresumableDataPolicy)
        )
        self.settings = UserSettings()
        """The trainer's settings as the user has them."""
        self.recorder = RunRecorder()
        """Where the run stands, and what belongs to that moment."""
        self._step_intervals = StepIntervals()
        self.batches: BatchSettings | None = None
        """How steps are made of samples."""
        self._pending: PendingResume | None = None
        self.overruled_orders: list[str] | None = None
        """What is said of each training loader's order; None where they were not asked for."""
        self._loaders_made = 0
        self._new_generators: list[dict[str, list[torch.Tensor]]] = []

    def set_batches(self, batches: BatchSettings) -> None:
        """Begin a fit whose steps are made of these batches."""
        self.batches = batches
        self._pending = None
        self.recorder = RunRecorder(batches)
        self._loaders_made = 0
        self._new_generators = []

    @property
    def _is_planned(self) -> bool:
        """Whether there is a global batch."""
        return self.batches is not None and self.batches.plan is not None

    def process_loader(self, loader: object, trainer: pl.Trainer, rank: int) -> object:
        """Make a loader one that can be resumed; Lightning prepared it before."""
        if self.batches is None:
            return loader
        if not trainer.training:
            return with_own_generator(loader, run_seed(), rank)
        if self._loaders_made and self._loaders_made >= len(training_loaders(trainer)) > 0:
            self._loaders_made, self._new_generators = 0, []  # they are made anew
        loader = elastic_loader(loader, self.batches, rank, run_seed(), trainer.current_epoch)
        if (elastic := elastic_sampler_of(loader)) is None:
            self.batches.check_fixed_batches(loader)
        else:
            self._check_first(elastic, loader)
            if elastic.seed == run_seed():
                elastic.seed = self.recorder.seed
        self._loaders_made += 1
        self._new_generators.append(generator_states(loader))
        return loader

    def _check_first(self, elastic: ElasticSampler, loader: object) -> None:
        """Refuse a first loader that is not cut as was settled by the batch size that it had."""
        plan = self.batches.plan if self.batches is not None else None
        if batch_size_of(loader) is None:
            return  # its items are batches, and are not cut
        if plan is not None and not self._loaders_made and elastic.plan != plan:
            msg = (
                f"global_batch_size={plan.global_batch_size} was cut for another batch_size than "
                f"the training loader has, which would make it {elastic.plan.global_batch_size}: "
                "let train_dataloader give the same batch_size each time that it is called"
            )
            raise UnsupportedError(msg)

    def weight(self, trainer: pl.Trainer, rank: int) -> float:
        """Return the weight of the running micro-batch's loss, beside 1 / accumulation."""
        plan = self.batches.plan if self.batches is not None else None
        if plan is None or plan.is_even:
            return 1.0
        return plan.loss_weight(rank, trainer.fit_loop.batch_idx % plan.accumulate)

    def before_batch_transfer(self, trainer: pl.Trainer) -> None:
        """Note what has been summed up, when a batch has come and its hooks are still to run."""
        self._step_intervals.restore(trainer)
        self.recorder.epoch_metrics.note(trainer)

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Compute what is due after a batch that was fetched and is about to be trained on.

        Raises:
            UnsupportedError: the accumulation was changed since the fit began.
        """
        if self.batches is not None:
            self.batches.check_accumulation(trainer)
        self.recorder.before_batch(trainer, batch_idx)
        self._step_intervals.begin_batch(trainer)

    def resume_from(
        self, state: dict[str, Any], manifest: Manifest, trainer: pl.Trainer, where: str
    ) -> None:
        """Rewrite a loaded checkpoint's loop counters for this number of devices, in place."""
        own = state.pop(STATE_KEY, {})
        if (loops := counted_loops(state)) is None:
            return
        sampler, steps = manifest.progress.sampler, int(state.get("global_step", 0))
        record = (
            DataProgress.from_plain(sampler, f"{where}/manifest.json")
            if sampler
            else infer_progress(loops, manifest.progress, manifest.world_size, steps)
        )
        size = self.batches.global_batch_size if self.batches is not None else None
        if (every := reload_interval(trainer)) and not self._is_planned:
            size = None  # the loaders of that epoch may have another one than those so far
        position = record.at_batch_size(size)
        states = loops.get("state_dict", {}).get(LOADER_STATES, [])
        held = (own, list(states), loops.get(VALIDATION, {}))
        now = trainer.accumulate_grad_batches
        of_this = (trainer.world_size, every, now)
        self._pending = PendingResume(where, record, position, bool(sampler), *held, *of_this)
        rewritten = fit_loop_at(loops, position, was=record.accumulate, now=now)
        if states and record.world_size == trainer.world_size:
            rewritten["state_dict"][LOADER_STATES] = states
        state["loops"]["fit_loop"] = rewritten
        state["epoch"] = position.epoch

    def on_train_start(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Restore everything before the first batch.

        Raises:
            CheckpointMismatchError: the data cannot be resumed where it was left, and the user did
                not allow the epoch to be restarted.
        """
        self._step_intervals.begin_fit(trainer, is_planned=self._is_planned)
        self.recorder.epoch_metrics.begin(trainer)
        pending, self._pending = self._pending, None
        given: list[Any] = []
        if pending is not None:
            given = self._resume(pending, trainer, device)
        self._warn_about_data(trainer)
        self.recorder.begin_training(trainer, given, device)

    def _resume(
        self, pending: PendingResume, trainer: pl.Trainer, device: torch.device
    ) -> list[Any]:
        """Restore what was loaded; return the states that loaders were given."""
        rank, world_size = trainer.global_rank, trainer.world_size
        now = self.recorder.record(trainer, trainer.fit_loop.state_dict(), world_size)
        self._warn_about_changes(pending, now, has_schedule=bool(trainer.lr_scheduler_configs))
        live = LoopRestorer(trainer, pending)
        pending = live.at_batch_size(now.global_batch_size)
        if (seed := pending.run_seed) is not None:
            self.recorder.seed = seed
        combined = combined_loader(trainer)
        sizes = samples_per_step(self.batches, training_loaders(trainer))
        of_this = (combined, sizes, self._on_unresumable_data)
        placed = position_dataloaders(pending, *of_this)
        if (position := live.within_limit(placed.position)) != placed.position:
            placed = position_dataloaders(replace(pending, position=position), *of_this)
        self.recorder.begin_at(placed)
        if position != pending.position or now.accumulate != pending.record.accumulate:
            live.complete_counters(position)
        self._step_intervals.resume_at(trainer, is_last=position.is_over)
        live.restart_at(position)
        set_last_reload(trainer, position.epoch)
        for text in late_loader_warnings(position, pending.reload_every):
            rank_zero_warn(text)
        ahead = _validated_ahead(pending, position, now)
        if position.is_validated or ahead:
            self.recorder.mark_validated(trainer, ahead)
            self._step_intervals.skip_validations(trainer, ahead)
        live.restore_validation_counters()
        live.restore_metrics()
        source = SavedMetrics.of(pending, rank)
        self.recorder.epoch_metrics.resume_from(source, trainer, position)
        live.step_plateaus(position, self._step_intervals)
        loaders = training_loaders(trainer)
        if not position.epoch:  # its iterator is made anew, here
            for loader, states in zip(loaders, self._new_generators, strict=False):
                set_generator_states(loader, states, "workers", "order")
        live.restart_data(position)
        finish_placement(placed, combined)
        live.start_progress_bar(position)
        live.skip_repeated_saves()
        live.restore_stop()
        given = pending.loader_states_at(position)
        if "random" not in pending.state:
            return given
        is_same_world = pending.record.world_size == world_size
        kinds = ("workers", "order") if is_same_world else ("order",)
        saved = () if pending.makes_loaders else pending.state.get("generators", ())
        for loader, states in zip(loaders, saved, strict=False):
            set_generator_states(loader, states, *kinds)
        if is_same_world:
            for text in worker_warnings(loaders, position):
                rank_zero_warn(text)
            set_rng_states(pending.state["random"], device)
        else:
            seed_rng_streams(run_seed(), trainer.global_step, rank)
            rank_zero_info(
                f"Random numbers: saved on another number of devices "
                f"({pending.record.world_size}), so each rank of {world_size} starts a stream of "
                f"its own (seed {run_seed()}, step {trainer.global_step}, rank)"
            )
        return given

    def _warn_about_data(self, trainer: pl.Trainer) -> None:
        """Warn of what becomes of the training data that the user may not expect."""
        loaders = training_loaders(trainer)
        texts = [*shuffle_warnings(self.overruled_orders or (), loaders)]
        self.overruled_orders = None
        if self._on_unresumable_data == "refuse":
            sizes = samples_per_step(self.batches, loaders)
            texts += unresumable_warnings(loaders, trainer.world_size, sizes)
        for text in texts:
            rank_zero_warn(text)

    def _warn_about_changes(
        self, pending: PendingResume, now: DataProgress, *, has_schedule: bool
    ) -> None:
        """Warn of what changed since the save."""
        made = now if has_schedule else replace(now, planned_steps=None)
        for text in change_warnings(
            pending.record,
            made,
            is_given=self._is_planned,
            foreign_path="" if pending.is_own_format else pending.where,
        ):
            rank_zero_warn(text)


def _validated_ahead(pending: PendingResume, position: Position, now: DataProgress) -> int:
    """Return how many of the next micro-batches validations have followed before the save.

    A save inside a window goes back to the step before; callbacks, whose states are of the save,
    do not. As many samples are meant as in the run that saved.
    """
    inside = int(pending.state.get(VALIDATED_IN_WINDOW, 0))
    if not inside or position.steps != pending.position.steps:
        return 0
    record = pending.record
    done = record.position.steps * record.accumulate + inside
    saved, here = record.global_batch_size, now.global_batch_size
    if not saved or not here:
        saved = here = 1
    batches = done * saved * now.accumulate // (record.accumulate * here)
    return max(0, batches - position.steps * now.accumulate)


def counted_loops(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fit loop's counters of Lightning's checkpoint; None where it has none.

    Without them the trainer begins at step 0.
    """
    loops: dict[str, Any] | None = state.get("loops", {}).get("fit_loop")
    return loops if loops is not None and EPOCHS in loops else None
