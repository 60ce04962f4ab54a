"""``convert``: write a checkpoint of any kind for other software, in one step or not at all.

Targets of weights are files of ``torch.save`` (``fp32``, ``bf16``, ``lightning``) and folders
(``safetensors``, ``adapter``). Those for resuming are ``universal`` and ``dcp``. All stream: only
chunks of one tensor are in memory.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.core.manifest import (
    Manifest,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS, ByteCount, Progress
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.core.save_files import TAG
from lightning_elastic_zero.core.tensors import (
    can_overflow,
    host_chunk,
    overflowed,
    unplain,
)
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError, SaveError, UnsupportedError
from lightning_elastic_zero.formats.deepspeed_files import LATEST_UNIVERSAL, OURS
from lightning_elastic_zero.formats.elastic_write import model_entries
from lightning_elastic_zero.formats.reader import WEIGHT
from lightning_elastic_zero.formats.torch_write import ChunkedSource, TorchFileWriter
from lightning_elastic_zero.storage.disk_checkpoints import remove_leftovers
from lightning_elastic_zero.storage.exports import staged_export
from lightning_elastic_zero.storage.file_write import (
    ChecksummedWriter,
    as_save_error,
    write_durably,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import check_local_path, read_file, real_path
from lightning_elastic_zero.tools.view import (
    OpenCheckpoint,
    TensorEntry,
    entry_of,
    holds_whole_tensors,
    open_view,
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
    """PEFT's ``adapter_config.json``; None: the one in or next to the checkpoint's folder."""
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

    def check(self, to: str) -> None:
        """Refuse options that contradict a target."""
        msg = ""
        if to in DTYPES and self.dtype not in {None, to}:
            other = self.dtype if self.dtype in TARGETS else "safetensors"
            msg = f"{to} contains weights in {to}: remove dtype={self.dtype}, or write {other}"
        if self.optimizer and to in {"fp32", "bf16", "adapter"}:
            msg = (
                f"{to} contains weights only: remove optimizer=True (--optimizer yes), or write "
                "lightning, safetensors or dcp"
            )
        if self.optimizer is False and to == "universal":
            msg = (
                "universal always contains the optimizer state: remove optimizer=False "
                "(--optimizer no), or write weights (safetensors, fp32)"
            )
        if to == "universal" and (self.include or self.exclude or self.dtype):
            msg = (
                "universal contains the whole state for a resume: remove include, exclude and "
                "dtype, or convert weights only (safetensors, fp32)"
            )
        if msg:
            raise UnsupportedError(msg)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of ``convert_checkpoint``."""

    target: str
    kind: str
    """Kind of the source, such as ``"stock DeepSpeed checkpoint"``."""
    bytes: int
    """Number of bytes written."""
    lacks: tuple[str, ...]
    """Parts of a run's state that the source does not contain."""
    lost: tuple[str, ...] = ()
    """States and counters of the source that the target cannot hold."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    options: ConvertOptions | None = None,
    *,
    progress: Progress = NO_PROGRESS,
) -> Conversion:
    """Write a checkpoint of any kind in another format.

    - ``fp32``, ``bf16``: one file of ``torch.save`` with names and tensors;
    - ``safetensors``: a folder for transformers, one file or shards with an index;
    - ``lightning``: a file for ``MyModel.load_from_checkpoint``;
    - ``universal``: a Universal Checkpoint of DeepSpeed;
    - ``dcp``: a directory of ``torch.distributed.checkpoint`` with ``model`` and ``optimizer``;
    - ``adapter``: PEFT's folder of an adapter.

    The result appears in one step. Memory is two or three chunks of 16 MiB at any model size, or of
    whole chunks of the writer for sources of ``torch.distributed.checkpoint``. A value that would
    become infinite in the target dtype is refused by name.

    Args:
        source: Directory, file or URL of the checkpoint.
        target: Output path on a file system, which must not exist.
        to: One of the formats above.
        options: Selection, names and dtype.
        progress: Receives the number of bytes written.

    Raises:
        CheckpointNotFoundError: Nothing is at ``source``.
        CheckpointFormatError: ``source`` is not a checkpoint that can be read.
        CheckpointCorruptedError: A checksum does not match.
        CheckpointMismatchError: The source lacks a part that the target needs.
        UnsupportedError: The target cannot hold the source's state, is in an object store, or the
            options conflict.
        SaveError: ``target`` exists or could not be written.
    """
    options, written = options or ConvertOptions(), ByteCount(progress)
    options.check(to)
    with open_view(source, allow_pickle=options.allow_pickle, renamed=options.rename) as checkpoint:
        path = check_local_path(target)
        if checkpoint.path in real_path(path).parents:
            msg = f"{target} is inside the checkpoint {source}: choose another path"
            raise SaveError(msg)
        # Weights alone are those that a validation of the checkpoint uses; optimizer state belongs
        # to the masters.
        checkpoint.module_weights = not _exports_optimizer(to, checkpoint, options)
        with suppress(OSError):  # Leftovers that cannot be listed or removed stay.
            remove_leftovers(path.parent)
        with staged_export(path) as export:
            TARGETS[to](checkpoint, export.path, options, written)
            export.drop_sums()
            export.publish(_FILE if to in _SINGLE_FILES else "")
        info = checkpoint.reader.info
        return Conversion(
            str(target), info.kind, written.total(), info.lacks, _lost(to, checkpoint)
        )


def _exports_optimizer(to: str, checkpoint: OpenCheckpoint, options: ConvertOptions) -> bool:
    if options.optimizer is None and to in {"universal", "dcp"}:
        return not checkpoint.manifest.weights_only
    return bool(options.optimizer)


def _lost(to: str, checkpoint: OpenCheckpoint) -> tuple[str, ...]:
    """Return the state that a target for resuming cannot hold."""
    lost: tuple[str, ...] = ()
    if checkpoint.reader.weights_differ and not checkpoint.module_weights:
        lost = ("weights that user code had changed in place (the masters are written)",)
    if to not in ("universal", "dcp"):
        return lost
    manifest = checkpoint.manifest
    lost += tuple(f"optimizer state {key!r}" for key in checkpoint.reader.optimizer_state() or ())
    if to == "universal":
        # DeepSpeed treats any other file next to fp32.pt as a tensor of the parameter's shape.
        scalars = {key.name for group in manifest.groups for key in group.scalars}
        return (*sorted(scalars - {_STEP}), *lost)
    if manifest.progress.global_steps:
        step = f"a resume begins at step 0, not {manifest.progress.global_steps}"
        lost += (f"the trainer's state and counters ({step})",)
    return lost


# -- the tensors that are written -----------------------------------------------------------------


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
_SINGLE_FILES = {"fp32", "bf16", "lightning"}


def write_weights_file(
    checkpoint: OpenCheckpoint,
    folder: Path,
    options: ConvertOptions,
    progress: Progress,
    *,
    dtype: torch.dtype,
) -> None:
    """Write names and tensors, with weights in ``dtype``."""
    builder = TorchFileWriter()
    tree = _state_dict(builder, checkpoint, options, dtype)
    builder.write(tree, folder, _FILE, save_id="", progress=progress, crc32=True)


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
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
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
    builder.write(tree, folder, _FILE, save_id="", progress=progress, crc32=True)


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
            for key in checkpoint.state_names(name):
                source = source_of(checkpoint, entry_of(parameter, key))
                held[key] = builder.add(source).view(parameter.shape)
            state[len(state)] = held
        ids = list(range(first, len(state)))
        groups.append({**unplain(group.hyperparameters), "params": ids})
    return {"state": state, "param_groups": groups}


# -- safetensors -----------------------------------------------------------------------------------

_MODEL_CONFIGS = ("config.json", "generation_config.json")
"""Files that Hugging Face's Trainer saves with a checkpoint, and ``from_pretrained`` reads."""


