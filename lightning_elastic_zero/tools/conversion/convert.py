"""The conversion, from opening to publishing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage import (
    check_local_path,
    ignore_bytes,
    real_path,
    remove_leftovers,
)
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint, open_view
from lightning_elastic_zero.tools.conversion import (
    adapter_folder,
    dcp_directory,
    elastic_directory,
    safetensors_folder,
    torch_files,
    universal_directory,
)
from lightning_elastic_zero.tools.conversion.selection import DTYPES, ConvertOptions
from lightning_elastic_zero.tools.progress_line import OnBytes

Write: TypeAlias = Callable[[OpenCheckpoint, Path, ConvertOptions, OnBytes], None]

TARGETS: dict[str, Write] = {
    "fp32": torch_files.write_fp32,
    "bf16": torch_files.write_bf16,
    "safetensors": safetensors_folder.write_safetensors_folder,
    "lightning": torch_files.write_lightning,
    "universal": universal_directory.write_universal_directory,
    "dcp": dcp_directory.write_dcp_directory,
    "elastic": elastic_directory.write_elastic_directory,
    "adapter": adapter_folder.write_adapter_folder,
}
"""What a checkpoint can be converted to, and what writes it."""

WEIGHTS_ALONE = {"fp32", "bf16", "adapter"}
"""Targets that have no room for the optimizer's state."""

ALWAYS_WITH_OPTIMIZER = {"universal"}
"""Targets that are nothing without it."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What ``convert_checkpoint`` did."""

    target: str
    """Where the result is."""
    kind: str
    """What the source was."""
    bytes: int
    """That were written."""
    lacks: tuple[str, ...]
    """What a run has and the source did not hold."""
    lost: tuple[str, ...] = ()
    """What of a resume the source held and the target has no room for: states, counters."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    options: ConvertOptions | None = None,
    *,
    on_bytes: OnBytes = ignore_bytes,
) -> Conversion:
    """Write a checkpoint of any kind as something else, whole or not at all.

    - ``fp32``, ``bf16``: one file of ``torch.save``, names and tensors, tied names and buffers too;
    - ``safetensors``: a folder as transformers reads it, one file or shards with an index;
    - ``lightning``: a file for ``MyModel.load_from_checkpoint``, with its hyperparameters;
    - ``universal``: a Universal Checkpoint, which DeepSpeed itself loads;
    - ``dcp``: a directory of ``torch.distributed.checkpoint``, with ``model`` and ``optimizer``;
    - ``elastic``: this library's own format;
    - ``adapter``: PEFT's folder of an adapter.

    Args:
        source: a checkpoint's directory, or file.
        target: a path where nothing is yet.
        to: one of these.
        options: what is taken, under which names, in which type.
        on_bytes: told of the bytes that were written.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: bytes are not those that were written.
        CheckpointMismatchError: it lacks what the target needs.
        UnsupportedError: the target cannot hold what it holds.
        SaveError: something is at the target, or it could not be written.
    """
    options, written = options or ConvertOptions(), 0
    _check_optimizer_option(to, options)
    _check_dtype_option(to, options)

    def count(size_bytes: int) -> None:
        nonlocal written
        written += size_bytes
        on_bytes(size_bytes)

    with open_view(source, allow_pickle=options.allow_pickle, renamed=options.rename) as checkpoint:
        path = check_local_path(target)
        if checkpoint.path in real_path(path).parents:
            msg = f"{target} lies in the checkpoint {source}, which is only read: give another path"
            raise SaveError(msg)
        with suppress(OSError):  # What cannot be listed, or removed, is left.
            remove_leftovers(path.parent)
        TARGETS[to](checkpoint, path, options, count)
        info = checkpoint.reader.info
        return Conversion(str(target), info.kind, written, info.lacks, _lost(to, checkpoint))


def _lost(to: str, checkpoint: OpenCheckpoint) -> tuple[str, ...]:
    """Return what a target that holds an optimizer's state, and so looks whole, has no room for."""
    if to not in ("universal", "dcp"):
        return ()
    manifest = checkpoint.manifest
    keys = checkpoint.reader.optimizer_state() or ()
    lost = tuple(f"the optimizer's state {key!r}" for key in keys)
    if to == "universal":
        return (*universal_directory.lost_scalars(checkpoint), *lost)
    if manifest.progress.global_steps:
        step = f"a resume begins at step 0, not {manifest.progress.global_steps}"
        lost += (f"the trainer's state and counters ({step})",)
    return lost


def _check_dtype_option(to: str, options: ConvertOptions) -> None:
    """Refuse a type of the weights that the target's name contradicts.

    Raises:
        UnsupportedError: it does.
    """
    if to in DTYPES and options.dtype not in {None, to}:
        other = options.dtype if options.dtype in TARGETS else "safetensors"
        msg = (
            f"{to} holds weights in {to}, and {options.dtype} was asked for (dtype, --dtype): "
            f"leave that out, or write {other}"
        )
        raise UnsupportedError(msg)


def _check_optimizer_option(to: str, options: ConvertOptions) -> None:
    """Refuse an ``optimizer`` that the target would pass over without a word.

    Raises:
        UnsupportedError: it is wanted where there is no room for it, or not where it always is.
    """
    if options.optimizer and to in WEIGHTS_ALONE:
        msg = (
            f"{to} holds weights alone, and the optimizer's state was asked for (optimizer=True, "
            "--optimizer yes): leave that out, or write lightning, safetensors, dcp or elastic"
        )
        raise UnsupportedError(msg)
    if options.optimizer is False and to in ALWAYS_WITH_OPTIMIZER:
        msg = (
            f"{to} always holds the optimizer's state, which was not wanted (optimizer=False, "
            "--optimizer no): leave that out, or write weights (safetensors, fp32)"
        )
        raise UnsupportedError(msg)
