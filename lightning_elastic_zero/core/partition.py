"""ZeRO's partition rules: which rank holds which elements, as arithmetic.

Two rules cover every stage of DeepSpeed. ZeRO-1/2 (and ``BF16_Optimizer``) concatenate a parameter
group into one flat buffer and cut it into equal contiguous partitions. ZeRO-3 cuts each parameter
into ``ceil(numel / world_size)`` elements per rank and concatenates a rank's pieces. The rules
follow DeepSpeed 0.19.8 (``stage_1_and_2.py``, ``stage3.py`` and ``partition_parameters.py`` in
``runtime/zero``); tests compare them with live engines. In stage 0 each rank has everything and
writes the part that it would have in ZeRO-1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_elastic_zero.core.layout import Fragment, Layout
from lightning_elastic_zero.errors import CheckpointFormatError


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """The parameters of one flat buffer, the same on every rank.

    It is a parameter group in ZeRO-1/2 and a sub-group of one in ZeRO-3.
    """

    group: int
    """Index of the optimizer's parameter group."""
    names: tuple[str, ...]
    """Parameter names in the order of the buffer."""
    numels: tuple[int, ...]
    """Elements of each whole parameter."""
    paddings: tuple[int, ...] = ()
    """ZeRO-1/2: elements of padding after each parameter; empty if none."""
    partition_numel: int = 0
    """ZeRO-1/2: elements of each rank's partition, padding included. Not used in ZeRO-3."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.numels) or len(set(self.names)) != len(self.names):
            msg = f"a flat buffer of group {self.group} lists a parameter twice or without a size"
            raise CheckpointFormatError(msg)
        if self.paddings and len(self.paddings) != len(self.names):
            msg = f"a flat buffer of group {self.group} has {len(self.paddings)} paddings"
            raise CheckpointFormatError(msg)
        if min((*self.numels, *self.paddings, self.partition_numel)) < 0:
            msg = f"a flat buffer of group {self.group} has a negative number of elements"
            raise CheckpointFormatError(msg)

    def with_names(self, named: Callable[[str], str]) -> FlatBuffer:
        """Return it with other names of its parameters."""
        return replace(self, names=tuple(map(named, self.names)))

    def starts(self) -> tuple[int, ...]:
        """Return each parameter's first element in the whole (unpartitioned) ZeRO-1/2 buffer."""
        pads = self.paddings or (0,) * len(self.names)
        ends = accumulate(n + pad for n, pad in zip(self.numels, pads, strict=True))
        return (0, *ends)[: len(self.names)]

    def partition_range(self, rank: int) -> tuple[int, int]:
        """ZeRO-1/2: the elements ``[start, stop)`` of a rank's partition, padding included."""
        return rank * self.partition_numel, (rank + 1) * self.partition_numel


@dataclass(frozen=True, slots=True)
class _ParameterSpan:
    """The place of a parameter in a row of elements that is cut into equal parts, one per rank.

    The row is the whole flat buffer in ZeRO-1/2, and the parameter itself in ZeRO-3.
    """

    buffer: int
    first: int
    """Index of the parameter's first element in the row."""
    numel: int
    """Elements of the whole parameter."""
    part: int
    """Elements of each rank's part of the row."""
    offset: int
    """Offset of that part in each rank's flat buffer."""

    def range_on(self, rank: int) -> tuple[int, int]:
        """Return the parameter's elements ``[start, stop)`` in a rank's part, padding included."""
        begin = rank * self.part - self.first
        return max(begin, 0), begin + self.part


class _Partition:
    """A layout that is computed from the places of the parameters."""

    def __init__(self, buffers: Sequence[FlatBuffer], world_size: int) -> None:
        if world_size < 1:
            msg = f"a layout needs at least one rank, found {world_size}"
            raise CheckpointFormatError(msg)
        seen: set[str] = set()
        for buffer in buffers:
            if twice := seen.intersection(buffer.names):
                msg = f"parameters in two flat buffers: {', '.join(sorted(twice))}"
                raise CheckpointFormatError(msg)
            seen.update(buffer.names)
        self._buffers = tuple(buffers)
        self._places: dict[str, _ParameterSpan] = {}
        """By name, ordered by buffer and offset."""

    def on_rank(self, rank: int) -> list[Fragment]:
        return [
            fragment
            for name in self._near(rank)
            for fragment in self.covering(name, *self._places[name].range_on(rank))
        ]

    def covering(self, name: str, start: int, stop: int, shard: int = 0) -> Iterator[Fragment]:
        del shard  # There is one.
        place = self._places[name]
        stop = min(stop, place.numel)
        if start >= stop:
            return
        rank, skipped = divmod(place.first + start, place.part)
        while start < stop:
            end = min(start + place.part - skipped, stop)
            yield Fragment(name, start, end, rank, place.buffer, place.offset + skipped)
            rank, start, skipped = rank + 1, end, 0

    def _near(self, rank: int) -> Iterable[str]:
        """Return the parameters of which a rank may hold elements, in order."""
        del rank
        return self._places


