"""Tensors whose elements lie without gaps, but not in logical order: ``channels_last``, for one.

Such a tensor is read in blocks: its elements ``[k * block, (k + 1) * block)`` are the same ones in
logical order and in the file, so that a run is read from the blocks that it touches. In
``channels_last`` a block is all channels of one output channel; of a transposed matrix it is all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

MOST_ELEMENTS = 1 << 22
"""The most elements that are read at a time, where a block is no larger."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element lies beside another one, in whatever order, and in no other's place."""
    if tensor.layout != torch.strided:
        return False
    reached = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != reached:
            return tensor.numel() == 0
        reached *= size
    return True


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of a tensor, one after the other."""

    tensor: torch.Tensor
    """It is dense."""
    start: int
    """The first element, counted in the file and in logical order."""
    stop: int
    """The element after the last one, likewise."""

    def in_logical_order(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements ``(stop - start,)``, as the file has them, in logical order."""
        outer, block = _split(self.tensor)
        inner = (self.tensor.shape[outer:], self.tensor.stride()[outer:])
        count = elements.numel() // block
        return elements.as_strided((count, *inner[0]), (block, *inner[1])).reshape(-1)


def blocks_of(
    tensor: torch.Tensor, start: int, stop: int, most_elements: int = MOST_ELEMENTS
) -> Iterator[Blocks]:
    """Yield the blocks that hold the elements ``[start, stop)`` of a dense tensor, some at a time.

    Args:
        tensor: its values are not looked at.
        start: the first element, in logical order.
        stop: the element after the last one.
        most_elements: of the blocks that are given at once, where one has no more.
    """
    _, block = _split(tensor)
    step = max(most_elements // block, 1) * block
    for first in range(start // block * block, stop, step):
        yield Blocks(tensor, first, min(first + step, -(-stop // block) * block))


def _split(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many dimensions are outermost in the file too, and the elements of the others."""
    block = tensor.numel()
    for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != block // size:
            return index, block
        block //= size
    return tensor.dim(), block
