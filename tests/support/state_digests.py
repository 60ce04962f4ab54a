"""A whole checkpoint, read in one process without DeepSpeed, as digests of its values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer, TransferPlan
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.reader import WEIGHT, CheckpointReader
from lightning_elastic_zero.storage.paths import AnyPath
from tests.support.bits import bitwise_repr


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def read_digests(path: AnyPath) -> dict[str, str]:
    """Return a digest of each value that a load can receive, by name."""
    with closing(open_checkpoint(path)) as source:
        source.check_all()
        source.verify(0, 1, NO_PROGRESS)
        tensors = _tensors(source)
        found = {name: digest(bits_of(tensor)) for name, tensor in tensors.items()}
        found |= dict(_once(source))
        found["manifest"] = digest(bitwise_repr(asdict(source.manifest)).encode())
    return found


def _tensors(source: CheckpointReader) -> dict[str, torch.Tensor]:
    manifest = source.manifest
    masters = {p.name: p.numel for p in manifest.optimized if p.numel}
    frozen = {p.name: p.numel for p in manifest.frozen if p.numel}
    targets: list[dict[str, torch.Tensor]] = []
    transfers: list[Transfer] = []
    for buffer, (name, numel) in enumerate({**masters, **frozen}.items()):
        layout = source.layout() if name in masters else source.frozen_layout()
        plan = TransferPlan([Fragment(name, 0, numel, 0, buffer, 0)], layout)
        transfers += [t for _, of_rank in plan.by_rank() for t in of_rank]
        keys = _keys_of(manifest, name).items()
        targets.append({key: torch.empty(numel, dtype=dtype) for key, dtype in keys})
    source.check(
        sorted({t.source_rank for t in transfers if t.name in masters}),
        sorted({t.source_rank for t in transfers if t.name in frozen}),
    )
    source.read(transfers, targets, NO_PROGRESS)
    return {
        f"{key or 'weight'}/{name}": target
        for name, of_name in zip([*masters, *frozen], targets, strict=True)
        for key, target in of_name.items()
    }


def _keys_of(manifest: Manifest, name: str) -> Mapping[str, torch.dtype]:
    parameter = next(p for p in manifest.parameters if p.name == name)
    if parameter.group is None:
        return {WEIGHT: getattr(torch, parameter.dtype)}
    state = [k for k in manifest.groups[parameter.group].state if k.kind == "elementwise"]
    masters = getattr(torch, manifest.master_dtype)
    return {WEIGHT: masters, **{k.name: getattr(torch, k.dtype) for k in state}}


def _once(source: CheckpointReader) -> Iterator[tuple[str, str]]:
    """Yield each value once, as each rank of the save would receive it."""
    manifest = source.manifest
    for rank in range(manifest.world_size):
        once: Any = source.module_state(rank, manifest.world_size)
        for field in ("buffers", "client_state", "loss_scaler", "lr_scheduler"):
            value = getattr(once, field)
            as_dict = dict(value) if isinstance(value, Mapping) else value
            yield f"{field} of rank {rank}", digest(bitwise_repr(as_dict).encode())
        for name, buffer in once.buffers.items() if rank == 0 else ():
            yield f"buffer/{name}", digest(bits_of(buffer))
        for at in source.layout().on_rank(rank):
            scalars = bitwise_repr(dict(source.scalars(at)))
            yield f"scalars of {at.name} on rank {rank}", digest(scalars.encode())
