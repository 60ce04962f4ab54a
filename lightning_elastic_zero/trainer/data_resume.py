"""Position training loaders and Lightning's live loops at the resume point.

Loop counters were rewritten when the checkpoint was loaded (``RunResumer.resume_from``). The
functions here run when training is about to start, once loaders and loops exist: they position the
loaders, or explain why that is impossible, and set the state that only live loops have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.data_progress.batches import (
    Consumed,
    DataProgress,
    Position,
    validation_counters_at,
)
from lightning_elastic_zero.data_progress.sampler import ElasticSampler
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.trainer.lightning import (
    combined_loader,
    data_fetcher,
    defer_save,
    drop_iterator,
    end_restart,
    forget_loader_states,
    is_validation_due,
    make_next_iterator,
    mark_exhausted,
    repeats_shorter_loaders,
    run_seed,
    save_intervals,
    set_last_saved_step,
    set_logged_steps,
    step_scheduler,
    training_loaders,
)
from lightning_elastic_zero.trainer.loaders import (
    NO_DIGEST,
    REPRODUCIBLE,
    ResumesAtSample,
    Stateful,
    describe_loader,
    elastic_sampler_of,
    ends_before_data,
    length_of,
    load_state_at_epoch_end,
    resumable_part_of,
    warn_state_not_restored,
)
from lightning_elastic_zero.trainer.windows import StepIntervals, prefetch_next_batch

UnresumableDataPolicy: TypeAlias = Literal["refuse", "restart_epoch"]
"""What to do if training data cannot resume in the middle of an epoch."""


@dataclass(frozen=True, slots=True)
class PendingResume:
    """Loaded state that is restored when training begins."""

    where: str
    """Path of the checkpoint, for messages."""
    record: DataProgress
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
    world_size: int
    """Data-parallel ranks of this run."""
    reload_every: int
    """``reload_dataloaders_every_n_epochs``; 0: never."""
    accumulate: int
    """Micro-batches of a rank per optimizer step of this run."""

    @property
    def run_seed(self) -> int | None:
        """The run's seed for the sample order in the saved run; None: unknown."""
        of_loaders = [loader.get("seed") for loader in self.record.loaders]
        known = [seed for seed in (self.record.seed, *of_loaders) if type(seed) is int]
        return known[0] if known and self.is_own_format else None

    @property
    def makes_loaders(self) -> bool:
        """Whether the loaders are recreated for the epoch in which the run resumes."""
        at = self.record.position
        return bool(self.reload_every and not at.steps and at.epoch % self.reload_every == 0)

    def consumed_of(self, index: int, loaders: Sequence[Any]) -> Consumed | None:
        """Return how much of one training loader the epoch had consumed; None: unknown."""
        return self.record.consumed_of(index, is_only_one=len(loaders) == 1)

    def loader_states_at(self, position: Position) -> list[Any]:
        """Return the states to load into stateful loaders at a position."""
        starts_over = position.steps != self.position.steps
        is_of_others = self.record.world_size != self.world_size
        return [] if starts_over or is_of_others else self.loader_states


@dataclass(frozen=True, slots=True)
class Placement:
    """Position at which a resumed run continues."""

    position: Position
    consumed: tuple[Consumed | None, ...] = ()
    """For each training loader; None: unknown."""


def position_dataloaders(
    pending: PendingResume,
    combined: CombinedLoader | None,
    samples_per_step: Sequence[int | None],
    on_unresumable_data: UnresumableDataPolicy,
) -> Placement:
    """Set every training loader to the position, or to the epoch's start if that is allowed.

    Args:
        pending: The loaded state.
        combined: The training loaders; None if there are none.
        samples_per_step: Samples of each loader per optimizer step of this run; None: unknown.
        on_unresumable_data: What to do if a loader cannot start at the position.

    Returns:
        The position at which the run continues.

    Raises:
        CheckpointMismatchError: A loader cannot start there, and the policy is ``"refuse"``.
    """
    if combined is None:
        return Placement(pending.position)
    position, loaders = pending.position, combined.flattened
    if pending.is_own_format and (position.is_over or not position.steps):
        _warn_of_other_order(pending, loaders)
    lost = _unresumable_reason(pending, loaders) if position.steps else ""
    if lost and on_unresumable_data == "refuse":
        raise CheckpointMismatchError(_refusal(pending, lost))
    if not lost:
        return _position_all(pending, combined, position, samples_per_step)
    rank_zero_warn(
        f"Epoch {position.epoch} starts over after {position.steps} optimizer steps: {lost}."
    )
    return _position_all(pending, combined, Position(position.epoch, 0), samples_per_step)


