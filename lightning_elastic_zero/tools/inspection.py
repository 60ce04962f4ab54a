"""``inspect`` and ``plan``: a checkpoint's contents and a resume's cost, without its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_elastic_zero.core.manifest import (
    STAGE_WEIGHTS,
    STAGES,
    Manifest,
    Parameter,
    Plain,
    Writer,
)
from lightning_elastic_zero.core.partition import piece_numel
from lightning_elastic_zero.core.tensors import itemsize_of
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import describe_missing_latest
from lightning_elastic_zero.storage.checkpoints import file_sizes
from lightning_elastic_zero.tools.view import OpenCheckpoint, holds_whole_tensors, open_view

MAX_DEVICES = 4096
"""Largest device count that is listed."""

STAGE_GRADIENTS = 2
"""First ZeRO stage that partitions gradients."""


@dataclass(frozen=True, slots=True)
class ParameterReport:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in the model."""
    elements: int
    weight_bytes: int
    """Stored size of the master weight or frozen weight."""
    state_bytes: int
    """Stored size of the element-wise optimizer states."""
    group: int | None
    """Index of the parameter group; None without an optimizer."""
    aliases: tuple[str, ...]
    """Other names of a tied weight."""

    @property
    def size_bytes(self) -> int:
        """Stored size of the weight and its states."""
        return self.weight_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One parameter group of the optimizer."""

    parameters: int
    elements: int
    hyperparameters: Mapping[str, Plain]
    state: Mapping[str, str]
    """State keys, each with its kind and dtype."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file."""

    name: str
    size_bytes: int | None
    """Size on disk; None: the file is missing."""
    recorded_bytes: int | None = None
    """Size when written; None: not recorded, as in most formats."""

    @property
    def problem(self) -> str:
        """Problem with the file's presence or size; empty: none."""
        if self.size_bytes is None:
            return f"{self.name} is missing"
        if self.recorded_bytes not in {None, self.size_bytes}:
            return f"{self.name} has {self.size_bytes} bytes, recorded are {self.recorded_bytes}"
        return ""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Result of ``inspect_checkpoint``."""

    path: str
    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``."""
    writer: Writer
    """Software that wrote the checkpoint."""
    stage: int
    """ZeRO stage; 0 also for whole tensors, then ``writer.engine`` is empty."""
    world_size: int
    """Data-parallel ranks of the save."""
    precision: str
    """Precision of the module, such as ``"bf16"``."""
    master_dtype: str
    """Dtype of the master weights, such as ``"float32"``."""
    steps: int
    """Optimizer steps of the run."""
    epoch: int | None
    """Epoch of the Trainer, from 0; None if not recorded."""
    samples: int
    """DeepSpeed's sample count; 0 if not recorded."""
    epoch_samples: int | None
    """Samples of this epoch consumed by all ranks; None if not recorded."""
    global_batch_size: int | None
    """Samples per optimizer step; None if not recorded."""
    gradient_accumulation_steps: int
    """Micro-batches of each rank per optimizer step."""
    weights_only: bool
    """Whether the checkpoint lacks optimizer state by request."""
    lacks: tuple[str, ...]
    """Parts of a run's state that the checkpoint does not contain."""
    doubts: tuple[str, ...]
    """Reasons why the optimizer state may be unusable; usually empty."""
    note: str
    """Why other software cannot use the checkpoint although it is intact; usually empty."""
    excluded: tuple[str, ...]
    """Frozen parameters and buffers left out by request."""
    groups: tuple[GroupReport, ...]
    """Parameter groups of the optimizer."""
    parameters: tuple[ParameterReport, ...]
    """All parameters, including frozen ones."""
    module_buffers: tuple[str, ...]
    """Names of the persistent module buffers."""
    client_objects: tuple[str, ...]
    """Paths in the trainer's state of objects that are not plain data."""
    files: tuple[FileReport, ...]
    """Files with the state, and their sizes."""
    resumable_on: str
    """Device counts and stages for a resume, in words."""

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.elements for p in self.parameters)

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


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointReport:
    """Describe the contents of a checkpoint of any kind.

    No tensor is read, so it takes milliseconds for any size.

    Args:
        path: Directory, file or URL of the checkpoint.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointFormatError: It is not a checkpoint that can be read.
        CheckpointCorruptedError: The checkpoint is incomplete.
        UnsupportedError: The run that wrote it cannot be resumed.
    """
    with open_view(path) as checkpoint:
        return report_of(checkpoint)


def report_of(checkpoint: OpenCheckpoint) -> CheckpointReport:
    """Describe the contents of an open checkpoint."""
    reader, manifest = checkpoint.reader, checkpoint.manifest
    progress, info = manifest.progress, reader.info
    epoch = reader.trainer_entry("epoch")
    samples = reader.trainer_entry("epoch_samples")
    return CheckpointReport(
        path=str(checkpoint.path),
        kind=info.kind,
        writer=manifest.writer,
        stage=manifest.stage,
        world_size=manifest.world_size,
        precision=manifest.precision,
        master_dtype=manifest.master_dtype,
        steps=progress.global_steps,
        epoch=epoch if type(epoch) is int else None,
        samples=progress.global_samples,
        epoch_samples=samples if type(samples) is int else None,
        global_batch_size=progress.global_batch_size,
        gradient_accumulation_steps=progress.gradient_accumulation_steps,
        weights_only=manifest.weights_only,
        lacks=info.lacks,
        doubts=tuple(text for text in (info.mixed, info.unmatched) if text),
        note=describe_missing_latest(checkpoint.path),
        excluded=manifest.excluded,
        groups=tuple(_group(manifest, index) for index in range(len(manifest.groups))),
        parameters=tuple(_parameter(manifest, p) for p in manifest.parameters),
        module_buffers=manifest.module_buffers,
        client_objects=manifest.client_objects,
        files=tuple(_files(checkpoint)),
        resumable_on=_resumable_on(manifest, unmatched=bool(info.unmatched)),
    )


