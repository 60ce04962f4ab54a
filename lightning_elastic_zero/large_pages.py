"""Fresh memory on the host for whole states: large pages, which nothing fills before its owner."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

_LARGE_BYTES = 4 << 20
"""From this size on memory is mapped by itself: less holds no large page, whose size is 2 MB."""

_CHUNK_BYTES = 256 << 10
"""From this size on a chunk is mapped by itself, which costs less than filling it."""

LARGE_PAGES = "MADV_HUGEPAGE"
"""Pages of 2 MB where the system has such: one page fault in the place of 512."""

NOT_FOR_CHILDREN = "MADV_DONTFORK"
"""Memory that a forked child does not have: what it shares would be copied once more when the
parent fills it. For memory that no child reads."""


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the host, which the system makes when they are first used.

    Other than with ``torch.zeros`` nothing writes them: who overwrites all of it pays for it once.

    Args:
        shape: of the tensor.
        dtype: of its elements.

    Raises:
        OSError: the system has no memory.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < _LARGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    return map_pages(size_bytes, (LARGE_PAGES,)).view(dtype).view(tuple(shape))


def host_chunk(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory on the host for a part of a tensor, to be filled; nobody keeps it when it ends.

    Not ``torch.empty``: of many chunks one after the other, malloc may reuse none, where something
    small was allocated behind each. A process then grows as if it held the whole tensor.

    Args:
        numel: elements of the 1-D tensor that is returned.
        dtype: of each.

    Raises:
        OSError: the system has no memory.
    """
    size_bytes = numel * dtype.itemsize
    if size_bytes < _CHUNK_BYTES:
        return torch.empty(numel, dtype=dtype, device="cpu")
    return map_pages(size_bytes, (LARGE_PAGES,)).view(dtype)


def map_pages(size_bytes: int, advice: Sequence[str]) -> torch.Tensor:
    """Map fresh memory, zeros: a 1-D tensor of ``torch.uint8`` that it ends with.

    Not ``torch.empty``: where deterministic algorithms are asked for, that fills what it returns.

    Args:
        size_bytes: at least one.
        advice: names of what the system is told of it, as ``mmap`` has them; those that this
            system does not know are left out, since they are for speed.

    Raises:
        OSError: the system has no memory.
    """
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in advice:
        if hasattr(mmap, name):
            with suppress(OSError):
                pages.madvise(getattr(mmap, name))
    return torch.frombuffer(pages, dtype=torch.uint8)
