"""Warnings at the start of a fit: about its data, and changes since the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.data_progress.batches import DataProgress, Position
from lightning_elastic_zero.trainer.loaders import (
    Stateful,
    describe_loader,
    elastic_sampler_of,
    loader_sampler,
    resumable_part_of,
)

REMEDIES = (
    "Give the data set, sampler or loader a method resume_at(epoch, samples); or pass "
    'ElasticDeepSpeedStrategy(on_unresumable_data="restart_epoch"), and the epoch starts over; '
    "or save at the end of epochs only"
)

BATCH_COUNT_SETTINGS = ("val_check_interval", "limit_train_batches")
"""Trainer settings that, as integers, count the batches of one rank."""

_SHUFFLED_ANYWAY = (
    "is shuffled, although it has no shuffle=True: Lightning shuffles training data for every "
    "distributed strategy, this one on one device too, and cannot tell sampler=SequentialSampler("
    "dataset) from a loader without a sampler. To keep the order, make it with "
    "sampler=range(len(dataset)), or with your own DistributedSampler(dataset, shuffle=False); if "
    "it may be shuffled, shuffle=True says so"
)
_OWN_GENERATOR = (
    "is shuffled by the run's seed (seed_everything) and the epoch, so that every rank has one "
    "order: Lightning does not draw from the generator of the loader or of its RandomSampler. An "
    "order of your own is taken from a sampler of a class of your own, which may draw from a "
    "generator in an attribute"
)
_OTHER_SAMPLES = (
    "gives every sample once in an epoch: Lightning replaces a RandomSampler, and replacement=True "
    "and num_samples with it. A sampler of a class of your own, or WeightedRandomSampler, is kept"
)


def overruled_orders(loaders: Any) -> list[str]:
    """Return what is to be said of each loader where Lightning puts its samples in order.

    Args:
        loaders: what a ``train_dataloader`` hook returns, as the user made them.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return [_overruled(loader_sampler(loader)) for loader in combined.flattened]


def _overruled(sampler: object) -> str:
    """Return what is said of a user's sampler that is not kept; empty: it is, or is shuffled."""
    if isinstance(sampler, SequentialSampler):
        return _SHUFFLED_ANYWAY
    if type(sampler) is not RandomSampler:  # a user's own need not have the parent's attributes
        return ""
    if sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return _OTHER_SAMPLES
    return "" if sampler.generator is None else _OWN_GENERATOR


def shuffle_warnings(overruled: Sequence[str], loaders: Sequence[object]) -> Iterator[str]:
    """Yield which loaders, as training uses them, are shuffled otherwise than they were made."""
    for text, loader in zip(overruled, loaders, strict=False):
        sampler = loader_sampler(loader)
        own = getattr(elastic_sampler_of(loader), "sampler", None)
        is_replaced = own is None and isinstance(sampler, DistributedSampler) and sampler.shuffle
        if text and is_replaced:
            yield f"The training {describe_loader(loader)} {text}"


def unresumable_warnings(
    loaders: Sequence[object], world_size: int, samples_per_step: Sequence[int | None]
) -> Iterator[str]:
    """Yield which loaders cannot be resumed in mid-epoch; a step's samples may not be known."""
    for loader, size in zip(loaders, samples_per_step, strict=True):
        name = describe_loader(loader)
        if elastic_sampler_of(loader) is not None:
            continue
        if resumable_part_of(loader) is not None:
            if size is None:
                yield (
                    f"A checkpoint inside an epoch will be refused on resume: the {name} does not "
                    "tell its batch_size, so it is not known how many samples a step has. Pass "
                    "global_batch_size and logging_batch_size_per_gpu to the strategy"
                )
        elif isinstance(loader, Stateful):
            yield (
                f"A checkpoint inside an epoch will be refused on another number of devices than "
                f"{world_size}: the {name} has a state for each rank. {REMEDIES}"
            )
        else:
            yield (
                f"A checkpoint inside an epoch will be refused on resume: the {name} cannot be "
                f"told where to begin. {REMEDIES}"
            )


def worker_warnings(loaders: Sequence[object], position: Position) -> Iterator[str]:
    """Yield whose workers draw other random numbers than those of the uninterrupted run.

    Workers of loaders whose order is this library's are seeded for each micro-batch.
    """
    for loader in loaders:
        is_seeded = elastic_sampler_of(loader) is not None or isinstance(loader, Stateful)
        if is_seeded or not getattr(loader, "num_workers", 0):
            continue
        if position.steps and not position.is_over:
            why = "they begin inside the epoch"
        elif getattr(loader, "persistent_workers", False) and position.epoch + position.steps:
            why = "with persistent_workers=True they draw on from epoch to epoch"
        else:
            continue
        yield (
            f"The workers of the {describe_loader(loader)} draw other random numbers than in the "
            f"uninterrupted run: {why}. Random numbers that follow from the sample's index are "
            "the same in any run"
        )


def change_warnings(
    was: DataProgress, now: DataProgress, *, is_given: bool, foreign_path: str
) -> Iterator[str]:
    """Yield a sentence for all that changed since the save.

    Args:
        was: the record of the save.
        now: that of this run.
        is_given: the global batch is settled by the strategy's option.
        foreign_path: the checkpoint's path, where another program wrote it.
    """
    yield from _changed_batch(was, now, is_given=is_given)
    if not foreign_path:
        yield from _changed_plan(was, now)
    yield from _changed_settings(was, now)
    if foreign_path and was.accumulate > 1:
        yield (
            f"{foreign_path} was saved by a run that may have divided gradients by its "
            f"accumulation ({was.accumulate}) twice, as Lightning's DeepSpeedStrategy does; "
            "here a gradient is the mean over the global batch. Adam's moments take a few "
            "steps to follow, and gradient_clip_val may need to be larger"
        )