def _group(manifest: Manifest, index: int) -> GroupReport:
    group = manifest.groups[index]
    members = [p for p in manifest.optimized if p.group == index]
    return GroupReport(
        parameters=len(members),
        elements=sum(p.numel for p in members),
        hyperparameters=group.hyperparameters,
        state={key.name: f"{key.kind} {key.dtype}" for key in group.state},
    )


def _parameter(manifest: Manifest, parameter: Parameter) -> ParameterReport:
    has_master = parameter.group is not None and not holds_whole_tensors(manifest)
    dtype = manifest.master_dtype if has_master else parameter.dtype
    keys = () if parameter.group is None else manifest.groups[parameter.group].state
    states = [itemsize_of(key.dtype) for key in keys if key.kind == "elementwise"]
    held = parameter.numel if parameter.name not in manifest.excluded else 0
    return ParameterReport(
        name=parameter.name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        elements=parameter.numel,
        weight_bytes=held * itemsize_of(dtype),
        state_bytes=held * sum(states),
        group=parameter.group,
        aliases=parameter.aliases,
    )


def _files(checkpoint: OpenCheckpoint) -> Iterator[FileReport]:
    reader = checkpoint.reader
    for name, size_bytes in file_sizes(reader.files.folder, reader.names()):
        found = None if isinstance(size_bytes, OSError) else size_bytes
        yield FileReport(name, found, reader.recorded_bytes(name))


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
class BatchChoice:
    """A combination that keeps the global batch."""

    micro_batch: int
    """Samples per device and forward pass."""
    accumulation: int
    """Micro-batches per optimizer step."""


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
    batches: tuple[BatchChoice, ...]
    """Combinations with the same global batch, largest micro-batch first; empty if unknown."""
    obstacles: tuple[str, ...]
    """Problems that prevent the resume."""

    @property
    def is_possible(self) -> bool:
        """Whether there are no problems."""
        return not self.obstacles


def plan_resume(path: str | os.PathLike[str], devices: int, stage: int) -> ResumePlan:
    """Predict the bytes and memory of a resume, and problems.

    Args:
        path: Directory, file or URL of the checkpoint.
        devices: Number of data-parallel ranks of the resumed run.
        stage: ZeRO stage of the resumed run, 0 to 3.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointFormatError: It is not a checkpoint that can be read.
        CheckpointCorruptedError: The checkpoint is incomplete.
        UnsupportedError: ``devices`` or ``stage`` is out of range.
    """
    if stage not in STAGES or devices < 1:
        msg = f"devices={devices}, stage={stage}: expected at least 1 device and a stage of 0 to 3"
        raise UnsupportedError(msg)
    with open_view(path) as checkpoint:
        report = report_of(checkpoint)
        damage = _damage(checkpoint)
    weights, frozen, trained = _weight_bytes(report, devices, stage)
    states, in_place = _state_bytes(report, devices, stage)
    whole = sum(p.size_bytes for p in report.parameters)
    frozen_once = sum(p.weight_bytes for p in report.parameters if p.group is None)
    copies = devices - 1 if stage != STAGE_WEIGHTS else 0
    again = whole if stage == 0 else frozen_once
    batch = report.global_batch_size
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


def _weight_bytes(report: CheckpointReport, devices: int, stage: int) -> tuple[int, int, int]:
    """Return a rank's bytes of weights, of frozen weights as stored, and of gradients."""
    weights = frozen = trained = 0
    for p in report.parameters:
        itemsize = itemsize_of(p.dtype)
        piece = piece_numel(p.elements, devices)
        weights += itemsize * (piece if stage == STAGE_WEIGHTS else p.elements)
        if p.group is None:
            share = piece if stage == STAGE_WEIGHTS else p.elements
            frozen += share * (p.weight_bytes // max(p.elements, 1))
        else:
            trained += itemsize * (piece if stage >= STAGE_GRADIENTS else p.elements)
    return weights, frozen, trained


def _state_bytes(report: CheckpointReport, devices: int, stage: int) -> tuple[int, int]:
    """Return a rank's bytes of masters and states, and of masters that are the weights."""
    states = in_place = 0
    for index, group in enumerate(report.groups):
        members = [p for p in report.parameters if p.group == index]
        each = next((p.size_bytes // p.elements for p in members if p.elements), 0)
        if stage == STAGE_WEIGHTS:
            states += each * sum(piece_numel(p.elements, devices) for p in members)
        else:  # At stage 0 every rank has the whole state.
            states += each * piece_numel(group.elements, devices if stage else 1)
        if stage == 0:
            same = [p for p in members if p.dtype == report.master_dtype]
            in_place += sum(p.elements * itemsize_of(p.dtype) for p in same)
    return states, in_place


def _choices(batch: int | None, devices: int) -> list[BatchChoice]:
    if not batch or batch % devices:
        return []
    each = batch // devices
    return [BatchChoice(m, each // m) for m in range(each, 0, -1) if each % m == 0]


def _obstacles(report: CheckpointReport, devices: int) -> list[str]:
    found = list(report.doubts)
    batch = report.global_batch_size
    if batch and batch % devices:
        counts = [n for n in device_counts(batch) if n <= 2 * devices]
        found.append(
            f"{devices} devices cannot share a global batch of {batch} samples evenly: "
            f"{', '.join(map(str, counts))} can, or allow_uneven_batches"
        )
    if report.weights_only:
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
