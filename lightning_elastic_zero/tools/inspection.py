"""``inspect`` and ``plan``: a checkpoint's contents and a resume's cost, without its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_elastic_zero.core.manifest import (
    STAGE_WEIGHTS,
    STAGES,
    Manifest,
    Parameter,
)
from lightning_elastic_zero.core.partition import piece_numel
from lightning_elastic_zero.core.tensors import itemsize_of
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import describe_missing_latest
from lightning_elastic_zero.formats.torch_read import is_cut
from lightning_elastic_zero.storage.checkpoints import file_sizes
from lightning_elastic_zero.tools.view import OpenCheckpoint, holds_whole_tensors, open_view

MAX_DEVICES = 4096
"""Largest device count that is listed."""

STAGE_GRADIENTS = 2
"""First ZeRO stage that partitions gradients."""


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

    @property
    def problem(self) -> str:
        """Problem with the file's presence or size; empty: none."""
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
    """Reasons why the optimizer state may be unusable; usually empty."""
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
    with open_view(path, allow_pickle=allow_pickle) as checkpoint:
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
        doubts=tuple(text for text in (info.mixed, info.unmatched) if text),
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
    keys = () if parameter.group is None else manifest.groups[parameter.group].state
    states = [itemsize_of(key.dtype) for key in keys if key.kind == "elementwise"]
    return parameter.numel * sum(states)


def stored_bytes(manifest: Manifest, parameter: Parameter) -> int:
    """Return the stored size of a parameter's weight and states."""
    return weight_bytes(manifest, parameter) + state_bytes(manifest, parameter)


def _files(checkpoint: OpenCheckpoint) -> Iterator[FileReport]:
    reader = checkpoint.reader
    for name, size_bytes in file_sizes(reader.files.folder, reader.names()):
        found = None if isinstance(size_bytes, OSError) else size_bytes
        recorded, folder = reader.recorded_bytes(name), reader.files.folder
        unrecorded = found is not None and recorded is None and isinstance(folder, Path)
        yield FileReport(name, found, recorded, unrecorded and is_cut(folder / name))


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


# -- plan ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Result of ``plan_resume``."""

    path: str
    devices: int
    stage: int
    read_bytes_per_rank: int
    """Masters, states and frozen weights that the rank with the largest share reads."""
    read_bytes: int
    """All ranks together, without the rest of chunks that are read for checksums (at most 5 %)."""
    state_bytes_per_rank: int
    """Masters and optimizer states, on the device or offloaded. Stage 0 in fp32 has no masters in
    addition to the weights; ZeRO copies the weights in fp32 too."""
    weight_bytes_per_rank: int
    """The model's weights between steps."""
    gradient_bytes_per_rank: int
    """Gradients of the trained weights in their low-precision dtype, partitioned from ZeRO-2 on."""
    global_batch_size: int | None
    """Samples per optimizer step; None if not recorded."""
    batches: tuple[tuple[int, int], ...]
    """Pairs of micro-batch (samples per device) and accumulation (micro-batches per step) with the
    same global batch, largest micro-batch first; empty if unknown."""
    obstacles: tuple[str, ...]
    """Problems that prevent the resume."""

    @property
    def is_possible(self) -> bool:
        """Whether there are no problems."""
        return not self.obstacles


