"""The copies of a weight that each tensor rank trains for itself, compared in a checkpoint's files.

Saves of this library compare them in memory (``checkpoint/shards``). Those of DeepSpeed do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_elastic_zero.core.layout import Fragment, Layout, Resharding, TransferPlan
from lightning_elastic_zero.core.manifest import Parameter
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import different_bits
from lightning_elastic_zero.formats.reader import WEIGHT, CheckpointReader

_COMPARED_ELEMENTS = 1 << 16
"""Elements of a weight that are compared, from its first: norms whole, an embedding in part. All of
an embedding on eight tensor ranks can be more bytes than a third of the state."""

_BATCH = 256
"""Weights that are in memory together."""


def drifted_copies(reader: CheckpointReader, progress: Progress = NO_PROGRESS) -> list[str]:
    """Return the names of weights of which the copies of the tensor ranks differ."""
    manifest = reader.manifest
    if manifest.tensor_parallel.size == 1:
        return []
    found = []
    for parameters, layout in (
        (manifest.optimized, reader.layout()),
        (manifest.frozen, reader.frozen_layout()),
    ):
        copied = [p for p in parameters if p.numel and p.name not in manifest.sharding.cuts]
        for first in range(0, len(copied), _BATCH):
            found += _drifted(reader, copied[first : first + _BATCH], layout, progress)
    return found


def _drifted(
    reader: CheckpointReader, parameters: Sequence[Parameter], layout: Layout, progress: Progress
) -> list[str]:
    names: set[str] = set()
    first = _copies_of(reader, 0, parameters, layout, progress)
    for rank in range(1, reader.manifest.tensor_parallel.size):
        others = _copies_of(reader, rank, parameters, layout, progress)
        for parameter, one, other in zip(parameters, first, others, strict=True):
            if different_bits(one, other).any():
                names.add(parameter.name)
    return [parameter.name for parameter in parameters if parameter.name in names]


def _copies_of(
    reader: CheckpointReader,
    rank: int,
    parameters: Sequence[Parameter],
    layout: Layout,
    progress: Progress,
) -> list[torch.Tensor]:
    """Read the first elements of a tensor rank's copies."""
    manifest, wanted, copies = reader.manifest, [], []
    for index, parameter in enumerate(parameters):
        dtype = parameter.dtype if parameter.group is None else manifest.master_dtype
        copies.append(
            torch.empty(min(parameter.numel, _COMPARED_ELEMENTS), dtype=getattr(torch, dtype))
        )
        wanted.append(Fragment(parameter.name, 0, copies[-1].numel(), 0, index, 0))
    same_shards = Resharding(manifest.sharding, manifest.sharding, rank)
    targets = [{WEIGHT: copy} for copy in copies]
    for _, transfers in TransferPlan(wanted, layout, same_shards).by_rank():
        reader.read(transfers, targets, progress)
    return copies
