"""The oracle detects state that was not restored, and shares no code with the library."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import distributed

from tests.support import engines, oracle
from tests.support.checkpoints import STEPS, Saved, fresh
from tests.support.engines import UNTRAINED, Engine, EngineCase, engine_of, train, trained
from tests.support.oracle import (
    PADDING,
    Dump,
    differences,
    dump,
    flat_buffers,
    positions,
    unrounded,
)
from tests.support.ranks import Pools


def flipped_bits_found(setup: EngineCase) -> dict[str, tuple[dict[str, int], list[str]]] | None:
    """Flip a bit in a buffer on the last rank; return the oracle's findings."""
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


def _some_element(engine: Engine, setup: EngineCase) -> tuple[torch.Tensor, int]:
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


def public_values(setup: EngineCase) -> tuple[Values, Values]:
    """Return the oracle's values of a trained run, and those of DeepSpeed's public functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    # After a first step, ZeRO-1/2 does not find the states of groups that were stepped last.
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


pytestmark = pytest.mark.engine

RUNS = (
    EngineCase(2, "1"),
    EngineCase(3, "2", "bf16", alignment=True),
    EngineCase(4, "3", sub_group=700),
    EngineCase(2, "B", "bf16"),
)


def must_differ(saved: Dump) -> set[str]:
    """Return keys that cannot be equal by chance in a run with another seed and other rates."""
    kinds = ("master", "weight", "frozen", "buffer", "exp_avg", "exp_avg_sq", "scalar")
    differing = {k for k in saved if k.split("/")[0] in kinds}
    differing |= {k for k in saved if k.endswith(("/lr", "/weight_decay", "/betas"))}
    differing |= {"counter/global_steps", "counter/global_samples"}
    # Without gradients, moments are zero in every run.
    return differing - {f"exp_avg/{UNTRAINED}", f"exp_avg_sq/{UNTRAINED}"}


@pytest.mark.parametrize("setup", [*RUNS, EngineCase(3, "0")], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_loaded_nothing_differs_everywhere(
    setup: EngineCase, steps: int, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(setup)
    verdict = pools.run(setup.world, partial(fresh, setup, saved, steps=steps))[0]
    assert verdict is not None
    assert must_differ(saved.dump()) <= verdict.differing.keys()


@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_one_flipped_bit_on_one_rank_is_found_and_named(setup: EngineCase, pools: Pools) -> None:
    found = pools.run(setup.world, partial(flipped_bits_found, setup))[0]
    assert found is not None
    for kind, (differing, rounded_off) in found.items():
        assert [name.split("/")[0] for name in differing] == [kind]
        assert list(differing.values()) == [1]
        assert bool(rounded_off) == (kind == "master" and setup.precision == "fp32")


@pytest.mark.parametrize("setup", RUNS, ids=str)
def test_the_oracle_agrees_with_safe_get_full(setup: EngineCase, pools: Pools) -> None:
    ours, theirs = pools.run(setup.world, partial(public_values, setup))[0]
    assert ours
    assert theirs == ours


def test_the_oracle_does_not_import_the_library() -> None:
    for module in (oracle, engines):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        imported += [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert not [name for name in imported if name.startswith("lightning_elastic_zero")]