class ContiguousPartition(_Partition):
    """ZeRO-1/2: rank ``r`` holds ``[r, r + 1) * partition_numel`` of each group's flat buffer."""

    def __init__(self, buffers: Sequence[FlatBuffer], world_size: int) -> None:
        super().__init__(buffers, world_size)
        self._starts = [buffer.starts() for buffer in buffers]
        for index, (buffer, starts) in enumerate(zip(buffers, self._starts, strict=True)):
            size = buffer.partition_numel
            end = starts[-1] + buffer.numels[-1] if starts else 0
            if end > size * world_size:
                msg = (
                    f"group {buffer.group}: {end} elements do not fit into {world_size} "
                    f"partitions of {size}"
                )
                raise CheckpointFormatError(msg)
            for name, start, numel in zip(buffer.names, starts, buffer.numels, strict=True):
                self._places[name] = _ParameterSpan(index, start, numel, part=size, offset=0)

    def _near(self, rank: int) -> Iterator[str]:
        for buffer, starts in zip(self._buffers, self._starts, strict=True):
            first, last = buffer.partition_range(rank)
            # From the parameter that the partition begins in to the last one that begins in it.
            entered = max(bisect_right(starts, first) - 1, 0)
            yield from buffer.names[entered : bisect_left(starts, last)]


class PerParameterPartition(_Partition):
    """ZeRO-3: rank ``r`` holds ``[r, r + 1) * ceil(numel / world_size)`` of each parameter."""

    def __init__(self, buffers: Sequence[FlatBuffer], world_size: int) -> None:
        super().__init__(buffers, world_size)
        for index, buffer in enumerate(buffers):
            offset = 0
            for name, numel in zip(buffer.names, buffer.numels, strict=True):
                piece = piece_numel(numel, world_size)
                self._places[name] = _ParameterSpan(index, 0, numel, piece, offset)
                offset += piece


def replicated_layout(buffers: Sequence[FlatBuffer]) -> Layout:
    """Return the layout of a rank of stage 0, which holds everything."""
    whole = [replace(b, partition_numel=sum((*b.numels, *b.paddings))) for b in buffers]
    return ContiguousPartition(whole, world_size=1)


def zero_layout(stage: int, buffers: Sequence[FlatBuffer], world_size: int) -> Layout:
    """Return the layout of a ZeRO stage; in stage 0, of the parts that ranks write."""
    rule = PerParameterPartition if stage == 3 else ContiguousPartition  # noqa: PLR2004
    return rule(buffers, world_size)


def frozen_partition(shapes: Iterable[tuple[str, int]], world_size: int) -> PerParameterPartition:
    """Return the layout of frozen weights. ZeRO-1/2 keeps them whole: ``world_size`` is 1."""
    names, numels = zip(*shapes, strict=True) if (shapes := list(shapes)) else ((), ())
    return PerParameterPartition([FlatBuffer(0, tuple(names), tuple(numels))], world_size)


def piece_numel(numel: int, world_size: int) -> int:
    """ZeRO-3: the elements of each rank's piece of a parameter, padding included."""
    return -(-numel // world_size)


def piece_start(numel: int, world_size: int, rank: int) -> int:
    """ZeRO-3: the first element of a rank's piece of a parameter."""
    return rank * piece_numel(numel, world_size)


def round_robin_order(count: int, world_size: int) -> tuple[int, ...]:
    """ZeRO-1/2 with ``round_robin_gradients``: the flat order of a group's parameters."""
    return tuple(i for first in range(world_size) for i in range(first, count, world_size))
