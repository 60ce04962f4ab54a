"""A folder of safetensors as transformers reads it, with the optimizer's state beside it if wanted.

``model.safetensors``, or ``model-00001-of-00003.safetensors`` and ``model.safetensors.index.json``.
The optimizer's state is named as torch flattens it (``state.<parameter>.<key>``), in
``optimizer.safetensors``; its groups, and states that are Python numbers, are in
``optimizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lightning_elastic_zero.formats.safetensors_file import NamedSource, write_safetensors
from lightning_elastic_zero.formats.torch_file import ChunkedSource
from lightning_elastic_zero.storage import write_durably
from lightning_elastic_zero.storage.exports import staged_export
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint
from lightning_elastic_zero.tools.conversion.selection import (
    ConvertOptions,
    check_optimizer,
    chosen_weights,
    source_of,
)
from lightning_elastic_zero.tools.progress_line import OnBytes


def write_safetensors_folder(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write the folder; a tied weight is in it once, as transformers wants it."""
    weights = [
        NamedSource(entry.name, entry.shape, source)
        for entry, source in chosen_weights(checkpoint, options)
    ]
    states: list[NamedSource] = []
    if options.optimizer:
        check_optimizer(checkpoint, options)
        states = list(_states(checkpoint))
    with staged_export(target) as export:
        write_sharded(export.path, "model", weights, options.max_shard_bytes, on_bytes)
        if options.optimizer:
            write_sharded(export.path, "optimizer", states, options.max_shard_bytes, on_bytes)
            groups = [
                {**group.hyperparameters, "params": list(group.names)}
                for group in checkpoint.manifest.groups
            ]
            numbers = {
                parameter.name: {
                    key: value
                    for key, value in checkpoint.scalars(parameter.name).items()
                    if not isinstance(value, torch.Tensor)
                }
                for parameter in checkpoint.manifest.optimized
            }
            state = {name: held for name, held in numbers.items() if held}
            text = json.dumps({"param_groups": groups, "state": state}, indent=1)
            write_durably(export.path / "optimizer.json", text.encode())
        export.drop_sums()
        export.publish()


def _states(checkpoint: OpenCheckpoint) -> Iterator[NamedSource]:
    for entry in checkpoint.states():
        name = f"state.{entry.name}.{entry.key}"
        yield NamedSource(name, entry.shape, source_of(checkpoint, entry))
    for parameter in checkpoint.manifest.optimized:
        for key, value in checkpoint.scalars(parameter.name).items():
            if isinstance(value, torch.Tensor):
                yield _number(f"state.{parameter.name}.{key}", value)


def _number(name: str, value: torch.Tensor) -> NamedSource:
    return NamedSource(name, (), ChunkedSource(1, value.dtype, lambda: iter([value.reshape(1)])))


def write_sharded(
    folder: Path, stem: str, tensors: Sequence[NamedSource], most_bytes: int, on_bytes: OnBytes
) -> None:
    """Write one file, or several of at most so many bytes and an index of them."""
    shards = _shards(tensors, most_bytes)
    names = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder, name, shard, {"format": "pt"}, on_bytes)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.size_bytes for t in tensors)},
            "weight_map": {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            },
        }
        text = json.dumps(index, indent=2)
        write_durably(folder / f"{stem}.safetensors.index.json", text.encode())


def _shards(tensors: Sequence[NamedSource], most_bytes: int) -> list[list[NamedSource]]:
    """Split tensors, in order; one that is larger than a shard has one of its own."""
    shards: list[list[NamedSource]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.size_bytes > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.size_bytes
    return shards
