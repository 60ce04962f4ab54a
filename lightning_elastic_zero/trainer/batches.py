"""The batch settings of a run, and the trainer settings that depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_elastic_zero.data_progress.batches import BatchPlan, ceil_div, plan_batches
from lightning_elastic_zero.errors import UnsupportedError


class UserSettings:
    """Changes trainer settings for one fit, and remembers the user's values."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        self._past: dict[str, tuple[Any, Any]] = {}

    def get(self, trainer: pl.Trainer, name: str) -> Any:
        """Return the user's value. A value changed by others since ``make`` is the user's."""
        value = getattr(trainer, name, None)
        given, made = self._made.get(name, (value, value))
        return given if value == made else value

    def make(self, trainer: pl.Trainer, name: str, value: object) -> None:
        """Set a value for this fit."""
        self._made[name] = (self.get(trainer, name), value)
        self._past = {}
        setattr(trainer, name, value)

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore the user's values when the fit is over."""
        if self._made:
            for name in self._made:
                setattr(trainer, name, self.get(trainer, name))
            self._past, self._made = self._made, {}

    @contextmanager
    def reapplied(self, trainer: pl.Trainer) -> Iterator[None]:
        """Apply the values of the last fit again, for a save of its loop counters."""
        before = {name: getattr(trainer, name, None) for name in self._past}
        for name, (_, made) in self._past.items():
            setattr(trainer, name, made)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Batch size of the loader, and how an optimizer step is made of its batches."""

    loader_batch_size: int | None
    """``batch_size`` of the first training loader; None: unknown."""
    plan: BatchPlan | None
    """How the global batch is divided; None without ``global_batch_size``."""
    world_size: int
    accumulate: int

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None: unknown."""
        if self.plan is not None:
            return self.plan.global_batch_size
        if self.loader_batch_size is None:
            return None
        return self.loader_batch_size * self.world_size * self.accumulate

    def check_fixed_batches(self, loader: object) -> None:
        """Refuse a loader with its own order whose batches do not add up to the global batch.

        Raises:
            UnsupportedError: The plan has other micro-batches than the loader.
        """
        # A loader without a batch size has the one that the user has declared.
        plan, size = self.plan, batch_size_of(loader) or self.loader_batch_size
        if plan is None or (plan.is_even and plan.largest_micro_batch == size):
            return
        even = "" if plan.is_even else "up to "
        msg = (
            f"global_batch_size={plan.global_batch_size} on {self.world_size} devices needs "
            f"micro-batches of {even}{plan.largest_micro_batch} samples, and the "
            f"{type(loader).__name__} with its own order yields {size}. Set its batch_size so that "
            f"devices x batch_size divides {plan.global_batch_size}"
        )
        raise UnsupportedError(msg)

    def check_accumulation(self, trainer: pl.Trainer) -> None:
        """Refuse an accumulation that changed during the fit, as Lightning's strategy does.

        Raises:
            UnsupportedError: A step has another number of micro-batches now.
        """
        if (now := trainer.accumulate_grad_batches) == self.accumulate:
            return
        msg = (
            f"trainer.accumulate_grad_batches was changed from {self.accumulate} to {now} during "
            f"the fit (before a step of epoch {trainer.current_epoch}), but DeepSpeed has one "
            "value per fit. Pass it to Trainer(accumulate_grad_batches=...) and use a separate fit "
            "for each value"
        )
        raise UnsupportedError(msg)

    def plan_for(self, batch_size: int | None) -> BatchPlan:
        """Return the plan for one of several loaders.

        Args:
            batch_size: Its batch size; None if its items are batches, which count as samples.

        Raises:
            UnsupportedError: The loaders have different batch sizes and cannot all keep their
                global batch.
        """
        plan, first = self.plan, self.loader_batch_size
        if plan is not None and batch_size == first:
            return plan
        if plan is None or (plan.is_even and plan.largest_micro_batch == first):
            samples = (batch_size or 1) * self.world_size * self.accumulate
            return BatchPlan(samples, self.world_size, self.accumulate)
        if batch_size is None:
            msg = (
                f"global_batch_size={plan.global_batch_size} on {self.world_size} devices needs "
                f"micro-batches of {plan.largest_micro_batch} samples, and the loader with "
                f"batch_size=None yields items of {first} samples. Make global_batch_size a "
                f"multiple of devices x {first}"
            )
            raise UnsupportedError(msg)
        msg = (
            f"global_batch_size={plan.global_batch_size} is divided into micro-batches of "
            f"{plan.largest_micro_batch} samples for the loader with batch_size={first}, which "
            f"does not fit the loader with batch_size={batch_size}. Give all training loaders the "
            "same batch_size, or make global_batch_size / devices a multiple of the first one"
        )
        raise UnsupportedError(msg)