def write_safetensors_folder(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write ``model.safetensors``, or shards with an index, as transformers reads them.

    A tied weight is stored once. The model's configuration is copied if Hugging Face's Trainer
    saved it with the checkpoint. The optimizer state goes to ``optimizer.safetensors``, named
    ``state.<parameter>.<key>``; groups and states that are Python numbers to ``optimizer.json``.
    """
    weights = [
        NamedSource(entry.name, entry.shape, source)
        for entry, source in selected_weights(checkpoint, options)
    ]
    if options.optimizer:
        check_optimizer(checkpoint, options)
        states = list(_states(checkpoint))
        write_sharded(folder, "optimizer", states, options.max_shard_bytes, progress)
        write_durably(folder / "optimizer.json", _groups_json(checkpoint))
    write_sharded(folder, "model", weights, options.max_shard_bytes, progress)
    for name in _MODEL_CONFIGS:
        if (path := _next_to(checkpoint, name, "trainer_state.json")) is not None:
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
_PARTS = (
    "lora_",
    "ia3_",
    "hada_",
    "lokr_",
    "oft_",
    "boft_",
    "ln_tuning_",
    "trainable_tokens_delta",
)
"""Beginnings of the names that PEFT gives to an adapter's weights, before the adapter's name."""


def write_adapter_folder(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write PEFT's ``adapter_model.safetensors`` and ``adapter_config.json``.

    The weights are those that ``save_pretrained`` selects. PEFT's own function needs the model,
    which no checkpoint contains, so they are recognised by name.

    Raises CheckpointMismatchError if the adapter or its configuration is missing, or if weights
    were trained that belong to no adapter.
    """
    config = _adapter_config(checkpoint, options)
    fields = json.loads(config)
    weights, left = [], []
    for entry, source in selected_weights(checkpoint, options):
        adapter, key = adapter_key(entry.name)
        if not adapter and entry.role == "trained":
            adapter, key = _other_key(entry.name, fields, options.adapter_name)
            left += [] if adapter else [entry.name]
        if adapter == options.adapter_name:
            weights.append(NamedSource(key, entry.shape, source))
    ways = (
        "To write the adapter with PEFT, convert to fp32, load that file into the model and call "
        "its save_pretrained"
    )
    if not weights:
        msg = (
            f"{checkpoint.path} has no weights of an adapter named {options.adapter_name!r} that "
            f"are recognised ({fields['peft_type']}); PEFT's names contain {_BASE!r} and the "
            f"adapter's name. {ways}"
        )
        raise CheckpointMismatchError(msg)
    if left:
        msg = (
            f"{checkpoint.path}: {format_names(left, limit=len(left))} were trained, but are not "
            f"recognised as weights of the adapter {options.adapter_name!r} "
            f"({fields['peft_type']}). {ways}. To leave them out, exclude them"
        )
        raise CheckpointMismatchError(msg)
    write_safetensors(folder, "adapter_model.safetensors", weights, progress)
    write_durably(folder / _ADAPTER_CONFIG, config)


def adapter_key(name: str) -> tuple[str, str]:
    """Return the adapter that a weight belongs to and the weight's name in PEFT's file.

    Both are empty if its name is not that of an adapter's weight.
    """
    parts = name.partition(_BASE)[2].split(".")
    for at, (part, adapter) in enumerate(itertools.pairwise(parts)):
        if part == _SAVED or part.startswith(_PARTS):
            kept = [*parts[: at + (part != _SAVED)], *parts[at + 2 :]]
            key = _BASE + ".".join(kept)
            # DoRA's magnitude is a module in the model, and a tensor in the file.
            return adapter, key.removesuffix(".weight") if part == _MAGNITUDE else key
    return "", ""


_MAGNITUDE = "lora_magnitude_vector"


def _other_key(name: str, config: Mapping[str, Any], adapter: str) -> tuple[str, str]:
    """Return the same for trained weights that only the configuration assigns to the adapter."""
    bias = name.endswith(".bias") and config.get("bias", "none") != "none"
    if bias and _BASE in name:
        return adapter, _BASE + name.partition(_BASE)[2]
    prompt = f"prompt_encoder.{adapter}.embedding.weight"
    if config["peft_type"] == "PROMPT_TUNING" and f".{name}".endswith(f".{prompt}"):
        return adapter, "prompt_embeddings"
    return "", ""


def _adapter_config(checkpoint: OpenCheckpoint, options: ConvertOptions) -> bytes:
    is_default = options.adapter_name == "default"
    # PEFT saves other adapters than the default one in folders of their names.
    name = _ADAPTER_CONFIG if is_default else f"{options.adapter_name}/{_ADAPTER_CONFIG}"
    path = options.adapter_config or _next_to(checkpoint, name)
    if path is None:
        msg = (
            f"{checkpoint.path} does not contain the adapter's configuration (lora_alpha, ...): "
            f"pass the {_ADAPTER_CONFIG} that model.peft_config[...].save_pretrained(folder) writes"
        )
        raise CheckpointMismatchError(msg)
    path = Path(path)
    path = path / _ADAPTER_CONFIG if path.is_dir() else path
    try:
        text = read_file(path)
        content = json.loads(text)
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as PEFT's {_ADAPTER_CONFIG} ({error})"
        raise CheckpointMismatchError(msg) from error
    if not isinstance(content, dict) or "peft_type" not in content:
        msg = f"{path} is not PEFT's {_ADAPTER_CONFIG}: it has no peft_type"
        raise CheckpointMismatchError(msg)
    return text


def _next_to(checkpoint: OpenCheckpoint, *names: str) -> Path | None:
    """Return the first of these files, which are all in the checkpoint's folder or its parent."""
    path = folder_at(checkpoint.path).local
    for folder in (path, path.parent) if path is not None else ():
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    return None


# -- universal -------------------------------------------------------------------------------------
#
#     target/
#     ├── latest_universal                            the text "checkpoint"
#     └── checkpoint/                                 Lightning requires this name
#         ├── zero/<parameter>/fp32.pt, <state>.pt, step.pt
#         ├── zero/optimizer_state.pt                 hyperparameters, counters
#         ├── mp_rank_00_model_states.pt              for ZeRO-1/2
#         └── zero_pp_rank_0_mp_rank_00_model_states.pt   for ZeRO-3
#
# DeepSpeed's own loader restores Adam's two moments, but no buffers or frozen weights. The model
# file has them for other readers, such as this library.

_MASTER = "fp32"
_STEP = "step"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def write_universal(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write a folder for ``engine.load_checkpoint`` with ``load_universal``.

    Raises UnsupportedError if a parameter's name cannot name a folder, or a group has several
    steps.
    """
    check_optimizer(checkpoint, options)
    _check_steps(checkpoint)

    def save(tree: object, folder: Path, name: str, builder: TorchFileWriter | None = None) -> None:
        writer = builder or TorchFileWriter()
        writer.write(tree, folder, name, save_id="", progress=progress, crc32=True)

    tag = folder / TAG
    (tag / "zero").mkdir(parents=True)
    for parameter in checkpoint.manifest.optimized:
        if "/" in parameter.name:
            msg = (
                f"{checkpoint.path}: a Universal Checkpoint has a folder per parameter, but the "
                f"name {parameter.name!r} contains a slash: --rename it, or write dcp"
            )
            raise UnsupportedError(msg)
        place = tag / "zero" / parameter.name
        with as_save_error(place):
            place.mkdir()
        for key in (WEIGHT, *checkpoint.state_names(parameter.name)):
            builder = TorchFileWriter()
            source = source_of(checkpoint, entry_of(parameter, key))
            tensor = builder.add(source).view(parameter.shape)
            save({"param": tensor}, place, f"{key or _MASTER}.pt", builder)
        if (step := checkpoint.step(parameter.name)) is not None:
            save(step, place, f"{_STEP}.pt")
    for name in _MODEL_FILES:
        builder = TorchFileWriter()
        save(_universal_model(checkpoint, builder), tag, name, builder)
    # The list shows whether files are missing; nothing else in this format does.
    files = [path.relative_to(tag).as_posix() for path in sorted(tag.rglob("*.pt"))]
    state = {**_universal_optimizer(checkpoint), OURS: {"files": files}}
    save(state, tag / "zero", "optimizer_state.pt")
    write_durably(folder / LATEST_UNIVERSAL, TAG.encode())


def _check_steps(checkpoint: OpenCheckpoint) -> None:
    """Check that each group has one step count: DeepSpeed has one flat buffer per group."""
    for group in checkpoint.manifest.groups:
        counted: dict[object, str] = {}
        for name in group.names:
            step = checkpoint.step(name)
            counted.setdefault(step if step is None else float(step), name)
        if len(counted) > 1:
            several = ", ".join(f"{step} of {name}" for step, name in counted.items())
            msg = (
                f"{checkpoint.path}: a parameter group has different steps ({several}), but a "
                "Universal Checkpoint holds one step per group: write dcp"
            )
            raise UnsupportedError(msg)


def _deepspeed_version(manifest: Manifest) -> str:
    """Return a DeepSpeed release; its loader requires one."""
    return manifest.writer.deepspeed or version_of("deepspeed") or "0.16.0"


def _universal_optimizer(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    groups = [
        {**unplain(group.hyperparameters), "params": [index]}
        for index, group in enumerate(manifest.groups)
    ]
    steps = (checkpoint.step(p.name) for p in manifest.optimized)
    step = next((step for step in steps if step is not None), None)
    return {
        # The stage of the model file that readers prefer.
        "zero_stage": 1,
        "ds_version": _deepspeed_version(manifest),
        "partition_count": manifest.world_size,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {_STEP: step}}, "param_groups": groups},
    }


def _universal_model(checkpoint: OpenCheckpoint, builder: TorchFileWriter) -> dict[str, Any]:
    """Return DeepSpeed's model file, in which trained weights are empty."""
    manifest = checkpoint.manifest
    progress = manifest.progress
    frozen = {
        p.name: builder.add(source_of(checkpoint, entry_of(p))).view(p.shape)
        for p in manifest.frozen
    }
    empty = {p.name: torch.empty(0, dtype=getattr(torch, p.dtype)) for p in manifest.optimized}
    # Copies, so that each storage has the buffer's own size.
    buffers = {name: tensor.clone() for name, tensor in checkpoint.buffers.items()}
    names = [group.names for group in manifest.groups]
    return {
        **checkpoint.reader.module_state(0, manifest.world_size).client_state,
        **model_entries(manifest, names, {**empty, **frozen}, frozen, buffers),
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "ds_config": {
            "gradient_accumulation_steps": progress.gradient_accumulation_steps,
            "train_batch_size": progress.global_batch_size,
        },
        "ds_version": _deepspeed_version(manifest),
    }


# -- dcp -------------------------------------------------------------------------------------------


def write_dcp(
    checkpoint: OpenCheckpoint, folder: Path, options: ConvertOptions, progress: Progress
) -> None:
    """Write a directory of ``torch.distributed.checkpoint``, as FSDP2 code loads it.

    ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``, as
    ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns it.
    """
    # Importing it takes a second.
    from lightning_elastic_zero.formats.dcp_write import RowsSource, write_directory

    def rows(
        path: tuple[str | int, ...], entry: TensorEntry, dtype: torch.dtype | None = None
    ) -> RowsSource:
        stored = dtype or checkpoint.dtype(entry)
        return RowsSource(
            path,
            entry.shape,
            stored,
            lambda a, b: cast_weight(checkpoint, entry, checkpoint.elements(entry, a, b), stored),
        )

    tensors: list[RowsSource] = []
    for entry, source in selected_weights(checkpoint, options):
        first = rows(("model", entry.name), entry, source.dtype)
        tensors.append(first)
        tensors += [
            replace(first, path=("model", name), same_as=first.path)
            for name in checkpoint.aliases(entry)
        ]
    objects: dict[tuple[str | int, ...], Any] = {}
    if options.optimizer or (options.optimizer is None and not checkpoint.manifest.weights_only):
        check_optimizer(checkpoint, options)
        tensors += [
            rows(("optimizer", "state", entry.name, entry.key), entry)
            for entry in checkpoint.states()
        ]
        objects = dict(_dcp_groups(checkpoint))
        for parameter in checkpoint.manifest.optimized:
            # torch's optimizers convert Python numbers to tensors when they load.
            for key, value in checkpoint.scalars(parameter.name).items():
                path = ("optimizer", "state", parameter.name, key)
                if isinstance(value, torch.Tensor):
                    flat = value.reshape(-1)
                    tensors.append(RowsSource(path, (), flat.dtype, partial(_slice, flat)))
                else:
                    objects[path] = value
    with as_save_error(folder):
        write_directory(folder, tensors, objects, progress)


def _slice(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return flat[start:stop]


def _dcp_groups(checkpoint: OpenCheckpoint) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for index, group in enumerate(checkpoint.manifest.groups):
        at = ("optimizer", "param_groups", index)
        yield (*at, "params"), list(group.names)
        for key, value in group.hyperparameters.items():
            yield (*at, key), unplain(value)


Write: TypeAlias = Callable[[OpenCheckpoint, Path, ConvertOptions, Progress], None]

TARGETS: dict[str, Write] = {
    "fp32": partial(write_weights_file, dtype=torch.float32),
    "bf16": partial(write_weights_file, dtype=torch.bfloat16),
    "safetensors": write_safetensors_folder,
    "lightning": write_lightning,
    "universal": write_universal,
    "dcp": write_dcp,
    "adapter": write_adapter_folder,
}
"""Functions that write each format."""
