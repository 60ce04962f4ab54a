"""The limits of the machine for the bytes of a checkpoint: write and sync, read and checksums."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import distributed

PIECE_BYTES = 8 << 20
READ_BYTES, SUM_BYTES = 1 << 20, 256 << 10
"""A piece is read, and its checksums are computed, as in a load of this library."""


class RawWrite:
    """Writes the tensors of this rank into one file, and syncs it."""

    def __init__(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        self.path, self._tensors = path, tensors

    def write(self) -> None:
        """Write the file; like a save, keep the last file until the new one is complete."""
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("wb", buffering=0) as file:
            for tensor in self._tensors:
                data = tensor.detach().view(torch.uint8).numpy().data
                for start in range(0, len(data), PIECE_BYTES):
                    file.write(data[start : start + PIECE_BYTES])
            os.fsync(file.fileno())
        new.replace(self.path)


class RawRead:
    """Reads this rank's share of a checkpoint's bytes, with checksums as in a load.

    The memory is as large as the share: it exists already, or is new, so that the system creates
    each page during the read.
    """

    def __init__(self, folder: Path, *, new_memory: bool) -> None:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        self._shares = [_share(file, rank, ranks) for file in files]
        self._size_bytes = sum(stop - start for _, start, stop in self._shares)
        self._memory: Any = None if new_memory else bytearray(b"1") * self._size_bytes

    def read(self) -> None:
        """Read the share."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, self._size_bytes)
        memory = memoryview(self._memory)
        for file, start, stop in self._shares:
            with file.open("rb", buffering=0) as opened:
                done = 0
                while done < stop - start:
                    piece = memory[done : min(done + READ_BYTES, stop - start)]
                    count = os.preadv(opened.fileno(), [piece], start + done)
                    for low in range(0, count, SUM_BYTES):
                        xxhash.xxh3_64_digest(piece[low : min(low + SUM_BYTES, count)])
                    done += count
            memory = memory[stop - start :]

    def forget(self) -> None:
        """Drop the files from the system's page cache, so that a read comes from the disk."""
        for file, *_ in self._shares:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        distributed.barrier()


def _share(file: Path, rank: int, ranks: int) -> tuple[Path, int, int]:
    size_bytes = file.stat().st_size
    return file, size_bytes * rank // ranks, size_bytes * (rank + 1) // ranks
