"""The global batch of a run, and the trainer's settings that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.progress import BatchPlan, plan_batches


@dataclass(frozen=True, slots=True)
class Batches:
    """How many samples a loader gives at once, and how a step is made of them."""

    most_samples: int | None
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
        if self.most_samples is None:
            return None
        return self.most_samples * self.world_size * self.accumulate

    def check_uncut(self, loader: object) -> None:
        """Refuse a loader that cuts its own batches, where they do not make up the global batch.

        Raises:
            UnsupportedError: the plan has other micro-batches than the loader gives.
        """
        plan, size = self.plan, batch_size_of(loader)
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

    def plan_for(self, batch_size: int) -> BatchPlan:
        """Give the plan of a loader, which may not be the first one.

        Raises:
            UnsupportedError: several loaders with batches of different sizes, which cannot all keep
                their global batch.
        """
        if self.plan is None:
            return BatchPlan(
                batch_size * self.world_size * self.accumulate, self.world_size, self.accumulate
            )
        if batch_size == self.most_samples:
            return self.plan
        if self.plan.is_even and self.plan.largest_micro_batch == self.most_samples:
            return BatchPlan(
                batch_size * self.world_size * self.accumulate, self.world_size, self.accumulate
            )
        msg = (
            f"global_batch_size={self.plan.global_batch_size} is cut into micro-batches of "
            f"{self.plan.largest_micro_batch} samples for a loader with batch_size="
            f"{self.most_samples}; a loader with batch_size={batch_size} cannot follow: give the "
            "training loaders one batch_size, or one that global_batch_size / devices is a "
            "multiple of"
        )
        raise UnsupportedError(msg)


def settle_batches(
    trainer: pl.Trainer,
    world_size: int,
    most_samples: int | None,
    global_batch_size: int | None,
    *,
    allow_uneven: bool,
) -> Batches:
    """Set the trainer's accumulation from the global batch, and what counts batches with it.

    With a global batch, the integers ``limit_train_batches`` and ``val_check_interval`` count
    global batches: the same number of samples on any number of devices.

    Raises:
        UnsupportedError: the global batch cannot be cut, or the accumulation was given too.
    """
    if global_batch_size is None:
        accumulate = trainer.accumulate_grad_batches
        return Batches(most_samples, None, world_size, accumulate)
    if most_samples is None:
        msg = (
            f"global_batch_size={global_batch_size} needs a training loader that tells its "
            "batch_size; pass logging_batch_size_per_gpu to the strategy if it cannot"
        )
        raise UnsupportedError(msg)
    plan = plan_batches(global_batch_size, most_samples, world_size, allow_uneven=allow_uneven)
    if trainer.accumulate_grad_batches not in (1, plan.accumulate):
        msg = (
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and "
            f"global_batch_size={global_batch_size} contradict each other: {world_size} devices "
            f"and micro-batches of {plan.largest_micro_batch} make it {plan.accumulate}. Leave "
            "accumulate_grad_batches out"
        )
        raise UnsupportedError(msg)
    _scale_settings(trainer, plan.accumulate)
    trainer.accumulate_grad_batches = plan.accumulate
    even = "" if plan.is_even else "up to "
    rank_zero_info(
        f"Global batch of {global_batch_size}: {world_size} devices x {plan.accumulate} "
        f"micro-batches of {even}{plan.largest_micro_batch} samples"
    )
    return Batches(most_samples, plan, world_size, plan.accumulate)


def _scale_settings(trainer: pl.Trainer, accumulate: int) -> None:
    """Turn counts of global batches into counts of micro-batches, which is what Lightning takes."""
    if isinstance(trainer.limit_train_batches, int):
        trainer.limit_train_batches *= accumulate
    # Where validation is a matter of time, Lightning's trainer has no such attribute.
    if isinstance(interval := getattr(trainer, "val_check_interval", None), int):
        trainer.val_check_interval = interval * accumulate


def scale_frequency(configs: list[Any], accumulate: int) -> None:
    """Let ``frequency`` of a scheduler with interval "step" count optimizer steps, as it says.

    Lightning compares it with the number of micro-batches.
    """
    for config in configs:
        if config.interval == "step":
            config.frequency *= accumulate


def batch_size_of(loaders: Any) -> int | None:  # noqa: ANN401 (a loader, or any nesting of them)
    """Give the batch size of the first loader that tells it.

    Args:
        loaders: what a ``train_dataloader`` hook returns.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    for loader in combined.flattened:
        sampler = getattr(loader, "batch_sampler", None)
        for source in (sampler, loader):
            size = getattr(source, "batch_size", None)
            if type(size) is int and size > 0:
                return size
        if sampler is None and hasattr(loader, "batch_size"):
            return 1  # automatic batching is off: each sample is a batch
    return None
