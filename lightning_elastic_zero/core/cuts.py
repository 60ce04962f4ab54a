"""How tensor parallelism cuts parameters: rows of elements in a shard and in the whole parameter.

A tensor rank has a shard of each parameter that is cut, and ZeRO partitions the shards. A cut along
one dimension is a few ``Rows`` for each tensor rank: a cut of the first dimension is one row, and
one of the second has a row per matrix row. Nothing is enumerated per row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_elastic_zero.errors import CheckpointFormatError


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of ``length`` elements that are the same in two flattened tensors.

    Row ``i`` begins at ``source + i * source_step`` of one tensor, and at
    ``target + i * target_step`` of the other. Rows are in order and do not overlap.
    """

    count: int
    length: int
    source: int
    target: int
    source_step: int = 0
    """0 if there is one row."""
    target_step: int = 0

    @property
    def source_stop(self) -> int:
        """One past the last element in the source."""
        return self.source + (self.count - 1) * self.source_step + self.length

    @property
    def numel(self) -> int:
        return self.count * self.length

    def swapped(self) -> Rows:
        """Return the rows with source and target exchanged."""
        steps = self.target_step, self.source_step
        return Rows(self.count, self.length, self.target, self.source, *steps)

    def from_zero(self) -> Rows:
        """Return the rows with both indices counted from the first element."""
        return Rows(self.count, self.length, 0, 0, self.source_step, self.target_step)

    def part(self, first: int, last: int, start: int, stop: int) -> Rows:
        """Return the elements ``[start, stop)`` of the rows ``[first, last)``."""
        source = self.source + first * self.source_step + start
        target = self.target + first * self.target_step + start
        return _rows(last - first, stop - start, source, target, self.source_step, self.target_step)

    def clip(self, start: int, stop: int) -> Iterator[Rows]:
        """Yield the elements in ``[start, stop)`` of the source, as at most three ``Rows``."""
        start, stop = max(start, self.source), min(stop, self.source_stop)
        if start >= stop:
            return
        step = self.source_step or self.length
        first, begin = divmod(start - self.source, step)
        last, end = divmod(stop - self.source - 1, step)
        end += 1
        if first == last:
            if begin < min(end, self.length):
                yield self.part(first, first + 1, begin, min(end, self.length))
            return
        if begin:
            if begin < self.length:
                yield self.part(first, first + 1, begin, self.length)
            first += 1
        is_cut = end < self.length
        if first < last + (not is_cut):
            yield self.part(first, last + (not is_cut), 0, self.length)
        if is_cut:
            yield self.part(last, last + 1, 0, end)

    def through(self, other: Rows) -> Iterator[Rows]:
        """Yield the rows from this source to the target of ``other``, whose source is this target.

        Rows of two cuts of one dimension have equal steps between these. If the steps differ, each
        row is matched for itself.
        """
        if other.count == 1:
            onward = other.target - other.source
            for r in self.swapped().clip(other.source, other.source_stop):
                at = r.target, onward + r.source
                yield Rows(r.count, r.length, *at, r.target_step, r.source_step)
        elif self.count == 1:
            back = self.source - self.target
            for r in other.clip(self.target, self.target + self.length):
                at = back + r.source, r.target
                yield Rows(r.count, r.length, *at, r.source_step, r.target_step)
        elif self.target_step == other.source_step:
            yield from self._side_by_side(other)
        else:
            for row in range(self.count):
                yield from self.part(row, row + 1, 0, self.length).through(other)

    def _side_by_side(self, other: Rows) -> Iterator[Rows]:
        """Yield what rows with equal steps in between share, as at most two ``Rows``."""
        step, apart = other.source_step, other.source - self.target
        shift = (-other.length - apart) // step + 1  # row i meets row i + shift of other
        while (begin := apart + shift * step) < self.length:
            first, last = max(0, -shift), min(self.count, other.count - shift)
            low, high = max(0, begin), min(self.length, begin + other.length)
            if first < last:
                ours = self.part(first, last, low, high)
                theirs = other.part(first + shift, last + shift, low - begin, high - begin)
                steps = self.source_step, other.target_step
                yield _rows(last - first, high - low, ours.source, theirs.target, *steps)
            shift += 1


def _rows(count: int, length: int, source: int, target: int, *steps: int) -> Rows:
    """Return rows; those that are adjacent in both tensors are one."""
    if count == 1 or steps == (length, length):
        return Rows(1, count * length, source, target)
    return Rows(count, length, source, target, *steps)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tensor ranks share a parameter: each element is in the shard of one of them."""

    name: str
    """Name of the parameter."""
    dimension: int
    """The dimension that is cut."""
    widths: tuple[int, ...]
    """Size of each tensor rank's shard along the dimension. If the parameter consists of several
    (fused) ones, which are cut separately, the sizes of the first are followed by those of the
    next."""

    @property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """Equal for parameters that are cut alike."""
        return self.dimension, self.widths

    def of_rank(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the widths of a tensor rank's part of each fused parameter."""
        return self.widths[rank::size]

    def shape_on(self, rank: int, size: int, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor rank's shard."""
        width = sum(self.of_rank(rank, size))
        return (*whole[: self.dimension], width, *whole[self.dimension + 1 :])

    def rows(self, rank: int, size: int, whole: Sequence[int]) -> tuple[Rows, ...]:
        """Return the rows from a tensor rank's shard to the whole parameter of that shape."""
        count = math.prod(whole[: self.dimension])
        inner = math.prod(whole[self.dimension + 1 :])
        steps = sum(self.of_rank(rank, size)) * inner, whole[self.dimension] * inner
        parts, source = [], 0
        for first in range(0, len(self.widths), size):
            length, before = self.widths[first + rank] * inner, sum(self.widths[: first + rank])
            if count and length:
                parts.append(_rows(count, length, source, before * inner, *steps))
            source += length
        return tuple(parts)

    def check(self, size: int, whole: Sequence[int]) -> None:
        """Raise CheckpointFormatError unless ``size`` shards are the parameter of that shape."""
        fits = 0 <= self.dimension < len(whole) and min(self.widths, default=-1) >= 0
        if not fits or len(self.widths) % size or sum(self.widths) != whole[self.dimension]:
            msg = (
                f"{self.name} of the shape {tuple(whole)} is not cut into {size} shards of the "
                f"widths {self.widths} along dimension {self.dimension}"
            )
            raise CheckpointFormatError(msg)
