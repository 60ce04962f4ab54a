"""Resume a run from a recorded position.

Lightning restores its loops from counters, when the loaders may not exist yet. So a resume has two
parts: ``RunResumer.resume_from`` rewrites the counters for this number of devices when they are
loaded, and ``RunResumer.on_train_start`` restores samplers, iterators, random states and what only
live loops have, when training is about to begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args
from weakref import ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.options import check_choice
from lightning_elastic_zero.data_progress.counters import (
    EPOCHS,
    LOADER_STATES,
    VALIDATION,
    fit_loop_at,
    infer_position,
    validation_counters_at,
)
from lightning_elastic_zero.data_progress.position import (
    Consumed,
    DataPosition,
    LoaderRecord,
    Position,
)
from lightning_elastic_zero.data_progress.sampler import (
    ElasticSampler,
    derive_seed,
    seed_rng_streams,
    set_rng_states,
)
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError
from lightning_elastic_zero.trainer.accumulation import (
    StepIntervals,
    check_one_batch_per_step,
    prefetch_next_batch,
)
from lightning_elastic_zero.trainer.batches import BatchController, batch_size_of
from lightning_elastic_zero.trainer.checks import (
    REMEDIES,
    warn_of_changes,
    warn_of_epoch_hooks,
    warn_of_late_loaders,
    warn_of_shuffling,
    warn_of_unresumable_data,
    warn_of_workers,
)
from lightning_elastic_zero.trainer.lightning import (
    can_stop_early,
    combined_loader,
    data_fetcher,
    drop_iterator,
    early_stopping_of,
    mark_exhausted,
    reload_interval,
    repeats_shorter_loaders,
    run_seed,
    set_logged_steps,
    training_loaders,
)
from lightning_elastic_zero.trainer.loaders import (
    NO_DIGEST,
    REPRODUCIBLE,
    ResumesAtSample,
    Stateful,
    describe_loader,
    elastic_loader,
    elastic_sampler_of,
    ends_before_data,
    generator_states,
    length_of,
    load_state_at_epoch_end,
    resumable_part_of,
    samples_per_step,
    set_generator_states,
    warn_state_not_restored,
    with_own_generator,
)
from lightning_elastic_zero.trainer.metrics import ENDING, RESULTS, EpochMetrics, SavedMetrics
from lightning_elastic_zero.trainer.recorder import (
    RANDOM_BEFORE_FETCH,
    RunRecorder,
    validation_batches,
)

STATE_KEY = "lightning_elastic_zero"
"""Entry of the checkpoint dictionary for this library's state."""

UnresumableDataPolicy: TypeAlias = Literal["refuse", "restart_epoch"]
"""What to do if training data cannot resume in the middle of an epoch."""


@dataclass(frozen=True, slots=True)
class PendingResume:
    """Loaded state that is restored when training begins."""

    trainer: pl.Trainer
    where: str
    """Path of the checkpoint, for messages."""
    record: DataPosition
    position: Position
    """In steps of this run's global batch."""
    is_own_format: bool
    """Written by this library, so the data must be the same as in the saved run."""
    state: Mapping[str, Any]
    """Result of ``RunRecorder.state_dict`` at the save."""
    loader_states: list[Any]
    """States of stateful loaders; applied on the same number of ranks only."""
    validation: Mapping[str, Any]
    """Lightning's validation counters, as saved."""

    @property
    def saved_world_size(self) -> int:
        """Number of ranks of the saved run."""
        return self.record.settings.world_size

    @property
    def is_same_world(self) -> bool:
        """Whether the saved run had the same number of ranks."""
        return self.saved_world_size == self.trainer.world_size

    def loader(self, index: int) -> LoaderRecord:
        """Return the record of a training loader; empty if there is none."""
        loaders = self.record.loaders
        return loaders[index] if index < len(loaders) else LoaderRecord()

    @property
    def makes_loaders(self) -> bool:
        """Whether the loaders are recreated for the epoch in which the run resumes."""
        every, at = reload_interval(self.trainer), self.record.position
        return bool(every and not at.steps and at.epoch % every == 0)

    def loader_states_at(self, position: Position) -> list[Any]:
        """Return the states to load into stateful loaders at a position."""
        starts_over = position.steps != self.position.steps
        return self.loader_states if self.is_same_world and not starts_over else []