def plan_resume(
    path: str | os.PathLike[str], devices: int, stage: int, *, allow_pickle: bool = False
) -> ResumePlan:
    """Predict the bytes and memory of a resume, and problems.

    Args:
        path: Directory, file or URL of the checkpoint.
        devices: Number of data-parallel ranks of the resumed run.
        stage: ZeRO stage of the resumed run, 0 to 3.
        allow_pickle: Build Python objects of any class; this can run code.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointFormatError: It is not a checkpoint that can be read.
        CheckpointCorruptedError: The checkpoint is incomplete.
        UnsupportedError: ``devices`` or ``stage`` is out of range.
    """
    if stage not in STAGES or devices < 1:
        msg = f"devices={devices}, stage={stage}: expected at least 1 device and a stage of 0 to 3"
        raise UnsupportedError(msg)
    with open_view(path, allow_pickle=allow_pickle) as checkpoint:
        report = report_of(checkpoint)
        damage = _damage(checkpoint)
    manifest = report.manifest
    weights, frozen, trained = _weight_bytes(manifest, devices, stage)
    states, in_place = _state_bytes(manifest, devices, stage)
    whole = sum(stored_bytes(manifest, p) for p in manifest.parameters)
    frozen_once = sum(weight_bytes(manifest, p) for p in manifest.frozen)
    copies = devices - 1 if stage != STAGE_WEIGHTS else 0
    again = whole if stage == 0 else frozen_once
    batch = manifest.progress.global_batch_size
    return ResumePlan(
        path=report.path,
        devices=devices,
        stage=stage,
        read_bytes_per_rank=states + frozen,
        read_bytes=whole + copies * again,
        state_bytes_per_rank=states - in_place,
        weight_bytes_per_rank=weights,
        gradient_bytes_per_rank=trained,
        global_batch_size=batch,
        batches=tuple(_choices(batch, devices)),
        obstacles=(*damage, *_obstacles(report, devices)),
    )


def _weight_bytes(manifest: Manifest, devices: int, stage: int) -> tuple[int, int, int]:
    """Return a rank's bytes of weights, of frozen weights as stored, and of gradients."""
    weights = frozen = trained = 0
    for p in manifest.parameters:
        itemsize = itemsize_of(p.dtype)
        piece = piece_numel(p.numel, devices)
        held = piece if stage == STAGE_WEIGHTS else p.numel
        weights += itemsize * held
        if p.group is None:
            frozen += held * (weight_bytes(manifest, p) // max(p.numel, 1))
        else:
            trained += itemsize * (piece if stage >= STAGE_GRADIENTS else p.numel)
    return weights, frozen, trained


def _state_bytes(manifest: Manifest, devices: int, stage: int) -> tuple[int, int]:
    """Return a rank's bytes of masters and states, and of masters that are the weights."""
    states = in_place = 0
    for index in range(len(manifest.groups)):
        members = [p for p in manifest.optimized if p.group == index]
        each = next((stored_bytes(manifest, p) // p.numel for p in members if p.numel), 0)
        if stage == STAGE_WEIGHTS:
            states += each * sum(piece_numel(p.numel, devices) for p in members)
        else:  # At stage 0 every rank has the whole state.
            states += each * piece_numel(sum(p.numel for p in members), devices if stage else 1)
        if stage == 0:
            same = [p for p in members if p.dtype == manifest.master_dtype]
            in_place += sum(p.numel * itemsize_of(p.dtype) for p in same)
    return states, in_place


def _choices(batch: int | None, devices: int) -> list[tuple[int, int]]:
    if not batch or batch % devices:
        return []
    each = batch // devices
    return [(m, each // m) for m in range(each, 0, -1) if each % m == 0]


def _obstacles(report: CheckpointReport, devices: int) -> list[str]:
    found = list(report.doubts)
    batch = report.manifest.progress.global_batch_size
    if batch and batch % devices:
        counts = [n for n in device_counts(batch) if n <= 2 * devices]
        found.append(
            f"{devices} devices cannot share a global batch of {batch} samples evenly: "
            f"{', '.join(map(str, counts))} can, or allow_uneven_batches"
        )
    if report.manifest.weights_only:
        found.append(
            "it contains weights only: pass load_optimizer_state=False to start a new run from "
            "them; the new optimizer state needs additional memory"
        )
    return found


def _damage(checkpoint: OpenCheckpoint) -> list[str]:
    try:
        checkpoint.reader.check_all()
    except (CheckpointCorruptedError, CheckpointFormatError) as error:
        return [str(error)]
    return []