def _position_all(
    pending: PendingResume,
    combined: CombinedLoader,
    position: Position,
    samples_per_step: Sequence[int | None],
) -> Placement:
    states = iter(pending.loader_states_at(position))
    placed: list[Consumed | None] = []
    for index, (loader, size) in enumerate(zip(combined.flattened, samples_per_step, strict=True)):
        was = pending.consumed_of(index, combined.flattened) if position.steps else Consumed(0)
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
                was = _rounded_down(was, size, pending.accumulate, length_of(loader))
            resumer.resume_at(position.epoch, 0 if was is None else was.samples)
        elif isinstance(loader, Stateful):
            is_cut = ends_before_data(combined, index, state)
            _position_stateful(loader, state, pending, position, is_cut=is_cut)
        placed.append(was)
    return Placement(position, tuple(placed))


def _rounded_down(was: Consumed, size: int, accumulate: int, length: int | None) -> Consumed:
    """Round down to the beginning of a step, or of a micro-batch in a loader that restarted.

    A shorter loader can restart or end within a step.

    Args:
        was: The recorded place.
        size: Samples per step.
        accumulate: Micro-batches per step.
        length: Length of the loader in batches; None: it has none.
    """
    unit = size // accumulate
    has_ended = length is not None and was.samples >= length * unit
    unit = unit if was.passes or has_ended else size
    return replace(was, samples=was.samples // unit * unit)


def finish_placement(placement: Placement, combined: CombinedLoader | None) -> None:
    """Finish after the loaders' iterators and workers were created in the middle of an epoch.

    Workers copied the data set with its start position. The data set in this process is never
    iterated, so its start position is reset for workers that start later.
    """
    position = placement.position
    if combined is None or position.is_over or not position.steps:
        return
    mark_exhausted(combined, [part is not None and part.passes > 0 for part in placement.consumed])
    for loader in combined.flattened:
        data = getattr(loader, "dataset", None)
        if not isinstance(data, ResumesAtSample) or resumable_part_of(loader) is not data:
            continue
        if getattr(loader, "num_workers", 0) > 0:
            data.resume_at(position.epoch, 0)


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
        warn_state_not_restored(loader, pending.record.world_size, pending.world_size)


def _restore_seed(elastic: ElasticSampler, pending: PendingResume, index: int) -> None:
    """Restore the order of the saved run, unless the loader is recreated for this epoch."""
    record = pending.record
    if not pending.is_own_format or index >= len(record.loaders):
        return
    if pending.makes_loaders:
        if elastic.seed == run_seed() and pending.run_seed is not None:
            elastic.seed = pending.run_seed
        return
    seed = record.loaders[index].get("seed")
    elastic.seed = seed if type(seed) is int else elastic.seed


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


def _unresumable_reason(pending: PendingResume, loaders: Sequence[Any]) -> str:
    """Return why the data cannot resume inside an epoch; empty if it can."""
    if pending.position.is_over:
        return ""
    for index, loader in enumerate(loaders):
        is_known = pending.consumed_of(index, loaders) is not None
        if not (lost := _loader_unresumable_reason(loader, pending, is_known=is_known)):
            continue
        if pending.is_own_format:
            return lost
        rank_zero_warn(f"Data starts at its first batch: {lost}.")
    if not pending.is_own_format:
        return ""
    if changed := _changed(pending, loaders):
        return f"the data differs from that of the saved run ({changed})"
    return _changed_order(pending, loaders, pending.position.epoch)


def _changed(pending: PendingResume, loaders: Sequence[Any]) -> str:
    """Return known differences between the data and that of the saved run."""
    was, now = pending.record.loaders, [*map(elastic_sampler_of, loaders)]
    if was and len(was) != len(now):
        return f"{len(was)} training loaders then, {len(now)} now"
    return "; ".join(
        f"{key} was {before[key]!r}, is {here.get(key)!r}"
        for before, sampler in zip(was, now, strict=False)
        for here in [sampler.describe() if sampler is not None else {}]
        for key in sorted(before.keys() - {"seed"})
        if before[key] != here.get(key)
    )


def _warn_of_other_order(pending: PendingResume, loaders: Sequence[Any]) -> None:
    """Warn of users' samplers that do not reproduce the order of the epoch that has ended.

    The next epoch then differs from that of the uninterrupted run. This is not refused, because
    data may change at the end of an epoch.
    """
    epochs = {was[0] for was in pending.record.orders if was is not None}
    if pending.makes_loaders or len(epochs) != 1 or _changed(pending, loaders):
        return
    (epoch,) = epochs
    own = [
        loader if (s := elastic_sampler_of(loader)) is not None and s.sampler is not None else None
        for loader in loaders
    ]
    if changed := _changed_order(pending, own, epoch):
        rank_zero_warn(
            f"The next epoch may have another order than in the uninterrupted run: {changed}."
        )


def _changed_order(pending: PendingResume, loaders: Sequence[Any], epoch: int) -> str:
    """Return which samplers order an epoch differently than in the saved run; empty: none."""
    names, unknown = [], []
    for index, (loader, was) in enumerate(zip(loaders, pending.record.orders, strict=False)):
        elastic = elastic_sampler_of(loader)
        if elastic is None or was is None or was[0] != epoch:
            continue
        _restore_seed(elastic, pending, index)
        if not was[1]:
            unknown.append(type(elastic.sampler or elastic).__name__)
        elif elastic.order_digest(epoch) != was[1]:
            names.append(type(elastic.sampler or elastic).__name__)
    if unknown:
        return f"{' and '.join(unknown)} {NO_DIGEST}"
    if not names:
        return ""
    return (
        f"{' and '.join(names)} put epoch {epoch} in another order than in the saved run (it may "
        "count epochs, draw from a source that cannot be seeded, or depend on training). "
        f"{REPRODUCIBLE}"
    )


def _loader_unresumable_reason(loader: object, pending: PendingResume, *, is_known: bool) -> str:
    """Return why a loader cannot start inside an epoch; empty if it can."""
    if elastic_sampler_of(loader) is not None:
        return ""
    kind = describe_loader(loader)
    if resumable_part_of(loader) is not None:
        return "" if is_known else _UNKNOWN_SAMPLES.format(kind)
    if not pending.loader_states or not isinstance(loader, Stateful):
        return f"the {kind} cannot start at a given sample"
    saved, now = pending.record.world_size, pending.world_size
    if saved != now:
        return f"the {kind} has one state per rank, saved on {saved} ranks; this run has {now}"
    return ""


_UNKNOWN_SAMPLES = (
    "the number of samples that the {} had yielded is unknown: either it has no batch_size, and "
    "global_batch_size and logging_batch_size_per_gpu were not passed; or it has no length and "
    "restarted within the epoch because another training loader is longer"
)


def _refusal(pending: PendingResume, lost: str) -> str:
    position = pending.record.position
    return (
        f"{pending.where}: saved in epoch {position.epoch} after {position.steps} of its optimizer "
        f"steps, and {lost}. Resume from a checkpoint at the end of an epoch; or give the data "
        "set, sampler or loader a method resume_at(epoch, samples); or pass "
        'ElasticDeepSpeedStrategy(on_unresumable_data="restart_epoch") to repeat the epoch'
    )


SAVES = "saves"
"""Entry of this library's state in a checkpoint: the last save of each ``ModelCheckpoint``."""


class LoopRestorer:
    """Sets the live loops of a fit that is about to take its first batch after a resume."""

    def __init__(self, trainer: pl.Trainer, pending: PendingResume) -> None:
        self._trainer = trainer
        self._pending = pending
        self._state = pending.state
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop

    def at_batch_size(self, global_batch_size: int | None) -> PendingResume:
        """Return the loaded state with its position in steps of the current loaders.

        This changes it only if ``train_dataloader`` returns another batch size in each epoch.
        """
        pending = self._pending
        position = pending.record.at_batch_size(global_batch_size)
        if (more := position.steps - pending.position.steps) != 0:
            self._count(more * self._trainer.accumulate_grad_batches)
        self._pending = replace(pending, position=position)
        return self._pending

    def _count(self, more: int) -> None:
        progress = self._epoch.batch_progress
        for counts in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, getattr(counts, name) + more)

    def restart_at(self, position: Position) -> None:
        """Set the loops to start there.

        Otherwise Lightning would enter a finished epoch again for one more batch (with
        ``max_steps``), count the loggers' steps as if a batch had been interrupted, and omit the
        next update of ``ReduceLROnPlateau``.
        """
        epoch = self._epoch
        # Also if the counters are inside an epoch that starts over.
        if position.steps == 0 and not position.is_over:
            epoch.restarting = False
            make_next_iterator(self._trainer)
        end_restart(self._trainer)
        axis: int | None = self._state.get("axis")
        if self._trainer.lightning_module.automatic_optimization:
            axis = self._trainer.global_step  # the loggers count optimizer steps then
        if axis is not None:
            set_logged_steps(self._trainer, axis - self._will_end_batch())

    def within_limit(self, position: Position) -> Position:
        """Return the position, as the epoch's end if the epoch is shorter now than its progress."""
        reached = position.steps * self._trainer.accumulate_grad_batches
        if position.is_over or not position.steps or reached < self._fit.max_batches:
            return position
        rank_zero_warn(
            f"Epoch {position.epoch} ends here: {position.steps} of its optimizer steps were "
            "taken, and an epoch is now shorter than that."
        )
        self._epoch.batch_progress.is_last_batch = True
        return replace(position, is_over=True)

    def restore_stop(self) -> None:
        """Stop as soon as min_epochs and min_steps allow, if a callback had requested a stop."""
        if self._state.get("waits_to_stop"):
            self._trainer.should_stop = True
            rank_zero_info(
                "A callback requested a stop before the save: training ends at min_epochs/min_steps"
            )

    def start_progress_bar(self, position: Position) -> None:
        """Start the progress bar in the middle of an epoch, so that it has the epoch's length.

        Lightning does not call ``on_train_epoch_start`` for an epoch that was entered before.
        """
        bar = self._trainer.progress_bar_callback
        if bar is not None and (position.steps or position.is_over):
            bar.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    def skip_repeated_saves(self) -> None:
        """Keep each ``ModelCheckpoint`` from saving the same step again.

        Its own state does not contain the step. Inside the next accumulation window it would
        write the same state over the checkpoint from which the run was resumed. A save that was
        deferred to a validation is made after that validation.
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
        """Count all batches of an epoch that is over, if its length has changed."""
        if not position.is_over or self._fit.max_batches == float("inf"):
            return
        self._count(int(self._fit.max_batches) - self._epoch.batch_progress.current.ready)

    def _will_end_batch(self) -> bool:
        """Whether the restarted loop first ends the last batch, and counts it for the loggers."""
        return bool(self._epoch.restarting and is_validation_due(self._trainer))

    def restore_validation_counters(self) -> None:
        """Set the validation's batch counters to those of the uninterrupted run.

        Lightning has already used its counters to decide whether to validate first.
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
        """Restore the metrics that callbacks and plateau schedulers use."""
        device = self._trainer.strategy.root_device
        saved = self._state.get("metrics", {}).items()
        self._trainer.callback_metrics.update({name: value.to(device) for name, value in saved})

    def step_plateaus(self, position: Position, intervals: StepIntervals) -> None:
        """Make the pending updates of ``ReduceLROnPlateau`` schedulers, each exactly once."""
        ends_batch, is_pending = self._will_end_batch(), self._state.get("plateau_step_pending")
        if is_pending and not ends_batch:
            self._step_plateaus("step", self._epoch.batch_idx + 1)
        if self._state.get("plateau_epoch_pending"):
            self._step_plateaus("epoch", position.epoch)
        if ends_batch and is_pending is False:  # already updated for this batch
            intervals.suspend_plateau_steps(self._trainer)

    def _step_plateaus(self, interval: str, done: int) -> None:
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
        """Recreate the iterator, because samplers have another start and epoch now."""
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
        if (fetcher := data_fetcher(self._trainer)) is None:
            return
        if position.is_over:
            # Lightning ends such an epoch by requesting one more batch, which must not be drawn.
            # The next iteration is that of the next epoch, also for data that count iterations.
            fetcher.reset()
            fetcher.iterator, fetcher.done = iter(()), True
        elif self._begins_epoch():
            fetcher.reset()
        else:
            iter(fetcher)
            if position.steps:
                prefetch_next_batch(self._trainer)  # as the uninterrupted run did one batch earlier

    def _begins_epoch(self) -> bool:
        """Whether Lightning creates the iterator, as at the start of every epoch but the first."""
        return self._trainer.current_epoch > 0 and not self._epoch.restarting


def validation_batches(trainer: pl.Trainer) -> int:
    """Return the batches of a validation on this rank; 0 if unknown."""
    batches = trainer.fit_loop.epoch_loop.val_loop.max_batches
    return 0 if float("inf") in batches else int(sum(batches))
