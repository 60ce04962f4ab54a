"""Bitwise comparison of values, and small files of tensors with random bit patterns."""

from __future__ import annotations

import struct
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.formats.torch_read import TorchFile
from lightning_elastic_zero.formats.torch_write import TorchFileWriter
from lightning_elastic_zero.storage.file_read import VerifiedFile


def bitwise_repr(value: object) -> str:
    """Return a text that includes types, NaN payloads and signs of zero, but not key order."""
    kind = type(value).__name__
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{kind} {_array_repr(value)}"
    if isinstance(value, (float, complex)):
        number = complex(value) if isinstance(value, complex) else complex(value, 0)
        return f"{kind} {struct.pack('<dd', number.real, number.imag).hex()}"
    if isinstance(value, dict):
        items = sorted((bitwise_repr(key), bitwise_repr(item)) for key, item in value.items())
        fields = bitwise_repr(vars(value)) if type(value) is OrderedDict and vars(value) else ""
        return f"{kind} {items} {fields}"
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(map(bitwise_repr, value))}"
    if isinstance(value, (list, tuple)):
        return f"{kind} {[bitwise_repr(item) for item in value]}"
    return f"{kind} {value!r}"


def _array_repr(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tolist()}"
    flat = value.detach().contiguous().reshape(-1)
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    text = f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {data.hex()}"
    return f"{text} {bitwise_repr(vars(value))}"


SAVE_ID = "5a7e"
NAME = "checkpoint/shard.pt"


def any_bits(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (numel * dtype.itemsize,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_tree(directory: Path, tree: object, builder: TorchFileWriter | None = None) -> FileEntry:
    return (builder or TorchFileWriter()).write(tree, directory, NAME, save_id=SAVE_ID)


def open_verified(
    directory: Path, record: FileEntry, save_id: str | None = None
) -> closing[TorchFile]:
    return closing(TorchFile(VerifiedFile(directory, record, save_id)))