def late_loader_warnings(position: Position, every: int) -> Iterator[str]:
    """Yield that training loaders are made in another epoch than those of the run that saved.

    Args:
        position: where the run goes on.
        every: epochs after which the loaders are made anew; 0: never.
    """
    epoch = position.epoch + position.is_over
    if every and (late := epoch % every):
        yield (
            f"reload_dataloaders_every_n_epochs={every} made the training loaders of epoch {epoch} "
            f"in epoch {epoch - late}; this run has called train_dataloader in epoch "
            f"{position.epoch}. If it depends on the epoch, let it use current_epoch - "
            f"current_epoch % {every}, or the samples are others than in a run that was not stopped"
        )


def _changed_batch(was: DataProgress, now: DataProgress, *, is_given: bool) -> Iterator[str]:
    """Yield that the global batch is another one, and what would keep it."""
    sizes = {was.global_batch_size, now.global_batch_size}
    if len(sizes) == 1 or None in sizes:
        return
    keep = (
        f"global_batch_size={was.global_batch_size} keeps it"
        if is_given
        else f"ElasticDeepSpeedStrategy(global_batch_size={was.global_batch_size}) keeps it on any "
        "number of devices"
    )
    yield (
        f"The global batch changes from {was.global_batch_size} samples ({_devices(was)}, "
        f"accumulation {was.accumulate}) to {now.global_batch_size} ({_devices(now)}, "
        f"accumulation {now.accumulate}): learning rate, schedules and max_steps now mean "
        f"something else. {keep}."
    )


def _devices(run: DataProgress) -> str:
    return f"{run.world_size} device{'s' if run.world_size > 1 else ''}"


def _changed_plan(was: DataProgress, now: DataProgress) -> Iterator[str]:
    """Yield that the run is planned for another number of optimizer steps."""
    planned = {was.planned_steps, now.planned_steps}
    if len(planned) > 1 and None not in planned:
        yield (
            f"The run was planned for {was.planned_steps} optimizer steps, and is now for "
            f"{now.planned_steps}: schedules that were made for a total (OneCycleLR, cosine) go on "
            f"as saved, for {was.planned_steps}; load_hyperparameters=False lets them follow the "
            "new one."
        )


def _changed_settings(was: DataProgress, now: DataProgress) -> Iterator[str]:
    """Yield which trainer settings count other amounts of data than in the saved run."""
    before = was.world_size * was.accumulate
    here = now.world_size * now.accumulate
    if was.accumulate == now.accumulate and was.global_batch_size == now.global_batch_size:
        return
    for name in BATCH_COUNT_SETTINGS:
        value, given = (dict(run.settings or {}).get(name) for run in (was, now))
        if type(value) is not int or type(given) is not int:
            continue
        then, today = value / was.accumulate, given / now.accumulate
        if then != today:
            yield (
                f"Trainer({name}={given}) counts batches of one device: {then:g} optimizer steps "
                f"when this was saved ({before} micro-batches per step), {today:g} now ({here}). "
                "With global_batch_size it counts global batches, on any number of devices."
            )


_INITIAL, _LIVE = "initial_lr", "lr"


def configured_rates(optimizers: Iterable[Any]) -> list[dict[str, float]]:
    """Return the rates of each parameter group of the engine's optimizer, before a load."""
    return [_rates(group) for optimizer in optimizers for group in optimizer.param_groups]


def replaced_rates_warnings(
    configured: Sequence[Mapping[str, float]], saved: Sequence[Group], *, scheduled: bool
) -> Iterator[str]:
    """Yield what saved rates differ from the configured ones where no scheduler explains it.

    With a scheduler the rate at its start is compared. A scheduler that does not keep that
    (``ReduceLROnPlateau``) may have led to any rate.

    Args:
        configured: the rates of this run's groups.
        saved: the groups of the checkpoint.
        scheduled: a scheduler is live, or was saved.
    """
    changes = []
    for index, (here, group) in enumerate(zip(configured, saved, strict=False)):
        was = _rates(group.hyperparameters)
        key = _INITIAL if _INITIAL in here or _INITIAL in was else _LIVE
        if key == _LIVE and scheduled:
            continue
        now, then = here.get(key, here.get(_LIVE)), was.get(key, was.get(_LIVE))
        if now is not None and then is not None and not math.isclose(now, then, rel_tol=1e-6):
            changes.append(f"group {index}: configured {now:g}, saved {then:g}")
    if changes:
        more = [f"and {len(changes) - _MOST} more"] if len(changes) > _MOST else []
        yield (
            f"The run goes on with the saved learning rate{' and schedule' if scheduled else ''}, "
            f"not with the configured one ({'; '.join(changes[:_MOST] + more)}). Pass "
            "load_hyperparameters=False to train with the configured one."
        )


_MOST = 4
"""Groups that are named."""


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of a live group, or of a saved one, which has a dictionary for a tensor."""
    values = {key: group[key] for key in (_INITIAL, _LIVE) if key in group}
    plain = {k: v.get("tensor") if isinstance(v, Mapping) else v for k, v in values.items()}
    # An optimizer that computes its own rate has None there.
    return {
        key: float(value)
        for key, value in plain.items()
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
