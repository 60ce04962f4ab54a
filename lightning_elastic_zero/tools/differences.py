"""``diff``: the differences between two checkpoints of any kinds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import canonical_repr, dtype_name, in_order
from lightning_elastic_zero.formats.client_state import digest_of
from lightning_elastic_zero.formats.reader import WEIGHT
from lightning_elastic_zero.tools.view import (
    OpenCheckpoint,
    TensorEntry,
    holds_whole_tensors,
    number_text,
    open_view,
)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Difference between the two versions of one tensor."""

    name: str
    key: str
    """Name of the optimizer state; empty for weights and buffers."""
    differing: int
    """Number of elements whose values differ; NaN equals NaN."""
    elements: int
    largest: float
    """Largest absolute difference; infinite or NaN if one side is."""
    largest_relative: float
    """Largest difference relative to the larger of both values."""
    change: str = ""
    """Different shapes or dtypes, as text; elements are compared only if the shapes are equal."""

    @property
    def title(self) -> str:
        """The name, with that of the state."""
        return _title(self.name, self.key)


@dataclass(frozen=True, slots=True)
class CheckpointDifferences:
    """Result of ``diff_checkpoints``."""

    only_in_first: tuple[str, ...]
    """Parameters, buffers and states (``name: key``)."""
    only_in_second: tuple[str, ...]
    """The same for the second checkpoint."""
    tensors: tuple[TensorDifference, ...]
    """Tensors that differ."""
    values: tuple[tuple[str, str, str], ...]
    """Differing hyperparameters, scalar states, counters, loss scales, states of the engine's
    scheduler and extra states of modules: name and both values."""
    compared: int
    """Number of tensors in both checkpoints."""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_in_first or self.only_in_second or self.tensors or self.values)


def diff_checkpoints(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    progress: Progress = NO_PROGRESS,
    allow_pickle: bool = False,
) -> CheckpointDifferences:
    """Compare two checkpoints of any kinds and device counts.

    NaN equals NaN, and -0.0 equals 0.0. Values that one of the two kinds does not record are not
    compared, nor is the state of the trainer, callbacks, data and random generators. With a
    tolerance, elements of tensors differ by more than ``atol + rtol * larger``, where ``larger`` is
    the larger magnitude of both, and dtypes are not compared.

    Args:
        first: Directory, file or URL of a checkpoint.
        second: The same for the other checkpoint.
        weights_only: Compare weights and buffers, not the optimizer.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        progress: Receives the number of bytes read.
        allow_pickle: Build Python objects of any class; this can run code.

    Raises:
        CheckpointNotFoundError: Nothing is at one of the paths.
        CheckpointFormatError: One is not a checkpoint that can be read.
        CheckpointCorruptedError: One is damaged.
        CheckpointMismatchError: One contains several models.
        UnsupportedError: A run that wrote one cannot be resumed.
    """
    tolerance = rtol, atol
    opened = partial(open_view, allow_pickle=allow_pickle, progress=progress)
    with opened(first) as one, opened(second) as other:
        mine, its = (_entries(side, weights_only=weights_only) for side in (one, other))
        both = [at for at in mine if at in its]
        compared = [_compare(one, mine[at], other, its[at], tolerance) for at in both]
        return CheckpointDifferences(
            tuple(_title(*at) for at in mine if at not in its),
            tuple(_title(*at) for at in its if at not in mine),
            tuple(found for found in compared if found.differing or found.change),
            tuple(_values(one, other, weights_only=weights_only)),
            len(both),
        )


def _entries(
    checkpoint: OpenCheckpoint, *, weights_only: bool
) -> dict[tuple[str, str], TensorEntry]:
    entries = {(e.name, WEIGHT): e for e in checkpoint.weights()}
    if not weights_only:
        entries |= {(e.name, e.key): e for e in checkpoint.states()}
    return entries


def _title(name: str, key: str) -> str:
    return f"{name}: {key}" if key else name


def _compare(
    one: OpenCheckpoint,
    mine: TensorEntry,
    other: OpenCheckpoint,
    its: TensorEntry,
    tolerance: tuple[float, float],
) -> TensorDifference:
    types = one.dtype(mine), other.dtype(its)
    changes = [
        f"{what} {before} and {after}"
        for what, before, after in (
            ("shapes", mine.shape, its.shape),
            ("types", *map(dtype_name, types)),
        )
        if before != after and not (what == "types" and any(tolerance))
    ]
    differing, largest, relative = 0, 0.0, 0.0
    same_shape = mine.shape == its.shape
    for a, b in zip(one.chunks(mine), other.chunks(its), strict=True) if same_shape else ():
        count, absolute, ratio = compare_values(a, b, *tolerance)
        differing += count
        largest, relative = _larger(largest, absolute), _larger(relative, ratio)
    return TensorDifference(
        mine.name, mine.key, differing, mine.numel, largest, relative, "; ".join(changes)
    )


def _larger(one: float, other: float) -> float:
    """Return the larger number; NaN counts as the largest."""
    return one if math.isnan(one) or one >= other else other