class RunResumer:
    """Makes a resumed run take the same steps as an uninterrupted one."""

    def __init__(
        self, batches: BatchController, on_unresumable_data: UnresumableDataPolicy
    ) -> None:
        self._batches = batches
        self._on_unresumable_data: UnresumableDataPolicy = check_choice(
            "on_unresumable_data", on_unresumable_data, get_args(UnresumableDataPolicy)
        )
        self.recorder = RunRecorder(batches)
        self._step_intervals = StepIntervals()
        self._pending: PendingResume | None = None
        self.has_begun = False
        """Whether the fit has begun to train; before, a loaded run is restored in part only."""
        self._new_generators: list[dict[str, list[torch.Tensor]]] = []
        """States of the generators of each training loader that was made."""
        self._validation_generators: list[ref[torch.Generator]] = []
        """This library's, of the loaders of validations, which a second fit may use again."""

    def begin(self) -> None:
        """Begin a fit."""
        self._pending, self.has_begun = None, False
        self.recorder = RunRecorder(self._batches)
        self._new_generators = []

    @property
    def is_resuming(self) -> bool:
        """Whether a checkpoint is loaded, but data and random states are not restored yet."""
        return self._pending is not None

    def process_loader(self, loader: object, trainer: pl.Trainer, rank: int) -> object:
        """Return a resumable version of a loader that Lightning has prepared."""
        batches = self._batches.current
        if batches is None:
            return loader
        if not trainer.training:
            own = with_own_generator(loader, run_seed(), rank)
            if own is not loader and isinstance(own, DataLoader) and own.generator is not None:
                known = [each for each in self._validation_generators if each() is not None]
                self._validation_generators = [*known, ref(own.generator)]
                self._seed_validation(trainer)
            return own
        if len(self._new_generators) >= len(training_loaders(trainer)) > 0:
            self._new_generators = []  # the loaders are recreated
        loader = elastic_loader(loader, batches, rank, run_seed(), trainer.current_epoch)
        plan, elastic = batches.plan, elastic_sampler_of(loader)
        if elastic is None:
            batches.check_fixed_batches(loader)
        else:
            has_changed = plan is not None and elastic.plan != plan
            # A loader without a batch size has batches for items.
            if plan and has_changed and not self._new_generators and batch_size_of(loader):
                msg = (
                    f"global_batch_size={plan.global_batch_size}: train_dataloader now returns "
                    "another batch_size, which would make it "
                    f"{elastic.plan.global_batch_size}. Return the same batch_size in every call"
                )
                raise UnsupportedError(msg)
            if elastic.seed == run_seed():
                index = len(self._new_generators)
                elastic.seed = self.recorder.seeds.setdefault(index, run_seed())
        self._new_generators.append(generator_states(loader))
        return loader

    def _seed_validation(self, trainer: pl.Trainer) -> None:
        """Seed the workers of a validation after the next batch, as any resumed run does."""
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        for reference in self._validation_generators:
            if (generator := reference()) is not None:
                generator.manual_seed(derive_seed(run_seed(), trainer.global_rank, done))

    def weight(self, trainer: pl.Trainer, rank: int) -> float:
        """Return the weight of the current micro-batch's loss, in addition to 1 / accumulation."""
        if (plan := self._batches.plan) is None:
            return 1.0
        return plan.loss_weight(rank, trainer.fit_loop.batch_idx % plan.accumulate)

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
        self._seed_validation(trainer)

    def resume_from(
        self, state: dict[str, Any], manifest: Manifest, trainer: pl.Trainer, where: str
    ) -> None:
        """Rewrite a loaded checkpoint's loop counters for this number of devices, in place."""
        own = state.pop(STATE_KEY, {})
        if (loops := counted_loops(state)) is None:
            return
        record = saved_position(state, manifest, where)
        is_own_format = bool(manifest.progress.sampler)
        if not is_own_format and manifest.progress.global_samples:  # so its ranks are known
            size = self._batches.samples_per_step_of(record.settings)
            record = replace(record, settings=replace(record.settings, global_batch_size=size))
        batches = self._batches.current
        size = batches.global_batch_size if batches is not None else None
        if reload_interval(trainer) and self._batches.plan is None:
            size = None  # the loaders of that epoch may have another batch size
        position = record.at_batch_size(size)
        states = list(loops.get("state_dict", {}).get(LOADER_STATES, []))
        pending = PendingResume(
            trainer,
            where,
            record,
            position,
            is_own_format=is_own_format,
            state=own,
            loader_states=states,
            validation=loops.get(VALIDATION, {}),
        )
        self._pending = pending
        now = trainer.accumulate_grad_batches
        rewritten = fit_loop_at(loops, position, was=record.settings.accumulate, now=now)
        if states and pending.is_same_world:
            rewritten["state_dict"][LOADER_STATES] = states
        state["loops"]["fit_loop"] = rewritten
        state["epoch"] = position.epoch

    def on_train_start(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Restore everything before the first batch."""
        self._step_intervals.begin_fit(trainer, is_planned=self._batches.plan is not None)
        self.recorder.epoch_metrics = EpochMetrics(trainer)
        given: list[Any] = []
        if self._pending is not None:
            given = self._resume(self._pending, trainer, device)
        loaders = training_loaders(trainer)
        warn_of_shuffling(self._batches.overruled_orders or (), loaders)
        self._batches.overruled_orders = None
        if self._on_unresumable_data == "refuse":
            sizes = samples_per_step(self._batches.current, loaders)
            warn_of_unresumable_data(loaders, trainer.world_size, sizes)
        self.recorder.begin_training(trainer, given, device)
        self._seed_validation(trainer)
        self._pending, self.has_begun = None, True

    def _resume(
        self, pending: PendingResume, trainer: pl.Trainer, device: torch.device
    ) -> list[Any]:
        """Restore the loaded state; return the states that were loaded into loaders."""
        record, state = pending.record, pending.state
        loop = trainer.fit_loop.epoch_loop
        manual = loop.manual_optimization.optim_step_progress.total.completed
        automatic = loop.automatic_optimization.optim_progress.optimizer_steps
        # Both are 0 if on_load_checkpoint dropped the loops to count from 0.
        if trainer.global_step == 0 < manual + automatic:
            msg = (
                f"{pending.where}: saved after {record.global_step} optimizer steps, and this run "
                "would count from 0, because Lightning counts the steps of manual and automatic "
                "optimization separately. Set automatic_optimization of the module as in the saved "
                "run, or pass load_optimizer_state=False with a checkpoint of weights alone"
            )
            raise CheckpointMismatchError(msg)
        was, now = record.settings, self.recorder.settings(trainer, trainer.world_size)
        foreign_path = "" if pending.is_own_format else pending.where
        planned = now if trainer.lr_scheduler_configs else replace(now, planned_steps=None)
        warn_of_changes(
            was, planned, is_given=self._batches.plan is not None, foreign_path=foreign_path
        )
        # Another position than at the load if train_dataloader now returns another batch size.
        position = record.at_batch_size(now.global_batch_size)
        _count_batches(trainer, (position.steps - pending.position.steps) * now.accumulate)
        pending = replace(pending, position=position)
        for index, loader in enumerate(record.loaders if pending.is_own_format else ()):
            if loader.has_run_seed and loader.seed is not None:
                self.recorder.seeds[index] = loader.seed
        combined: Any = combined_loader(trainer)  # Lightning has created it before this hook.
        loaders = training_loaders(trainer)
        position = _resumable_position(pending, loaders, self._on_unresumable_data)
        if is_shortened := _is_epoch_shortened(trainer, position):
            position = replace(position, is_over=True)
            pending = replace(pending, position=position)
        sizes = samples_per_step(self._batches.current, loaders)
        consumed = _position_loaders(pending, combined, position, sizes)
        self.recorder.begin_at(position, tuple(consumed))
        # Count all batches of an epoch that is over, if its length has changed.
        length = trainer.fit_loop.max_batches
        has_changed = is_shortened or now.accumulate != was.accumulate
        if position.is_over and has_changed and length != float("inf"):
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            _count_batches(trainer, int(length) - done)
        self._step_intervals.resume_at(trainer, is_last=position.is_over)
        _restart_loops(trainer, position, state.get("axis"))
        if every := reload_interval(trainer):
            created = position.epoch - position.epoch % every
            trainer.fit_loop._last_train_dl_reload_epoch = created
            warn_of_late_loaders(position, every)
        if position.is_validated:
            self.recorder.mark_validated(trainer)
        _restore_validation_counters(pending)
        metrics = state.get("metrics", {}).items()
        trainer.callback_metrics.update({name: value.to(device) for name, value in metrics})
        saved = SavedMetrics(state.get(RESULTS), bool(state.get(ENDING)), pending.is_same_world)
        if self.recorder.epoch_metrics is not None:
            starts_over = record.position.steps > 0 == position.steps and not position.is_over
            self.recorder.epoch_metrics.resume_from(
                saved, trainer, position, starts_over=starts_over
            )
        _step_pending_plateaus(trainer, state, position, self._step_intervals)
        if not position.epoch:  # its iterator is recreated here
            for loader, states in zip(loaders, self._new_generators, strict=False):
                set_generator_states(loader, states, "workers", "order")
        if pending.is_same_world and (before := state.get(RANDOM_BEFORE_FETCH)):
            self.recorder.random_before_fetch = before
            set_rng_states(before, device)
        _restart_data(trainer, position)
        _finish_loaders(combined, position, consumed)
        if position.steps and not position.is_over:
            warn_of_epoch_hooks(trainer, position.epoch)
        bar = trainer.progress_bar_callback
        if bar is not None and (position.steps or position.is_over):
            # Lightning does not call this for an epoch that was entered before.
            bar.on_train_epoch_start(trainer, trainer.lightning_module)
        _stop_as_requested(trainer, state)
        if "random" in state:
            _restore_random(pending, position, device)
        return pending.loader_states_at(position)


def _stop_as_requested(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Request a stop that was requested before the save."""
    if not state.get("waits_to_stop"):
        return
    where = "at min_epochs/min_steps"
    if can_stop_early(trainer):
        if not early_stopping_of(trainer):
            return  # The user has removed it, to train on.
        where = f"here, at step {trainer.global_step}. To train on, remove EarlyStopping"
    trainer.should_stop = True
    rank_zero_info(f"A callback requested a stop before the save: training ends {where}")


def _restore_random(pending: PendingResume, position: Position, device: torch.device) -> None:
    trainer, state = pending.trainer, pending.state
    loaders = training_loaders(trainer)
    kinds = ("workers", "order") if pending.is_same_world else ("order",)
    saved = () if pending.makes_loaders else state.get("generators", ())
    for loader, states in zip(loaders, saved, strict=False):
        set_generator_states(loader, states, *kinds)
    if pending.is_same_world:
        warn_of_workers(loaders, position)
        set_rng_states(state["random"], device)
        return
    seed_rng_streams(run_seed(), trainer.global_step, trainer.global_rank)
    rank_zero_info(
        f"Random numbers: saved on {pending.saved_world_size} devices, so each rank starts "
        f"a new stream from seed {run_seed()}, step {trainer.global_step} and its rank"
    )


def counted_loops(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fit loop's counters in Lightning's checkpoint; None: start at step 0."""
    loops: dict[str, Any] | None = state.get("loops", {}).get("fit_loop")
    return loops if loops is not None and EPOCHS in loops else None


def saved_position(state: Mapping[str, Any], manifest: Manifest, where: str) -> DataPosition:
    """Return a run's position at the save: as recorded, or inferred from Lightning's counters."""
    if manifest.progress.sampler:
        return DataPosition.of(manifest, f"{where}/manifest.json")
    steps, loops = int(state.get("global_step", 0)), state["loops"]["fit_loop"]
    return infer_position(loops, manifest.progress, manifest.world_size, steps)


def _resumable_position(
    pending: PendingResume, loaders: Sequence[Any], policy: UnresumableDataPolicy
) -> Position:
    position = pending.position
    if pending.is_own_format and (position.is_over or not position.steps):
        _warn_of_other_order(pending, loaders)
    reason = ""
    if position.steps and not position.is_over:
        reason = _unresumable_reason(pending, loaders)
    if not reason:
        return position
    if policy == "refuse":
        was = pending.record.position
        msg = (
            f"{pending.where}: saved in epoch {was.epoch} after {was.steps} of its optimizer "
            f"steps, and {reason}. {REMEDIES}"
        )
        raise CheckpointMismatchError(msg)
    rank_zero_warn(
        f"Epoch {position.epoch} starts over after {position.steps} optimizer steps: {reason}."
        + _schedule_overrun(pending, position.steps)
    )
    return Position(position.epoch, 0)


def _schedule_overrun(pending: PendingResume, steps: int) -> str:
    """Return a warning that a schedule ends before the run, which repeats a number of steps."""
    trainer, planned = pending.trainer, pending.record.settings.planned_steps
    configs = trainer.lr_scheduler_configs
    is_by_step = any(c.interval == "step" and not c.reduce_on_plateau for c in configs)
    if not is_by_step or planned == trainer.max_steps:
        return ""
    end = "the planned number of steps" if planned is None else planned
    return (
        f" The repeated {steps} steps are additional ones for the learning-rate schedule: if it "
        "has a fixed total, it ends before the run, and then OneCycleLR raises an error and a "
        f"cosine rises again. Pass Trainer(max_steps={end}) to end with the schedule. Or configure "
        f"it for {steps} more steps and pass load_hyperparameters=False."
    )


def _unresumable_reason(pending: PendingResume, loaders: Sequence[Any]) -> str:
    """Return why the data cannot resume inside an epoch; empty if it can."""
    for index, loader in enumerate(loaders):
        is_known = pending.record.consumed_of(index, is_only_one=len(loaders) == 1) is not None
        reason = _loader_unresumable_reason(loader, pending, is_known=is_known)
        if reason and pending.is_own_format:
            return reason
        if reason:
            rank_zero_warn(f"Data starts at its first batch: {reason}.")
    if not pending.is_own_format:
        return ""
    if changed := _changed_data(pending, loaders):
        return f"the data differs from that of the saved run ({changed})"
    return _changed_order(pending, loaders, pending.position.epoch)


def _loader_unresumable_reason(loader: object, pending: PendingResume, *, is_known: bool) -> str:
    if elastic_sampler_of(loader) is not None:
        return ""
    kind = describe_loader(loader)
    if resumable_part_of(loader) is not None:
        unknown = (
            f"the number of samples that the {kind} had yielded is unknown: it has no batch_size "
            "(pass global_batch_size and logging_batch_size_per_gpu), or it has no length and "
            "restarted within the epoch"
        )
        return "" if is_known else unknown
    if not pending.loader_states or not isinstance(loader, Stateful):
        return f"the {kind} cannot start at a given sample"
    if pending.is_same_world:
        return ""
    return (
        f"the {kind} has one state per rank, saved on {pending.saved_world_size} ranks; this run "
        f"has {pending.trainer.world_size}"
    )


def _changed_data(pending: PendingResume, loaders: Sequence[Any]) -> str:
    was, now = pending.record.loaders, [*map(elastic_sampler_of, loaders)]
    if was and len(was) != len(now):
        return f"{len(was)} training loaders then, {len(now)} now"
    return "; ".join(
        f"{key} was {before.order[key]!r}, is {here.get(key)!r}"
        for before, sampler in zip(was, now, strict=False)
        for here in [sampler.describe() if sampler is not None else {}]
        for key in sorted(before.order.keys() - {"seed"})
        if before.order[key] != here.get(key)
    )


def _warn_of_other_order(pending: PendingResume, loaders: Sequence[Any]) -> None:
    """Warn of users' samplers that do not reproduce the order of the epoch that has ended.

    The next epoch then differs from that of the uninterrupted run. This is not refused, because
    data may change at the end of an epoch.
    """
    epochs = {was.order_epoch for was in pending.record.loaders} - {None}
    if pending.makes_loaders or len(epochs) != 1 or _changed_data(pending, loaders):
        return
    own = [
        loader if (s := elastic_sampler_of(loader)) is not None and s.sampler is not None else None
        for loader in loaders
    ]
    if changed := _changed_order(pending, own, epochs.pop()):
        rank_zero_warn(
            f"The next epoch may have another order than in the uninterrupted run: {changed}."
        )


def _changed_order(pending: PendingResume, loaders: Sequence[Any], epoch: int | None) -> str:
    """Return which sampler orders an epoch differently than in the saved run; empty: none."""
    for index, loader in enumerate(loaders):
        elastic, was = elastic_sampler_of(loader), pending.loader(index)
        if elastic is None or epoch is None or was.order_epoch != epoch:
            continue
        _restore_seed(elastic, pending, index)
        name = type(elastic.sampler or elastic).__name__
        if not was.order_digest:
            return f"{name} {NO_DIGEST}"
        if elastic.order_digest(epoch) != was.order_digest:
            return (
                f"{name} put epoch {epoch} in another order than in the saved run (it may count "
                "epochs, draw from a source that cannot be seeded, or depend on training). "
                f"{REPRODUCIBLE}"
            )
    return ""


def _position_loaders(
    pending: PendingResume,
    combined: CombinedLoader,
    position: Position,
    samples_per_step: Sequence[int | None],
) -> list[Consumed | None]:
    """Set every training loader to a position; return how much of each the epoch has consumed."""
    states = iter(pending.loader_states_at(position))
    is_only_one = len(combined.flattened) == 1
    places: list[Consumed | None] = []
    for index, (loader, size) in enumerate(zip(combined.flattened, samples_per_step, strict=True)):
        was = pending.record.consumed_of(index, is_only_one=is_only_one)
        was = was if position.steps else Consumed(0)
        # Lightning lists the states of stateful loaders only, in order.
        state = next(states, None) if isinstance(loader, Stateful) else None
        elastic, resumer = elastic_sampler_of(loader), resumable_part_of(loader)
        if elastic is None:
            drop_iterator(loader)  # persistent workers have copies of the previous data
        if elastic is not None:
            _restore_seed(elastic, pending, index)
            was = _place_of(elastic, was, combined, position)
            elastic.start_at(position.epoch, was.samples // elastic.plan.global_batch_size)
        elif resumer is not None and position.is_over:
            # The number of its samples is unknown if its last step had fewer than the others.
            resumer.resume_at(position.epoch + 1, 0)
        elif resumer is not None:
            if was is not None and size:
                was = _rounded_down(was, size, pending.trainer, length_of(loader))
            resumer.resume_at(position.epoch, 0 if was is None else was.samples)
        elif isinstance(loader, Stateful):
            is_cut = ends_before_data(combined, index, state)
            _position_stateful(loader, state, pending, position, is_cut=is_cut)
        places.append(was)
    return places


def _rounded_down(was: Consumed, size: int, trainer: pl.Trainer, length: int | None) -> Consumed:
    """Round down to a step, or to a micro-batch in a loader that restarted or ended within a step.

    ``size``: samples per step; ``length``: of the loader, in batches.
    """
    unit = size // trainer.accumulate_grad_batches
    has_ended = length is not None and was.samples >= length * unit
    unit = unit if was.passes or has_ended else size
    return replace(was, samples=was.samples // unit * unit)


def _position_stateful(
    loader: Stateful, state: Any, pending: PendingResume, position: Position, *, is_cut: bool
) -> None:
    """Set a stateful loader to a position. ``is_cut``: its epochs end before its data."""
    if position.steps and not position.is_over:
        if state is not None:
            # Lightning may have loaded it already, but the iterator that consumed the state is
            # replaced, and the next one would start at the beginning.
            loader.load_state_dict(state)
    elif state is not None:
        load_state_at_epoch_end(loader, state, ends_before_data=is_cut)
    elif position == pending.position and (position.epoch or position.is_over):
        warn_state_not_restored(loader, pending.saved_world_size, pending.trainer.world_size)


def _restore_seed(elastic: ElasticSampler, pending: PendingResume, index: int) -> None:
    """Restore the order of the saved run, unless the loader is recreated for this epoch."""
    was = pending.loader(index)
    if not pending.is_own_format or was.seed is None:
        return
    if not pending.makes_loaders or (was.has_run_seed and elastic.seed == run_seed()):
        elastic.seed = was.seed


def _place_of(
    elastic: ElasticSampler, was: Consumed | None, combined: CombinedLoader, position: Position
) -> Consumed:
    """Return the place in the sampler's order at which it starts, at a step of this run.

    Of several loaders, shorter ones restart within an epoch or are exhausted.
    """
    size, passes = elastic.plan.global_batch_size, 0
    if position.is_over:
        step = elastic.steps
    elif was is not None:
        step, passes = min(was.samples // size, elastic.steps), was.passes
    elif repeats_shorter_loaders(combined):
        passes, step = divmod(position.steps, max(elastic.steps, 1))
    else:
        step = min(position.steps, elastic.steps)
    return Consumed(step * size, passes)


def _finish_loaders(
    combined: CombinedLoader, position: Position, consumed: Sequence[Consumed | None]
) -> None:
    """Finish after the loaders' iterators and workers were created in the middle of an epoch.

    Workers copied the data set with its start position. The data set in this process is never
    iterated, so its start position is reset for workers that start later.
    """
    if position.is_over or not position.steps:
        return
    mark_exhausted(combined, [part is not None and part.passes > 0 for part in consumed])
    for loader in combined.flattened:
        data = getattr(loader, "dataset", None)
        if not isinstance(data, ResumesAtSample) or resumable_part_of(loader) is not data:
            continue
        if getattr(loader, "num_workers", 0) > 0:
            data.resume_at(position.epoch, 0)


def _count_batches(trainer: pl.Trainer, more: int) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + more)


def _is_epoch_shortened(trainer: pl.Trainer, position: Position) -> bool:
    """Whether an epoch is now shorter than its progress, so that it ends at this position."""
    fit = trainer.fit_loop
    reached = position.steps * trainer.accumulate_grad_batches
    if position.is_over or not position.steps or reached < fit.max_batches:
        return False
    rank_zero_warn(
        f"Epoch {position.epoch} ends here: {position.steps} of its optimizer steps were "
        "taken, and an epoch is now shorter than that."
    )
    fit.epoch_loop.batch_progress.is_last_batch = True
    return True


def _restart_loops(trainer: pl.Trainer, position: Position, axis: int | None) -> None:
    """Set the loops to start at a position. ``axis``: the loggers' step at the save.

    Otherwise Lightning would enter a finished epoch again for one more batch (with ``max_steps``),
    count the loggers' steps as if a batch had been interrupted, and omit the next update of
    ``ReduceLROnPlateau``.
    """
    fit: Any = trainer.fit_loop
    # Also if the counters are inside an epoch that starts over.
    if position.steps == 0 and not position.is_over:
        # Lightning creates the iterator, as in a run that is not resumed, after the random states
        # were restored, so what the iterator draws on creation is the same.
        fit.epoch_loop.restarting = fit._resuming_from_checkpoint = False
    fit._restarting = False
    if trainer.lightning_module.automatic_optimization:
        axis = trainer.global_step  # the loggers count optimizer steps then
    if axis is not None:
        set_logged_steps(trainer, axis - _will_end_batch(trainer))


def _will_end_batch(trainer: pl.Trainer) -> bool:
    """Whether the restarted loop first ends the last batch, and counts it for the loggers."""
    loop, fetcher = trainer.fit_loop.epoch_loop, data_fetcher(trainer)
    return bool(loop.restarting and fetcher is not None and loop._should_check_val_fx(fetcher))


def _restore_validation_counters(pending: PendingResume) -> None:
    """Set the validation's batch counters to those of the uninterrupted run.

    Lightning has already used its counters to decide whether to validate first.
    """
    loop = pending.trainer.fit_loop.epoch_loop.val_loop
    counters = validation_counters_at(
        pending.validation,
        began=bool(pending.state.get("validation_began")),
        was=int(pending.state.get("validation_batches", 0)),
        now=validation_batches(pending.trainer),
    )
    loop.batch_progress.load_state_dict(counters)
    loop.restarting = False


def _step_pending_plateaus(
    trainer: pl.Trainer, state: Mapping[str, Any], position: Position, intervals: StepIntervals
) -> None:
    """Make the pending updates of ``ReduceLROnPlateau`` schedulers, each exactly once."""
    ends_batch, is_pending = _will_end_batch(trainer), state.get("plateau_step_pending")
    if is_pending and not ends_batch:
        _step_plateaus(trainer, "step", trainer.fit_loop.epoch_loop.batch_idx + 1)
    if state.get(ENDING):
        _step_plateaus(trainer, "epoch", position.epoch)
    if ends_batch and is_pending is False:  # already updated for this batch
        intervals.suspend_plateau_steps(trainer)


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


def _restart_data(trainer: pl.Trainer, position: Position) -> None:
    """Recreate the iterator, because samplers have another start and epoch now."""
    trainer.fit_loop._combined_loader_states_to_load = []  # loaded once already
    for loader in training_loaders(trainer):
        for sampler in (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        ):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(position.epoch)
    if (fetcher := data_fetcher(trainer)) is None:
        return
    if position.is_over:
        # Lightning ends such an epoch by requesting one more batch, which must not be drawn.
        # The next iteration is that of the next epoch, also for data that count iterations.
        fetcher.reset()
        fetcher.iterator, fetcher.done = iter(()), True
    elif trainer.current_epoch > 0 and not trainer.fit_loop.epoch_loop.restarting:
        fetcher.reset()  # Lightning creates the iterator, as at the start of later epochs
    else:
        iter(fetcher)
        if position.steps:
            prefetch_next_batch(trainer)  # as the uninterrupted run did one batch earlier
