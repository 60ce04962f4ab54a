"""Records the state of a run that a save needs, between two optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.data_progress.batches import ceil_div
from lightning_elastic_zero.data_progress.counters import read_position
from lightning_elastic_zero.data_progress.position import (
    Consumed,
    DataPosition,
    LoaderRecord,
    Position,
    RunSettings,
)
from lightning_elastic_zero.data_progress.sampler import collect_rng_states, set_rng_states
from lightning_elastic_zero.trainer.accumulation import pending_micro_batches, prefetch_next_batch
from lightning_elastic_zero.trainer.batches import BatchController, BatchSettings, batch_size_of
from lightning_elastic_zero.trainer.fit_warnings import BATCH_COUNT_SETTINGS
from lightning_elastic_zero.trainer.lightning import (
    BATCH_END,
    EPOCH_END,
    VALIDATION_END,
    can_stop_early,
    combined_loader,
    data_fetcher,
    early_stopping_of,
    exhausted_loaders,
    is_ending,
    is_fitting,
    is_interrupted,
    known_callback_metrics,
    logged_steps,
    repeats_shorter_loaders,
    training_loaders,
)
from lightning_elastic_zero.trainer.loaders import (
    elastic_sampler_of,
    generator_states,
    has_own_state,
    has_stateful_loader,
    length_of,
    samples_per_step,
)
from lightning_elastic_zero.trainer.metrics import EpochMetrics
from lightning_elastic_zero.trainer.model_checkpoint import saves_of
from lightning_elastic_zero.trainer.prepared_loaders import PreparedLoaders
from lightning_elastic_zero.trainer.run_state import RunState
from lightning_elastic_zero.trainer.tensor_parallel import grid_of


@dataclass(frozen=True, slots=True)
class _AtEnd:
    """The state of the training loaders at the end of a fit, which Lightning then resets."""

    records: tuple[LoaderRecord, ...]
    generators: list[Any]
    states: list[Any]
    """Of stateful loaders."""
    random_before_fetch: dict[str, Any] | None
    """None if no batch was fetched ahead."""


class RunRecorder:
    """Records during training the state that a save needs.

    A checkpoint taken inside an accumulation window contains the weights and the position of the
    last step, and otherwise the state of its moment. Without accumulation, each batch is a window.

    For data without a length, Lightning fetches one batch ahead to detect the last one. A stateful
    loader is then also ahead, and a run resumed from its state would never see that batch. So its
    state is recorded before each batch, and the random states before each fetch, because a resumed
    run fetches the batch again.
    """

    def __init__(self, batches: BatchController, prepared: PreparedLoaders) -> None:
        self._batches, self._prepared = batches, prepared
        self.epoch_metrics: EpochMetrics | None = None
        """Metrics accumulated in the epoch; None outside a fit."""
        self._begun: Position | None = None
        self._consumed_before: tuple[Consumed | None, ...] = ()
        self.random_before_fetch: dict[str, Any] | None = None
        """Random states before the last fetch of a batch; None for data with a length."""
        self._loaders_at_step: list[Any] = []
        self._stepped_at = -1
        """Number of the batch that has taken the last optimizer step."""
        self._random_before_validation: dict[str, Any] | None = None
        self._validated_at = -1
        self._at_end: _AtEnd | None = None
        self._latest_loaders: list[Any] | None = None
        self._loaders_before: list[Any] | None = None
        self._is_new_fit = False
        self._ends_batch_again, self._updates_plateaus = False, False

    def begin_at(self, position: Position, consumed: tuple[Consumed | None, ...]) -> None:
        """Set the position of a resumed run and the samples consumed from each loader."""
        self._begun, self._consumed_before = position, consumed

    def expect_end_of_batch(self, *, updates_plateaus: bool) -> None:
        """Note that the restarted loop will first end the last batch.

        ``updates_plateaus``: it will also update ``ReduceLROnPlateau``.
        """
        self._ends_batch_again, self._updates_plateaus = True, updates_plateaus

    def begin_training(
        self, trainer: pl.Trainer, loader_states: list[Any], device: torch.device
    ) -> None:
        """Record the state before the first batch.

        ``loader_states``: loaded into stateful loaders, which may be a batch ahead by now.
        """
        self._loaders_before = copy.deepcopy(loader_states)
        self._latest_loaders = _loader_states(trainer) if has_stateful_loader(trainer) else None
        self._is_new_fit = True
        loop: Any = trainer.fit_loop.epoch_loop
        loop._on_before_fetch = partial(self._before_fetch, trainer, device)
        loop.val_loop._on_evaluation_end = partial(self._end_validation, trainer)
        self.after_optimizer_step(trainer)

    def _before_fetch(self, trainer: pl.Trainer, device: torch.device) -> None:
        if data_fetcher(trainer).length is None:
            self.random_before_fetch = collect_rng_states(device)
        loop = trainer.fit_loop.epoch_loop
        type(loop)._on_before_fetch(loop)

    def _end_validation(self, trainer: pl.Trainer) -> None:
        """Record that a validation is over, before the hooks in which callbacks save."""
        self.mark_validated(trainer)
        loop = trainer.fit_loop.epoch_loop.val_loop
        type(loop)._on_evaluation_end(loop)

    def after_optimizer_step(self, trainer: pl.Trainer) -> None:
        """Record the loaders' states, because a save inside the next window repeats its batches."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        self._stepped_at = progress.total.ready
        # With manual optimization, a batch may have any number of steps.
        if trainer.lightning_module.automatic_optimization:
            self._loaders_at_step = self._loaders_now(trainer)

    def has_uncounted_step(self, trainer: pl.Trainer) -> bool:
        """Whether the current batch has taken a step that the position does not include."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        is_inside = progress.current.ready != progress.current.processed
        return bool(is_inside and self._stepped_at == progress.total.ready)

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Begin an epoch's metrics, before the hooks of its first batch."""
        if self.epoch_metrics is not None:
            self.epoch_metrics.begin_batch(trainer)

    def before_batch(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Record loader states; a batch was fetched and is about to be trained on."""
        self.begin_batch(trainer)  # for training steps that fetch their own batches
        self._record_loaders(trainer, is_first=batch_idx == 0)
        if prefetch_next_batch(trainer):
            self._record_loaders(trainer, is_first=False)

    def on_validation_start(self, device: torch.device) -> None:
        """Copy the random states, so that a validation does not change those of training.

        A run that is resumed inside or after a validation may or may not repeat it.
        """
        self._random_before_validation = collect_rng_states(device)
        if self.epoch_metrics is not None:
            self.epoch_metrics.validating()

    def on_validation_end(self, device: torch.device) -> None:
        """Restore the random states after the hooks of callbacks."""
        if self.epoch_metrics is not None:
            self.epoch_metrics.validated()
        if self._random_before_validation is not None:
            set_rng_states(self._random_before_validation, device)
            self._random_before_validation = None

    def mark_validated(self, trainer: pl.Trainer) -> None:
        """Record that the validations up to this batch are over."""
        self._validated_at = _batches_done(trainer)

    def end(self, trainer: pl.Trainer) -> None:
        """Keep the state that a save after the fit needs and a following evaluation removes."""
        if loaders := training_loaders(trainer):
            loops = trainer.fit_loop.state_dict()
            record = self.position(trainer, loops, grid_of(trainer))
            self._at_end = _AtEnd(
                record.loaders,
                [*map(generator_states, loaders)],
                self.loader_states(trainer),
                self._random_before_fetch_ahead(trainer),
            )

    def position(
        self, trainer: pl.Trainer, loops: Mapping[str, Any], grid: RankGrid
    ) -> DataPosition:
        """Return the position of the last optimizer step. ``loops``: the fit loop's counters."""
        settings = self.settings(trainer, grid)
        total = trainer.num_training_batches
        position = read_position(loops, settings.accumulate, batches=total)
        # The position is the last step, also inside the next window.
        if self._validated_at >= _batches_done(trainer) - pending_micro_batches(trainer):
            position = replace(position, is_validated=True)
        ended = self._state_of_ended_fit(trainer)
        loaders = self._loader_records(trainer, position) if ended is None else ended.records
        return DataPosition(position, trainer.global_step, settings, loaders)

    def settings(self, trainer: pl.Trainer, grid: RankGrid) -> RunSettings:
        """Return how the run makes optimizer steps of its data; its loaders may exist already."""
        batches, loaders = self._batches.current, training_loaders(trainer)
        size = None
        if batches is not None:
            # train_dataloader may return another batch size in each epoch.
            live = batch_size_of(loaders) or batches.loader_batch_size
            size = replace(batches, loader_batch_size=live).global_batch_size
        if size is None:
            elastic = filter(None, map(elastic_sampler_of, loaders))
            size = next((sampler.plan.global_batch_size for sampler in elastic), None)
        accumulate, total = trainer.accumulate_grad_batches, trainer.num_training_batches
        steps_per_epoch = None if total == float("inf") else ceil_div(int(total), accumulate)
        return RunSettings(
            grid,
            accumulate,
            size,
            steps_per_epoch=steps_per_epoch,
            planned_steps=_planned_steps(trainer, steps_per_epoch),
            batch_counts=_batch_counts(trainer, batches),
        )

    def run_state(
        self,
        trainer: pl.Trainer,
        record: DataPosition,
        device: torch.device,
        path: str,
        *,
        repeated_hook: str,
    ) -> RunState:
        """Return this rank's state of this moment for a checkpoint at a path.

        ``repeated_hook``: the hook whose saves a resume makes again now.
        """
        generators = [*map(generator_states, training_loaders(trainer))]
        before_fetch = self._random_before_fetch_ahead(trainer)
        if (ended := self._state_of_ended_fit(trainer)) is not None:
            generators, before_fetch = ended.generators, ended.random_before_fetch
        # Only known values: computing more could communicate with ranks that do not save.
        metrics = known_callback_metrics(trainer)
        validating = is_fitting(trainer) and trainer.validating
        validated = validating and self._validated_at == _batches_done(trainer)
        # Before, the validation's counters are those of the previous one.
        has_begun = validating and self._random_before_validation is not None
        loop: Any = trainer.fit_loop
        # A stop inside an epoch also calls the hooks at its end, but the epoch is not over.
        is_next = record.position.epoch == loop.epoch_progress.current.processed
        ending = is_next and is_ending(loop.epoch_progress)
        batch_ending = is_ending(loop.epoch_loop.batch_progress) or trainer.validating
        # A save that a resume makes is one of the moment of the loaded checkpoint.
        ends_again = self._ends_batch_again and loop.epoch_loop.restarting
        plateau_pending = batch_ending or (ends_again and self._updates_plateaus)
        is_stopping = is_fitting(trainer) and trainer.should_stop
        has_stopped = any(map(_has_stopped, early_stopping_of(trainer)))
        results = None
        if (epoch := self.epoch_metrics) is not None:
            is_complete = record.position.is_over or ending
            results = epoch.state(
                trainer, validated=validated, ending=ending, is_complete=is_complete
            )
        hook = repeated_hook or _hook_of(trainer, ending=ending, validated=validated)
        return RunState(
            results=results,
            random_before_fetch=before_fetch,
            validation_began=has_begun and not validated,
            validation_batches=validation_batches(trainer),
            random=self._random_before_validation or collect_rng_states(device),
            generators=generators,
            metrics={name: value.detach().cpu() for name, value in metrics.items()},
            plateau_epoch_pending=ending,
            # Lightning counts a batch for the loggers when it has ended.
            axis=logged_steps(trainer) + (batch_ending or ends_again),
            # Another stop ends this run only, such as that of a Timer before a deadline.
            waits_to_stop=is_stopping and (has_stopped or not can_stop_early(trainer)),
            saves=saves_of(trainer, path, hook),
            hook=hook,
            plateau_step_pending=plateau_pending and not is_inside_window(trainer),
        )

    def loader_states(self, trainer: pl.Trainer) -> list[Any]:
        """Return the states of stateful loaders at the last optimizer step."""
        if (ended := self._state_of_ended_fit(trainer)) is not None:
            return ended.states
        # An exception may have interrupted the fetch of the next batch.
        may_be_ahead = is_inside_window(trainer) or is_interrupted(trainer)
        if may_be_ahead and trainer.lightning_module.automatic_optimization:
            return self._loaders_at_step
        return self._loaders_now(trainer)

    def _state_of_ended_fit(self, trainer: pl.Trainer) -> _AtEnd | None:
        """Return the state of loaders at the end of the fit, if it is over."""
        return self._at_end if data_fetcher(trainer) is None else None

    def _random_before_fetch_ahead(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        return self.random_before_fetch if _has_fetched_ahead(trainer) else None

    def _record_loaders(self, trainer: pl.Trainer, *, is_first: bool) -> None:
        # If all have a length, no batch is fetched ahead.
        is_ahead = any(length_of(loader) is None for loader in training_loaders(trainer))
        if is_ahead and has_stateful_loader(trainer):
            # In later epochs, the state before the batch that is fetched ahead is unknown.
            is_known = self._is_new_fit or not is_first
            self._loaders_before = self._latest_loaders if is_known else None
            self._is_new_fit = False
            self._latest_loaders = _loader_states(trainer)

    def _loaders_now(self, trainer: pl.Trainer) -> list[Any]:
        """Return the loaders' states after the batches trained on so far; empty if unknown."""
        if not has_stateful_loader(trainer):
            return []
        if _has_fetched_ahead(trainer):
            return self._loaders_before or []
        return _loader_states(trainer)

    def _loader_records(self, trainer: pl.Trainer, position: Position) -> tuple[LoaderRecord, ...]:
        """Return the training loaders' records at a position; empty if there are no loaders."""
        records = []
        pairs = zip(training_loaders(trainer), self._consumed(trainer, position), strict=True)
        combined = combined_loader(trainer)
        ended = exhausted_loaders(combined) if combined is not None else []
        for index, (loader, consumed) in enumerate(pairs):
            is_ended = ended[index : index + 1] == [True]
            has_restarted = consumed is None and is_ended and has_own_state(loader)
            record = LoaderRecord(consumed, has_restarted)
            if (elastic := elastic_sampler_of(loader)) is not None:
                epoch, digest = elastic.latest_order() or (None, "")
                record = LoaderRecord(
                    consumed,
                    order=elastic.describe(),
                    has_run_seed=self._prepared.has_run_seed(index, elastic.seed),
                    order_epoch=epoch,
                    order_digest=digest,
                )
            records.append(record)
        return tuple(records)

    def _consumed(self, trainer: pl.Trainer, position: Position) -> tuple[Consumed | None, ...]:
        """Return how much of each training loader this epoch has consumed up to a position."""
        if (combined := combined_loader(trainer)) is None:
            return ()
        loaders, before, steps = combined.flattened, self._consumed_before, position.steps
        is_of_epoch = self._begun is not None and self._begun.epoch == position.epoch
        if self._begun is not None and is_of_epoch and len(before) == len(loaders):
            steps -= self._begun.steps
        else:
            before = (Consumed(0),) * len(loaders)
        repeats = len(loaders) > 1 and repeats_shorter_loaders(combined)
        ended = exhausted_loaders(combined) if repeats else []
        sizes = samples_per_step(self._batches.current, loaders)
        parts: list[Consumed | None] = []
        for index, (loader, size, part) in enumerate(zip(loaders, sizes, before, strict=True)):
            whole = _samples_of_pass(loader, size, trainer.accumulate_grad_batches)
            is_lost = whole is None and ended[index : index + 1] == [True]
            if size is None or part is None or is_lost:
                parts.append(None)
                continue
            passes, samples = part.passes, part.samples + steps * size
            if whole and repeats:
                passes, samples = passes + samples // whole, samples % whole
            parts.append(Consumed(min(samples, whole or samples), passes))
        return tuple(parts)


def _has_fetched_ahead(trainer: pl.Trainer) -> bool:
    return bool(getattr(data_fetcher(trainer), "batches", []))


def _loader_states(trainer: pl.Trainer) -> list[Any]:
    """Copy the states of the training loaders that have their own."""
    combined = combined_loader(trainer)
    return [] if combined is None else copy.deepcopy(combined._state_dicts())


def validation_batches(trainer: pl.Trainer) -> int:
    """Return the batches of a validation on this rank; 0 if unknown."""
    batches = trainer.fit_loop.epoch_loop.val_loop.max_batches
    return 0 if float("inf") in batches else int(sum(batches))


def _samples_of_pass(loader: object, size: int | None, accumulate: int) -> int | None:
    if (elastic := elastic_sampler_of(loader)) is not None:
        return elastic.total_size
    length = length_of(loader)
    return None if length is None or size is None else length * size // accumulate


def is_inside_window(trainer: pl.Trainer) -> bool:
    """Whether a run is between the first micro-batch of an optimizer step and the step."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.ready != current.processed or pending_micro_batches(trainer) > 0


def _batches_done(trainer: pl.Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.total.processed)


def _hook_of(trainer: pl.Trainer, *, ending: bool, validated: bool) -> str:
    """Return the hook in which a ``ModelCheckpoint`` saves now."""
    if ending:
        return EPOCH_END
    if validated:
        return VALIDATION_END
    in_batch = is_fitting(trainer) and is_ending(trainer.fit_loop.epoch_loop.batch_progress)
    return BATCH_END if in_batch and not trainer.validating else ""


def _has_stopped(callback: EarlyStopping) -> bool:
    """Whether a callback has requested a stop; it may have done so in epoch 0."""
    reason = getattr(callback, "stopping_reason", None)  # since 2.6
    is_given = reason is not None and bool(reason.value)
    # With patience=0, the callback also waits once before it stops.
    has_waited = callback.wait_count >= max(callback.patience, 1)
    return is_given or callback.stopped_epoch > 0 or has_waited


def _batch_counts(trainer: pl.Trainer, batches: BatchSettings | None) -> dict[str, Any]:
    """Return the settings that count batches, with integers in micro-batches of one rank."""
    settings = {name: getattr(trainer, name, None) for name in BATCH_COUNT_SETTINGS}
    counts = {name: float(v) if isinstance(v, float) else v for name, v in settings.items()}
    interval = counts["val_check_interval"]
    if type(interval) is int and batches is not None and batches.plan is not None:
        counts["val_check_interval"] = interval * batches.accumulate
    return counts


def _planned_steps(trainer: pl.Trainer, steps_per_epoch: int | None) -> int | None:
    epochs, most = trainer.max_epochs, trainer.max_steps
    limits = [most] if most >= 0 else []
    if steps_per_epoch is not None and epochs is not None and epochs >= 0:
        limits.append(steps_per_epoch * epochs)
    return min(limits, default=None)
