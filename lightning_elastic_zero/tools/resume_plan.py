"""``plan``: bytes, memory and problems of a resume on another number of devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, STAGES
from lightning_elastic_zero.partition import piece_numel
from lightning_elastic_zero.tensor_state import itemsize_of
from lightning_elastic_zero.tools.checkpoint_view import OpenCheckpoint, open_view
from lightning_elastic_zero.tools.inspection import CheckpointReport, device_counts, report_of
from lightning_elastic_zero.tools.verification import DAMAGE

STAGE_GRADIENTS = 2
"""The ZeRO stage from which on gradients are partitioned too."""


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A way to take the same global batch."""

    micro_batch: int
    """Samples of a device at a time."""
    accumulation: int
    """Of those, for an optimizer step."""


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What ``plan_resume`` found."""

    path: str
    devices: int
    stage: int
    read_bytes_per_rank: int
    """Of the rank that reads most: its part of masters, states and frozen weights."""
    read_bytes: int
    """Of all ranks together, without what checksums need around runs (a twentieth at most)."""
    state_bytes_per_rank: int
    """Masters and optimizer states, on the device or offloaded. In stage 0 without those masters
    that are the weights themselves, as in fp32; ZeRO copies them there too."""
    weight_bytes_per_rank: int
    """The model's weights, between steps."""
    gradient_bytes_per_rank: int
    """Of the trained weights in their low-precision type, partitioned from ZeRO-2 on."""
    global_batch_size: int | None
    batches: tuple[BatchChoice, ...]
    """For the same global batch, the largest micro-batch first; empty where nothing says it."""
    obstacles: tuple[str, ...]
    """Problems that prevent the resume."""

    @property
    def is_possible(self) -> bool:
        """Whether there are no problems."""
        return not self.obstacles


def plan_resume(path: str | os.PathLike[str], devices: int, stage: int) -> ResumePlan:
    """Compute what a resume on so many devices, at a ZeRO stage, would read and take.

    Args:
        path: a checkpoint of any kind.
        devices: the data-parallel ranks that are to resume.
        stage: 0 to 3.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: a checkpoint is there that is not whole.
        UnsupportedError: no run has that stage, or so few devices.
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
    """Return a rank's bytes of weights, of those that are frozen, as stored, and of gradients."""
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
    """Return a rank's bytes of masters and states, and of those masters that are the weights."""
    states = in_place = 0
    for index, group in enumerate(report.groups):
        members = [p for p in report.parameters if p.group == index]
        each = next((p.size_bytes // p.elements for p in members if p.elements), 0)
        if stage == STAGE_WEIGHTS:
            states += each * sum(piece_numel(p.elements, devices) for p in members)
        else:  # In stage 0 every rank has all of it.
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
    """Return what is missing, or has another size than when it was written."""
    try:
        checkpoint.reader.check_all()
    except DAMAGE as error:
        return [str(error)]
    return []
