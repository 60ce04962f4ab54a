"""A run's position for the manifest, in units that no number of devices changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.manifest import Plain


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two optimizer steps of a run."""

    epoch: int
    """Index of the epoch that the next step belongs to, or that is about to end."""
    steps: int
    """Optimizer steps taken in that epoch."""
    is_over: bool = False
    """All steps of the epoch are taken, and what belongs to its end is still to come."""
    is_validated: bool = False
    """The validation that was due here is over."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """How much of a loader's data an epoch has consumed, on all ranks together."""

    samples: int
    """Of its current pass; items where each item is a batch (``batch_size=None``)."""
    passes: int = 0
    """Whole passes before: of several loaders the shorter ones begin again."""


@dataclass(frozen=True, slots=True)
class DataProgress:
    """What a checkpoint says of the data, and of how far the run is in it."""

    position: Position
    global_step: int
    """Optimizer steps of the whole run."""
    global_batch_size: int | None
    """Samples per optimizer step; None where the loader does not say its batch size."""
    accumulate: int
    """Micro-batches of a rank per optimizer step, in the run that saved."""
    world_size: int
    """Of the run that saved."""
    steps_per_epoch: int | None = None
    """None: the data has no length."""
    planned_steps: int | None = None
    """Optimizer steps of the whole run as it was planned: what schedules were made for."""
    loaders: tuple[Mapping[str, Plain], ...] = ()
    """A fingerprint of each training loader's sampler: seed, order, dataset length, ..."""
    orders: tuple[tuple[int, str] | None, ...] = ()
    """For each training loader, the epoch that its order was made for last and the order's digest;
    None where its order is its own."""
    consumed: tuple[Consumed | None, ...] = ()
    """For each training loader, what the epoch has consumed of it; None: not known."""
    gradient: str = "mean"
    """Of a step: the mean over its samples, whatever the accumulation."""
    settings: Mapping[str, Plain] | None = None
    """Trainer settings that count batches, as they were given."""
    seed: int | None = None
    """The seed that orders the samples where the user gives none: that of ``seed_everything`` in
    the run's first fit; None in checkpoints of before it was recorded."""

    @property
    def samples(self) -> int | None:
        """Samples of the epoch that all ranks together have consumed."""
        if self.global_batch_size is None:
            return None
        return self.position.steps * self.global_batch_size

    def consumed_of(self, loader: int, *, is_only_one: bool) -> Consumed | None:
        """Return what the epoch has consumed of a training loader; None: not known."""
        if self.consumed or not is_only_one:
            return self.consumed[loader] if loader < len(self.consumed) else None
        return None if self.samples is None else Consumed(self.samples)

    def to_plain(self) -> dict[str, Plain]:
        """Return what the manifest holds."""
        position = self.position
        return {
            "epoch": position.epoch,
            "epoch_steps": position.steps,
            "epoch_samples": self.samples,
            "epoch_is_over": position.is_over,
            "is_validated": position.is_validated,
            "global_step": self.global_step,
            "global_batch_size": self.global_batch_size,
            "accumulate": self.accumulate,
            "world_size": self.world_size,
            "steps_per_epoch": self.steps_per_epoch,
            "planned_steps": self.planned_steps,
            "gradient": self.gradient,
            "settings": dict(self.settings or {}),
            "seed": self.seed,
            "loaders": [dict(loader) for loader in self.loaders],
            "orders": [
                None if order is None else {"epoch": order[0], "digest": order[1]}
                for order in self.orders
            ],
            "consumed": [
                None if part is None else {"samples": part.samples, "passes": part.passes}
                for part in self.consumed
            ],
        }

    @classmethod
    def from_plain(cls, content: Mapping[str, Any], where: str) -> DataProgress:
        """Read what ``to_plain`` gave.

        Raises:
            CheckpointFormatError: a field is missing or no number.
        """
        try:
            counts = [int(content[name]) for name in ("epoch", "epoch_steps", "global_step")]
            shape = [int(content[name]) for name in ("accumulate", "world_size")]
            record = cls(
                Position(
                    counts[0],
                    counts[1],
                    is_over=bool(content["epoch_is_over"]),
                    is_validated=bool(content["is_validated"]),
                ),
                global_step=counts[2],
                global_batch_size=_optional(content["global_batch_size"]),
                accumulate=shape[0],
                world_size=shape[1],
                steps_per_epoch=_optional(content["steps_per_epoch"]),
                planned_steps=_optional(content["planned_steps"]),
                loaders=tuple(dict(loader) for loader in content["loaders"]),
                # Checkpoints of before this was recorded lack it.
                orders=tuple(_order(order) for order in content.get("orders", ())),
                consumed=tuple(_consumed(part) for part in content.get("consumed", ())),
                gradient=str(content["gradient"]),
                settings=dict(content["settings"]),
                seed=_optional(content.get("seed")),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = (
                f"{where}: a field of progress.sampler is missing or invalid ({error!r}): the file "
                "is damaged; resume from another checkpoint"
            )
            raise CheckpointFormatError(msg) from error
        parts = [n for part in record.consumed if part for n in (part.samples, part.passes)]
        if min(*counts, *parts, *(number - 1 for number in shape)) < 0:
            msg = f"{where} has a negative count in progress.sampler: the file is damaged"
            raise CheckpointFormatError(msg)
        return record

    def at_batch_size(self, global_batch_size: int | None) -> Position:
        """Return the position in steps of another global batch, rounded down: none is skipped."""
        samples = self.samples
        if not samples or not global_batch_size:
            return self.position
        steps = samples // global_batch_size
        exact = steps * global_batch_size == samples
        return replace(
            self.position, steps=steps, is_validated=self.position.is_validated and exact
        )


def _order(content: Any) -> tuple[int, str] | None:  # noqa: ANN401 (JSON)
    return None if content is None else (int(content["epoch"]), str(content["digest"]))


def _consumed(content: Any) -> Consumed | None:  # noqa: ANN401 (JSON)
    return None if content is None else Consumed(int(content["samples"]), int(content["passes"]))


def _optional(value: Any) -> int | None:  # noqa: ANN401 (JSON)
    return None if value is None else int(value)
