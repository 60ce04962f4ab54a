"""Writes safetensors files, piece by piece: eight bytes, a JSON header, then the tensors' bytes.

The writer of the ``safetensors`` package is not used: it needs all tensors in memory. The format
is at https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import in_order
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.torch_write import ChunkedSource
from lightning_elastic_zero.storage.checksums import ChecksummedWriter

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    source: ChunkedSource

    @property
    def size_bytes(self) -> int:
        """In the file."""
        return self.source.numel * self.source.dtype.itemsize


def write_safetensors(
    folder: Path,
    name: str,
    tensors: Sequence[NamedSource],
    metadata: Mapping[str, str],
    progress: Progress = NO_PROGRESS,
) -> None:
    """Write one file, and the checksums of its chunks, synced to disk.

    Args:
        folder: a directory that is being written.
        name: the file's.
        tensors: its content, in this order.
        metadata: texts for its header; transformers requires ``format: pt``.
        progress: receives the number of bytes written.

    Raises:
        SaveError: the system did not take the bytes.
        UnsupportedError: a tensor is of a type that the format does not have.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        if tensor.source.dtype not in _DTYPES:
            msg = (
                f"{tensor.name} is of {tensor.source.dtype}, which safetensors files cannot "
                "contain. Exclude it, or write fp32 or lightning"
            )
            raise UnsupportedError(msg)
        stop = at + tensor.size_bytes
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.source.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with ChecksummedWriter(folder, name, progress) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            start = file.size_bytes
            for chunk in tensor.source.chunks():
                if chunk.numel():
                    file.write(in_order(chunk).view(torch.uint8).numpy().data)
            if (written := file.size_bytes - start) != tensor.size_bytes:
                msg = f"{tensor.name} yielded {written} bytes, expected {tensor.size_bytes}"
                raise ValueError(msg)
        file.finish("")
