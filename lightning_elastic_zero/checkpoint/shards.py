"""What tensor ranks report to rank 0 in a save: their flat buffers, and their copies of weights.

Weights that are not cut are trained by each tensor rank for itself. They drift apart if gradients
differ, and a checkpoint keeps each tensor rank's copy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import xxhash

from lightning_elastic_zero.core.manifest import Manifest, Shard, from_json
from lightning_elastic_zero.core.tensors import RankState
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import UnsupportedError

_BUFFERS, _DIGEST, _SUMS = "buffers", "digest", "sums"

_MODULUS = 1 << 64
"""Sums over bits are those of 64-bit integers."""

log = logging.getLogger(__name__)


def shard_report(manifest: Manifest, state: RankState, data_rank: int) -> dict[str, Any]:
    """Return a rank's report as plain data; empty without tensor parallelism."""
    if manifest.tensor_parallel.size == 1:
        return {}
    rows = [asdict(buffer) for buffer in manifest.buffers]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(rows).encode())
    sent = rows if data_rank == 0 else []
    return {_BUFFERS: sent, _DIGEST: digest, _SUMS: dict(state.copy_sums)}


def check_shards(manifest: Manifest, reports: Sequence[Mapping[str, Any]]) -> tuple[Shard, ...]:
    """Rank 0: return the shards of the tensor ranks from 1 on, and warn of copies that differ.

    Raises UnsupportedError if data ranks of one tensor rank differ in their flat buffers, or tensor
    ranks in the number of theirs.
    """
    size = manifest.tensor_parallel.size
    if size == 1 or not all(reports):  # A rank of another run reports nothing, and is refused.
        return ()
    for rank, report in enumerate(reports):
        if report[_DIGEST] != reports[rank % size][_DIGEST]:
            msg = (
                f"rank {rank} has other flat buffers than rank {rank % size}, which has the same "
                "shards: use the same DeepSpeed config on all ranks"
            )
            raise UnsupportedError(msg)
    shards = [from_json(Shard, report) for report in reports[1:size]]
    for rank, shard in enumerate(shards, 1):
        if len(shard.buffers) != len(manifest.buffers):
            msg = (
                f"tensor rank {rank} has {len(shard.buffers)} flat buffers, tensor rank 0 "
                f"{len(manifest.buffers)}, because their shards have other sizes: increase "
                "zero_optimization.sub_group_size"
            )
            raise UnsupportedError(msg)
    _warn_of_copies(size, [report[_SUMS] for report in reports])
    return tuple(shards)


def _warn_of_copies(size: int, of_ranks: Sequence[Mapping[str, int]]) -> None:
    sums: list[dict[str, int]] = [{} for _ in range(size)]
    for rank, of_rank in enumerate(of_ranks):
        of_shard = sums[rank % size]
        for name, value in of_rank.items():
            of_shard[name] = (of_shard.get(name, 0) + value) % _MODULUS
    if drifted := [n for n, value in sums[0].items() if any(o[n] != value for o in sums[1:])]:
        log.warning(
            "%s. Each tensor rank's copy is saved; on another number of tensor ranks, some are "
            "dropped.",
            describe_drifted(drifted),
        )


def describe_drifted(names: Sequence[str]) -> str:
    """Describe copies of weights that differ between tensor ranks."""
    return (
        f"Every tensor rank trains {format_names(names)} for itself, and these copies have become "
        "different: their gradients differ between tensor ranks, so the model is not the one that "
        "is meant to train (a layer that the preset of AutoTP does not know?)"
    )
