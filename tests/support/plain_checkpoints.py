"""Checkpoints in this library's format, of any stage and world size, written by one process."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import (
    Group,
    Manifest,
    Parameter,
    StateKey,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.core.tensors import FlatState, RankState, dtype_name, state_key
from lightning_elastic_zero.formats.client_state import SplitState, split_objects
from lightning_elastic_zero.formats.elastic_write import RankWriter

SHAPES = {
    "layers.0.weight": (13, 7),
    "layers.0.bias": (13,),
    "layers.1.weight": (13, 7),
    "layers.1.bias": (13,),
    "scale": (),
    "head.weight": (5, 13),
}
"""Shapes of the trained parameters; the frozen one is separate."""

STATES = ("exp_avg", "exp_avg_sq")


def _values(seed: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


@dataclass
class WholeState:
    masters: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]
    """Keys are the parameter and the state key."""
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    step: float = 3.0
    """An int is saved as such, a float as a tensor, as in torch's optimizers."""
    steps: tuple[float, ...] = ()
    """Different steps for each flat buffer."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Other scalar states, equal in all flat buffers."""
    own: tuple[dict[str, Any], ...] = ()
    """Values of these that each rank has instead."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of ``RankState``, such as ``loss_scaler``."""
    groups: tuple[tuple[str, ...], ...] = ()
    rates: tuple[float, ...] = (1e-3, 5e-4)
    client: dict[str, Any] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.999)})


def make_state(shapes: dict[str, tuple[int, ...]] | None = None) -> WholeState:
    shapes = SHAPES if shapes is None else shapes
    names = tuple(shapes)
    flat = torch.float32
    return WholeState(
        masters={n: _values(n, s, flat) for n, s in shapes.items()},
        states={
            n: {k: _values(f"{n}/{k}", s, flat).abs() for k in STATES} for n, s in shapes.items()
        },
        frozen={"frozen.weight": _values("frozen", (4, 3), torch.bfloat16)},
        buffers={"mean": _values("mean", (6,), flat), "count": torch.tensor(7)},
        groups=(names[: len(names) // 2], names[len(names) // 2 :]),
        client={
            "epoch": 2,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.6",
            "hyper_parameters": {"width": 7},
        },
    )


def manifest_of(state: WholeState, stage: int, world_size: int, **changes: Any) -> Manifest:
    group_of = {name: i for i, names in enumerate(state.groups) for name in names}
    keys: tuple[StateKey, ...] = (
        *(StateKey(k, "elementwise", "float32") for k in STATES),
        *(state_key(k, v, elementwise=False) for k, v in state.scalars.items()),
        state_key("step", _step_value(state.step), elementwise=False),
    )
    if changes.get("weights_only"):
        keys = ()
    buffers = []
    for index, names in enumerate(state.groups):
        numels = tuple(state.masters[n].numel() for n in names)
        part = -(-sum(numels) // world_size)
        buffers.append(FlatBuffer(index, names, numels, partition_numel=0 if stage == 3 else part))
    trained = [
        Parameter(name, tuple(t.shape), "bfloat16", group_of[name])
        for name, t in state.masters.items()
    ]
    frozen = [
        Parameter(name, tuple(t.shape), dtype_name(t.dtype), None)
        for name, t in state.frozen.items()
    ]
    manifest = Manifest(
        save_id=f"save{stage}x{world_size}",
        stage=stage,
        world_size=world_size,
        precision="bf16",
        master_dtype="float32",
        parameters=(*trained, *frozen),
        groups=tuple(
            Group(names, {**state.hyperparameters, "lr": rate}, keys)
            for names, rate in zip(state.groups, state.rates, strict=True)
        ),
        buffers=tuple(buffers),
        module_buffers=tuple(state.buffers),
        files=(),
        progress=TrainingProgress(
            global_steps=3,
            global_samples=36,
            global_batch_size=12,
            sampler={"epoch": 2, "epoch_samples": 12},
        ),
        writer=Writer(library="0.1.0", torch="2.13", engine="engine", optimizer="AdamW"),
    )
    return replace(manifest, **changes)


def _step_value(step: float) -> torch.Tensor | int:
    return step if isinstance(step, int) else torch.tensor(step)


def _cut(fragments: list[Fragment], whole: dict[str, torch.Tensor], numel: int) -> torch.Tensor:
    flat = torch.full((numel,), float("nan"))
    for f in fragments:
        flat[f.offset : f.offset + f.stop - f.start] = whole[f.name].view(-1)[f.start : f.stop]
    return flat


def rank_state(state: WholeState, manifest: Manifest, rank: int) -> RankState:
    held = manifest.layout().on_rank(rank)
    flats = []
    for index in range(len(manifest.buffers)):
        mine = [f for f in held if f.buffer == index]
        numel = max((f.offset + f.stop - f.start for f in mine), default=0) + 3
        step = state.steps[index] if state.steps else state.step
        states = (
            {}
            if manifest.weights_only
            else {
                key: _cut(mine, {n: s[key] for n, s in state.states.items()}, numel)
                for key in STATES
            }
        )
        own = state.own[rank] if state.own else {}
        scalars = {"step": _step_value(step), **state.scalars, **own}
        scalars = {} if manifest.weights_only else scalars
        flats.append(FlatState(tuple(mine), _cut(mine, state.masters, numel), states, scalars))
    # With more ranks than elements, some ranks have an empty piece.
    pieces = {name: t.new_empty(0) for name, t in state.frozen.items()}
    pieces |= {
        f.name: state.frozen[f.name].view(-1)[f.start : f.stop]
        for f in manifest.frozen_layout().on_rank(rank if manifest.stage == 3 else 0)
    }
    engine = {"loss_scaler": {}, **state.engine}
    return RankState(tuple(flats), pieces, state.buffers, {}, **engine)


def write_elastic(
    folder: Path,
    state: WholeState,
    stage: int = 2,
    world_size: int = 2,
    **changes: Any,
) -> Path:
    (folder / "checkpoint").mkdir(parents=True)
    manifest = manifest_of(state, stage, world_size, **changes)
    files = []
    for rank in range(world_size):
        writer = RankWriter(folder, manifest, rank, NO_PROGRESS)
        client = split_objects({} if rank else state.client)
        held = rank_state(state, manifest, rank)
        if rank:
            held = replace(held, module_buffers={})
        files += writer.write(held, client, SplitState())
    (folder / "manifest.json").write_text(replace(manifest, files=tuple(files)).to_json())
    (folder / "latest").write_text("checkpoint")
    return folder


def write_dcp(folder: Path, tree: dict[str, Any]) -> Path:
    """Write a checkpoint of ``torch.distributed.checkpoint``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns about the missing process group.
        dcp.save(tree, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    return folder
