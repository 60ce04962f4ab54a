"""Warnings about a fit: its data, changes since the checkpoint, frozen and unfrozen parameters.

Those of a load into any engine are in ``checkpoint.load_checks``, those of Hugging Face's loops in
``integrations.differences``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.data_progress.position import Position, RunSettings
from lightning_elastic_zero.engine.live import follows_requires_grad, trained_parameters
from lightning_elastic_zero.trainer.batches import loader_sampler
from lightning_elastic_zero.trainer.lightning import callbacks_of
from lightning_elastic_zero.trainer.loaders import (
    Stateful,
    describe_loader,
    elastic_sampler_of,
    resumable_part_of,
    worker_init_of,
)
from lightning_elastic_zero.trainer.schedulers import CLASS_KEYS

REMEDIES = (
    "Give the data set, sampler or loader a method resume_at(epoch, samples); or pass "
    'ElasticDeepSpeedStrategy(on_unresumable_data="restart_epoch") to repeat the epoch; '
    "or use checkpoints at the end of epochs only"
)
"""For data that cannot resume in the middle of an epoch."""

BATCH_COUNT_SETTINGS = ("val_check_interval", "limit_train_batches")
"""Trainer settings that, as integers, count the batches of one rank."""

_INITIAL, _LIVE = "initial_lr", "lr"

_MOST = 4  # groups that a message lists

FILTERED_WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    # DeepSpeed (up to 0.19) uses names of collectives that torch 2.13 deprecates.
    (
        FutureWarning,
        r"`torch\.distributed\.\w+` is deprecated",
        r"torch\.distributed\.c10d_logger",
    ),
    # Lightning (up to 2.6) uses a deprecated name of torch to walk trees of loaders.
    (
        FutureWarning,
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        r"lightning\.pytorch\.utilities\._pytree",
    ),
    # Lightning only considers loaders with a ``state_dict``. This library refuses data that cannot
    # resume in the middle of an epoch, or warns that the epoch starts over.
    (
        UserWarning,
        r"You're resuming from a checkpoint that ended before the epoch ended",
        r"lightning\.pytorch\.loops\.training_epoch_loop",
    ),
)
"""Class, text and module of warnings between libraries, which users cannot change."""


def warn_of_shuffling(overruled: Sequence[str], loaders: Sequence[object]) -> None:
    """Warn of each training loader whose order Lightning has replaced; see ``overruled_orders``."""
    for part, loader in zip(overruled, loaders, strict=False):
        sampler = loader_sampler(loader)
        user_sampler = getattr(elastic_sampler_of(loader), "sampler", None)
        is_replaced = (
            user_sampler is None and isinstance(sampler, DistributedSampler) and sampler.shuffle
        )
        if part and is_replaced:
            rank_zero_warn(
                f"The training {describe_loader(loader)} yields every sample once per epoch, "
                f"shuffled by the run's seed (seed_everything) and the epoch, and {part} has no "
                "effect, because Lightning replaces the sampler for every distributed strategy, "
                "even on one device. To keep the order, pass sampler=range(len(dataset)) or your "
                "own DistributedSampler(dataset, shuffle=False); for another order, a sampler "
                "class of your own, which may keep a generator in an attribute. To silence this "
                "warning, pass shuffle=True without a generator."
            )


def warn_of_unresumable_data(
    loaders: Sequence[object], grid: RankGrid, samples_per_step: Sequence[int | None]
) -> None:
    """Warn of each loader that cannot resume in the middle of an epoch."""
    for loader, size in zip(loaders, samples_per_step, strict=True):
        where, remedies = "", REMEDIES
        if elastic_sampler_of(loader) is not None:
            continue
        if resumable_part_of(loader) is not None:
            if size is not None:
                continue
            why = "has no batch_size, so the samples of a step are unknown"
            remedies = "Pass global_batch_size and logging_batch_size_per_gpu to the strategy"
        elif isinstance(loader, Stateful):
            where, why = (
                f" on another number of devices than {grid.ranks}",
                "has one state per rank",
            )
        else:
            why = "cannot start at a given sample"
        rank_zero_warn(
            f"A checkpoint inside an epoch will be refused on resume{where}: the "
            f"{describe_loader(loader)} {why}. {remedies}."
        )


def warn_of_workers(loaders: Sequence[object], position: Position) -> None:
    """Warn of each loader whose workers draw different random numbers after a resume.

    This run's loaders decide: a checkpoint does not record the workers of the saved ones. Workers
    of loaders with an ``ElasticSampler`` seed the global generators for each micro-batch, but not
    generators of the user.
    """
    for loader in loaders:
        if not getattr(loader, "num_workers", 0):
            continue
        numbers = "random numbers"
        if elastic_sampler_of(loader) is not None or isinstance(loader, Stateful):
            if _is_lightnings(worker_init_of(loader)):
                continue
            numbers = "numbers from generators that worker_init_fn creates"
        if position.steps and not position.is_over:
            why = "they start inside the epoch"
        elif getattr(loader, "persistent_workers", False) and position.epoch + position.steps:
            why = "with persistent_workers=True their generators continue across epochs"
        else:
            continue
        rank_zero_warn(
            f"The workers of the {describe_loader(loader)} draw other {numbers} than in the "
            f"uninterrupted run: {why}. Derive random numbers from the sample's index to make them "
            "reproducible."
        )


def warn_of_changes(
    was: RunSettings, now: RunSettings, *, is_given: bool, foreign_path: str
) -> None:
    """Warn of each relevant difference between the saved run and this one.

    ``is_given``: ``global_batch_size`` was passed to the strategy. ``foreign_path``: path of the
    checkpoint if another program wrote it; else empty.
    """
    sizes = {was.global_batch_size, now.global_batch_size}
    if len(sizes) > 1 and None not in sizes:
        keep = (
            f"Pass global_batch_size={was.global_batch_size} to keep it"
            if is_given
            else f"ElasticDeepSpeedStrategy(global_batch_size={was.global_batch_size}) keeps it on "
            "any number of devices"
        )
        rank_zero_warn(
            f"The global batch changes from {was.global_batch_size} samples ({was.grid}, "
            f"accumulation {was.accumulate}) to {now.global_batch_size} ({now.grid}, "
            f"accumulation {now.accumulate}), so the learning rate, schedules and max_steps may no "
            f"longer fit. {keep}."
        )
    planned = {was.planned_steps, now.planned_steps}
    if not foreign_path and len(planned) > 1 and None not in planned:
        rank_zero_warn(
            f"The run was planned for {was.planned_steps} optimizer steps and is now planned for "
            f"{now.planned_steps}: schedules with a fixed total (OneCycleLR, cosine) continue as "
            f"saved, for {was.planned_steps}. Pass load_hyperparameters=False to use the new total."
        )
    if was.accumulate != now.accumulate or len(sizes) > 1:
        _warn_of_changed_settings(was, now)
    if foreign_path and was.accumulate > 1:
        rank_zero_warn(
            f"{foreign_path}: the saved run may have divided gradients by its accumulation "
            f"({was.accumulate}) twice, as Lightning's DeepSpeedStrategy does. Here a gradient is "
            "the mean over the global batch. Adam's moments adapt within a few steps; "
            "gradient_clip_val may need to be larger."
        )


def _warn_of_changed_settings(was: RunSettings, now: RunSettings) -> None:
    for name in BATCH_COUNT_SETTINGS:
        value, given = (run.batch_counts.get(name) for run in (was, now))
        if type(value) is not int or type(given) is not int:
            continue
        then, today = value / was.accumulate, given / now.accumulate
        if then != today:
            rank_zero_warn(
                f"Trainer({name}={given}) counts batches of one device: {then:g} optimizer steps "
                f"in the saved run ({was.grid.data * was.accumulate} micro-batches per step), "
                f"{today:g} now ({now.grid.data * now.accumulate}). With global_batch_size it "
                "counts global batches, on any number of devices."
            )


def warn_of_late_loaders(position: Position, every: int) -> None:
    """Warn if training loaders were created in another epoch than in the saved run.

    ``every``: ``reload_dataloaders_every_n_epochs``; 0: never.
    """
    epoch = position.epoch + position.is_over
    if every and (late := epoch % every):
        rank_zero_warn(
            f"reload_dataloaders_every_n_epochs={every}: the uninterrupted run calls "
            f"train_dataloader in epoch {epoch - late} for epoch {epoch}; this run called it in "
            f"epoch {position.epoch}. If train_dataloader depends on the epoch, let it use "
            f"current_epoch - current_epoch % {every}; otherwise the samples differ."
        )


def warn_of_epoch_hooks(trainer: pl.Trainer, epoch: int) -> None:
    """Warn of users' hooks at the start of an epoch, which a resume inside it does not call."""
    hooks = [
        (type(owner).__name__, getattr(owner, "on_train_epoch_start", None))
        for owner in (trainer.lightning_module, *callbacks_of(trainer))
    ]
    names = [name for name, hook in hooks if not _is_lightnings(hook)]
    if names:
        rank_zero_warn(
            f"on_train_epoch_start of {format_names(names, 5)} is not called for epoch {epoch}, "
            "inside which this run resumes, because Lightning calls it once per epoch. State that "
            "it sets and no checkpoint contains (eval mode of a frozen layer, an epoch number in "
            "the data set) differs until the next epoch. Set this state in on_train_start, too."
        )


