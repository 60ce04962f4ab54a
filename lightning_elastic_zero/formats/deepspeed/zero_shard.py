"""Inside one rank's optimizer shard of stock DeepSpeed: what ``optimizer.state_dict()`` gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.formats.deepspeed.constants import FP32_STAGE_1_2, FP32_STAGE_3, STATES
from lightning_elastic_zero.manifest import STAGE_WEIGHTS

Shard: TypeAlias = "Mapping[str, Any]"
"""What one rank's ``optimizer.state_dict()`` gave."""

BASE = "optimizer_state_dict"

BF16 = "BF16_Optimizer"
"""DeepSpeed's wrapper for bf16 with fp32 gradients; its files do not say a stage."""


def stage_of(shard: Shard, where: str) -> int:
    """Return the ZeRO stage; 1 for BF16_Optimizer, whose shards do not say one.

    Raises:
        UnsupportedError: it is no shard of ZeRO-1, 2 or 3.
    """
    if FP32_STAGE_3 in shard:
        return STAGE_WEIGHTS
    if FP32_STAGE_1_2 in shard:
        return int(shard.get("zero_stage", 1))
    msg = f"{where}: an optimizer shard without ZeRO's master weights: it is not of ZeRO-1, 2 or 3"
    raise UnsupportedError(msg)


def engine_of(shard: Shard, stage: int) -> str:
    """Return the name of DeepSpeed's wrapper that wrote it."""
    if stage == STAGE_WEIGHTS:
        return "DeepSpeedZeroOptimizer_Stage3"
    return "DeepSpeedZeroOptimizer" if "zero_stage" in shard else BF16


def flats_of(shard: Shard) -> Sequence[torch.Tensor]:
    """Return the masters' flat buffers."""
    found: Sequence[torch.Tensor] = (
        shard[FP32_STAGE_3] if FP32_STAGE_3 in shard else shard[FP32_STAGE_1_2]
    )
    return found


def param_groups_of(shard: Shard) -> Sequence[Mapping[str, Any]]:
    """Return the torch parameter groups of a shard; none where it does not hold them."""
    for key in (BASE, STATES):
        if isinstance(states := shard.get(key), Mapping) and "param_groups" in states:
            found: Sequence[Mapping[str, Any]] = states["param_groups"]
            return found
    return ()


def hyperparameters_of(shard: Shard) -> list[dict[str, Any]]:
    """Return each parameter group's hyperparameters; none where the shard does not hold them."""
    return [{k: v for k, v in g.items() if k != "params"} for g in param_groups_of(shard)]


def ranks_of(shard: Shard) -> int:
    """Return the number of ranks that a shard says it was written on."""
    count = shard["partition_count"]
    return int(max(count) if isinstance(count, (list, tuple)) else count)


def group_of_flats(groups: Sequence[Mapping[str, Any]], stage: int, count: int) -> tuple[int, ...]:
    """Return each flat buffer's parameter group.

    Args:
        groups: torch's parameter groups; in ZeRO-3 their ``params`` are the sub-groups in order.
        stage: the ZeRO stage; below 3 each group has one flat buffer.
        count: how many flat buffers there are.

    Raises:
        CheckpointFormatError: several groups share the sub-groups, and nothing says which.
    """
    if stage != STAGE_WEIGHTS:
        return tuple(range(count))
    placed = tuple(index for index, group in enumerate(groups) for _ in group["params"])
    if len(placed) == count:
        return placed
    if len(groups) <= 1:
        return (0,) * count
    msg = (
        f"the shard has {len(groups)} parameter groups and {count} sub-groups, and does not say "
        "which sub-group belongs to which group"
    )
    raise CheckpointFormatError(msg)


def is_vector(value: object) -> bool:
    """Whether a state is more than one value."""
    return is_lean(value) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def is_lean(value: object) -> TypeGuard[list[torch.Tensor]]:
    """Whether a state is a list with one tensor per parameter, as elastic ZeRO-3 writes it."""
    tensors = isinstance(value, list) and all(isinstance(v, torch.Tensor) for v in value)
    return tensors and bool(value)


def numel_of(shape: Sequence[int]) -> int:
    """Return the elements of a shape."""
    return math.prod(map(int, shape))


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """What a shard says by itself, before anybody has named its parameters."""

    stage: int
    engine: str
    world_size: int
    flats: Sequence[torch.Tensor]
    """The masters' flat buffers."""
    groups: tuple[int, ...]
    """Each flat buffer's parameter group."""
    tail_paddings: tuple[int, ...]
    """ZeRO-1/2: elements of padding at the end of each of this rank's partitions; the masters may
    lie there without them."""
    paddings: tuple[tuple[int, ...], ...]
    """ZeRO-1/2: recorded padding after each parameter of each flat buffer; empty where none is."""
    names: tuple[tuple[str, ...], ...]
    """ZeRO-1/2: the parameters of each group that reach into this rank's partition, as DeepSpeed
    lists them with their places. The places are wrong where ``round_robin_gradients`` was on."""


def shard_metadata(shard: Shard, where: str) -> ShardMetadata:
    """Return what a shard says by itself.

    Raises:
        CheckpointFormatError: it does not say which sub-group is of which parameter group.
        UnsupportedError: it is no shard of ZeRO-1, 2 or 3.
    """
    stage, flats = stage_of(shard, where), flats_of(shard)
    # Elastic ZeRO-3 records one padding per parameter here, and does not cut the masters.
    recorded = () if stage == STAGE_WEIGHTS else shard.get("group_paddings")
    tail_paddings = recorded or (0,) * len(flats)
    return ShardMetadata(
        stage=stage,
        engine=engine_of(shard, stage),
        world_size=ranks_of(shard),
        flats=flats,
        groups=group_of_flats(param_groups_of(shard), stage, len(flats)),
        tail_paddings=tuple(map(int, tail_paddings)),
        paddings=tuple(map(tuple, shard.get("param_alignment_paddings") or ())),
        names=tuple(map(tuple, shard.get("param_slice_mappings") or ())),
    )
