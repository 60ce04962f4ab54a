"""``inspect``: a checkpoint's contents, without its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_elastic_zero.core.manifest import Manifest, Parameter
from lightning_elastic_zero.core.tensors import itemsize_of
from lightning_elastic_zero.formats.deepspeed_files import describe_missing_latest
from lightning_elastic_zero.formats.torch_read import is_cut
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import is_on_nodes
from lightning_elastic_zero.tools.view import OpenCheckpoint, holds_whole_tensors, open_view

MAX_DEVICES = 4096
"""Largest device count that is listed."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file."""

    name: str
    size_bytes: int | None
    """Size on disk; None: the file is missing."""
    recorded_bytes: int | None = None
    """Size when written; None: not recorded, as in most formats."""
    is_cut: bool = False
    """Whether the end of the file is missing, in formats that do not record sizes."""
    is_elsewhere: bool = False
    """Whether this node does not have it, and other nodes may have it."""

    @property
    def problem(self) -> str:
        """Problem with the file's presence or size; empty: none."""
        if self.is_elsewhere:
            return ""
        if self.size_bytes is None:
            return f"{self.name} is missing"
        if self.recorded_bytes not in {None, self.size_bytes}:
            return f"{self.name} has {self.size_bytes} bytes, recorded are {self.recorded_bytes}"
        if self.is_cut:
            return f"{self.name} has {self.size_bytes} bytes, and its end is missing"
        return ""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Result of ``inspect_checkpoint``."""

    path: str
    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``."""
    manifest: Manifest
    """Description of the content; for other software's formats, inferred from the files."""
    epoch: int | None
    """Epoch of the Trainer, from 0; None if not recorded."""
    epoch_samples: int | None
    """Samples of this epoch consumed by all ranks; None if not recorded."""
    lacks: tuple[str, ...]
    """Parts of a run's state that the checkpoint does not contain."""
    doubts: tuple[str, ...]
    """Reasons why the optimizer state or the model may be unusable; usually empty."""
    note: str
    """Why other software cannot use the checkpoint although it is intact; usually empty."""
    files: tuple[FileReport, ...]
    """Files with the state, and their sizes."""
    resumable_on: str
    """Device counts and stages for a resume, in words."""

    @property
    def file_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes or 0 for file in self.files)

    @property
    def damage(self) -> tuple[str, ...]:
        """Files that are missing or have a wrong size."""
        return tuple(file.problem for file in self.files if file.problem)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Files that this node does not have, if the path is on nodes."""
        return tuple(file.name for file in self.files if file.is_elsewhere)

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON data, including ``damage``."""
        return {**asdict(self), "damage": self.damage}


def inspect_checkpoint(
    path: str | os.PathLike[str], *, allow_pickle: bool = False
) -> CheckpointReport:
    """Describe the contents of a checkpoint of any kind.

    No tensor is read, so it takes milliseconds for any size.

    Args:
        path: Directory, file or URL of the checkpoint.
        allow_pickle: Build Python objects of any class; this can run code.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointFormatError: It is not a checkpoint that can be read.
        CheckpointCorruptedError: The checkpoint is incomplete.
        UnsupportedError: The run that wrote it cannot be resumed.
    """
    with open_view(path, allow_pickle=allow_pickle, to_describe=True) as checkpoint:
        return report_of(checkpoint)


def report_of(checkpoint: OpenCheckpoint) -> CheckpointReport:
    """Describe the contents of an open checkpoint."""
    reader, info = checkpoint.reader, checkpoint.reader.info
    epoch, samples = (reader.trainer_entry(name) for name in ("epoch", "epoch_samples"))
    return CheckpointReport(
        path=str(checkpoint.path),
        kind=info.kind,
        manifest=checkpoint.manifest,
        epoch=epoch if type(epoch) is int else None,
        epoch_samples=samples if type(samples) is int else None,
        lacks=info.lacks,
        doubts=tuple(
            filter(None, (info.mixed, info.doubt, info.ambiguous, info.incomplete, info.unmatched))
        ),
        note=describe_missing_latest(checkpoint.path),
        files=tuple(_files(checkpoint)),
        resumable_on=_resumable_on(checkpoint.manifest, unmatched=bool(info.unmatched)),
    )


def weight_bytes(manifest: Manifest, parameter: Parameter) -> int:
    """Return the stored size of a master weight or frozen weight."""
    if parameter.name in manifest.excluded:
        return 0
    has_master = parameter.group is not None and not holds_whole_tensors(manifest)
    dtype = manifest.master_dtype if has_master else parameter.dtype
    return parameter.numel * itemsize_of(dtype)


def state_bytes(manifest: Manifest, parameter: Parameter) -> int:
    """Return the stored size of a parameter's element-wise optimizer states."""
    keys = () if parameter.group is None else manifest.groups[parameter.group].elementwise
    return parameter.numel * sum(itemsize_of(key.dtype) for key in keys)


def stored_bytes(manifest: Manifest, parameter: Parameter) -> int:
    """Return the stored size of a parameter's weight and states."""
    return weight_bytes(manifest, parameter) + state_bytes(manifest, parameter)


def _files(checkpoint: OpenCheckpoint) -> Iterator[FileReport]:
    reader = checkpoint.reader
    folder = folder_at(reader.files.folder)
    for name, size_bytes in folder.sizes(reader.names()):
        known_bytes = None if isinstance(size_bytes, OSError) else size_bytes
        recorded, local = reader.recorded_bytes(name), folder.local
        foreign = local if known_bytes is not None and recorded is None else None
        yield FileReport(
            name,
            known_bytes,
            recorded,
            foreign is not None and is_cut(foreign / name),
            is_elsewhere=known_bytes is None and is_on_nodes(folder.path),
        )


def device_counts(global_batch_size: int) -> list[int]:
    """Return the device counts that divide a global batch evenly."""
    most = min(global_batch_size, MAX_DEVICES)
    return [n for n in range(1, most + 1) if global_batch_size % n == 0]


def _resumable_on(manifest: Manifest, *, unmatched: bool) -> str:
    batch = manifest.progress.global_batch_size
    if manifest.weights_only:
        return "any number of devices, ZeRO 0 to 3: a new run from the weights"
    text = "any number of devices, ZeRO 0 to 3"
    if unmatched:
        text += " (the optimizer state is assigned to parameters by the model's code)"
    if batch:
        counts = ", ".join(map(str, device_counts(batch)))
        text += f"; with the same global batch of {batch} samples: {counts} devices"
    return text