def _is_lightnings(hook: object) -> bool:
    """Whether a function is Lightning's or None."""
    hook = getattr(hook, "func", hook)  # of a partial
    module = str(getattr(hook, "__module__", ""))
    return hook is None or module.split(".", maxsplit=1)[0] == "lightning"


def configured_rates(optimizers: Iterable[Any]) -> list[dict[str, float]]:
    """Return ``lr`` and ``initial_lr`` of each parameter group, before a load."""
    return [_rates(group) for optimizer in optimizers for group in optimizer.param_groups]


def warn_of_replaced_rates(
    configured: Sequence[Mapping[str, float]], saved: Sequence[Group], *, scheduled: bool
) -> None:
    """Warn if saved learning rates differ from the configured ones.

    With a scheduler, ``initial_lr`` is compared. A scheduler that does not keep it
    (``ReduceLROnPlateau``) can lead to any rate, so nothing is compared then. ``scheduled``: a
    scheduler is live or was saved.
    """
    changes = []
    for index, (live, group) in enumerate(zip(configured, saved, strict=False)):
        was = _rates(group.hyperparameters)
        key = _INITIAL if _INITIAL in live or _INITIAL in was else _LIVE
        if key == _LIVE and scheduled:
            continue
        now, then = live.get(key, live.get(_LIVE)), was.get(key, was.get(_LIVE))
        if now is not None and then is not None and not math.isclose(now, then, rel_tol=1e-6):
            changes.append(f"group {index}: configured {now:g}, saved {then:g}")
    if changes:
        more = [f"and {len(changes) - _MOST} more"] if len(changes) > _MOST else []
        rank_zero_warn(
            f"Continuing with the saved learning rate{' and schedule' if scheduled else ''}, "
            f"not with the configured one ({'; '.join(changes[:_MOST] + more)}). Pass "
            "load_hyperparameters=False to train with the configured one."
        )


