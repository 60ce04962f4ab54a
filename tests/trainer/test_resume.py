"""Trainers that stop on N ranks and continue on M; only the rank count changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fits import FitCase, error_of, evaluate, fit
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


def fit_all(worlds: Pools, world: int, plan: FitCase) -> list[dict[str, Any]]:
    return worlds.run(world, partial(fit, plan))


@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"),
    [(3, 2, 1, 3), (1, 3, 3, 2), (2, 1, 2, 2), (0, 2, 3, 3), (2, 3, 0, 2), (0, 1, 0, 3)],
)
def test_fit_continues_where_it_stopped(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """Weights, counters, schedules and user states are restored on every rank."""
    root = str(tmp_path)
    first = fit_all(worlds, ranks, FitCase(root, source, epochs=2))
    again = FitCase(root, target, epochs=3, ckpt_path="last", rate=0.9, seed=9)
    second = fit_all(worlds, more, again)
    for seen in second:
        assert seen["start"] == first[0]["end"]
        assert seen["start"] != seen["end"]
        assert (seen["step"], seen["epoch"]) == (6, 3)
        assert seen["lrs"] == first[0]["lrs at end"] == pytest.approx([0.0025, 0.005])
        assert seen["module"] == {"epoch": 1, "tensor": [0, 1, 2]}
        assert seen["data"] == {"seen": 7}
        assert seen["callback"] == {"rank": 0, "common": [1, 2.5, "three"]}


def test_a_weights_only_checkpoint_evaluates_and_starts_new_runs(
    worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    plan = FitCase(root, 3, checkpoint={"save_last": True, "save_weights_only": True})
    first = fit_all(worlds, 2, plan)[0]
    last = f"{root}/last.ckpt"
    assert "exp_avg" not in (tmp_path / "last.ckpt" / "manifest.json").read_text()
    worlds.run(1, partial(evaluate, FitCase(root, 3, ckpt_path=last), "test"))
    for message in worlds.run(3, partial(error_of, FitCase(root, 3, epochs=2, ckpt_path=last))):
        assert message.startswith("CheckpointMismatchError")
        assert "load_optimizer_state=False" in message
    warm = FitCase(root, 2, ckpt_path=last, strategy={"load_optimizer_state": False}, seed=4)
    for seen in fit_all(worlds, 3, warm):
        assert seen["start"] == first["end"]
        assert seen["step"] == 2


def test_load_hyperparameters_false_keeps_the_configured_schedule(
    worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    fit_all(worlds, 2, FitCase(root, 2))
    again = FitCase(root, 2, epochs=2, ckpt_path="last", rate=0.5)
    again.strategy["load_hyperparameters"] = False
    for seen in fit_all(worlds, 1, again):
        assert seen["lrs"] == [0.25, 0.5]
        assert seen["lrs at end"] == [0.125, 0.25]
        assert seen["step"] == 4
