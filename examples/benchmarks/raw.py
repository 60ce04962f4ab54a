"""The limits of the machine for the bytes of a checkpoint: write and sync, read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed

PIECE_BYTES = 8 << 20


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
    """Reads this rank's share of a checkpoint's bytes into allocated memory."""

    def __init__(self, folder: Path) -> None:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        self._shares = [_share(file, rank, ranks) for file in files]
        self._memory = memoryview(bytearray(max(stop - start for _, start, stop in self._shares)))

    def read(self) -> None:
        """Read the share."""
        for file, start, stop in self._shares:
            with file.open("rb", buffering=0) as opened:
                done = 0
                while done < stop - start:
                    piece = self._memory[done : min(done + PIECE_BYTES, stop - start)]
                    done += os.preadv(opened.fileno(), [piece], start + done)

    def forget(self) -> None:
        """Drop the files from the system's page cache, so that a read comes from the disk."""
        for file, *_ in self._shares:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        distributed.barrier()


def _share(file: Path, rank: int, ranks: int) -> tuple[Path, int, int]:
    size_bytes = file.stat().st_size
    return file, size_bytes * rank // ranks, size_bytes * (rank + 1) // ranks
