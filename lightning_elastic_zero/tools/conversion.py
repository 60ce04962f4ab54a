"""``convert``: write a checkpoint of any kind for other software, in one step or not at all.

Targets of weights are files of ``torch.save`` (``fp32``, ``bf16``, ``lightning``) and folders
(``safetensors``, ``adapter``). Those for resuming are ``universal`` and ``dcp``. All stream: only
chunks of one tensor are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from lightning_elastic_zero.core.progress import NO_PROGRESS, ByteCount, Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.formats.copies import drifted_copies
from lightning_elastic_zero.formats.reader import CheckpointReader, SharedState
from lightning_elastic_zero.storage.disk_checkpoints import remove_leftovers
from lightning_elastic_zero.storage.exports import staged_export
from lightning_elastic_zero.storage.paths import check_local_path, real_path
from lightning_elastic_zero.tools.selection import DTYPES, ConvertOptions
from lightning_elastic_zero.tools.to_adapter import write_adapter_folder
from lightning_elastic_zero.tools.to_dcp import write_dcp
from lightning_elastic_zero.tools.to_safetensors import write_safetensors_folder
from lightning_elastic_zero.tools.to_torch_file import (
    FILE_NAME,
    write_lightning,
    write_weights_file,
)
from lightning_elastic_zero.tools.to_universal import STEP, write_universal
from lightning_elastic_zero.tools.view import OpenCheckpoint, open_view

_SINGLE_FILES = {"fp32", "bf16", "lightning"}
"""Targets that are a file, not a folder."""

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
        CheckpointMismatchError: The source lacks a part that the target needs, or contains several
            models.
        UnsupportedError: The target cannot hold the source's state, is in an object store, or the
            options conflict.
        SaveError: ``target`` exists or could not be written.
    """
    options, written = options or ConvertOptions(), ByteCount(progress)
    _check_options(to, options)
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
        drifted = drifted_copies(checkpoint.reader)
        shared = checkpoint.reader.engine_state()  # Before anything is written: it may be damaged.
        with staged_export(path) as export:
            TARGETS[to](checkpoint, export.path, options, written)
            export.drop_sums()
            export.publish(FILE_NAME if to in _SINGLE_FILES else "")
        kind = checkpoint.reader.info.kind
        lost = (*_lost_weights(to, checkpoint, shared, drifted),)
        if _exports_optimizer(to, checkpoint, options):
            lost += (*_lost_state(to, checkpoint, shared),)
        return Conversion(str(target), kind, written.total(), _lacks(checkpoint.reader), lost)


def _check_options(to: str, options: ConvertOptions) -> None:
    """Refuse options that contradict a target."""
    msg = ""
    if to in DTYPES and options.dtype not in {None, to}:
        other = options.dtype if options.dtype in TARGETS else "safetensors"
        msg = f"{to} contains weights in {to}: remove dtype={options.dtype}, or write {other}"
    if options.optimizer and to in {"fp32", "bf16", "adapter"}:
        msg = (
            f"{to} contains weights only: remove optimizer=True (--optimizer yes), or write "
            "lightning, safetensors or dcp"
        )
    if options.optimizer is False and to == "universal":
        msg = (
            "universal always contains the optimizer state: remove optimizer=False "
            "(--optimizer no), or write weights (safetensors, fp32)"
        )
    if to == "universal" and (options.include or options.exclude or options.dtype):
        msg = (
            "universal contains the whole state for a resume: remove include, exclude and "
            "dtype, or convert weights only (safetensors, fp32)"
        )
    if msg:
        raise UnsupportedError(msg)


def _exports_optimizer(to: str, checkpoint: OpenCheckpoint, options: ConvertOptions) -> bool:
    if options.optimizer is None and to in {"universal", "dcp"}:
        return not checkpoint.manifest.weights_only
    return bool(options.optimizer)


def _lacks(reader: CheckpointReader) -> tuple[str, ...]:
    """Return the parts of a run's state that the source does not contain."""
    excluded = reader.manifest.excluded
    left_out = (f"weights that the save left out ({format_names(excluded)})",) if excluded else ()
    return (*left_out, *reader.info.lacks)


def _lost_weights(
    to: str, checkpoint: OpenCheckpoint, shared: SharedState, drifted: Sequence[str]
) -> Iterator[str]:
    """Yield the parts of the module's state that the target cannot hold."""
    if checkpoint.reader.weights_differ and not checkpoint.module_weights:
        yield "weights that user code had changed in place (the masters are written)"
    if drifted:
        names = format_names(drifted)
        yield f"copies of {names} that differ between tensor ranks (rank 0's are written)"
    if unread := checkpoint.reader.info.unread:
        names = format_names(unread)
        yield f"entries of state_dict that are neither parameters nor buffers ({names})"
    if shared.extra_states and to != "lightning":
        yield f"extra states of modules ({format_names(shared.extra_states)})"


def _lost_state(to: str, checkpoint: OpenCheckpoint, shared: SharedState) -> Iterator[str]:
    """Yield the parts of the rest of a run's state that the target cannot hold."""
    reader, manifest = checkpoint.reader, checkpoint.manifest
    if to == "universal":
        # DeepSpeed treats any other file next to fp32.pt as a tensor of the parameter's shape.
        yield from sorted({key.name for group in manifest.groups for key in group.scalars} - {STEP})
    else:
        differing = (
            key
            for parameter in manifest.optimized
            for key, texts in checkpoint.scalar_texts(parameter.name).items()
            if len(texts) > 1
        )
        yield from (f"values of {key!r} that differ between ranks" for key in sorted({*differing}))
    if to != "lightning":
        yield from (f"optimizer state {key!r}" for key in reader.optimizer_state() or ())
    if shared.scales_losses:
        yield "the loss scale"
    if shared.lr_scheduler and to != "universal":
        yield "the state of the engine's learning rate scheduler"
    steps = manifest.progress.global_steps
    if to in ("dcp", "safetensors") and (shared.client_state or steps):
        step = f" (a resume begins at step 0, not {steps})" if steps else ""
        yield f"the trainer's state and counters{step}"
