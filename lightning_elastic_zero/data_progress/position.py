"""A run's position in its data, as recorded in a checkpoint.

It counts samples and optimizer steps, which do not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import Manifest, Plain
from lightning_elastic_zero.errors import CheckpointFormatError


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two optimizer steps of a run."""

    epoch: int
    """Index of the epoch of the next step, or of the epoch that is about to end."""
    steps: int
    """Optimizer steps taken in that epoch."""
    is_over: bool = False
    """All steps of the epoch are taken, but the hooks at its end have not run."""
    is_validated: bool = False
    """The validation that is due here has run."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """How much of a loader's data an epoch has consumed, over all ranks."""

    samples: int
    """In the current pass; items, if each item is a batch (``batch_size=None``)."""
    passes: int = 0
    """Completed passes before: of several loaders, the shorter ones restart."""


@dataclass(frozen=True, slots=True)
class LoaderRecord:
    """A training loader at a position."""

    consumed: Consumed | None = None
    """None: unknown."""
    has_restarted: bool = False
    """Of a loader with its own state and without a length: whether this is not its first pass."""
    order: Mapping[str, Plain] = field(default_factory=dict)
    """``ElasticSampler.describe``: seed, dataset length, ...; empty without such a sampler."""
    has_run_seed: bool = False
    """Its order has the seed of ``seed_everything``, and not one that the user gave."""
    order_epoch: int | None = None
    """Epoch of the sampler's latest order; None: it has none yet."""
    order_digest: str = ""
    """Of that order; empty if it cannot be compared."""

    @property
    def seed(self) -> int | None:
        """Seed of the order; None: unknown."""
        seed = self.order.get("seed")
        return seed if type(seed) is int else None

    def to_plain(self) -> dict[str, Plain]:
        """Return plain data for the manifest."""
        consumed = self.consumed
        return {
            "consumed": None
            if consumed is None
            else {"samples": consumed.samples, "passes": consumed.passes},
            "has_restarted": self.has_restarted,
            "order": dict(self.order),
            "has_run_seed": self.has_run_seed,
            "order_epoch": self.order_epoch,
            "order_digest": self.order_digest,
        }

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> LoaderRecord:
        """Read the result of ``to_plain``; a missing entry has its default."""
        entries: dict[str, Any] = {**cls().to_plain(), **content}
        consumed, epoch = entries["consumed"], entries["order_epoch"]
        if consumed is not None:
            consumed = Consumed(_count(consumed["samples"]), _count(consumed["passes"]))
        return cls(
            consumed,
            bool(entries["has_restarted"]),
            dict(entries["order"]),
            has_run_seed=bool(entries["has_run_seed"]),
            order_epoch=None if epoch is None else _count(epoch),
            order_digest=str(entries["order_digest"]),
        )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run makes optimizer steps of its data."""

    grid: RankGrid
    accumulate: int
    """Micro-batches of a rank per optimizer step."""
    global_batch_size: int | None
    """Samples per optimizer step; None: the loader's batch size is unknown."""
    steps_per_epoch: int | None = None
    """None: the data has no length."""
    planned_steps: int | None = None
    """Planned optimizer steps of the whole run, for which schedules were created."""
    batch_counts: Mapping[str, Plain] = field(default_factory=dict)
    """Trainer settings that count batches, as given."""


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position of a run in its data, as recorded in a checkpoint.

    The manifest contains the number of ranks, the accumulation and the global batch; the rest is
    its ``progress.sampler``.
    """

    position: Position
    global_step: int
    """Optimizer steps of the whole run."""
    settings: RunSettings
    loaders: tuple[LoaderRecord, ...] = ()
    """The training loaders; empty if another program saved the run."""

    @property
    def samples(self) -> int | None:
        """Samples that the epoch has consumed over all ranks; None: unknown."""
        if (size := self.settings.global_batch_size) is None:
            return None
        return self.position.steps * size

    def consumed_of(self, loader: int, *, is_only_one: bool) -> Consumed | None:
        """Return how much of a training loader the epoch has consumed; None: unknown."""
        if self.loaders or not is_only_one:
            return self.loaders[loader].consumed if loader < len(self.loaders) else None
        return None if self.samples is None else Consumed(self.samples)

    def at_batch_size(self, global_batch_size: int | None) -> Position:
        """Return the position in steps of another global batch, rounded down to skip no sample."""
        samples = self.samples
        if not samples or not global_batch_size:
            return self.position
        steps = samples // global_batch_size
        # In a shortened epoch that goes on, other steps precede the validation.
        counts = self.position.is_over or steps * global_batch_size == samples
        return replace(
            self.position, steps=steps, is_validated=self.position.is_validated and counts
        )

    def to_plain(self) -> dict[str, Plain]:
        """Return plain data for the manifest's ``progress.sampler``."""
        position, settings = self.position, self.settings
        return {
            "epoch": position.epoch,
            "epoch_steps": position.steps,
            "epoch_samples": self.samples,
            "epoch_is_over": position.is_over,
            "is_validated": position.is_validated,
            "global_step": self.global_step,
            "steps_per_epoch": settings.steps_per_epoch,
            "planned_steps": settings.planned_steps,
            "gradient": "mean",  # over a step's samples, independent of the accumulation
            "settings": dict(settings.batch_counts),
            "loaders": [loader.to_plain() for loader in self.loaders],
        }

    @classmethod
    def of(cls, manifest: Manifest, where: str) -> DataPosition:
        """Read the position from a manifest. ``where``: its path, for messages."""
        progress = manifest.progress
        fields: Any = progress.sampler
        try:
            optional = {name: fields[name] for name in ("steps_per_epoch", "planned_steps")}
            return cls(
                Position(
                    _count(fields["epoch"]),
                    _count(fields["epoch_steps"]),
                    is_over=bool(fields["epoch_is_over"]),
                    is_validated=bool(fields["is_validated"]),
                ),
                _count(fields["global_step"]),
                RunSettings(
                    manifest.grid,
                    max(1, progress.gradient_accumulation_steps),
                    progress.global_batch_size,
                    **{n: None if v is None else _count(v) for n, v in optional.items()},
                    batch_counts=dict(fields["settings"]),
                ),
                tuple(map(LoaderRecord.from_plain, fields["loaders"])),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            msg = (
                f"{where}: a field of progress.sampler is missing or invalid ({error!r}). The file "
                "is damaged: resume from another checkpoint"
            )
            raise CheckpointFormatError(msg) from error


def _count(value: Any) -> int:
    number = int(value)
    if number < 0:
        msg = "negative count"
        raise ValueError(msg)
    return number
