"""Writes elastic ZeRO-3 checkpoints after the description of DeepSpeed pull request 8031.

That format was never released: the request was closed, and its code is not to be had. These files
are made from the words of its description (fp32 flat groups stay, padded, for weight recovery; the
optimizer's state is lean and by parameter, under ``base_optimizer_state``), so a test with them
shows that the description is read, and not that anybody's files are.

Nothing here may import ``lightning_elastic_zero``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.engine._oracle import dump
from tests.engine._setup import Setup, engine_of, train
from tests.foreign._deepspeed_writers import CLIENT_STATE, keep
from tests.foreign._fixture_table import FixtureRow


def write_pr_8031(row: FixtureRow, folder: str, by_name: bool) -> None:
    """Train, save with stock DeepSpeed, and rewrite each rank's shard. Collective."""
    setup = row.setup
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, row.steps)
        keep(dump(engine, setup), folder, "truth")
        engine.save_checkpoint(f"{folder}/checkpoint", tag="elastic", client_state=CLIENT_STATE)
        distributed.barrier()
        _rewrite(Path(folder) / "checkpoint" / "elastic", setup, by_name=by_name)
        distributed.barrier()


def _rewrite(tag: Path, setup: Setup, *, by_name: bool) -> None:
    rank = distributed.get_rank()
    prefix = "bf16_" if setup.precision == "bf16" else ""
    path = tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    model = torch.load(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
    tree = torch.load(path, weights_only=False)
    shard = tree["optimizer_state_dict"]
    states = shard.pop("optimizer_state_dict")["state"]
    lean = []
    for index, shapes in enumerate(model["param_shapes"]):
        of_names = _lean(states.get(index, {}), shapes, rank, setup.world)
        lean.append(of_names if by_name else list(of_names.values()))
    shard["base_optimizer_state"] = lean
    torch.save(tree, path)


def _lean(
    state: Mapping[str, Any], shapes: Mapping[str, torch.Size], rank: int, world: int
) -> dict[str, dict[str, Any]]:
    """Cut a sub-group's flat states into this rank's piece of each parameter, without padding."""
    found: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, shape in shapes.items():
        piece = -(-shape.numel() // world)
        numel = max(0, min(piece, shape.numel() - rank * piece))
        found[name] = {
            key: value[offset : offset + numel].clone()
            if isinstance(value, torch.Tensor) and value.ndim
            else value
            for key, value in state.items()
        }
        offset += piece
    return found
