"""How a run is taken up: what a save records of it, and what a resumed one does first.

Lightning restores its loops from numbers, when the loaders may not exist yet. So this happens at
two moments: ``resume_from`` rewrites the numbers for this number of devices as they are loaded, and
``start`` puts samplers, iterators and random numbers in place when training is about to begin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn

from lightning_elastic_zero.data_progress import (
    LOADER_STATES,
    VALIDATION,
    DataProgress,
    ElasticSampler,
    Position,
    collect_rng_states,
    fit_loop_at,
    read_position,
    seed_rng_streams,
    set_rng_states,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.trainer import dataloader_warnings, resume_warnings
from lightning_elastic_zero.trainer.batch_settings import BatchSettings, UserSettings
from lightning_elastic_zero.trainer.dataloader_resume import (
    PendingResume,
    UnresumableDataPolicy,
    loader_states_at,
    position_dataloaders,
)
from lightning_elastic_zero.trainer.dataloader_warnings import OrderAsMade
from lightning_elastic_zero.trainer.dataloaders import (
    elastic_loader,
    elastic_sampler_of,
    with_own_generator,
)
from lightning_elastic_zero.trainer.epoch_length import EpochLength
from lightning_elastic_zero.trainer.epoch_metrics import EpochMetrics, SavedMetrics
from lightning_elastic_zero.trainer.infer_progress import infer_record
from lightning_elastic_zero.trainer.loop_restore import (
    LoopRestorer,
    logger_step,
    planned_steps,
    restore_frequencies,
    validation_batches,
)
from lightning_elastic_zero.trainer.prefetch import prefetch_next_batch
from lightning_elastic_zero.trainer.step_intervals import (
    StepIntervals,
    optimizer_steps_in,
    pending_micro_batches,
)
from lightning_elastic_zero.trainer.step_state import LoaderStates, StepState

STATE_KEY = "lightning_elastic_zero"
"""Entry of the checkpoint dictionary with what the manifest has no place for."""


class RunResumer:
    """The part of the strategy that makes a resumed run take the steps of an uninterrupted one."""

    def __init__(self, on_unresumable_data: UnresumableDataPolicy, given: UserSettings) -> None:
        self._on_unresumable_data = on_unresumable_data
        self._epoch_length, self._step_intervals = EpochLength(given), StepIntervals(given)
        self._batches: BatchSettings | None = None
        self._pending: PendingResume | None = None
        self._step_state: StepState | None = None
        self._random_before_validation: dict[str, Any] | None = None
        self._suspended: list[tuple[Any, int]] = []
        self._loader_states = LoaderStates()
        self.orders_as_made: list[OrderAsMade] | None = None
        """Of each training loader as the user made it; None where they were not asked for."""
        self._epoch_metrics = EpochMetrics()
        self._validated_at = -1
        self._loaders_made = 0
        self._seeds: list[int | None] = []

    # -- setting up --------------------------------------------------------------------------

    def set_batches(self, batches: BatchSettings, trainer: pl.Trainer) -> None:
        """Take how steps are made of samples, once that is settled for a fit."""
        self._batches = batches
        self._pending = self._step_state = self._random_before_validation = None
        self._validated_at = -1
        self._epoch_length.begin(trainer, batches.accumulate, is_planned=batches.plan is not None)
        self._loaders_made, self._seeds = 0, []
        self._loader_states = LoaderStates()

    @property
    def batches(self) -> BatchSettings | None:
        """How steps are made of samples."""
        return self._batches

    def process_loader(self, loader: object, trainer: pl.Trainer, rank: int) -> object:
        """Make a loader one that can be taken up; Lightning prepared it before."""
        if self._batches is None:
            return loader
        if not trainer.training:
            return with_own_generator(loader, _seed(), rank)
        if self._loaders_made and self._loaders_made >= len(_loaders(trainer)) > 0:
            self._epoch_length.forget()
            self._loaders_made = 0  # they are made anew
        loader = elastic_loader(loader, self._batches, rank, _seed())
        if (elastic := elastic_sampler_of(loader)) is None:
            self._batches.check_fixed_batches(loader)
        else:
            self._check_first(elastic)
            kept = self._seeds[self._loaders_made : self._loaders_made + 1]
            elastic.seed = kept[0] if kept and kept[0] is not None else elastic.seed
        self._loaders_made += 1
        self._epoch_length.round_to_whole_steps(loader, trainer, self._batches.accumulate)
        return loader

    def _check_first(self, elastic: ElasticSampler) -> None:
        """Refuse a first loader that is not cut as was settled by the batch size that it had."""
        plan = self._batches.plan if self._batches is not None else None
        if plan is not None and not self._loaders_made and elastic.plan != plan:
            msg = (
                f"global_batch_size={plan.global_batch_size} was cut for another batch_size than "
                f"the training loader has, which would make it {elastic.plan.global_batch_size}: "
                "let train_dataloader give the same batch_size each time that it is called"
            )
            raise UnsupportedError(msg)

    # -- saving ------------------------------------------------------------------------------

    def record(
        self, trainer: pl.Trainer, loops: Mapping[str, Any], world_size: int
    ) -> DataProgress:
        """Say where the run stands."""
        batches = self._batches
        accumulate = trainer.accumulate_grad_batches
        position = read_position(
            loops,
            accumulate,
            batches=trainer.num_training_batches,
            validating=trainer.state.fn == TrainerFn.FITTING and trainer.validating,
        )
        # Inside a window the place is that of the step before, after which validation may have run.
        if self._validated_at == _batches_done(trainer) - pending_micro_batches(trainer):
            position = replace(position, is_validated=True)
        elastic = [elastic_sampler_of(loader) for loader in _loaders(trainer)]
        size = next((s.plan.global_batch_size for s in elastic if s is not None), None)
        if size is None and batches is not None:
            size = batches.global_batch_size
        total = trainer.num_training_batches
        return DataProgress(
            position,
            global_step=trainer.global_step,
            global_batch_size=size,
            accumulate=accumulate,
            world_size=world_size,
            steps_per_epoch=optimizer_steps_in(total, accumulate)
            if total != float("inf")
            else None,
            planned_steps=planned_steps(trainer, accumulate),
            loaders=tuple(s.describe() if s is not None else {} for s in elastic),
            orders=tuple(s.latest_order() if s is not None else None for s in elastic),
            settings={
                name: getattr(trainer, name, None) for name in resume_warnings.BATCH_COUNT_SETTINGS
            },
        )

    def state(
        self, trainer: pl.Trainer, record: DataProgress, device: torch.device
    ) -> dict[str, Any]:
        """Give what else of this moment belongs to the checkpoint, this rank's own."""
        step_state = self._step_state_of(trainer)
        # As known by now: to ask for more may be to talk to ranks that are gone, or do not save.
        metrics = trainer._logger_connector._callback_metrics  # noqa: SLF001
        validated, inside = record.position.is_validated, _is_mid_accumulation(trainer)
        ending = record.position.steps == 0 and _is_ending(trainer.fit_loop.epoch_progress)
        kept = self._epoch_metrics.state(trainer, inside=inside, validated=validated, ending=ending)
        return {
            **kept,
            "validation_began": trainer.validating and not validated,
            "validation_batches": validation_batches(trainer),
            "random": dict(step_state.random)
            if step_state
            else self._random_before_validation or collect_rng_states(device),
            "metrics": {name: value.detach().cpu() for name, value in metrics.items()},
            "plateau_epoch_pending": ending,
            "axis": logger_step(trainer),
            "plateau_step_pending": not step_state
            and (trainer.validating or _is_ending(trainer.fit_loop.epoch_loop.batch_progress)),
        }

    def buffers(self, trainer: pl.Trainer) -> Mapping[str, torch.Tensor] | None:
        """Give the buffers of the last optimizer step, if they are not the live ones."""
        step_state = self._step_state_of(trainer)
        return step_state.buffers if step_state else None

    def loader_states(self, trainer: pl.Trainer) -> list[Any]:
        """Give the states of loaders that keep their own, as of the last optimizer step."""
        step_state = self._step_state_of(trainer)
        return step_state.loaders if step_state else self._loader_states.now(trainer)

    def _step_state_of(self, trainer: pl.Trainer) -> StepState | None:
        """Give what was kept at the last step, inside a window of micro-batches."""
        return self._step_state if _is_mid_accumulation(trainer) else None

    # -- training ----------------------------------------------------------------------------

    def weight(self, trainer: pl.Trainer, rank: int) -> float:
        """Give what the running micro-batch's loss counts with, beside 1 / accumulation."""
        plan = self._batches.plan if self._batches is not None else None
        if plan is None or plan.is_even:
            return 1.0
        return plan.loss_weight(rank, trainer.fit_loop.batch_idx % plan.accumulate)

    def after_optimizer_step(
        self, module: nn.Module, trainer: pl.Trainer, device: torch.device
    ) -> None:
        """Keep what belongs to this moment, right after an optimizer step."""
        if trainer.accumulate_grad_batches > 1:
            self._step_state = StepState.of(module, self._loader_states.now(trainer), device)

    def before_batch_transfer(self, trainer: pl.Trainer) -> None:
        """Note what has been summed up, when a batch has come and its hooks are still to run."""
        self._step_intervals.before_batch_transfer(trainer)
        self._epoch_metrics.note(trainer)

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Note what loaders keep, when a batch was fetched and is about to be trained on."""
        restore_frequencies(self._suspended)
        self._epoch_metrics.note(trainer)  # of steps that take their batches themselves
        self._loader_states.before_batch(trainer, is_first=batch_idx == 0)
        if prefetch_next_batch(trainer):
            self._loader_states.before_batch(trainer, is_first=False)
        self._step_intervals.begin_batch(trainer)

    def validating(self, device: torch.device) -> None:
        """Set the streams of random numbers aside: what a validation draws is not training's.

        A run that is taken up inside or after a validation may do it again, or not.
        """
        self._random_before_validation = collect_rng_states(device)
        self._epoch_metrics.validating()

    def validated(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Note that the validation that was due here is over."""
        self._validated_at = _batches_done(trainer)
        self._epoch_metrics.validated()
        if self._random_before_validation is not None:
            set_rng_states(self._random_before_validation, device)
            self._random_before_validation = None

    # -- loading -----------------------------------------------------------------------------

    def resume_from(
        self,
        state: dict[str, Any],
        manifest: Manifest,
        trainer: pl.Trainer,
        where: str,
        world_size: int,
    ) -> None:
        """Rewrite a loaded checkpoint's loop counters for this number of devices, in place."""
        own = state.pop(STATE_KEY, {})
        loops = state.get("loops", {}).get("fit_loop")
        if loops is None or "epoch_progress" not in loops:
            return
        sampler = manifest.progress.sampler
        record = (
            DataProgress.from_plain(sampler, f"{where}/manifest.json")
            if sampler
            else infer_record(loops, manifest, int(state.get("global_step", 0)))
        )
        batches = self._batches
        position = record.at_batch_size(batches.global_batch_size if batches else None)
        states = loops.get("state_dict", {}).get(LOADER_STATES, [])
        held = (own, list(states), loops.get(VALIDATION, {}))
        self._pending = PendingResume(where, record, position, bool(sampler), *held)
        now = trainer.accumulate_grad_batches
        rewritten = fit_loop_at(loops, position, was=record.accumulate, now=now)
        if states and record.world_size == world_size:
            rewritten["state_dict"][LOADER_STATES] = states
        state["loops"]["fit_loop"] = rewritten
        state["epoch"] = position.epoch

    def start(self, trainer: pl.Trainer, rank: int, world_size: int, device: torch.device) -> None:
        """Put everything in place before the first batch; called in ``on_train_start``.

        Raises:
            CheckpointMismatchError: the data cannot be taken up where it was left, and the user
                did not allow the epoch to be restarted.
        """
        planned = self._batches is not None and self._batches.plan is not None
        self._step_intervals.begin_fit(trainer, is_planned=planned)
        self._epoch_metrics.begin(trainer)
        pending, self._pending = self._pending, None
        given: list[Any] = []
        if pending is not None:
            position = self._resume(pending, trainer, rank, world_size, device)
            given = loader_states_at(pending, position, world_size)
        self._warn_about_data(trainer, world_size)
        self._loader_states.begin(trainer, given)
        if trainer.accumulate_grad_batches > 1:
            states = self._loader_states.now(trainer)
            self._step_state = StepState.of(trainer.lightning_module, states, device)

    def _resume(
        self,
        pending: PendingResume,
        trainer: pl.Trainer,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> Position:
        now = self.record(trainer, trainer.fit_loop.state_dict(), world_size)
        self._warn_about_changes(pending, now, has_schedule=bool(trainer.lr_scheduler_configs))
        live = LoopRestorer(trainer)
        self._seeds = [
            seed if type(seed := loader.get("seed")) is int else None
            for loader in pending.record.loaders
        ]
        of_this = (_combined(trainer), world_size, self._on_unresumable_data)
        placed = position_dataloaders(pending, *of_this)
        if (position := live.within_limit(placed)) != placed:
            position_dataloaders(replace(pending, position=position), *of_this)
        if position != pending.position or now.accumulate != pending.record.accumulate:
            live.complete_counters(position)
        self._step_intervals.resume_at(trainer, is_last=position.is_over)
        live.restart_at(position, pending.state.get("axis"))
        if position.is_validated:
            self._validated_at = _batches_done(trainer)
        live.restore_validation_counters(pending.validation, pending.state)
        live.restore_metrics(pending.state)
        source = SavedMetrics.of(pending.state, rank, world_size, pending.record.world_size)
        self._epoch_metrics.resume_from(source, trainer, position)
        live.run_pending_plateau_steps(pending.state, position)
        self._suspended = live.suspend_plateau_steps(pending.state)
        live.restart_data(position)
        live.start_progress_bar(position)
        live.skip_repeated_saves()
        if "random" not in pending.state:
            return position
        if pending.record.world_size == world_size:
            set_rng_states(pending.state["random"], device)
        else:
            seed_rng_streams(_seed(), trainer.global_step, rank)
            rank_zero_info(
                f"Random numbers: saved on another number of devices "
                f"({pending.record.world_size}), so each rank of {world_size} starts a stream of "
                f"its own (seed {_seed()}, step {trainer.global_step}, rank)"
            )
        return position

    def _warn_about_data(self, trainer: pl.Trainer, world_size: int) -> None:
        """Say what becomes of the training data that the user may not expect."""
        loaders = _loaders(trainer)
        made, self.orders_as_made = self.orders_as_made or (), None
        for text in dataloader_warnings.shuffle_warnings(made, loaders):
            rank_zero_warn(text)
        is_known = self._batches is not None and self._batches.global_batch_size is not None
        if self._on_unresumable_data == "refuse":
            for text in dataloader_warnings.unresumable_warnings(
                loaders, world_size, is_known=is_known
            ):
                rank_zero_warn(text)

    def _warn_about_changes(
        self, pending: PendingResume, now: DataProgress, *, has_schedule: bool
    ) -> None:
        """Say what changed since the save."""
        given = self._batches is not None and self._batches.plan is not None
        foreign_path = "" if pending.is_own_format else pending.where
        made = now if has_schedule else replace(now, planned_steps=None)
        for text in resume_warnings.change_warnings(
            pending.record, made, is_given=given, foreign_path=foreign_path
        ):
            rank_zero_warn(text)


def _is_mid_accumulation(trainer: pl.Trainer) -> bool:
    """Tell whether a window of micro-batches is under way."""
    current = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    return bool(current["ready"] != current["processed"] or pending_micro_batches(trainer))


def _loaders(trainer: pl.Trainer) -> list[Any]:
    """Give the training loaders, flat."""
    combined = _combined(trainer)
    return [] if combined is None else list(combined.flattened)


def _combined(trainer: pl.Trainer) -> CombinedLoader | None:
    return trainer.fit_loop._combined_loader  # noqa: SLF001 - there is no public way


def _batches_done(trainer: pl.Trainer) -> int:
    done: int = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["total"]["processed"]
    return done


def _is_ending(progress: Any) -> bool:
    """Tell whether a batch or epoch is done, and the hooks at its end are not."""
    return bool(progress.current.completed < progress.current.processed)


def _seed() -> int:
    """Give the run's seed: what ``seed_everything`` left."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)
