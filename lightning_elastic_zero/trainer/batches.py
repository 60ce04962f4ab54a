"""The global batch of a run, and the trainer's settings that follow from it."""

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
    """The trainer's settings as the user has them, whatever was made of them for this fit."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        self._past: dict[str, tuple[Any, Any]] = {}

    def get(self, trainer: pl.Trainer, name: str) -> Any:
        """Return what the user has set; what was not made here is the user's."""
        value = getattr(trainer, name, None)
        given, made = self._made.get(name, (value, value))
        return given if value == made else value

    def make(self, trainer: pl.Trainer, name: str, value: object) -> None:
        """Set a setting for this fit."""
        self._made[name] = (self.get(trainer, name), value)
        self._past = {}
        setattr(trainer, name, value)

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore the user's settings, when the fit is over."""
        if self._made:
            for name in self._made:
                setattr(trainer, name, self.get(trainer, name))
            self._past, self._made = self._made, {}

    @contextmanager
    def reapplied(self, trainer: pl.Trainer) -> Iterator[None]:
        """Apply the last fit's settings again: its loops count by them, which a save records."""
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
    """How many samples a loader gives at once, and how a step is made of them."""

    loader_batch_size: int | None
    """The first training loader's ``batch_size``; None where it does not say."""
    plan: BatchPlan | None
    """How the global batch is cut; None where no ``global_batch_size`` was given."""
    world_size: int
    accumulate: int

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks, where they are known."""
        if self.plan is not None:
            return self.plan.global_batch_size
        if self.loader_batch_size is None:
            return None
        return self.loader_batch_size * self.world_size * self.accumulate

    def check_fixed_batches(self, loader: object) -> None:
        """Refuse a loader that cuts its own batches, where they do not make up the global batch.

        Raises:
            UnsupportedError: the plan has other micro-batches than the loader gives.
        """
        # A loader that says nothing is taken at the word of the user.
        plan, size = self.plan, batch_size_of(loader) or self.loader_batch_size
        if plan is None or (plan.is_even and plan.largest_micro_batch == size):
            return
        even = "" if plan.is_even else "up to "
        msg = (
            f"global_batch_size={plan.global_batch_size} on {self.world_size} devices needs "
            f"micro-batches of {even}{plan.largest_micro_batch} samples, and the "
            f"{type(loader).__name__}, whose order is its own, gives {size}: set its batch_size so "
            f"that devices x batch_size divides {plan.global_batch_size}"
        )
        raise UnsupportedError(msg)

    def check_accumulation(self, trainer: pl.Trainer) -> None:
        """Refuse an accumulation that a callback has changed, as Lightning's strategy does.

        Raises:
            UnsupportedError: a step has another number of micro-batches now.
        """
        if (now := trainer.accumulate_grad_batches) == self.accumulate:
            return
        msg = (
            f"trainer.accumulate_grad_batches was changed from {self.accumulate} to {now} during "
            f"the fit (before a step of epoch {trainer.current_epoch}). DeepSpeed has one value "
            "for a fit, and a resume needs it to count the samples of an epoch. Pass the value to "
            "Trainer(accumulate_grad_batches=...), and use a fit of its own for each value"
        )
        raise UnsupportedError(msg)

    def plan_for(self, batch_size: int | None) -> BatchPlan:
        """Return the plan of a loader, which may not be the first one.

        Args:
            batch_size: its own; None where its items are batches, which a plan counts as samples.

        Raises:
            UnsupportedError: several loaders with batches of different sizes, which cannot all keep
                their global batch.
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
                f"batch_size=None gives items of {first} samples, which are not cut: make "
                f"global_batch_size a multiple of devices x {first}"
            )
            raise UnsupportedError(msg)
        msg = (
            f"global_batch_size={plan.global_batch_size} is cut into micro-batches of "
            f"{plan.largest_micro_batch} samples for a loader with batch_size={first}; a loader "
            f"with batch_size={batch_size} cannot follow: give the training loaders one "
            "batch_size, or one that global_batch_size / devices is a multiple of"
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
    """Set the trainer's accumulation from the global batch, and what counts batches with it.

    A fraction of an epoch, in ``limit_train_batches``, is a fraction of its optimizer steps. With a
    global batch, the integer counts global batches: the same samples on any number of devices.

    Raises:
        UnsupportedError: the global batch cannot be cut, or the accumulation was given too.
    """
    given = int(settings.get(trainer, "accumulate_grad_batches"))
    if global_batch_size is None:
        _limit_epoch(trainer, settings, given, is_planned=False)
        return BatchSettings(loader_batch_size, None, world_size, given)
    if loader_batch_size is None:
        msg = (
            f"global_batch_size={global_batch_size} needs a training loader that tells its "
            "batch_size. A batch sampler of your own needs an attribute batch_size, a method "
            "resume_at(epoch, samples) to be resumed inside an epoch, and, as it shares out the "
            "samples among ranks itself, Trainer(use_distributed_sampler=False). For any other "
            "loader, and for the samples of an item where it has batch_size=None, pass "
            "logging_batch_size_per_gpu to the strategy"
        )
        raise UnsupportedError(msg)
    plan = plan_batches(global_batch_size, loader_batch_size, world_size, allow_uneven=allow_uneven)
    by_itself = not trainer.lightning_module.automatic_optimization
    if by_itself and not (plan.accumulate == 1 and plan.is_even):
        msg = (
            f"the module optimizes by itself, so each of its batches is a step: "
            f"global_batch_size={global_batch_size} on {world_size} devices needs a loader with "
            f"batch_size={-(-global_batch_size // world_size)}, and devices that divide it"
        )
        raise UnsupportedError(msg)
    if given not in (1, plan.accumulate):
        msg = (
            f"Trainer(accumulate_grad_batches={given}) and "
            f"global_batch_size={global_batch_size} contradict each other: {world_size} devices "
            f"and micro-batches of {plan.largest_micro_batch} make it {plan.accumulate}. Leave "
            "accumulate_grad_batches out"
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
    """Return the ending of a noun after its count."""
    return "" if count == 1 else ending


class StepFraction(float):
    """A fraction of an epoch, of which Lightning takes whole optimizer steps.

    Lightning multiplies ``limit_train_batches`` with the length of each training loader, in
    micro-batches, and rounds down. The product here has the steps that it has where each batch is
    a step.
    """

    accumulate: int

    @classmethod
    def make(cls, fraction: float, accumulate: int) -> StepFraction:
        """Return the fraction, where a step has so many micro-batches."""
        made = cls(fraction)
        made.accumulate = accumulate
        return made

    @override
    def __rmul__(self, batches: float) -> float:
        steps = ceil_div(int(batches), self.accumulate)
        if not (limit := int(steps * float(self))):
            msg = (
                f"limit_train_batches={self} of an epoch of {steps} optimizer steps is less than "
                f"one step. Use {1 / steps:.3g} or more, or limit_train_batches=1"
            )
            raise UnsupportedError(msg)
        return min(batches, limit * self.accumulate)


def _limit_epoch(
    trainer: pl.Trainer, settings: UserSettings, accumulate: int, *, is_planned: bool
) -> None:
    """Let ``limit_train_batches`` count optimizer steps, where Lightning counts micro-batches."""
    limit = settings.get(trainer, "limit_train_batches")
    if type(limit) is int and is_planned:
        settings.make(trainer, "limit_train_batches", limit * accumulate)
    elif type(limit) is float and 0.0 < limit < 1.0:
        settings.make(trainer, "limit_train_batches", StepFraction.make(limit, accumulate))


def scale_scheduler_frequency(configs: list[Any], accumulate: int) -> None:
    """Scale ``frequency`` of a scheduler with interval "step" to count optimizer steps.

    Lightning compares it with the number of micro-batches.
    """
    for config in configs:
        if config.interval == "step":
            config.frequency *= accumulate


def batch_size_of(loaders: Any) -> int | None:
    """Return the batch size of the first loader that tells it.

    Args:
        loaders: what a ``train_dataloader`` hook returns.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        # The last is a batch sampler that was passed as sampler, with batch_size=None.
        batch_sampler, sampler = (
            getattr(loader, name, None) for name in ("batch_sampler", "sampler")
        )
        for source in (batch_sampler, loader, sampler):
            size = getattr(source, "batch_size", None)
            if type(size) is int and size > 0:
                return size
    return None


def has_batches_for_items(loaders: Any) -> bool:
    """Whether a map-style loader gives the data set's items as batches (``batch_size=None``).

    Args:
        loaders: what a ``train_dataloader`` hook returns.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return any(
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and not isinstance(loader.dataset, IterableDataset)
        for loader in combined.flattened
    )
