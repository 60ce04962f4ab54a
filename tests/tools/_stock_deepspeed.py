"""Checkpoints as stock DeepSpeed 0.19 lays them out, of any size, without an engine.

What DeepSpeed itself wrote is in ``tests/foreign/data``, and small. These have the same entries,
and sizes that matter: what is read of them is compared with the state that they were made of.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from tests.support.plain_checkpoints import STATES, WholeState

ABOUT = {"ds_version": "0.19.8", "mp_world_size": 1}


def write_stock(folder: Path, state: WholeState, stage: int, world_size: int) -> Path:
    """Write a checkpoint of ZeRO-2 or ZeRO-3; return its folder."""
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    for rank in range(world_size):
        if stage == 3 or not rank:
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            name = f"{prefix}mp_rank_00_model_states.pt"
            torch.save(_model_file(state, stage, world_size, rank), tag / name)
        shard = (
            _shard_3(state, world_size, rank) if stage == 3 else _shard_2(state, world_size, rank)
        )
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": shard, **ABOUT}, tag / name)
    return folder


def _piece(tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor, filled up with zeros, as ZeRO cuts it."""
    numel = -(-tensor.numel() // world_size)
    piece = torch.zeros(numel, dtype=tensor.dtype)
    mine = tensor.reshape(-1)[rank * numel : (rank + 1) * numel]
    piece[: mine.numel()] = mine
    return piece


def _model_file(state: WholeState, stage: int, world_size: int, rank: int) -> dict[str, Any]:
    cut = stage == 3
    weights = {
        name: torch.empty(0, dtype=torch.bfloat16) if cut else tensor.bfloat16()
        for name, tensor in state.masters.items()
    }
    frozen = {
        name: _piece(tensor, world_size, rank) if cut else tensor
        for name, tensor in state.frozen.items()
    }
    return {
        "module": {**weights, **({} if cut else frozen), **state.buffers},
        "buffer_names": list(state.buffers),
        "param_shapes": [OrderedDict((n, state.masters[n].shape) for n in g) for g in state.groups],
        "frozen_param_shapes": {n: t.shape for n, t in state.frozen.items()} or None,
        "frozen_param_fragments": frozen or None,
        "shared_params": {},
        "global_steps": int(state.step),
        "global_samples": 36,
        "skipped_steps": 0,
        "dp_world_size": world_size,
        "ds_config": {"train_batch_size": 12, "gradient_accumulation_steps": 1},
        **ABOUT,
    }


def _groups(state: WholeState) -> list[dict[str, Any]]:
    return [
        {**state.hyperparameters, "lr": rate, "params": [index]}
        for index, rate in enumerate(state.rates)
    ]


def _shard_2(state: WholeState, world_size: int, rank: int) -> dict[str, Any]:
    """Return what ZeRO-2 saves: a part of each group's flat buffer."""
    masters, states, paddings = [], {}, []
    for index, names in enumerate(state.groups):
        flat = torch.cat([state.masters[n].reshape(-1) for n in names])
        padding = -flat.numel() % world_size if rank == world_size - 1 else 0
        paddings.append(padding)
        piece = _piece(flat, world_size, rank)
        masters.append(piece[: piece.numel() - padding].clone())
        of_group = {
            key: _piece(
                torch.cat([state.states[n][key].reshape(-1) for n in names]), world_size, rank
            )
            for key in STATES
        }
        states[index] = {"step": torch.tensor(state.step), **of_group}
    return {
        "zero_stage": 2,
        "partition_count": [world_size] * len(state.groups),
        "group_paddings": paddings,
        "base_optimizer_state": {"state": states, "param_groups": _groups(state)},
        "single_partition_of_fp32_groups": masters,
    }


def _shard_3(state: WholeState, world_size: int, rank: int) -> dict[str, Any]:
    """Return what ZeRO-3 saves: a part of each parameter, one sub-group for each group."""

    def flat(whole: dict[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
        return torch.cat([_piece(whole[name], world_size, rank) for name in names])

    states = {
        index: {
            "step": torch.tensor(state.step),
            **{key: flat({n: state.states[n][key] for n in names}, names) for key in STATES},
        }
        for index, names in enumerate(state.groups)
    }
    return {
        "zero_stage": 3,
        "partition_count": world_size,
        "optimizer_state_dict": {"state": states, "param_groups": _groups(state)},
        "fp32_flat_groups": [flat(state.masters, names) for names in state.groups],
    }
