"""Rates and weights that differ between ranks cause a warning and end no run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.support.engines import EngineCase, engine_of, train
from tests.support.outcome import captured_log
from tests.support.ranks import Pools


@dataclass(frozen=True)
class Drifted:
    rates: list[float]
    warnings: list[str]


def save_drifted(setup: EngineCase, path: str, rates: list[float], *, steps: int = 0) -> Drifted:
    """Save a run in which each rank has its own rate and a matching scheduler."""
    from lightning_elastic_zero.api import save_checkpoint

    rank = distributed.get_rank()
    with (
        captured_log("lightning_elastic_zero", logging.WARNING) as warned,
        engine_of(setup, 0) as engine,
    ):
        train(engine, setup, 0, 1)
        groups = engine.optimizer.param_groups
        groups[0]["lr"] = rates[rank]
        train(engine, setup, 1, 1 + steps)
        scheduler = {"_last_lr": [rates[rank]], "num_bad_epochs": rank}
        save_checkpoint(engine, path, {"lr_schedulers": [scheduler], "epoch": 3})
        return Drifted([group["lr"] for group in groups], warned)


def resume_drifted(setup: EngineCase, path: str) -> tuple[list[float], dict[str, Any]]:
    """Load; return the rates of this rank and the client state."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        loaded = load_checkpoint(engine, path)
        return [group["lr"] for group in engine.optimizer.param_groups], loaded.client_state


pytestmark = pytest.mark.engine


@pytest.mark.parametrize("source", [EngineCase(3, "2"), EngineCase(3, "3", sub_group=700)], ids=str)
def test_drifted_rates_cause_a_warning_and_rank_0s_are_saved(
    source: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Schedulers follow the rates."""
    path, rates = str(tmp_path / "drifted.ckpt"), [0.5, 0.25, 0.25]
    saved = pools.run(3, partial(save_drifted, source, path, rates))
    assert [drifted.rates[0] for drifted in saved] == rates
    (warning,) = saved[0].warnings
    for named in ("lr", "parameter group 0", "0.5 on rank 0", "0.25 on ranks 1, 2", "sync_dist"):
        assert named in warning
    assert "parameter group 1" not in warning
    assert not saved[1].warnings
    wanted = [0.5, saved[0].rates[1]]
    for world in (2, 3):
        found = pools.run(world, partial(resume_drifted, EngineCase(world, "1"), path))
        assert [rates for rates, _ in found] == [wanted] * world
        states = [state["lr_schedulers"] for _, state in found]
        assert states == [[{"_last_lr": [0.5], "num_bad_epochs": 0}]] * world


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_drifted_apart_in_stage_0_are_found(
    precision: str, pools: Pools, tmp_path: Path
) -> None:
    setup, path = EngineCase(3, "0", precision), str(tmp_path / "drifted.ckpt")
    saved = pools.run(3, partial(save_drifted, setup, path, [0.5, 0.5, 0.25], steps=1))
    rates, weights = saved[0].warnings[:2]
    assert "0.25 on rank 2" in rates
    assert "those of rank 2 differ from rank 0's (embedding.weight" in weights
    same = str(tmp_path / "same.ckpt")
    saved = pools.run(3, partial(save_drifted, setup, same, [0.5] * 3, steps=1))
    assert not any("different hyperparameters" in text for text in saved[0].warnings)


def test_schedulers_that_differ_while_rates_are_equal_are_rank_0s(
    pools: Pools, tmp_path: Path
) -> None:
    setup, path = EngineCase(2, "1"), str(tmp_path / "agreed.ckpt")
    saved = pools.run(2, partial(save_drifted, setup, path, [0.5, 0.5]))
    (warning,) = saved[0].warnings
    assert "The trainer's state differs between ranks: lr_schedulers on rank 1" in warning
    found = pools.run(2, partial(resume_drifted, setup, path))
    assert [state["lr_schedulers"][0]["num_bad_epochs"] for _, state in found] == [0, 0]


def save_with_own_frozen_weights(setup: EngineCase, path: str) -> list[str]:
    """Save an engine whose last rank has changed a frozen weight; return its warnings."""
    from lightning_elastic_zero.api import save_checkpoint

    rank = distributed.get_rank()
    with (
        captured_log("lightning_elastic_zero", logging.WARNING) as warned,
        engine_of(setup, 0) as engine,
    ):
        train(engine, setup, 0, 1)
        if rank == setup.world - 1:
            engine.module.frozen.weight.data.view(-1)[:1].add_(1)
        save_checkpoint(engine, path)
        return warned


@pytest.mark.parametrize(
    "zero",
    [pytest.param("0", marks=pytest.mark.long), "2", pytest.param("3", marks=pytest.mark.long)],
)
def test_frozen_weights_that_differ_are_named(zero: str, pools: Pools, tmp_path: Path) -> None:
    """In ZeRO-3, each rank has and writes its own part of them."""
    setup = EngineCase(3, zero, "bf16")
    if zero == "3":
        setup = replace(setup, persistence=0)
    first, *others = pools.run(
        3, partial(save_with_own_frozen_weights, setup, str(tmp_path / "frozen.ckpt"))
    )
    assert not any(others)
    if zero == "3":
        assert not first
    else:
        (warning,) = first
        assert "Frozen weights differ between ranks: frozen.weight on rank 2." in warning
