"""Target ``safetensors`` of ``convert``: a folder for transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.torch_write import ChunkedSource
from lightning_elastic_zero.storage.file_write import ChecksummedWriter, write_durably
from lightning_elastic_zero.storage.paths import read_file
from lightning_elastic_zero.tools.selection import (
    ConvertOptions,
    check_optimizer,
    file_next_to,
    selected_weights,
    source_of,
)
from lightning_elastic_zero.tools.view import OpenCheckpoint

_MODEL_CONFIGS = ("config.json", "generation_config.json")
"""Files that Hugging Face's Trainer saves with a checkpoint, and ``from_pretrained`` reads."""

_SAFETENSORS_DTYPES = {
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

_HEADER_ALIGNMENT = 8


def write_safetensors_folder(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write ``model.safetensors``, or shards with an index, as transformers reads them.

    A tied weight is stored once. The model's configuration is copied if Hugging Face's Trainer
    saved it with the checkpoint. The optimizer state goes to ``optimizer.safetensors``, named
    ``state.<parameter>.<key>``; groups and states that are Python numbers to ``optimizer.json``.
    """
    weights = [
        NamedSource(weight.names[0], weight.entry.shape, weight.source)
        for weight in selected_weights(checkpoint, options)
    ]
    if options.optimizer:
        check_optimizer(checkpoint, options)
        states = list(_states(checkpoint))
        write_sharded(folder, "optimizer", states, options.max_shard_bytes, progress)
        write_durably(folder / "optimizer.json", _groups_json(checkpoint))
    write_sharded(folder, "model", weights, options.max_shard_bytes, progress)
    for name in _MODEL_CONFIGS:
        if (path := file_next_to(checkpoint, name, "trainer_state.json")) is not None:
            write_durably(folder / name, read_file(path))


def _groups_json(checkpoint: OpenCheckpoint) -> bytes:
    groups = [
        {**group.hyperparameters, "params": list(group.names)}
        for group in checkpoint.manifest.groups
    ]
    state: dict[str, dict[str, Any]] = {}
    for parameter in checkpoint.manifest.optimized:
        for key, value in checkpoint.scalars(parameter.name).items():
            if not isinstance(value, torch.Tensor):
                state.setdefault(parameter.name, {})[key] = value
    return json.dumps({"param_groups": groups, "state": state}, indent=1).encode()


def _states(checkpoint: OpenCheckpoint) -> Iterator[NamedSource]:
    for entry in checkpoint.states():
        name = f"state.{entry.name}.{entry.key}"
        yield NamedSource(name, entry.shape, source_of(checkpoint, entry))
    for parameter in checkpoint.manifest.optimized:
        for key, value in checkpoint.scalars(parameter.name).items():
            if isinstance(value, torch.Tensor):
                source = ChunkedSource(1, value.dtype, partial(iter, [value.reshape(1)]))
                yield NamedSource(f"state.{parameter.name}.{key}", (), source)


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A tensor of a safetensors file."""

    name: str
    shape: tuple[int, ...]
    source: ChunkedSource

    @property
    def size_bytes(self) -> int:
        return self.source.numel * self.source.dtype.itemsize


def write_safetensors(
    folder: Path, name: str, tensors: Sequence[NamedSource], progress: Progress
) -> None:
    """Write one safetensors file in pieces: eight bytes, a JSON header, then the tensors' bytes.

    The writer of the ``safetensors`` package needs all tensors in memory. The format is at
    https://github.com/huggingface/safetensors#format. Raises UnsupportedError for a dtype that it
    does not have.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it.
    at = 0
    for tensor in tensors:
        if tensor.source.dtype not in _SAFETENSORS_DTYPES:
            msg = (
                f"{tensor.name} is of {tensor.source.dtype}, which safetensors files cannot "
                "contain. Exclude it, or write fp32 or lightning"
            )
            raise UnsupportedError(msg)
        header[tensor.name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.source.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size_bytes],
        }
        at += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with ChecksummedWriter(folder, name, progress) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for part in tensor.source.parts():
                file.write(part)
        file.finish("")


def write_sharded(
    folder: Path, stem: str, tensors: Sequence[NamedSource], max_bytes: int, progress: Progress
) -> None:
    """Write one file, or several of at most ``max_bytes`` and an index."""
    shards = _shards(tensors, max_bytes)
    if len(shards) == 1:
        write_safetensors(folder, f"{stem}.safetensors", tensors, progress)
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder, name, shard, progress)
        file_of |= {tensor.name: name for tensor in shard}
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    text = json.dumps(index, indent=2)
    write_durably(folder / f"{stem}.safetensors.index.json", text.encode())


def _shards(tensors: Sequence[NamedSource], max_bytes: int) -> list[list[NamedSource]]:
    """Split tensors in order; a tensor larger than ``max_bytes`` gets its own shard."""
    shards: list[list[NamedSource]] = [[]]
    shard_bytes = 0
    for tensor in tensors:
        if shards[-1] and shard_bytes + tensor.size_bytes > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += tensor.size_bytes
    return shards
