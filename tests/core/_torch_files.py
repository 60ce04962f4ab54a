"""Files of ``torch.save`` as the library writes them, with elements of every bit pattern."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.formats.torch_read import TorchFile
from lightning_elastic_zero.formats.torch_write import TorchFileWriter
from lightning_elastic_zero.storage.files import VerifiedFile

SAVE_ID = "5a7e"
NAME = "checkpoint/shard.pt"


def any_bits(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Make elements of every bit pattern: NaN with payloads, infinities, denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (numel * dtype.itemsize,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes: NaN equals itself only so."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_tree(directory: Path, tree: object, builder: TorchFileWriter | None = None) -> FileEntry:
    """Write a file of a tree, and of what its stand-ins stand for."""
    return (builder or TorchFileWriter()).write(tree, directory, NAME, save_id=SAVE_ID)


def open_verified(
    directory: Path, record: FileEntry, save_id: str | None = None
) -> closing[TorchFile]:
    """Open a file that was written with its checksums; it is closed at the end of a ``with``."""
    return closing(TorchFile(VerifiedFile(directory, record, save_id)))
