"""``convert``: options, the selected tensors, and the targets that are files of weights.

``fp32``, ``bf16`` and ``lightning`` are single files of ``torch.save``; ``safetensors`` and
``adapter`` are folders. All stream: only chunks of one tensor are in memory.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import can_overflow, host_chunk, overflowed, unplain
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError
from lightning_elastic_zero.formats.torch_write import ChunkedSource, TorchFileWriter
from lightning_elastic_zero.storage.checksums import ChecksummedWriter, write_durably
from lightning_elastic_zero.storage.publish import staged_export
from lightning_elastic_zero.tools.view import (
    OpenCheckpoint,
    TensorEntry,
    entry_of,
    holds_whole_tensors,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes to which weights can be cast."""

_CHECKED_ELEMENTS = 1 << 18
"""Elements checked for overflow at once, so that the temporary memory is small."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of ``convert_checkpoint``."""

    include: Sequence[str] = ()
    """Patterns (``model.*``) of weights and buffers to include; empty: all."""
    exclude: Sequence[str] = ()
    """Patterns of weights and buffers to exclude."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of names with their replacements, ``{"model.": ""}``, or patterns whose ``*`` are
    copied in order, ``{"*.gamma": "*.weight"}``. The other options match the new names."""
    dtype: str | None = None
    """One of ``DTYPES``, for weights; None: as stored, which is fp32 for masters. Buffers keep
    their dtype; in sources that do not distinguish them, those that ``buffers`` selects."""
    optimizer: bool | None = None
    """Whether to include the whole optimizer state, which excludes ``include`` and ``exclude``.
    None: if the target is for resuming."""
    max_shard_bytes: int = 5_000_000_000
    """Maximum size of a file of weights, for targets with several files."""
    allow_pickle: bool = False
    """Build objects of any class in the trainer's state; this can run code."""
    buffers: Sequence[str] = ()
    """Patterns of buffers in sources that do not distinguish them from frozen weights. Integers are
    always buffers. Other tensors of floating point are treated as frozen weights and cast."""
    adapter_config: str | None = None
    """PEFT's ``adapter_config.json``, which no checkpoint contains."""
    adapter_name: str = "default"
    """Name of the adapter in the model."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            msg = f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}"
            raise UnsupportedError(msg)

    def selects(self, name: str) -> bool:
        included = not self.include or any(fnmatch.fnmatchcase(name, p) for p in self.include)
        return included and not any(fnmatch.fnmatchcase(name, p) for p in self.exclude)

    def marks_as_buffer(self, checkpoint: OpenCheckpoint, entry: TensorEntry) -> bool:
        """Whether ``buffers`` selects a tensor that the source does not mark as a buffer."""
        unmarked = holds_whole_tensors(checkpoint.manifest) and entry.role == "frozen"
        return unmarked and any(fnmatch.fnmatchcase(entry.name, p) for p in self.buffers)

    def check_whole(self, target: str) -> None:
        """Refuse options that would leave out a part of the state."""
        if self.include or self.exclude or self.dtype:
            msg = (
                f"{target} contains the whole state for a resume: remove include, exclude and "
                "dtype, or convert weights only (safetensors, fp32)"
            )
            raise UnsupportedError(msg)


def selected_weights(
    checkpoint: OpenCheckpoint, options: ConvertOptions, dtype: torch.dtype | None = None
) -> Iterator[tuple[TensorEntry, ChunkedSource]]:
    """Yield the selected weights and buffers with their contents.

    ``dtype`` casts floating-point weights, except buffers; None: as the options say. Raises
    CheckpointMismatchError if nothing is selected.
    """
    dtype = dtype or (None if options.dtype is None else DTYPES[options.dtype])
    empty = True
    for entry in checkpoint.weights():
        if options.selects(entry.name):
            empty = False
            kept = options.marks_as_buffer(checkpoint, entry)
            yield entry, source_of(checkpoint, entry, None if kept else dtype)
    if empty:
        names = format_names(entry.name for entry in checkpoint.weights())
        given = f"include={list(options.include)}, exclude={list(options.exclude)}"
        msg = f"{checkpoint.path}: {given} select none of its weights: {names}"
        raise CheckpointMismatchError(msg)


def source_of(
    checkpoint: OpenCheckpoint, entry: TensorEntry, dtype: torch.dtype | None = None
) -> ChunkedSource:
    """Return the contents of a tensor, read when needed; floating-point weights are cast."""
    stored = checkpoint.dtype(entry)
    cast = dtype if dtype and stored.is_floating_point and entry.role != "buffer" else stored

    def fetch() -> Iterator[torch.Tensor]:
        return (cast_weight(checkpoint, entry, part, cast) for part in checkpoint.chunks(entry))

    return ChunkedSource(entry.numel, cast, fetch)


def cast_weight(
    checkpoint: OpenCheckpoint, entry: TensorEntry, values: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return elements of a tensor rounded to a dtype.

    Raises UnsupportedError if a finite value would become infinite.
    """
    if values.dtype == dtype:
        return values
    found = host_chunk(values.numel(), dtype).copy_(values)
    checked = values.numel() if can_overflow(values.dtype, dtype) else 0
    for start, stop in spans(0, checked, _CHECKED_ELEMENTS):
        was, now = values[start:stop], found[start:stop]
        if now.isfinite().all() or not (lost := overflowed(was, now)).any():
            continue
        name = next(text for text, known in DTYPES.items() if known == dtype)
        msg = (
            f"{checkpoint.path}: {entry.name} has the value {was[lost][0].item():.6g}, which would "
            f"become infinite in {name} (maximum {torch.finfo(dtype).max:.6g}). Write weights as "
            "stored (safetensors without --dtype) or in a wider dtype, or --exclude it"
        )
        raise UnsupportedError(msg)
    return found