def resolve_batch_settings(
    trainer: pl.Trainer,
    settings: UserSettings,
    world_size: int,
    loader_batch_size: int | None,
    global_batch_size: int | None,
    *,
    allow_uneven: bool,
) -> BatchSettings:
    """Set the trainer's accumulation and ``limit_train_batches`` from the global batch.

    A fractional ``limit_train_batches`` is a fraction of the optimizer steps. With a global batch,
    an integer counts global batches: the same samples on any number of devices.

    Raises:
        UnsupportedError: The global batch cannot be divided, or contradicts the accumulation.
    """
    given = int(settings.get(trainer, "accumulate_grad_batches"))
    if global_batch_size is None:
        _limit_epoch(trainer, settings, given, is_planned=False)
        return BatchSettings(loader_batch_size, None, world_size, given)
    if loader_batch_size is None:
        msg = (
            f"global_batch_size={global_batch_size} needs a training loader with a batch_size. "
            "Your own batch sampler needs an attribute batch_size, a method resume_at(epoch, "
            "samples) to resume inside an epoch, and Trainer(use_distributed_sampler=False). For "
            "any other loader, or for the samples of an item with batch_size=None, pass "
            "logging_batch_size_per_gpu to the strategy"
        )
        raise UnsupportedError(msg)
    plan = plan_batches(global_batch_size, loader_batch_size, world_size, allow_uneven=allow_uneven)
    is_manual = not trainer.lightning_module.automatic_optimization
    if is_manual and not (plan.accumulate == 1 and plan.is_even):
        msg = (
            f"global_batch_size={global_batch_size} with manual optimization: each batch is a "
            f"step, so {world_size} devices need a loader with "
            f"batch_size={-(-global_batch_size // world_size)} and a device count that divides "
            "global_batch_size"
        )
        raise UnsupportedError(msg)
    if given not in (1, plan.accumulate):
        msg = (
            f"Trainer(accumulate_grad_batches={given}) and "
            f"global_batch_size={global_batch_size} contradict each other: {world_size} devices "
            f"and micro-batches of {plan.largest_micro_batch} need {plan.accumulate}. Omit "
            "accumulate_grad_batches"
        )
        raise UnsupportedError(msg)
    _limit_epoch(trainer, settings, plan.accumulate, is_planned=True)
    settings.make(trainer, "accumulate_grad_batches", plan.accumulate)
    even = "" if plan.is_even else "up to "
    rank_zero_info(
        f"Global batch of {global_batch_size}: {world_size} device{_s(world_size)} x "
        f"{plan.accumulate} micro-batch{_s(plan.accumulate, 'es')} of {even}"
        f"{plan.largest_micro_batch} sample{_s(plan.largest_micro_batch)}"
    )
    return BatchSettings(loader_batch_size, plan, world_size, plan.accumulate)


def _s(count: int, ending: str = "s") -> str:
    return "" if count == 1 else ending


class StepFraction(float):
    """A fraction of an epoch that yields whole optimizer steps.

    Lightning multiplies ``limit_train_batches`` by the length of each training loader, in
    micro-batches, and rounds down. This product is rounded down to whole steps instead.
    """

    accumulate: int

    @classmethod
    def make(cls, fraction: float, accumulate: int) -> StepFraction:
        """Return the fraction for steps of a number of micro-batches."""
        made = cls(fraction)
        made.accumulate = accumulate
        return made

    @override
    def __rmul__(self, batches: float) -> float:
        steps = ceil_div(int(batches), self.accumulate)
        if not (limit := int(steps * float(self))):
            msg = (
                f"limit_train_batches={self} of an epoch of {steps} optimizer steps is less than "
                f"one step. Use at least {1 / steps:.3g}, or limit_train_batches=1"
            )
            raise UnsupportedError(msg)
        return min(batches, limit * self.accumulate)


def _limit_epoch(
    trainer: pl.Trainer, settings: UserSettings, accumulate: int, *, is_planned: bool
) -> None:
    """Make ``limit_train_batches`` count optimizer steps instead of micro-batches."""
    limit = settings.get(trainer, "limit_train_batches")
    if type(limit) is int and is_planned:
        settings.make(trainer, "limit_train_batches", limit * accumulate)
    elif type(limit) is float and 0.0 < limit < 1.0:
        settings.make(trainer, "limit_train_batches", StepFraction.make(limit, accumulate))


def scale_scheduler_frequency(configs: list[Any], accumulate: int) -> None:
    """Make ``frequency`` of schedulers with interval "step" count optimizer steps.

    Lightning compares it with the number of micro-batches.
    """
    for config in configs:
        if config.interval == "step":
            config.frequency *= accumulate


def batch_size_of(loaders: Any) -> int | None:
    """Return the batch size of the first loader that has one.

    Args:
        loaders: Return value of a ``train_dataloader`` hook.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        # The last is for a batch sampler passed as sampler, with batch_size=None.
        batch_sampler, sampler = (
            getattr(loader, name, None) for name in ("batch_sampler", "sampler")
        )
        for source in (batch_sampler, loader, sampler):
            size = getattr(source, "batch_size", None)
            if type(size) is int and size > 0:
                return size
    return None


def has_batches_for_items(loaders: Any) -> bool:
    """Whether a map-style loader yields the data set's items as batches (``batch_size=None``).

    Args:
        loaders: Return value of a ``train_dataloader`` hook.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return any(
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and not isinstance(loader.dataset, IterableDataset)
        for loader in combined.flattened
    )