def warn_of_other_schedulers(
    schedulers: Sequence[Any], states: Sequence[Mapping[str, Any]], *, as_saved: bool
) -> None:
    """Warn of schedulers without a saved state, of states without one, and of another class."""
    for scheduler in schedulers[len(states) :]:
        rank_zero_warn(
            f"The checkpoint contains no state of {type(scheduler).__name__}: the learning-rate "
            "schedule starts at its first step."
        )
    if len(states) > len(schedulers) and as_saved:
        rank_zero_warn(
            "The checkpoint contains the state of a learning-rate scheduler, and this run has "
            "none: the learning rate stays at its saved value. Configure the saved scheduler, or "
            "pass load_hyperparameters=False to use the configured rate."
        )
    for scheduler, state in zip(schedulers, states, strict=False) if as_saved else ():
        saved, live = (CLASS_KEYS & each.keys() for each in (state, scheduler.state_dict()))
        if saved != live:
            rank_zero_warn(
                "The saved learning-rate schedule is not of the configured class "
                f"{type(scheduler).__name__} (only the saved one has {sorted(saved - live)}, only "
                f"the configured one {sorted(live - saved)}), so the rates will follow neither. "
                "Configure the saved scheduler, or pass load_hyperparameters=False to use the "
                "configured one."
            )


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rates of a live or saved group. Saved tensors are in a dictionary."""
    values = {key: group[key] for key in (_INITIAL, _LIVE) if key in group}
    plain = {k: v.get("tensor") if isinstance(v, Mapping) else v for k, v in values.items()}
    # An optimizer that computes its own rate has None here.
    return {
        key: float(value)
        for key, value in plain.items()
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


class RequiresGradCheck:
    """Warns of parameters that are frozen or unfrozen during a fit: DeepSpeed does not follow."""

    def __init__(self, engine: Any) -> None:
        owned = set(trained_parameters(engine))
        parameters = [] if follows_requires_grad(engine) else list(engine.module.parameters())
        self._trained = tuple(p for p in parameters if p in owned and p.requires_grad)
        self._others = tuple(p for p in parameters if p not in owned and not p.requires_grad)
        self._warned_epoch = -1

    def before_batch(self, trainer: pl.Trainer, _batch_idx: int) -> None:
        """Warn of changes since the fit began, at most once per epoch."""
        module, epoch = trainer.lightning_module, trainer.current_epoch
        if self._warned_epoch == epoch:
            return
        thawed = {p for p in self._others if p.requires_grad}
        frozen = {p for p in self._trained if not p.requires_grad}
        if not (thawed or frozen):
            return
        self._warned_epoch = epoch
        changes = []
        if thawed:
            changes.append(
                f"unfrozen since the fit began, and not trained: {_names(module, thawed)}. "
                "DeepSpeed builds its optimizer once, from the parameters that require a gradient "
                "at that time"
            )
        if frozen:
            changes.append(
                "frozen since the fit began, and still changed by weight decay and the "
                f"optimizer's moments: {_names(module, frozen)}"
            )
        rank_zero_warn(
            f"Epoch {epoch}: parameters {'; '.join(changes)}. To train a part of the model later, "
            "put it into a separate parameter group with lr=0 before the fit and raise its lr when "
            "it is to be trained. Or start another fit from the checkpoint with "
            "load_optimizer_state=False."
        )


def _names(module: nn.Module, parameters: Collection[nn.Parameter]) -> str:
    return format_names((n for n, p in module.named_parameters() if p in parameters), 10)


def hide_known_warnings() -> None:
    """Ignore ``FILTERED_WARNINGS``, unless a filter of the user shows them."""
    for category, message, module in FILTERED_WARNINGS:
        warnings.filterwarnings("ignore", message, category, module, append=True)
