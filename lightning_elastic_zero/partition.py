"""ZeRO's partition rules: which rank holds which elements, as arithmetic.

Two rules cover every stage of DeepSpeed. ZeRO-1/2 (and ``BF16_Optimizer``) concatenate a
parameter group into one flat buffer and cut it into equal contiguous partitions, whatever the
parameter borders. ZeRO-3 cuts each parameter by itself into ``ceil(numel / world_size)`` elements
per rank, and concatenates a rank's pieces. The rules were read in DeepSpeed 0.19.8
(``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/zero/partition_parameters.py``) and are held against live engines by the tests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.layout import Fragment, Layout

FLAT_ALIGNMENT_PER_RANK = 2
"""ZeRO-1/2 pads a group's flat buffer to this many elements per rank (for NCCL)."""

PARAMETER_ALIGNMENT_BYTES = 16
"""With ``parameter_alignment``, ZeRO-1/2 starts each parameter at a multiple of this."""


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """The parameters that share one flat buffer, in flat order: alike on every rank.

    It is a parameter group in ZeRO-1/2 and a sub-group of one in ZeRO-3.
    """

    group: int
    """Index of the optimizer's parameter group."""
    names: tuple[str, ...]
    """Parameter names in the order in which they lie in the buffer."""
    numels: tuple[int, ...]
    """Elements of each whole parameter."""
    paddings: tuple[int, ...] = ()
    """ZeRO-1/2: elements of padding after each parameter; empty where there is none."""
    partition_numel: int = 0
    """ZeRO-1/2: elements of each rank's partition, padding included. Not used in ZeRO-3."""

    def __post_init__(self) -> None:
        """Refuse tables whose columns do not fit."""
        if len(self.names) != len(self.numels) or len(set(self.names)) != len(self.names):
            msg = f"a flat buffer of group {self.group} names a parameter twice, or without a size"
            raise CheckpointFormatError(msg)
        if self.paddings and len(self.paddings) != len(self.names):
            msg = f"a flat buffer of group {self.group} has {len(self.paddings)} paddings"
            raise CheckpointFormatError(msg)
        if min((*self.numels, *self.paddings, self.partition_numel)) < 0:
            msg = f"a flat buffer of group {self.group} has a negative number of elements"
            raise CheckpointFormatError(msg)

    def starts(self) -> tuple[int, ...]:
        """Return each parameter's first element in the whole (unpartitioned) ZeRO-1/2 buffer."""
        pads = self.paddings or (0,) * len(self.names)
        ends = accumulate(n + pad for n, pad in zip(self.numels, pads, strict=True))
        return (0, *ends)[: len(self.names)]


class ContiguousPartition:
    """ZeRO-1/2: rank ``r`` holds ``[r, r + 1) * partition_numel`` of each group's flat buffer."""

    def __init__(self, buffers: Sequence[FlatBuffer], world_size: int) -> None:
        """Hold the buffers in order.

        Raises:
            CheckpointFormatError: a buffer's partitions cannot hold its parameters, two buffers
                name one parameter, or there is no rank.
        """
        _check_ranks(world_size)
        self._buffers = tuple(buffers)
        self._world_size = world_size
        self._starts = [buffer.starts() for buffer in self._buffers]
        _check_names_once(self._buffers)
        for buffer, starts in zip(self._buffers, self._starts, strict=True):
            end = starts[-1] + buffer.numels[-1] if starts else 0
            if end > buffer.partition_numel * world_size:
                msg = (
                    f"group {buffer.group}: {end} elements do not fit into {world_size} "
                    f"partitions of {buffer.partition_numel}"
                )
                raise CheckpointFormatError(msg)

    @property
    def world_size(self) -> int:
        """The number of ranks that hold a partition."""
        return self._world_size

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, int]]:
        """Where each parameter lies: buffer, first element in the whole buffer, elements."""
        return {
            name: (index, start, numel)
            for index, (buffer, starts) in enumerate(zip(self._buffers, self._starts, strict=True))
            for name, start, numel in zip(buffer.names, starts, buffer.numels, strict=True)
        }

    def on_rank(self, rank: int) -> list[Fragment]:
        """Return all that one rank holds, ordered by buffer and offset."""
        return [
            fragment
            for index, buffer in enumerate(self._buffers)
            for fragment in self._in_partition(index, buffer, rank)
        ]

    def _in_partition(self, index: int, buffer: FlatBuffer, rank: int) -> Iterator[Fragment]:
        """Yield the fragments of one buffer's partition, touching only parameters inside it."""
        first, last = rank * buffer.partition_numel, (rank + 1) * buffer.partition_numel
        starts = self._starts[index]
        for i in range(max(bisect_right(starts, first) - 1, 0), len(starts)):
            if starts[i] >= last:
                return
            low, high = max(first, starts[i]), min(last, starts[i] + buffer.numels[i])
            if low < high:
                inside = low - starts[i], high - starts[i]
                yield Fragment(buffer.names[i], *inside, rank, index, low - first)

    def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
        """Yield the runs that hold ``[start, stop)`` of a parameter, in order."""
        index, base, numel = self._places[name]
        size = self._buffers[index].partition_numel
        low, stop = start, min(stop, numel)
        while low < stop:
            rank = (base + low) // size
            high = min(stop, (rank + 1) * size - base)
            yield Fragment(name, low, high, rank, index, base + low - rank * size)
            low = high


