"""``inspect``: what a checkpoint is and holds, from small files, whatever its size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_elastic_zero.formats.deepspeed.missing_latest import describe_missing_latest
from lightning_elastic_zero.manifest import Group, Manifest, Parameter, Plain, Writer
from lightning_elastic_zero.tensor_state import itemsize_of
from lightning_elastic_zero.tools.checkpoint_view import (
    OpenCheckpoint,
    holds_whole_tensors,
    open_view,
)

MOST_DEVICES = 4096
"""The largest number of devices that is listed."""


@dataclass(frozen=True, slots=True)
class ParameterReport:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """In which the model has it."""
    elements: int
    weight_bytes: int
    """Of its master weight, or frozen weight, as it is stored."""
    state_bytes: int
    """Of its element-wise optimizer states."""
    group: int | None
    """None: no optimizer owns it."""
    aliases: tuple[str, ...]
    """Other names of a tied weight."""

    @property
    def size_bytes(self) -> int:
        """Of all that is stored for it."""
        return self.weight_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One parameter group of the optimizer."""

    parameters: int
    elements: int
    hyperparameters: Mapping[str, Plain]
    state: Mapping[str, str]
    """State keys, each with its kind and type."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file."""

    name: str
    size_bytes: int | None
    """As it lies there; None: it is missing."""
    recorded_bytes: int | None = None
    """As it was written; None: nothing says, as of most kinds."""

    @property
    def problem(self) -> str:
        """What is wrong with it by its name and size; empty where nothing is."""
        if self.size_bytes is None:
            return f"{self.name} is missing"
        if self.recorded_bytes not in {None, self.size_bytes}:
            return f"{self.name} has {self.size_bytes} bytes, recorded are {self.recorded_bytes}"
        return ""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What ``inspect_checkpoint`` found."""

    path: str
    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``."""
    writer: Writer
    stage: int
    """The ZeRO stage; 0 also where whole tensors lie in it, of no ``writer.engine``."""
    world_size: int
    precision: str
    master_dtype: str
    steps: int
    epoch: int | None
    samples: int
    """That DeepSpeed had counted; 0 where nothing says."""
    epoch_samples: int | None
    """Of the epoch, consumed by all ranks; None where nothing says."""
    global_batch_size: int | None
    gradient_accumulation_steps: int
    weights_only: bool
    lacks: tuple[str, ...]
    """What a run has and this checkpoint does not hold."""
    doubts: tuple[str, ...]
    """Why its optimizer state may not be of use; empty as a rule."""
    note: str
    """What other software cannot do with it, though it is whole; empty as a rule."""
    excluded: tuple[str, ...]
    groups: tuple[GroupReport, ...]
    parameters: tuple[ParameterReport, ...]
    module_buffers: tuple[str, ...]
    client_objects: tuple[str, ...]
    """Where in the trainer's state objects lie that are no plain data."""
    files: tuple[FileReport, ...]
    resumable_on: str

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(p.elements for p in self.parameters)

    @property
    def file_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes or 0 for file in self.files)

    @property
    def damage(self) -> tuple[str, ...]:
        """Files that belong to it and are missing, or of another size: no byte of them is read."""
        return tuple(file.problem for file in self.files if file.problem)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it, with the damage that the sizes of its files show."""
        return {**asdict(self), "damage": self.damage}


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointReport:
    """Describe what a checkpoint of any kind is and holds.

    Only what tells of the tensors is read, never a tensor: it takes milliseconds whatever the size.

    Args:
        path: its directory, or file.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: a checkpoint is there that is not whole.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """
    with open_view(path) as checkpoint:
        return report_of(checkpoint)


def report_of(checkpoint: OpenCheckpoint) -> CheckpointReport:
    """Return what an open checkpoint is and holds."""
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
    group = None if parameter.group is None else manifest.groups[parameter.group]
    held = parameter.numel if parameter.name not in manifest.excluded else 0
    return ParameterReport(
        name=parameter.name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        elements=parameter.numel,
        weight_bytes=held * itemsize_of(dtype),
        state_bytes=held * _state_itemsize(group),
        group=parameter.group,
        aliases=parameter.aliases,
    )


def _state_itemsize(group: Group | None) -> int:
    """Return the bytes of an element's states."""
    keys = () if group is None else group.state
    return sum(itemsize_of(key.dtype) for key in keys if key.kind == "elementwise")


def _files(checkpoint: OpenCheckpoint) -> Iterator[FileReport]:
    reader = checkpoint.reader
    for name in reader.names():
        yield FileReport(name, _size(reader.files.folder / name), reader.recorded_bytes(name))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def device_counts(global_batch_size: int) -> list[int]:
    """Return the numbers of devices that can share a global batch evenly."""
    most = min(global_batch_size, MOST_DEVICES)
    return [n for n in range(1, most + 1) if global_batch_size % n == 0]


def _resumable_on(manifest: Manifest, *, unmatched: bool) -> str:
    """Return on what a run can go on from it."""
    batch = manifest.progress.global_batch_size
    if manifest.weights_only:
        return "any number of devices, ZeRO 0 to 3: a new run, from the weights alone"
    text = "any number of devices, ZeRO 0 to 3"
    if unmatched:
        text += " (whose the optimizer's state is, the model's code has to tell)"
    if batch:
        counts = ", ".join(map(str, device_counts(batch)))
        text += f"; with the same global batch of {batch} samples: {counts} devices"
    return text
