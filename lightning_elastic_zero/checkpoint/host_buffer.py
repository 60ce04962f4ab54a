"""Memory on the host that a state is copied to: allocated once, and used again by every save."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from lightning_elastic_zero.checkpoint.device_streams import can_pin, pin, unpin
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.large_pages import LARGE_PAGES, NOT_FOR_CHILDREN, map_pages
from lightning_elastic_zero.storage import PeriodicThread, ignore_progress

_ALIGNED_BYTES = 64
"""Where tensors begin, so that copies are not slowed down."""

_TOUCHED_BYTES = 256 << 20
"""How much is touched at a time."""

_PIN_S, _PIN_S_PER_BYTE = 10.0, 2e-9
"""How long pinning may take before it counts as work without progress: one call, and no part of a
block is pinned alone, because a tensor and its copy may then reach across two pinned regions."""

_SHOWN_EVERY_S = 1.0


class HostBuffer:
    """One block for the copies of one save, as large as they are together and no larger.

    Pages are large where the system has such: to touch 400 MB for the first time then takes 0.24 s
    instead of 1.3 s, and every later copy runs at the speed of memory. Pinned memory is not taken
    from torch, which rounds it up to a power of two.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._block: torch.Tensor | None = None
        self._pinned = False

    @property
    def size_bytes(self) -> int:
        """How much is allocated."""
        return 0 if self._block is None else self._block.numel()

    def allocate_like(
        self, tensors: Sequence[torch.Tensor], on_progress: Callable[[], None] = ignore_progress
    ) -> list[torch.Tensor]:
        """Return a contiguous host tensor of the shape and type of each, without values.

        What was given before is given up: it is the same memory.

        Args:
            tensors: what is to be copied.
            on_progress: called now and then while pages are made and pinned, which takes minutes
                for hundreds of GB.

        Raises:
            SaveError: there is no memory.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        starts = [0, *itertools.accumulate(map(aligned_bytes, tensors))]
        # Other devices copy from and to pages as they are, if not behind.
        pinned = any(can_pin(tensor.device) for tensor in tensors)
        block = self._of(starts[-1], on_progress, pinned=pinned)
        return [
            block[start : start + size].view(tensor.dtype).view(tensor.shape)
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        ]

    def _of(
        self, size_bytes: int, on_progress: Callable[[], None], *, pinned: bool
    ) -> torch.Tensor:
        """Return the block, a new one where the old one is too small or not pinned."""
        if self._block is None or self.size_bytes < size_bytes or pinned > self._pinned:
            self.release()
            self._block = _pages(size_bytes)
            if pinned and size_bytes:
                _touch(self._block, on_progress)
                with _shown(on_progress, _PIN_S + size_bytes * _PIN_S_PER_BYTE):
                    _pin(self._block)
            self._pinned = pinned
        return self._block

    def release(self) -> None:
        """Release the memory, once nothing reads or fills it any more."""
        if self._block is not None and self._pinned and self.size_bytes:
            unpin(self._block.data_ptr())
        self._block, self._pinned = None, False


def aligned_bytes(tensor: torch.Tensor) -> int:
    """Return how much memory a tensor's copy takes."""
    return -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _pages(size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return map_pages(size_bytes, (LARGE_PAGES, NOT_FOR_CHILDREN))
    except OSError as error:
        msg = (
            f"There are no {size_bytes / 1e9:.1f} GB of host memory for a copy of this rank's "
            f"state ({error.strerror}): limit it by max_snapshot_bytes, or save without async_save"
        )
        raise SaveError(msg) from error


def _touch(block: torch.Tensor, on_progress: Callable[[], None]) -> None:
    """Make a block's pages, part by part: to make them is most of what pinning them takes."""
    for start in range(0, block.numel(), _TOUCHED_BYTES):
        block[start : start + _TOUCHED_BYTES : mmap.PAGESIZE] = 0
        on_progress()


def _shown(on_progress: Callable[[], None], most_s: float) -> PeriodicThread:
    """Show progress within, for so long at most, while one call works that shows none."""
    end = time.monotonic() + most_s

    def show() -> None:
        # What fails the step elsewhere is raised by who calls next in the step's own thread.
        with suppress(ElasticZeroError):
            if time.monotonic() < end:
                on_progress()

    return PeriodicThread(show, _SHOWN_EVERY_S, "pins memory")


def _pin(block: torch.Tensor) -> None:
    """Lock pages in memory, so that the device copies into them by itself.

    Raises:
        SaveError: the system does not allow it.
    """
    failed = pin(block.data_ptr(), block.numel())
    if failed:
        msg = (
            f"{block.numel() / 1e9:.1f} GB of host memory could not be pinned for a snapshot of "
            f"the state (CUDA's error {failed}): limit it by max_snapshot_bytes, save without "
            "async_save, or allow more locked memory (ulimit -l)"
        )
        raise SaveError(msg)