def check_optimizer(checkpoint: OpenCheckpoint, options: ConvertOptions) -> None:
    """Check that the optimizer state can be converted.

    Raises CheckpointMismatchError if it is missing or not assigned to parameters, UnsupportedError
    if patterns select some of the weights.
    """
    if options.include or options.exclude:
        msg = (
            "include and exclude select weights, but the optimizer state covers all of them: "
            "remove the patterns, or the optimizer (optimizer=False, --optimizer no)"
        )
        raise UnsupportedError(msg)
    info, manifest = checkpoint.reader.info, checkpoint.manifest
    why = info.unmatched or info.mixed
    if not why and (manifest.weights_only or not manifest.groups):
        why = "it contains none"
    if why:
        msg = (
            f"{checkpoint.path}: its optimizer state cannot be converted: {why}. Convert its "
            "weights only, to safetensors, fp32, lightning or dcp (optimizer=False, --optimizer no)"
        )
        raise CheckpointMismatchError(msg)


# -- single files of torch.save --------------------------------------------------------------------

_FILE = "weights"


def write_weights_file(
    checkpoint: OpenCheckpoint,
    target: Path,
    options: ConvertOptions,
    progress: Progress,
    *,
    dtype: torch.dtype,
) -> None:
    """Write names and tensors, with weights in ``dtype``."""
    builder = TorchFileWriter()
    _write(builder, _state_dict(builder, checkpoint, options, dtype), target, progress)


def _write(builder: TorchFileWriter, tree: object, target: Path, progress: Progress) -> None:
    with staged_export(target) as export:
        builder.write(tree, export.path, _FILE, save_id="", progress=progress)
        export.publish(_FILE)


