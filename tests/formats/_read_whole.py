"""Read a whole checkpoint in one plain process, without engine, ranks or DeepSpeed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer, TransferPlan
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.formats.reader import WEIGHT, CheckpointReader


def read_whole(
    path: Path, *, allow_pickle: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return masters, frozen weights, states and buffers, after all checks of a load.

    Returns:
        1-D tensors by ``kind/name``; buffers with their shapes.
    """
    with closing(open_checkpoint(path, allow_pickle=allow_pickle)) as source:
        source.check_all()
        source.verify(0, 1, NO_PROGRESS)
        return _all_of(source, dtype)


def _all_of(source: CheckpointReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    manifest = source.manifest
    owned = {p.name for p in manifest.optimized}
    found: dict[str, torch.Tensor] = {}
    targets: list[dict[str, torch.Tensor]] = []
    transfers: list[Transfer] = []
    for buffer, parameter in enumerate((*manifest.optimized, *manifest.frozen)):
        keys = [WEIGHT]
        if parameter.name in owned:
            group = manifest.groups[parameter.group or 0]
            keys += [k.name for k in group.state if k.kind == "elementwise"]
        of_weights = "master" if parameter.name in owned else "frozen"
        targets.append(
            {key: torch.full((parameter.numel,), float("nan"), dtype=dtype) for key in keys}
        )
        for key, target in targets[-1].items():
            found[f"{key or of_weights}/{parameter.name}"] = target
        if parameter.numel:
            whole = Fragment(parameter.name, 0, parameter.numel, 0, buffer, 0)
            layout = source.layout() if parameter.name in owned else source.frozen_layout()
            transfers += [t for _, ts in TransferPlan([whole], layout).by_rank() for t in ts]
    source.check(
        sorted({t.source_rank for t in transfers if t.name in owned}),
        sorted({t.source_rank for t in transfers if t.name not in owned}),
    )
    source.read(transfers, targets, NO_PROGRESS)
    state = source.module_state(0, manifest.world_size)
    return {**found, **{f"buffer/{name}": tensor for name, tensor in state.buffers.items()}}