class PerParameterPartition:
    """ZeRO-3: rank ``r`` holds ``[r, r + 1) * ceil(numel / world_size)`` of each parameter."""

    def __init__(self, buffers: Sequence[FlatBuffer], world_size: int) -> None:
        """Hold the sub-groups in order.

        Raises:
            CheckpointFormatError: two buffers name one parameter, or there is no rank.
        """
        _check_ranks(world_size)
        self._buffers = tuple(buffers)
        self._world_size = world_size
        _check_names_once(self._buffers)

    @property
    def world_size(self) -> int:
        """The number of ranks that hold a piece."""
        return self._world_size

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, int]]:
        """Where each parameter lies: buffer, offset in every rank's buffer, elements."""
        places = {}
        for index, buffer in enumerate(self._buffers):
            offset = 0
            for name, numel in zip(buffer.names, buffer.numels, strict=True):
                places[name] = (index, offset, numel)
                offset += piece_numel(numel, self._world_size)
        return places

    def on_rank(self, rank: int) -> list[Fragment]:
        """Return all that one rank holds, ordered by buffer and offset."""
        fragments = []
        for name, (index, offset, numel) in self._places.items():
            piece = piece_numel(numel, self._world_size)
            start, stop = rank * piece, min((rank + 1) * piece, numel)
            if start < stop:
                fragments.append(Fragment(name, start, stop, rank, index, offset))
        return fragments

    def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
        """Yield the runs that hold ``[start, stop)`` of a parameter, in order."""
        index, offset, numel = self._places[name]
        piece = piece_numel(numel, self._world_size)
        low, stop = start, min(stop, numel)
        while low < stop:
            rank = low // piece
            high = min(stop, (rank + 1) * piece)
            yield Fragment(name, low, high, rank, index, offset + low - rank * piece)
            low = high


def zero_layout(stage: int, buffers: Sequence[FlatBuffer], world_size: int) -> Layout:
    """Return the layout of a ZeRO stage's flat buffers over the ranks."""
    rule = PerParameterPartition if stage == 3 else ContiguousPartition  # noqa: PLR2004
    return rule(buffers, world_size)


def frozen_partition(shapes: Iterable[tuple[str, int]], world_size: int) -> PerParameterPartition:
    """Return the layout of weights that the optimizer does not own: frozen ones.

    ZeRO-3 cuts them as it cuts all parameters; ZeRO-1/2 keeps them whole, so ``world_size`` is 1.
    """
    names, numels = zip(*shapes, strict=True) if (shapes := list(shapes)) else ((), ())
    return PerParameterPartition([FlatBuffer(0, tuple(names), tuple(numels))], world_size)


def piece_numel(numel: int, world_size: int) -> int:
    """ZeRO-3: the elements of each rank's piece of a parameter, padding included."""
    return -(-numel // world_size)


def partition_numel(numels: Sequence[int], paddings: Sequence[int], world_size: int) -> int:
    """ZeRO-1/2: the elements of each rank's partition of a group's flat buffer."""
    unit = FLAT_ALIGNMENT_PER_RANK * world_size
    return -(-(sum(numels) + sum(paddings)) // unit) * FLAT_ALIGNMENT_PER_RANK


def alignment_paddings(numels: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """ZeRO-1/2 with ``parameter_alignment``: padding after each parameter but the last.

    Args:
        numels: elements of the parameters, in flat order.
        itemsize: bytes per element of the low-precision parameters.
    """
    unit = max(PARAMETER_ALIGNMENT_BYTES // itemsize, 1)
    return tuple(0 if i == len(numels) - 1 else -n % unit for i, n in enumerate(numels))


def round_robin_order(count: int, world_size: int) -> tuple[int, ...]:
    """ZeRO-1/2 with ``round_robin_gradients``: the flat order of a group's parameters."""
    return tuple(i for first in range(world_size) for i in range(first, count, world_size))


def sub_groups(numels: Sequence[int], world_size: int, limit: int) -> list[tuple[int, ...]]:
    """ZeRO-3: cut a group into sub-groups, each closed once its pieces reach ``limit`` elements."""
    groups: list[tuple[int, ...]] = []
    current: list[int] = []
    size = 0
    for index, numel in enumerate(numels):
        current.append(index)
        size += piece_numel(numel, world_size)
        if size >= limit or index == len(numels) - 1:
            groups.append(tuple(current))
            current, size = [], 0
    return groups


def _check_ranks(world_size: int) -> None:
    """Refuse a layout over no ranks."""
    if world_size < 1:
        msg = f"a layout over {world_size} ranks holds nothing"
        raise CheckpointFormatError(msg)


def _check_names_once(buffers: Sequence[FlatBuffer]) -> None:
    """Refuse a parameter that lies in two buffers."""
    seen: set[str] = set()
    for buffer in buffers:
        if twice := seen.intersection(buffer.names):
            msg = f"parameters in two flat buffers: {', '.join(sorted(twice))}"
            raise CheckpointFormatError(msg)
        seen.update(buffer.names)
