"""Record a run's position for saves, and resume a run from such a record.

Lightning restores its loops from counters, when the loaders may not exist yet. So a resume has two
parts: ``RunResumer.resume_from`` rewrites the counters for this number of devices when they are
loaded, and ``RunResumer.on_train_start`` restores samplers, iterators and random states when
training is about to begin. ``RunRecorder`` keeps the state that a save at any moment needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.options import check_choice
from lightning_elastic_zero.data_progress.batches import (
    EPOCHS,
    LOADER_STATES,
    VALIDATION,
    Consumed,
    DataProgress,
    Position,
    fit_loop_at,
    infer_progress,
    read_position,
)
from lightning_elastic_zero.data_progress.sampler import (
    ElasticSampler,
    collect_rng_states,
    seed_rng_streams,
    set_rng_states,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.batches import BatchSettings, UserSettings, batch_size_of
from lightning_elastic_zero.trainer.checks import (
    BATCH_COUNT_SETTINGS,
    change_warnings,
    late_loader_warnings,
    shuffle_warnings,
    unresumable_warnings,
    worker_warnings,
)
from lightning_elastic_zero.trainer.data_resume import (
    SAVES,
    LoopRestorer,
    PendingResume,
    Placement,
    UnresumableDataPolicy,
    finish_placement,
    position_dataloaders,
    validation_batches,
)
from lightning_elastic_zero.trainer.lightning import (
    combined_loader,
    exhausted_loaders,
    is_fitting,
    is_save_deferred,
    known_callback_metrics,
    last_saved_step,
    logged_steps,
    reload_interval,
    repeats_shorter_loaders,
    run_seed,
    set_last_reload,
    training_loaders,
    waits_to_stop,
)
from lightning_elastic_zero.trainer.loaders import (
    LoaderStates,
    elastic_loader,
    elastic_sampler_of,
    generator_states,
    length_of,
    samples_per_step,
    set_generator_states,
    with_own_generator,
)
from lightning_elastic_zero.trainer.metrics import EpochMetrics, SavedMetrics
from lightning_elastic_zero.trainer.windows import (
    StepIntervals,
    optimizer_steps_in,
    pending_micro_batches,
    prefetch_next_batch,
)

STATE_KEY = "lightning_elastic_zero"
"""Entry of the checkpoint dictionary for this library's state."""

VALIDATED_IN_WINDOW = "validated_in_window"
"""Entry of that state: micro-batches since the last step up to the last completed validation."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Copies made at the last optimizer step, for saves inside an accumulation window.

    Weights change at optimizer steps; buffers, random states and loaders at every micro-batch. A
    checkpoint taken inside a window goes back to the last step, so it needs their state at that
    step.
    """

    random: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor]
    """By the names of the module's ``named_buffers``."""
    loaders: list[Any]
    """States of stateful training loaders."""
    generators: list[Any]
    """States of the generators from which the training loaders draw."""

    @classmethod
    def of(cls, trainer: pl.Trainer, loaders: list[Any], device: torch.device) -> StepState:
        """Copy the current state."""
        module: nn.Module = trainer.lightning_module
        buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        generators = [*map(generator_states, training_loaders(trainer))]
        return cls(collect_rng_states(device), buffers, loaders, generators)


