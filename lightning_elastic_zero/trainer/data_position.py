"""Where the training data of a resumed run continue.

``check_data`` decides whether the data can continue inside an epoch, ``position_loaders`` sets all
training loaders to the position, and ``restart_data`` recreates their iterators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.data_progress.position import Consumed, Position
from lightning_elastic_zero.data_progress.sampler import ElasticSampler
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.trainer.accumulation import prefetch_next_batch
from lightning_elastic_zero.trainer.fit_warnings import REMEDIES
from lightning_elastic_zero.trainer.lightning import (
    data_fetcher,
    drop_iterator,
    mark_exhausted,
    repeats_shorter_loaders,
    run_seed,
    training_loaders,
)
from lightning_elastic_zero.trainer.loaded_run import LoadedRun
from lightning_elastic_zero.trainer.loaders import (
    NO_DIGEST,
    REPRODUCIBLE,
    ResumesAtSample,
    Stateful,
    describe_loader,
    elastic_sampler_of,
    ends_before_data,
    has_own_state,
    length_of,
    load_state_at_epoch_end,
    resumable_part_of,
    warn_loader_is_new,
    warn_state_not_restored,
)
from lightning_elastic_zero.trainer.tensor_parallel import grid_of

UnresumableDataPolicy: TypeAlias = Literal["refuse", "restart_epoch"]
"""What to do if training data cannot resume in the middle of an epoch."""


def check_data(
    loaded: LoadedRun,
    loaders: Sequence[Any],
    samples_per_step: Sequence[int | None],
    policy: UnresumableDataPolicy,
) -> LoadedRun:
    """Return the run at the position where its data can continue.

    Raises:
        CheckpointMismatchError: They cannot continue inside the epoch, and ``policy`` refuses that.
    """
    if not loaded.is_inside_epoch and loaded.is_own_format:
        _warn_of_other_order(loaded, loaders)
    if not loaded.was_inside_epoch:
        return loaded
    reasons = {
        index: reason
        for index, size in enumerate(samples_per_step)
        if (reason := _loader_unresumable_reason(index, loaders, size, loaded))
    }
    if not loaded.is_own_format:
        for reason in reasons.values():
            rank_zero_warn(f"Data starts at its first batch: {reason}.")
        starts_over = any(has_own_state(loaders[index]) for index in reasons)
        return replace(loaded, starts_over=starts_over)
    reason = next(iter(reasons.values()), "")
    if not reason and loaded.is_inside_epoch:
        reason = _changed_data_reason(loaded, loaders)
    if not reason:
        return loaded
    was = loaded.saved.position
    if policy == "refuse":
        msg = (
            f"{loaded.where}: saved in epoch {was.epoch} after {was.steps} of its optimizer "
            f"steps, and {reason}. {REMEDIES}"
        )
        raise CheckpointMismatchError(msg)
    epoch, steps = loaded.position.epoch, loaded.position.steps
    rank_zero_warn(
        f"Epoch {epoch} starts over after {was.steps} optimizer steps: {reason}."
        + _schedule_overrun(loaded, steps)
    )
    return replace(loaded, position=Position(epoch, 0), starts_over=True)


def _schedule_overrun(loaded: LoadedRun, steps: int) -> str:
    """Return a warning that a schedule ends before the run, which repeats a number of steps."""
    trainer, planned = loaded.trainer, loaded.saved.settings.planned_steps
    configs = trainer.lr_scheduler_configs
    is_by_step = any(c.interval == "step" and not c.reduce_on_plateau for c in configs)
    if not steps or not is_by_step or planned == trainer.max_steps:
        return ""
    end = "the planned number of steps" if planned is None else planned
    return (
        f" The repeated {steps} steps are additional ones for the learning-rate schedule: if it "
        "has a fixed total, it ends before the run, and then OneCycleLR raises an error and a "
        f"cosine rises again. Pass Trainer(max_steps={end}) to end with the schedule. Or configure "
        f"it for {steps} more steps and pass load_hyperparameters=False."
    )


def _changed_data_reason(loaded: LoadedRun, loaders: Sequence[Any]) -> str:
    """Return why other data than in the saved run cannot resume; empty: they are the same."""
    if changed := _changed_data(loaded, loaders):
        return f"the data differs from that of the saved run ({changed})"
    return _changed_order(loaded, loaders, loaded.position.epoch)


def _loader_unresumable_reason(
    index: int, loaders: Sequence[Any], size: int | None, loaded: LoadedRun
) -> str:
    """Return why a loader cannot start at the position; empty if it can.

    ``size``: its samples per step; None: unknown.
    """
    loader = loaders[index]
    was = loaded.saved.consumed_of(index, is_only_one=len(loaders) == 1)
    # Also if the position was rounded down to the start of the epoch: the state was not.
    if has_own_state(loader) and loaded.loader_states:
        count = sum(isinstance(each, Stateful) for each in loaders)
        if (saved := len(loaded.loader_states)) != count:
            return f"the training loaders with a state were {saved} in the saved run, are {count}"
        return _misplaced_state(loader, was, size, loaded)
    if elastic_sampler_of(loader) is not None or not loaded.is_inside_epoch:
        return ""
    kind = describe_loader(loader)
    if resumable_part_of(loader) is not None:
        unknown = (
            f"the number of samples that the {kind} had yielded is unknown: it has no batch_size "
            "(pass global_batch_size and logging_batch_size_per_gpu), or it has no length and "
            "restarted within the epoch"
        )
        return unknown if was is None else ""
    if not loaded.all_loader_states or not isinstance(loader, Stateful):
        return f"the {kind} cannot start at a given sample"
    return (
        f"the {kind} has one state per rank, saved on {loaded.saved_grid}; this run has "
        f"{grid_of(loaded.trainer)}"
    )


def _misplaced_state(
    loader: object, was: Consumed | None, size: int | None, loaded: LoadedRun
) -> str:
    """Return why the state of a loader is not at the position; empty if it is.

    A state may count micro-batches or samples, so both must be as in the saved run.
    """
    accumulate = loaded.trainer.accumulate_grad_batches
    done = loaded.saved.position.steps * loaded.saved.settings.accumulate
    place = loaded.position.steps * accumulate
    state = f"the {describe_loader(loader)} has its own state, saved after"
    keep = "(keep batch_size and accumulation)"
    if place != done:
        return f"{state} {done} micro-batches of each rank; this run continues after {place} {keep}"
    if was is None or was.passes or size is None:
        return ""
    length = length_of(loader)
    samples = (done if length is None else min(done, length)) * size // accumulate
    if samples == was.samples:
        return ""
    return f"{state} {was.samples} samples in {done} micro-batches; this run has {samples} {keep}"


def _changed_data(loaded: LoadedRun, loaders: Sequence[Any]) -> str:
    was, now = loaded.saved.loaders, [*map(elastic_sampler_of, loaders)]
    if was and len(was) != len(now):
        return f"{len(was)} training loaders then, {len(now)} now"
    return "; ".join(
        f"{key} was {before.order[key]!r}, is {live.get(key)!r}"
        for before, sampler in zip(was, now, strict=False)
        for live in [sampler.describe() if sampler is not None else {}]
        for key in sorted(before.order.keys() - {"seed"})
        if before.order[key] != live.get(key)
    )


def _warn_of_other_order(loaded: LoadedRun, loaders: Sequence[Any]) -> None:
    """Warn of users' samplers that do not reproduce the order of the epoch that has ended.

    The next epoch then differs from that of the uninterrupted run. This is not refused, because
    data may change at the end of an epoch.
    """
    epochs = {was.order_epoch for was in loaded.saved.loaders} - {None}
    if loaded.makes_loaders or len(epochs) != 1 or _changed_data(loaded, loaders):
        return
    with_user_sampler = [
        loader if (s := elastic_sampler_of(loader)) is not None and s.sampler is not None else None
        for loader in loaders
    ]
    if changed := _changed_order(loaded, with_user_sampler, epochs.pop()):
        rank_zero_warn(
            f"The next epoch may have another order than in the uninterrupted run: {changed}."
        )


def _changed_order(loaded: LoadedRun, loaders: Sequence[Any], epoch: int | None) -> str:
    """Return which sampler orders an epoch differently than in the saved run; empty: none."""
    for index, loader in enumerate(loaders):
        elastic, was = elastic_sampler_of(loader), loaded.loader(index)
        if elastic is None or epoch is None or was.order_epoch != epoch:
            continue
        _restore_seed(elastic, loaded, index)
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


def position_loaders(
    loaded: LoadedRun, combined: CombinedLoader, samples_per_step: Sequence[int | None]
) -> tuple[Consumed | None, ...]:
    """Set every training loader to a position; return how much of each the epoch has consumed."""
    states, position = iter(loaded.loader_states), loaded.position
    is_only_one = len(combined.flattened) == 1
    places: list[Consumed | None] = []
    for index, (loader, size) in enumerate(zip(combined.flattened, samples_per_step, strict=True)):
        was = loaded.saved.consumed_of(index, is_only_one=is_only_one)
        was = was if position.steps else Consumed(0)
        # Lightning lists the states of stateful loaders only, in order.
        state = next(states, None) if isinstance(loader, Stateful) else None
        elastic, resumer = elastic_sampler_of(loader), resumable_part_of(loader)
        if elastic is None:
            drop_iterator(loader)  # persistent workers have copies of the previous data
        if elastic is not None:
            _restore_seed(elastic, loaded, index)
            was = _place_of(elastic, was, combined, position)
            elastic.start_at(position.epoch, was.samples // elastic.plan.global_batch_size)
        elif resumer is not None and position.is_over:
            # The number of its samples is unknown if its last step had fewer than the others.
            resumer.resume_at(position.epoch + 1, 0)
        elif resumer is not None:
            if was is not None and size:
                was = _rounded_down(was, size, loaded.trainer, length_of(loader))
            resumer.resume_at(position.epoch, 0 if was is None else was.samples)
        elif isinstance(loader, Stateful):
            if was is None and loaded.loader(index).has_restarted:
                was = Consumed(0, passes=1)  # Its state has the place in this pass.
            is_cut = ends_before_data(combined, index, state)
            _position_stateful(loader, state, loaded, is_cut=is_cut)
        places.append(was)
    return tuple(places)


def _restore_seed(elastic: ElasticSampler, loaded: LoadedRun, index: int) -> None:
    """Restore the order of the saved run, unless the loader is recreated for this epoch."""
    was = loaded.loader(index)
    if not loaded.is_own_format or was.seed is None:
        return
    if not loaded.makes_loaders or (was.has_run_seed and elastic.seed == run_seed()):
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


def _rounded_down(was: Consumed, size: int, trainer: pl.Trainer, length: int | None) -> Consumed:
    """Round down to a step, or to a micro-batch in a loader that restarted or ended within a step.

    ``size``: samples per step; ``length``: of the loader, in batches.
    """
    unit = size // trainer.accumulate_grad_batches
    has_ended = length is not None and was.samples >= length * unit
    unit = unit if was.passes or has_ended else size
    return replace(was, samples=was.samples // unit * unit)


def _position_stateful(loader: Stateful, state: Any, loaded: LoadedRun, *, is_cut: bool) -> None:
    """Set a stateful loader to a position. ``is_cut``: its epochs end before its data."""
    position = loaded.position
    if state is not None and loaded.is_inside_epoch:
        loader.load_state_dict(state)
    elif state is not None:
        load_state_at_epoch_end(loader, state, ends_before_data=is_cut)
    elif loaded.starts_over or loaded.is_inside_epoch:
        return
    elif loaded.makes_loaders:
        if loaded.all_loader_states:
            warn_loader_is_new(loader, position.epoch)
    elif position.epoch or position.is_over:
        warn_state_not_restored(loader, loaded.saved_grid, grid_of(loaded.trainer))


def restart_data(
    loaded: LoadedRun, combined: CombinedLoader, consumed: Sequence[Consumed | None]
) -> None:
    """Recreate the iterators, because samplers have another start and epoch now."""
    trainer, position = loaded.trainer, loaded.position
    trainer.fit_loop._combined_loader_states_to_load = []  # loaded once already
    for loader in training_loaders(trainer):
        for sampler in (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        ):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(position.epoch)
    if (fetcher := data_fetcher(trainer)) is not None:
        _restart_fetcher(fetcher, trainer, position)
    if loaded.is_inside_epoch:
        _finish_loaders(combined, position, consumed)


def _restart_fetcher(fetcher: Any, trainer: pl.Trainer, position: Position) -> None:
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


def _finish_loaders(
    combined: CombinedLoader, position: Position, consumed: Sequence[Consumed | None]
) -> None:
    """Finish after the loaders' iterators and workers were created in the middle of an epoch.

    Workers copied the data set with its start position. The data set in this process is never
    iterated, so its start position is reset for workers that start later.
    """
    mark_exhausted(combined, [part is not None and part.passes > 0 for part in consumed])
    for loader in combined.flattened:
        data = getattr(loader, "dataset", None)
        if not isinstance(data, ResumesAtSample) or resumable_part_of(loader) is not data:
            continue
        if getattr(loader, "num_workers", 0) > 0:
            data.resume_at(position.epoch, 0)