def compare_values(
    one: torch.Tensor, other: torch.Tensor, rtol: float = 0.0, atol: float = 0.0
) -> tuple[int, float, float]:
    """Return the number of differing elements, the largest absolute and relative difference.

    NaN equals NaN and -0.0 equals 0.0. If only one side is NaN or infinite, so is the difference,
    and no tolerance applies.
    """
    bits = [in_order(tensor).view(torch.uint8) for tensor in (one, other)]
    if one.dtype == other.dtype and torch.equal(*bits):
        return 0, 0.0, 0.0
    is_complex = one.is_complex() or other.is_complex()
    a, b = (t.to(torch.complex128 if is_complex else torch.float64) for t in (one, other))
    unlike = (a != b) & ~(a.isnan() & b.isnan())
    if one.dtype == other.dtype and not (is_complex or one.is_floating_point()):
        # float64 cannot represent all 64-bit integers.
        unlike = one.to(torch.int64) != other.to(torch.int64)
    if not unlike.any():
        return 0, 0.0, 0.0
    distance = (a - b).abs()[unlike]
    larger = torch.maximum(a.abs(), b.abs())[unlike]
    if rtol or atol:
        beyond = ~(distance <= atol + rtol * larger) | ~distance.isfinite()
        distance, larger = distance[beyond], larger[beyond]
        if not distance.numel():
            return 0, 0.0, 0.0
    relative = distance / larger
    return distance.numel(), float(distance.max()), float(relative.max())


# -- values ----------------------------------------------------------------------------------------


def _values(
    one: OpenCheckpoint, other: OpenCheckpoint, *, weights_only: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the differences other than tensors."""
    yield from _engine_values(one, other, weights_only=weights_only)
    counters = _counters(one), _counters(other)
    both_know = counters[0].keys() & counters[1].keys()
    yield from _differing(*({k: c[k] for k in c if k in both_know} for c in counters))
    if weights_only:
        return
    if one.reader.info.hyperparameters and other.reader.info.hyperparameters:
        yield from _differing(_hyperparameters(one.manifest), _hyperparameters(other.manifest))
    both = [p.name for p in one.manifest.optimized if p.name in other.parameters]
    if one.manifest.optimized and other.manifest.optimized:
        yield from _differing(_scalars(one, both), _scalars(other, both))


def _scalars(checkpoint: OpenCheckpoint, names: Iterable[str]) -> dict[str, str]:
    return {
        f"{name}: {key}": ", ".join(texts)
        for name in names
        for key, texts in checkpoint.scalar_texts(name).items()
    }


def _engine_values(
    one: OpenCheckpoint, other: OpenCheckpoint, *, weights_only: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the differences of state that does not belong to parameters.

    Files of weights may have nothing of it, so a part that one of two such files has is no
    difference. Python objects are not compared.
    """
    same_kind = one.reader.info.kind == other.reader.info.kind
    record_all = same_kind and not holds_whole_tensors(one.manifest)
    mine, its = (_engine_parts(side, weights_only=weights_only) for side in (one, other))
    for title in dict.fromkeys((*mine, *its)):
        if record_all or (title in mine and title in its):
            parts = mine.get(title, {}), its.get(title, {})
            with suppress(_ObjectError):
                yield from _differing(*(dict(_leaves(part, title)) for part in parts))


def _engine_parts(checkpoint: OpenCheckpoint, *, weights_only: bool) -> dict[str, Any]:
    """Return the parts of this state by title, except empty ones."""
    shared, progress = checkpoint.reader.engine_state(), checkpoint.manifest.progress
    parts = {
        f"extra state: {name}": state
        for name, state in shared.extra_states.items()
        if state is not None  # It has Python objects.
    }
    if not weights_only:
        counters = {"samples": progress.global_samples, "skipped steps": progress.skipped_steps}
        more: dict[str, Any] = {
            "loss scale": shared.loss_scaler if shared.scales_losses else {},
            "scheduler": shared.lr_scheduler,
            "optimizer state": checkpoint.reader.optimizer_state(),
            "counters": counters if progress.global_samples else {},
        }
        parts |= {title: part for title, part in more.items() if part}
    return parts


class _ObjectError(Exception):
    """A value is a Python object."""


def _leaves(value: object, title: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of all values in a tree, with their places."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{title}: {key}")
    elif isinstance(value, (list, tuple)):
        yield from _leaves(dict(enumerate(value)), title)
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        values = value.detach()
        if values.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            values = values + 0.0  # -0.0 equals 0.0.
        yield title, f"{dtype_name(value.dtype)} {tuple(value.shape)} {digest_of(values)}"
    elif isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool):
        yield title, number_text(value)
    elif value is None or isinstance(value, (bool, str, bytes, complex, torch.dtype)):
        yield title, repr(value)
    else:
        raise _ObjectError


def _counters(checkpoint: OpenCheckpoint) -> dict[str, str]:
    """Return the recorded counters; some formats have none."""
    progress = checkpoint.manifest.progress
    steps = {"steps": str(progress.global_steps)} if checkpoint.reader.info.has_counters else {}
    batch = progress.global_batch_size
    return {**steps, **({} if batch is None else {"global batch": str(batch)})}


def _hyperparameters(manifest: Manifest) -> dict[str, str]:
    """Return the hyperparameters; a group is named by its first member."""
    return {
        f"group {index} ({group.names[0] if group.names else 'empty'}): {name}": canonical_repr(v)
        for index, group in enumerate(manifest.groups)
        for name, v in group.hyperparameters.items()
    }


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    absent = "absent"
    for what in dict.fromkeys((*one, *other)):
        values = one.get(what, absent), other.get(what, absent)
        if values[0] != values[1]:
            yield (what, *values)
