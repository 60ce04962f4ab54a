"""Refuses numbers that the type they are read into cannot hold: a cast makes them infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.large_pages import host_chunk
from lightning_elastic_zero.layout import spans
from lightning_elastic_zero.tensor_state import can_overflow, dtype_name, overflowed

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are looked at, and where one is not finite read again, at a time."""

ReadInto: TypeAlias = Callable[[Iterable[tuple[torch.Tensor, StoredRun]]], int]
"""``read_into`` of an open file: fills 1-D tensors, returns the bytes read from disk."""


@dataclass(frozen=True, slots=True)
class ReadRun:
    """A run of elements that has been read."""

    found: torch.Tensor
    """What it filled, shape ``(elements of the run,)``, of any floating-point type."""
    run: StoredRun
    """Where it lies."""
    name: str
    """The parameter's."""
    state: str
    """The optimizer state's; empty for the weight itself."""


def check_no_overflow(read: ReadRun, path: Path, read_into: ReadInto) -> int:
    """Refuse finite numbers of a file that became infinite when they were read.

    Nothing is done where the type was not a narrower one. Elsewhere what was read is looked at
    once, and read again, in the file's own type, where it is not finite: that may have been so in
    the file, and stays what it is.

    Args:
        read: what was read.
        path: the file, or directory, that it was read from.
        read_into: reads there once more.

    Returns:
        The bytes that were read once more.

    Raises:
        CheckpointMismatchError: a number is too large for the type that it was read into.
    """
    found, run, bytes_read = read.found, read.run, 0
    saved = run.tensor.dtype
    if not can_overflow(saved, found.dtype):
        return 0
    for start, stop in spans(0, found.numel(), _CHECKED_ELEMENTS):
        cast = found[start:stop].cpu()
        if cast.isfinite().all():
            continue
        held = host_chunk(stop - start, saved)
        part = StoredRun(run.tensor, run.start + start, run.start + stop)
        bytes_read += read_into([(held, part)])
        if (lost := overflowed(held, cast)).any():
            raise CheckpointMismatchError(_refusal(read, path, held[lost][0].item()))
    return bytes_read


def _refusal(read: ReadRun, path: Path, value: complex) -> str:
    """Return what is wrong with a number, and what helps."""
    saved, here = read.run.tensor.dtype, read.found.dtype
    what = f"the optimizer state {read.state} of {read.name}" if read.state else read.name
    ways = ["Resume from another checkpoint"]
    if here.itemsize < torch.float32.itemsize:
        ways.append("run in a precision whose type holds such numbers")
    if read.state:
        ways.append("go on from the weights with a fresh optimizer (load_optimizer_state=False)")
    return (
        f"{path}: {what} has the value {value:.9g}, saved as {dtype_name(saved)}, and is kept as "
        f"{dtype_name(here)} here, which holds numbers up to {torch.finfo(here).max:.9g}: it would "
        "become infinite. Numbers of that size are mostly those of a training that had diverged, "
        f"or of a file that was written wrongly. {', or '.join(ways)}"
    )
