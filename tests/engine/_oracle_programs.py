"""What ranks do to put the oracle itself to the test."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import distributed

from tests.support.checkpoints import STEPS
from tests.support.engines import Engine, Setup, engine_of, train, trained
from tests.support.oracle import PADDING, differences, dump, flat_buffers, positions, unrounded


def flipped_bits_found(setup: Setup) -> dict[str, tuple[dict[str, int], list[str]]] | None:
    """Flip a bit of the first element of a buffer on the last rank; give what the oracle finds."""
    found: dict[str, tuple[dict[str, int], list[str]]] = {}
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        before = dump(engine, setup)
        for kind in ("master", "exp_avg"):
            flat, place = _some_element(engine, setup)
            tensor = flat if kind == "master" else engine.optimizer.optimizer.state[flat][kind]
            _flip_lowest_bit(tensor, place)
            after = dump(engine, setup)
            _flip_lowest_bit(tensor, place)
            if before is not None and after is not None:
                found[kind] = (differences(before, after), unrounded(after))
    return found or None


def _some_element(engine: Engine, setup: Setup) -> tuple[torch.Tensor, int]:
    """Return an element that this rank holds."""
    for flat, places in zip(flat_buffers(engine, setup), positions(setup), strict=True):
        held = (places != PADDING).nonzero()
        if len(held):
            return flat, int(held[0])
    msg = "this rank holds nothing"
    raise AssertionError(msg)


def _flip_lowest_bit(tensor: torch.Tensor, place: int) -> None:
    if distributed.get_rank() == distributed.get_world_size() - 1:
        tensor.detach().view(torch.int32)[place] ^= 1


Values: TypeAlias = "dict[str, list[float]]"


def public_values(setup: Setup) -> tuple[Values, Values]:
    """Return what the oracle finds in a trained run, and what DeepSpeed's public functions give."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # After a first step ZeRO-1/2 does not find the states of groups that were stepped last.
    keys = () if setup.zero in "12" else ("exp_avg", "exp_avg_sq")
    theirs: Values = {}
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        found = dump(engine, setup) or {}
        for name, p in trained(engine.module).items():
            theirs[f"master/{name}"] = safe_get_full_fp32_param(p).flatten().tolist()
            for key in keys:
                values = safe_get_full_optimizer_state(p, key)
                theirs[f"{key}/{name}"] = values.flatten().tolist()
    kinds = ("master", *keys)
    ours = {k: v.flatten().tolist() for k, v in found.items() if k.split("/")[0] in kinds}
    return ours, theirs
