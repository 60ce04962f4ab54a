"""The tensors that a conversion writes: options, selection, names and dtypes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.core.tensors import can_overflow, host_chunk, overflowed
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError
from lightning_elastic_zero.formats.torch_write import ChunkedSource
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.tools.view import OpenCheckpoint, TensorEntry, holds_whole_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes to which weights can be cast."""

_CHECKED_ELEMENTS = 1 << 18
"""Elements checked for overflow at once, so that the temporary memory is small."""


@dataclass(frozen=True, slots=True)
class SelectedWeight:
    """A weight or buffer that a conversion writes."""

    names: Sequence[str]
    """The selected names, several if it is tied; targets that store it once use the first."""
    entry: TensorEntry
    source: ChunkedSource


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


def selected_weights(
    checkpoint: OpenCheckpoint, options: ConvertOptions, dtype: torch.dtype | None = None
) -> Iterator[SelectedWeight]:
    """Yield the selected weights and buffers.

    ``dtype`` casts floating-point weights, except buffers; None: as the options say. Raises
    CheckpointMismatchError if nothing is selected, or a pattern matches no name.
    """
    dtype = dtype or (None if options.dtype is None else DTYPES[options.dtype])
    weights = [(w, (w.name, *checkpoint.aliases(w))) for w in checkpoint.weights()]
    _check_patterns(checkpoint, options, [name for _, names in weights for name in names])
    for entry, names in weights:
        if selected := [*filter(options.selects, names)]:
            kept = options.marks_as_buffer(checkpoint, entry)
            source = source_of(checkpoint, entry, None if kept else dtype)
            yield SelectedWeight(selected, entry, source)


def _check_patterns(
    checkpoint: OpenCheckpoint, options: ConvertOptions, names: Sequence[str]
) -> None:
    """Refuse patterns of ``include`` and ``exclude`` that match nothing, or select nothing."""
    patterns = (*options.include, *options.exclude)
    unused = [each for each in patterns if not fnmatch.filter(names, each)]
    if unused:
        msg = (
            f"{checkpoint.path}: {format_names(unused)} matches none of its weights "
            f"({format_names(names)}). A pattern matches whole names: head.*, not head"
        )
        raise CheckpointMismatchError(msg)
    if not any(map(options.selects, names)):
        given = f"include={list(options.include)}, exclude={list(options.exclude)}"
        msg = f"{checkpoint.path}: {given} select none of its weights: {format_names(names)}"
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
    rounded = host_chunk(values.numel(), dtype).copy_(values)
    checked = values.numel() if can_overflow(values.dtype, dtype) else 0
    for start, stop in spans(0, checked, _CHECKED_ELEMENTS):
        was, now = values[start:stop], rounded[start:stop]
        if now.isfinite().all() or not (lost := overflowed(was, now)).any():
            continue
        name = next(text for text, known in DTYPES.items() if known == dtype)
        msg = (
            f"{checkpoint.path}: {entry.name} has the value {was[lost][0].item():.6g}, which would "
            f"become infinite in {name} (maximum {torch.finfo(dtype).max:.6g}). Write weights as "
            "stored (safetensors without --dtype) or in a wider dtype, or --exclude it"
        )
        raise UnsupportedError(msg)
    return rounded


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


def file_next_to(checkpoint: OpenCheckpoint, *names: str) -> Path | None:
    """Return the first of these files, which are all in the checkpoint's folder or its parent."""
    path = folder_at(checkpoint.path).local
    for folder in (path, path.parent) if path is not None else ():
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    return None