class RunRecorder:
    """Keeps during training what a save at any moment has to record."""

    def __init__(self, batches: BatchSettings | None = None) -> None:
        self._batches = batches
        self._step_state: StepState | None = None
        self._random_before_validation: dict[str, Any] | None = None
        self._states_of_loaders = LoaderStates()
        self._validated_at = -1
        self.seed = run_seed()
        """Seed of the sample order if the user gives none; restored by a resume."""
        self._placement: Placement | None = None
        self._at_end: tuple[DataProgress, list[Any]] | None = None
        self.epoch_metrics = EpochMetrics()
        """Metrics accumulated in the epoch."""

    def begin_training(self, trainer: pl.Trainer, given: list[Any], device: torch.device) -> None:
        """Record the state before the first batch; ``given``: states loaded into loaders."""
        self._states_of_loaders.begin(trainer, given)
        self.after_optimizer_step(trainer, device)

    def after_optimizer_step(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Copy the state of this moment, right after an optimizer step."""
        if trainer.accumulate_grad_batches > 1:
            self._step_state = StepState.of(trainer, self._states_of_loaders.now(trainer), device)

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Record loader states; a batch was fetched and is about to be trained on."""
        self.epoch_metrics.note(trainer)  # for training steps that fetch their own batches
        self._states_of_loaders.before_batch(trainer, is_first=batch_idx == 0)
        if prefetch_next_batch(trainer):
            self._states_of_loaders.before_batch(trainer, is_first=False)

    def on_validation_start(self, device: torch.device) -> None:
        """Copy the random states, so that a validation does not change those of training.

        A run that is resumed inside or after a validation may or may not repeat it.
        """
        self._random_before_validation = collect_rng_states(device)
        self.epoch_metrics.validating()

    def on_validation_end(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Record that the validation is over, and restore the random states."""
        self.mark_validated(trainer)
        self.epoch_metrics.validated(trainer)
        if self._random_before_validation is not None:
            set_rng_states(self._random_before_validation, device)
            self._random_before_validation = None

    def mark_validated(self, trainer: pl.Trainer, ahead: int = 0) -> None:
        """Record that the validations up to this batch, or ``ahead`` batches later, are over."""
        self._validated_at = _batches_done(trainer) + ahead

    def record(
        self, trainer: pl.Trainer, loops: Mapping[str, Any], world_size: int
    ) -> DataProgress:
        """Return the current position of the run."""
        batches = self._batches
        accumulate = trainer.accumulate_grad_batches
        position = read_position(
            loops,
            accumulate,
            batches=trainer.num_training_batches,
            validating=is_fitting(trainer) and trainer.validating,
        )
        # Inside a window, the position is the last step; a validation may have run since.
        if self._validated_in_window(trainer) >= 0:
            position = replace(position, is_validated=True)
        elastic = [elastic_sampler_of(loader) for loader in training_loaders(trainer)]
        size = None
        if batches is not None:
            # train_dataloader may return another batch size in each epoch.
            live = batch_size_of(training_loaders(trainer)) or batches.loader_batch_size
            size = replace(batches, loader_batch_size=live).global_batch_size
        if size is None:
            size = next((s.plan.global_batch_size for s in elastic if s is not None), None)
        total = trainer.num_training_batches
        found = DataProgress(
            position,
            global_step=trainer.global_step,
            global_batch_size=size,
            accumulate=accumulate,
            world_size=world_size,
            steps_per_epoch=optimizer_steps_in(total, accumulate)
            if total != float("inf")
            else None,
            planned_steps=_planned_steps(trainer),
            loaders=tuple(s.describe() if s is not None else {} for s in elastic),
            consumed=self._consumed(trainer, position),
            orders=tuple(s.latest_order() if s is not None else None for s in elastic),
            settings=_batch_counts(trainer, batches),
            seed=self.seed,
        )
        if elastic or self._at_end is None:
            return found
        kept = self._at_end[0]
        return replace(found, loaders=kept.loaders, consumed=kept.consumed, orders=kept.orders)

    def end(self, trainer: pl.Trainer) -> None:
        """Keep the record of the loaders, which a following evaluation removes."""
        if loaders := training_loaders(trainer):
            loops = trainer.fit_loop.state_dict()
            record = self.record(trainer, loops, trainer.world_size)
            self._at_end = record, [*map(generator_states, loaders)]

    def _generators(self, trainer: pl.Trainer) -> list[Any]:
        loaders = training_loaders(trainer)
        if not loaders and self._at_end is not None:
            return self._at_end[1]
        return [*map(generator_states, loaders)]

    def begin_at(self, placement: Placement) -> None:
        """Set the position at which a resumed run continues."""
        self._placement = placement

    def _consumed(self, trainer: pl.Trainer, position: Position) -> tuple[Consumed | None, ...]:
        """Return how much of each training loader this epoch has consumed up to a position."""
        combined = combined_loader(trainer)
        if combined is None:
            return ()
        loaders, begun = combined.flattened, self._placement
        is_of_epoch = begun is not None and begun.position.epoch == position.epoch
        if begun is None or not is_of_epoch or len(begun.consumed) != len(loaders):
            begun = Placement(Position(position.epoch, 0), (Consumed(0),) * len(loaders))
        steps = position.steps - begun.position.steps
        repeats = len(loaders) > 1 and repeats_shorter_loaders(combined)
        ended = exhausted_loaders(combined) if repeats else []
        sizes = samples_per_step(self._batches, loaders)
        parts: list[Consumed | None] = []
        for index, (loader, size, part) in enumerate(
            zip(loaders, sizes, begun.consumed, strict=True)
        ):
            whole = _samples_of_pass(loader, size, trainer.accumulate_grad_batches)
            is_lost = whole is None and ended[index : index + 1] == [True]
            if size is None or part is None or is_lost:
                parts.append(None)
            else:
                parts.append(_after(part, steps * size, whole, repeats=repeats))
        return tuple(parts)

    def state_dict(
        self, trainer: pl.Trainer, record: DataProgress, device: torch.device, path: str
    ) -> dict[str, Any]:
        """Return this rank's state of this moment for a checkpoint at a path."""
        step_state = self._step_state_of(trainer)
        # Only known values: computing more could communicate with ranks that do not save.
        metrics = known_callback_metrics(trainer)
        began = is_fitting(trainer) and trainer.validating
        validated, inside = began and _is_validation_over(trainer), _is_mid_accumulation(trainer)
        ending = record.position.steps == 0 and _is_ending(trainer.fit_loop.epoch_progress)
        kept = self.epoch_metrics.state(trainer, inside=inside, validated=validated, ending=ending)
        return {
            **kept,
            "validation_began": began and not validated,
            VALIDATED_IN_WINDOW: max(0, self._validated_in_window(trainer)) if inside else 0,
            "validation_batches": validation_batches(trainer),
            "random": dict(step_state.random)
            if step_state
            else self._random_before_validation or collect_rng_states(device),
            "generators": step_state.generators if step_state else self._generators(trainer),
            "metrics": {name: value.detach().cpu() for name, value in metrics.items()},
            "plateau_epoch_pending": ending,
            "axis": _logger_step(trainer),
            "waits_to_stop": is_fitting(trainer) and waits_to_stop(trainer),
            SAVES: dict(_saves(trainer, path)),
            "plateau_step_pending": not step_state
            and (trainer.validating or _is_ending(trainer.fit_loop.epoch_loop.batch_progress)),
        }

    def buffers(self, trainer: pl.Trainer) -> Mapping[str, torch.Tensor] | None:
        """Return the buffers of the last optimizer step; None if the live ones are equal."""
        step_state = self._step_state_of(trainer)
        return step_state.buffers if step_state else None

    def loader_states(self, trainer: pl.Trainer) -> list[Any]:
        """Return the states of stateful loaders at the last optimizer step."""
        step_state = self._step_state_of(trainer)
        return step_state.loaders if step_state else self._states_of_loaders.now(trainer)

    def _validated_in_window(self, trainer: pl.Trainer) -> int:
        """Return the micro-batches since the last step up to the last completed validation.

        Negative if that validation was before the step. A running validation counts as completed
        once its batches are done, because callbacks count it then.
        """
        done = _batches_done(trainer)
        over = is_fitting(trainer) and trainer.validating and _is_validation_over(trainer)
        validated_at = done if over else self._validated_at
        return validated_at - (done - pending_micro_batches(trainer))

    def _step_state_of(self, trainer: pl.Trainer) -> StepState | None:
        """Return the copies of the last step if the run is inside an accumulation window."""
        return self._step_state if _is_mid_accumulation(trainer) else None


def _samples_of_pass(loader: object, size: int | None, accumulate: int) -> int | None:
    """Return the samples of a complete pass through a loader; None if unknown."""
    if (elastic := elastic_sampler_of(loader)) is not None:
        return elastic.total_size
    length = length_of(loader)
    return None if length is None or size is None else length * size // accumulate


def _after(part: Consumed, samples: int, whole: int | None, *, repeats: bool) -> Consumed:
    """Return the place in a loader after a number of further samples."""
    samples += part.samples
    if not whole:
        return Consumed(samples, part.passes)
    if not repeats:
        return Consumed(min(samples, whole), part.passes)
    passes, samples = divmod(samples, whole)
    return Consumed(samples, part.passes + passes)


def _is_mid_accumulation(trainer: pl.Trainer) -> bool:
    current = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    return bool(current["ready"] != current["processed"] or pending_micro_batches(trainer))


def _is_validation_over(trainer: pl.Trainer) -> bool:
    """Whether all batches of the running validation are done."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    current = progress.current
    return bool(progress.is_last_batch and current.completed == current.ready > 0)


def _batches_done(trainer: pl.Trainer) -> int:
    done: int = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["total"]["processed"]
    return done


def _saves(trainer: pl.Trainer, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key of each ``ModelCheckpoint``, its last saved step, and if a save is deferred.

    Its own state contains neither. The callback that saves now updates its step afterwards.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            own = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
            step = trainer.global_step if path in own else last_saved_step(callback)
            deferred = path not in own and is_save_deferred(callback)
            yield callback.state_key, {"step": step, "deferred": deferred}


def _is_ending(progress: Any) -> bool:
    """Whether a batch or epoch is done, but the hooks at its end are not."""
    return bool(progress.current.completed < progress.current.processed)


def _logger_step(trainer: pl.Trainer) -> int:
    """Return the loggers' step for the next batch. Lightning counts a batch when it has ended."""
    current = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    ending = current["completed"] < current["processed"] or trainer.validating
    return logged_steps(trainer) + ending


def _batch_counts(trainer: pl.Trainer, batches: BatchSettings | None) -> dict[str, Any]:
    """Return the settings that count batches, with integers in micro-batches of one rank."""
    found = {name: getattr(trainer, name, None) for name in BATCH_COUNT_SETTINGS}
    counts = {name: float(v) if isinstance(v, float) else v for name, v in found.items()}
    interval = counts["val_check_interval"]
    if type(interval) is int and batches is not None and batches.plan is not None:
        counts["val_check_interval"] = interval * batches.accumulate
    return counts


def _planned_steps(trainer: pl.Trainer) -> int | None:
    """Return the planned optimizer steps of the whole run; None: unknown."""
    batches, epochs, most = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    by_epochs = (
        None
        if batches == float("inf") or epochs is None or epochs < 0
        else optimizer_steps_in(batches, trainer.accumulate_grad_batches) * epochs
    )
    if most < 0:
        return by_epochs
    return most if by_epochs is None else min(most, by_epochs)


class RunResumer:
    """Makes a resumed run take the same steps as an uninterrupted one."""

    def __init__(self, on_unresumable_data: UnresumableDataPolicy) -> None:
        """Prepare for fits.

        Raises:
            ValueError: ``on_unresumable_data`` is not a known policy.
        """
        self._on_unresumable_data: UnresumableDataPolicy = check_choice(
            "on_unresumable_data", on_unresumable_data, get_args(UnresumableDataPolicy)
        )
        self.settings = UserSettings()
        """The user's values of trainer settings that this library changes."""
        self.recorder = RunRecorder()
        self._step_intervals = StepIntervals()
        self.batches: BatchSettings | None = None
        """How an optimizer step is made of samples; None before the first fit."""
        self._pending: PendingResume | None = None
        self.overruled_orders: list[str] | None = None
        """Result of ``overruled_orders`` for the user's loaders; None: not determined yet."""
        self._loaders_made = 0
        self._new_generators: list[dict[str, list[torch.Tensor]]] = []

    def set_batches(self, batches: BatchSettings) -> None:
        """Begin a fit with these batch settings."""
        self.batches = batches
        self._pending = None
        self.recorder = RunRecorder(batches)
        self._loaders_made = 0
        self._new_generators = []

    @property
    def _is_planned(self) -> bool:
        return self.batches is not None and self.batches.plan is not None

    def process_loader(self, loader: object, trainer: pl.Trainer, rank: int) -> object:
        """Return a resumable version of a loader that Lightning has prepared."""
        if self.batches is None:
            return loader
        if not trainer.training:
            return with_own_generator(loader, run_seed(), rank)
        if self._loaders_made and self._loaders_made >= len(training_loaders(trainer)) > 0:
            self._loaders_made, self._new_generators = 0, []  # the loaders are recreated
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
        """Refuse a first loader whose batch size has changed since the batches were resolved."""
        plan = self.batches.plan if self.batches is not None else None
        if batch_size_of(loader) is None:
            return  # its items are batches
        if plan is not None and not self._loaders_made and elastic.plan != plan:
            msg = (
                f"global_batch_size={plan.global_batch_size}: train_dataloader now returns another "
                f"batch_size, which would make it {elastic.plan.global_batch_size}. Return the "
                "same batch_size in every call"
            )
            raise UnsupportedError(msg)

    def weight(self, trainer: pl.Trainer, rank: int) -> float:
        """Return the weight of the current micro-batch's loss, in addition to 1 / accumulation."""
        plan = self.batches.plan if self.batches is not None else None
        if plan is None or plan.is_even:
            return 1.0
        return plan.loss_weight(rank, trainer.fit_loop.batch_idx % plan.accumulate)

    def before_batch_transfer(self, trainer: pl.Trainer) -> None:
        """Record metrics; a batch was fetched and its hooks have not run yet."""
        self._step_intervals.restore(trainer)
        self.recorder.epoch_metrics.note(trainer)

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Determine what is due after a batch that is about to be trained on.

        Raises:
            UnsupportedError: The accumulation has changed since the fit began.
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
            size = None  # the loaders of that epoch may have another batch size
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
            CheckpointMismatchError: The data cannot resume at the saved position, and the policy
                is ``"refuse"``.
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
        """Restore the loaded state; return the states that were loaded into loaders."""
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
        if not position.epoch:  # its iterator is recreated here
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
                f"Random numbers: saved on {pending.record.world_size} devices, so each of the "
                f"{world_size} ranks starts a new stream from seed {run_seed()}, step "
                f"{trainer.global_step} and its rank"
            )
        return given

    def _warn_about_data(self, trainer: pl.Trainer) -> None:
        """Warn of reordered and unresumable training data."""
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
        made = now if has_schedule else replace(now, planned_steps=None)
        for text in change_warnings(
            pending.record,
            made,
            is_given=self._is_planned,
            foreign_path="" if pending.is_own_format else pending.where,
        ):
            rank_zero_warn(text)


def _validated_ahead(pending: PendingResume, position: Position, now: DataProgress) -> int:
    """Return for how many of the next micro-batches validation had already run before the save.

    A save inside a window goes back to the last step, but the callbacks' states do not. The count
    is converted to the micro-batches of this run that have the same number of samples.
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
    """Return the fit loop's counters in Lightning's checkpoint; None: start at step 0."""
    loops: dict[str, Any] | None = state.get("loops", {}).get("fit_loop")
    return loops if loops is not None and EPOCHS in loops else None
