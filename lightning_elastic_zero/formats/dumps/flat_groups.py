"""Possible places of parameters in dumps whose flat buffers name none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.partition import (
    ContiguousPartition,
    FlatBuffer,
    PerParameterPartition,
    piece_numel,
)


@dataclass(frozen=True, slots=True)
class BufferPosition:
    """A place in a stream where a parameter can begin."""

    at: int = 0
    """Elements before it: of the whole buffer in ZeRO-1/2, of each rank's in ZeRO-3."""
    count: int = 0
    """Parameters before it."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """The flat buffers of one parameter group, end to end, with the parameters unknown."""

    stage: int
    world_size: int
    first_buffer: int
    """Index of its first flat buffer."""
    sizes: tuple[int, ...]
    """Elements of each flat buffer on each rank: one in ZeRO-1/2, the sub-groups in ZeRO-3."""
    total: int
    """What is not padding at the end, counted as ``BufferPosition``."""
    paddings: tuple[int, ...] = ()
    """ZeRO-1/2: recorded padding after each parameter; empty where nothing was recorded."""

    @property
    def capacity(self) -> int:
        """Elements that its parameters must have together; in ZeRO-3 on each rank."""
        return self.total - sum(self.paddings)

    def counts(self, numel: int) -> int:
        """Return what a parameter takes of ``capacity``."""
        return piece_numel(numel, self.world_size) if self.stage == STAGE_WEIGHTS else numel

    def after(self, position: BufferPosition, numel: int) -> BufferPosition | None:
        """Return the spot behind a parameter of so many elements; None where it does not fit."""
        if self.stage == STAGE_WEIGHTS:
            if position.at >= self.total:
                return None
            index, begin = self._sub_group(position)
            at = position.at + piece_numel(numel, self.world_size)
            return (
                BufferPosition(at, position.count + 1) if at <= begin + self.sizes[index] else None
            )
        if self.paddings and position.count >= len(self.paddings):
            return None
        at = position.at + numel + (self.paddings[position.count] if self.paddings else 0)
        return BufferPosition(at, position.count + 1) if at <= self.total else None

    def is_end(self, position: BufferPosition) -> bool:
        """Whether nothing is left behind a spot."""
        whole = not self.paddings or position.count == len(self.paddings)
        return position.at == self.total and whole

    def fragments(self, name: str, numel: int, position: BufferPosition) -> list[Fragment]:
        """Return where a parameter's elements lie if it begins at a spot, by the stage's rule."""
        if self.stage == STAGE_WEIGHTS:
            index, begin = self._sub_group(position)
            before = (position.at - begin) * self.world_size
            buffer = FlatBuffer(0, ("", name), (before, numel))
            found = PerParameterPartition([buffer], self.world_size).covering(name, 0, numel)
        else:
            index = 0
            buffer = FlatBuffer(0, ("", name), (position.at, numel), (), self.sizes[0])
            found = ContiguousPartition([buffer], self.world_size).covering(name, 0, numel)
        return [replace(f, buffer=self.first_buffer + index) for f in found]

    def _sub_group(self, position: BufferPosition) -> tuple[int, int]:
        """Return the index of a spot's sub-group, and where that begins."""
        ends = list(accumulate(self.sizes))
        index = bisect_right(ends, position.at)
        return index, ends[index] - self.sizes[index]

    def split(self, members: Iterable[tuple[str, int]]) -> list[list[str]]:
        """Cut the names and sizes that fill the stream into its flat buffers."""
        found: list[list[str]] = [[] for _ in self.sizes]
        position: BufferPosition | None = BufferPosition()
        for name, numel in members:
            if position is not None:
                index = self._sub_group(position)[0] if self.stage == STAGE_WEIGHTS else 0
                found[index].append(name)
                position = self.after(position, numel)
        return found