def _state_dict(
    builder: TorchFileWriter,
    checkpoint: OpenCheckpoint,
    options: ConvertOptions,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    found = {}
    for entry, source in selected_weights(checkpoint, options, dtype):
        tensor = builder.add(source).view(entry.shape)
        for name in (entry.name, *checkpoint.aliases(entry)):
            found[name] = tensor
    return found


_ONLY_WITH_OPTIMIZER = {
    "optimizer_states",
    "lr_schedulers",
    "loops",
    "state_dict",
    "precision_plugin",
}
"""Entries of a Lightning file that are useless without optimizer state, or written anew."""


def write_lightning(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write a single Lightning file with the trainer's state, and the optimizer's if wanted."""
    manifest = checkpoint.manifest
    shared = checkpoint.reader.module_state(0, manifest.world_size)
    client, extra_states = dict(shared.client_state), dict(shared.extra_states)
    if not options.optimizer:
        client = {key: value for key, value in client.items() if key not in _ONLY_WITH_OPTIMIZER}
    builder = TorchFileWriter()
    tree: dict[str, Any] = {
        "epoch": 0,
        "global_step": manifest.progress.global_steps,
        "pytorch-lightning_version": manifest.writer.lightning or "2.5.0",
        **client,
        "state_dict": {**_state_dict(builder, checkpoint, options), **extra_states},
    }
    if options.optimizer:
        check_optimizer(checkpoint, options)
        optimizer = _optimizer_state(builder, checkpoint)
        optimizer["state"].update(checkpoint.reader.optimizer_state() or {})
        tree["optimizer_states"] = [optimizer]
        tree.setdefault("lr_schedulers", [])
    _write(builder, tree, target, progress)


def _optimizer_state(builder: TorchFileWriter, checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return the optimizer state with torch's numbering: one group after another."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group in checkpoint.manifest.groups:
        first = len(state)
        for name in group.names:
            parameter = checkpoint.parameters[name]
            # Copies: torch.save would keep a shared step shared, and optimizers change it.
            held = {key: copy.deepcopy(value) for key, value in checkpoint.scalars(name).items()}
            for key in checkpoint.state_keys(name, "elementwise"):
                source = source_of(checkpoint, entry_of(parameter, key))
                held[key] = builder.add(source).view(parameter.shape)
            state[len(state)] = held
        ids = list(range(first, len(state)))
        groups.append({**unplain(group.hyperparameters), "params": ids})
    return {"state": state, "param_groups": groups}


# -- safetensors -----------------------------------------------------------------------------------


def write_safetensors_folder(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write ``model.safetensors``, or shards with an index, as transformers reads them.

    A tied weight is stored once. The optimizer state goes to ``optimizer.safetensors``, named
    ``state.<parameter>.<key>``; groups and states that are Python numbers to ``optimizer.json``.
    """
    weights = [
        NamedSource(entry.name, entry.shape, source)
        for entry, source in selected_weights(checkpoint, options)
    ]
    states: list[NamedSource] = []
    if options.optimizer:
        check_optimizer(checkpoint, options)
        states = list(_states(checkpoint))
    with staged_export(target) as export:
        write_sharded(export.path, "model", weights, options.max_shard_bytes, progress)
        if options.optimizer:
            write_sharded(export.path, "optimizer", states, options.max_shard_bytes, progress)
            write_durably(export.path / "optimizer.json", _groups_json(checkpoint))
        export.drop_sums()
        export.publish()


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
            stop = file.size_bytes + tensor.size_bytes
            for part in tensor.source.parts():
                file.write(part)
            if file.size_bytes != stop:
                msg = f"{tensor.name} ends at byte {file.size_bytes}, expected {stop}"
                raise ValueError(msg)
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
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.size_bytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.size_bytes
    return shards


# -- PEFT ------------------------------------------------------------------------------------------

_ADAPTER_CONFIG = "adapter_config.json"
_BASE = "base_model.model."
_SAVED = "modules_to_save"


def write_adapter_folder(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write PEFT's ``adapter_model.safetensors`` and ``adapter_config.json``.

    Raises CheckpointMismatchError if the adapter or its configuration is missing, or if weights
    were trained that belong to no adapter.
    """
    config = _adapter_config(checkpoint, options)
    weights = [
        NamedSource(key, entry.shape, source)
        for entry, source in selected_weights(checkpoint, options)
        for adapter, key in [adapter_key(entry.name)]
        if adapter == options.adapter_name
    ]
    if not weights:
        msg = (
            f"{checkpoint.path} has no weights of an adapter named {options.adapter_name!r}; "
            f"PEFT's names contain {_BASE!r} and the adapter's name"
        )
        raise CheckpointMismatchError(msg)
    _check_nothing_left_out(checkpoint, options)
    with staged_export(target) as export:
        write_safetensors(export.path, "adapter_model.safetensors", weights, progress)
        write_durably(export.path / _ADAPTER_CONFIG, config)
        export.drop_sums()
        export.publish()


def _check_nothing_left_out(checkpoint: OpenCheckpoint, options: ConvertOptions) -> None:
    """Refuse to drop trained weights, except excluded ones and those of other adapters."""
    trained = [p.name for p in checkpoint.manifest.optimized if options.selects(p.name)]
    lost = [name for name in trained if not adapter_key(name)[0]]
    if lost:
        msg = (
            f"{checkpoint.path}: {format_names(lost, limit=len(lost))} were trained, but the "
            f"adapter {options.adapter_name!r} consists of lora_* and {_SAVED} only. Write all "
            "weights (safetensors), or exclude these"
        )
        raise CheckpointMismatchError(msg)


def adapter_key(name: str) -> tuple[str, str]:
    """Return the adapter that a weight belongs to and the weight's name in PEFT's file.

    Both are empty if the weight belongs to no adapter.
    """
    parts = name.partition(_BASE)[2].split(".")
    for at, (part, adapter) in enumerate(itertools.pairwise(parts)):
        if part == _SAVED or part.startswith("lora_"):
            kept = [*parts[: at + (part != _SAVED)], *parts[at + 2 :]]
            return adapter, _BASE + ".".join(kept)
    return "", ""


def _adapter_config(checkpoint: OpenCheckpoint, options: ConvertOptions) -> bytes:
    if options.adapter_config is None:
        msg = (
            f"{checkpoint.path} does not contain the adapter's configuration (lora_alpha, ...): "
            f"pass the {_ADAPTER_CONFIG} that model.peft_config[...].save_pretrained(folder) writes"
        )
        raise CheckpointMismatchError(msg)
    path = Path(options.adapter_config)
    path = path / _ADAPTER_CONFIG if path.is_dir() else path
    try:
        text = path.read_bytes()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as PEFT's {_ADAPTER_CONFIG} ({error})"
        raise CheckpointMismatchError(msg) from error
    if not isinstance(content, dict) or "peft_type" not in content:
        msg = f"{path} is not PEFT's {_ADAPTER_CONFIG}: it has no peft_type"
        raise CheckpointMismatchError(msg)
    return text
