"""Reads a checkpoint whole, in one plain process: no engine, no ranks, no DeepSpeed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from lightning_elastic_zero.formats import WEIGHT, CheckpointReader, ReadRequest, open_checkpoint
from lightning_elastic_zero.layout import Fragment, Layout, TransferPlan
from lightning_elastic_zero.manifest import Parameter
from lightning_elastic_zero.storage import ignore_bytes


def read_whole(
    path: Path, *, allow_pickle: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return masters, frozen weights, states and buffers; every check of a load is made.

    Returns:
        1-D tensors by ``kind/name``; buffers with their shapes.
    """
    with closing(open_checkpoint(path, allow_pickle=allow_pickle)) as source:
        source.check_all()
        source.verify(0, 1, ignore_bytes)
        return _all_of(source, dtype)


def _all_of(source: CheckpointReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    manifest = source.manifest
    found: dict[str, torch.Tensor] = {}
    requests: list[ReadRequest] = []
    for parameter in manifest.optimized:
        group = manifest.groups[parameter.group or 0]
        keys = [WEIGHT, *(k.name for k in group.state if k.kind == "elementwise")]
        for key in keys:
            target = torch.full((parameter.numel,), float("nan"), dtype=dtype)
            found[f"{key or 'master'}/{parameter.name}"] = target
            requests += _requests(parameter, key, target, source.layout())
    for parameter in manifest.frozen:
        target = torch.full((parameter.numel,), float("nan"), dtype=dtype)
        found[f"frozen/{parameter.name}"] = target
        requests += _requests(parameter, WEIGHT, target, source.frozen_layout())
    owned = {p.name for p in manifest.optimized}
    source.check(
        sorted({r.transfer.source_rank for r in requests if r.transfer.name in owned}),
        sorted({r.transfer.source_rank for r in requests if r.transfer.name not in owned}),
    )
    source.read(requests, ignore_bytes)
    state = source.module_state(0, manifest.world_size)
    return {**found, **{f"buffer/{name}": tensor for name, tensor in state.buffers.items()}}


def _requests(
    parameter: Parameter, key: str, target: torch.Tensor, layout: Layout
) -> list[ReadRequest]:
    if not parameter.numel:
        return []
    whole = Fragment(parameter.name, 0, parameter.numel, 0, 0, 0)
    by_rank = TransferPlan([whole], layout).by_rank()
    return [ReadRequest(key, t, target) for _, transfers in by_rank for t in transfers]
