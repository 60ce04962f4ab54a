"""Selection of what is converted: options, and the tensors that they choose."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError, UnsupportedError
from lightning_elastic_zero.formats.torch_file import ChunkedSource
from lightning_elastic_zero.large_pages import host_chunk
from lightning_elastic_zero.layout import spans
from lightning_elastic_zero.tensor_state import can_overflow, overflowed
from lightning_elastic_zero.text import format_names
from lightning_elastic_zero.tools.checkpoint_view import (
    OpenCheckpoint,
    TensorEntry,
    holds_whole_tensors,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What weights can be cast to."""

_CHECKED_ELEMENTS = 1 << 18
"""Elements that are looked at together: the memory for it is small beside a chunk's."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What is converted, and how."""

    include: Sequence[str] = ()
    """Patterns (``model.*``) of the weights and buffers that are taken; none: all."""
    exclude: Sequence[str] = ()
    """Patterns of those that are not."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names, and what they are to be, ``{"model.": ""}``; or patterns, whose ``*``
    are those of the new name in turn, ``{"*.gamma": "*.weight"}``. Other patterns see new names."""
    dtype: str | None = None
    """One of ``DTYPES``, for weights; None: as they are stored, which for what was trained is fp32.
    Buffers keep their type; where the source does not tell them, those that ``buffers`` names."""
    optimizer: bool | None = None
    """Whether the optimizer's state is converted too; None: where the target is there to resume. It
    is whole: ``include`` and ``exclude`` do not go with it."""
    max_shard_bytes: int = 5_000_000_000
    """The largest file of weights that is written, where they can be cut in several."""
    allow_pickle: bool = False
    """Read objects of any class from the trainer's state; that can run code."""
    buffers: Sequence[str] = ()
    """Patterns of the tensors that are buffers, where a source of whole tensors does not tell them
    from frozen weights; whole numbers always are. Others of floating-point types are taken for
    weights: they are cast, and a target that tells the two has them as frozen."""
    adapter_config: str | None = None
    """PEFT's ``adapter_config.json``, which no checkpoint holds."""
    adapter_name: str = "default"
    """The adapter's name in the model."""

    def __post_init__(self) -> None:
        """Refuse a type that is not known."""
        if self.dtype is not None and self.dtype not in DTYPES:
            msg = f"weights are written as {', '.join(DTYPES)}, not as {self.dtype!r}"
            raise UnsupportedError(msg)

    def takes(self, name: str) -> bool:
        """Whether a tensor is taken."""
        included = not self.include or any(fnmatch.fnmatchcase(name, p) for p in self.include)
        return included and not any(fnmatch.fnmatchcase(name, p) for p in self.exclude)

    def name_buffer(self, checkpoint: OpenCheckpoint, entry: TensorEntry) -> bool:
        """Whether they call a tensor a buffer that the source does not tell from frozen weights."""
        untold = holds_whole_tensors(checkpoint.manifest) and entry.role == "frozen"
        return untold and any(fnmatch.fnmatchcase(entry.name, p) for p in self.buffers)

    def check_whole(self, target: str) -> None:
        """Refuse to leave something out of what is there to resume from.

        Raises:
            UnsupportedError: something would be.
        """
        if self.include or self.exclude or self.dtype:
            msg = (
                f"{target} is there to resume a run from, and so holds all of it, as it is: leave "
                "out include, exclude and dtype, or write weights (safetensors, fp32)"
            )
            raise UnsupportedError(msg)


def chosen_weights(
    checkpoint: OpenCheckpoint, options: ConvertOptions, dtype: torch.dtype | None = None
) -> Iterator[tuple[TensorEntry, ChunkedSource]]:
    """Yield the weights and buffers that are taken, each with what fetches it.

    Args:
        checkpoint: from where.
        options: which.
        dtype: to which floating-point weights are cast, but for named buffers; None: to none.

    Raises:
        CheckpointMismatchError: none is taken.
    """
    dtype = dtype or (None if options.dtype is None else DTYPES[options.dtype])
    taken = False
    for entry in checkpoint.weights():
        if options.takes(entry.name):
            taken = True
            kept = options.name_buffer(checkpoint, entry)
            yield entry, source_of(checkpoint, entry, None if kept else dtype)
    if not taken:
        names = format_names(entry.name for entry in checkpoint.weights())
        given = f"include={list(options.include)}, exclude={list(options.exclude)}"
        msg = f"{checkpoint.path}: the patterns ({given}) take none of its weights: {names}"
        raise CheckpointMismatchError(msg)


def source_of(
    checkpoint: OpenCheckpoint, entry: TensorEntry, dtype: torch.dtype | None = None
) -> ChunkedSource:
    """Return what fetches a tensor's elements; weights of floating-point types are cast."""
    stored = checkpoint.dtype(entry)
    cast = dtype if dtype and stored.is_floating_point and entry.role != "buffer" else stored

    def fetch() -> Iterator[torch.Tensor]:
        return (cast_weight(checkpoint, entry, part, cast) for part in checkpoint.chunks(entry))

    return ChunkedSource(entry.numel, cast, fetch)


def cast_weight(
    checkpoint: OpenCheckpoint, entry: TensorEntry, values: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return some of a tensor's elements, rounded to a type: as they are where it is theirs.

    Raises:
        UnsupportedError: a number is too large for the type, which would have infinity for it.
    """
    if values.dtype == dtype:
        return values
    found = host_chunk(values.numel(), dtype).copy_(values)
    if can_overflow(values.dtype, dtype):
        for start, stop in spans(0, values.numel(), _CHECKED_ELEMENTS):
            _check_range(checkpoint, entry, values[start:stop], found[start:stop])
    return found


def _check_range(
    checkpoint: OpenCheckpoint, entry: TensorEntry, values: torch.Tensor, found: torch.Tensor
) -> None:
    """Refuse numbers that have become infinite in a smaller type.

    Raises:
        UnsupportedError: one has.
    """
    if found.isfinite().all() or not (lost := overflowed(values, found)).any():
        return
    name = next(text for text, dtype in DTYPES.items() if dtype == found.dtype)
    msg = (
        f"{checkpoint.path}: {entry.name} has the value {values[lost][0].item():.6g}, and {name} "
        f"holds numbers up to {torch.finfo(found.dtype).max:.6g}: it would become infinite. Write "
        "weights as they are stored (safetensors, without --dtype) or in a larger type, or leave "
        "it out (--exclude)"
    )
    raise UnsupportedError(msg)


def check_optimizer(checkpoint: OpenCheckpoint, options: ConvertOptions) -> None:
    """Refuse to convert an optimizer's state that is not there, or not known whose it is.

    Raises:
        CheckpointMismatchError: it is so.
        UnsupportedError: patterns choose among the weights, whose groups could not stay whole.
    """
    if options.include or options.exclude:
        msg = (
            "include and exclude choose among weights, and the optimizer's state is of all of "
            "them: leave out the patterns, or the optimizer (optimizer=False, --optimizer no)"
        )
        raise UnsupportedError(msg)
    info, manifest = checkpoint.reader.info, checkpoint.manifest
    why = info.unmatched or info.mixed
    if not why and (manifest.weights_only or not manifest.groups):
        why = "it holds none"
    if why:
        msg = (
            f"{checkpoint.path}: its optimizer's state cannot be converted: {why}. Its weights "
            "can: write them alone, as safetensors, fp32, lightning or dcp (optimizer=False, "
            "--optimizer no)"
        )
        raise CheckpointMismatchError(msg)
