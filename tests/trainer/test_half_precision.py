"""The Trainer's fp16, ``16-true`` and ``16-mixed``: between stages, with the loss scale."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Pools
from tests.trainer._half_precision import MOMENTS, HalfFit, differing, fit, wanted_of

pytestmark = pytest.mark.engine

CASES = [
    ("16-true", 0, 2, "16-true", 0, 3),
    ("16-true", 1, 3, "16-true", 2, 2),
    ("16-true", 2, 2, "16-true", 3, 1),
    ("16-true", 3, 2, "16-true", 0, 3),
    ("16-true", 0, 1, "16-true", 1, 2),
    ("16-mixed", 0, 2, "16-mixed", 3, 3),
    ("16-mixed", 1, 2, "16-mixed", 0, 1),
    ("16-mixed", 2, 3, "16-mixed", 1, 2),
    ("16-mixed", 3, 2, "16-mixed", 2, 3),
    ("16-true", 2, 2, "16-mixed", 2, 3),
    ("16-mixed", 3, 3, "16-true", 3, 2),
]


@pytest.mark.long
@pytest.mark.parametrize(("precision", "stage", "ranks", "other", "target", "more"), CASES)
def test_half_precision_state_is_restored_on_another_world(
    precision: str,
    stage: int,
    ranks: int,
    other: str,
    target: int,
    more: int,
    worlds: Pools,
    tmp_path: Path,
) -> None:
    first = HalfFit(str(tmp_path / "first"), precision, stage)
    ends = [end for _, end in worlds.run(ranks, partial(fit, first))]
    saved = ends[0]
    assert saved["counter/skipped_steps"] == 1
    assert saved["scaler/last_overflow_iter"] == "1"
    assert saved["weight/first.weight"].dtype == torch.float16
    assert all(saved[f"{key}/first.weight"].any() for key in MOMENTS)
    last = str(tmp_path / "first" / "last.ckpt")
    second = HalfFit(str(tmp_path / "second"), other, target, 2, last, lr=0.9, seed=9)
    for start, end in worlds.run(more, partial(fit, second)):
        wanted = wanted_of(saved, first, second, start)
        assert not differing(wanted, start)
        assert differing({k: v for k, v in wanted.items() if k.startswith("master")}, end)
        assert end["counter/global_steps"] == 8
        assert end["counter/skipped_steps"] == 2


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_half_precision_run_continues_bit_for_bit(
    stage: int, precision: str, worlds: Pools, tmp_path: Path
) -> None:
    """Overflows, skipped steps and changes of the scale, too."""
    first = HalfFit(str(tmp_path / "half"), precision, stage)
    worlds.run(2, partial(fit, first))
    last = str(tmp_path / "half" / "last.ckpt")
    again = replace(first, epochs=2, ckpt_path=last, seed=9, lr=0.9)
    whole = replace(first, root=str(tmp_path / "whole"), epochs=2)
    resumed: list[Any] = worlds.run(2, partial(fit, again))
    for (_, uninterrupted), (_, end) in zip(
        worlds.run(2, partial(fit, whole)), resumed, strict=True
    ):
        assert not differing(uninterrupted, end)
        assert uninterrupted["counter/skipped_steps"] == 2


@pytest.mark.long
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_gradients_of_stage_0_equal_those_of_zero(
    manual: bool, worlds: Pools, tmp_path: Path
) -> None:
    """DeepSpeed divides them by the loss scale in all stages, and scales the loss in ZeRO only."""
    moments = []
    for stage in (0, 1):
        plan = HalfFit(str(tmp_path / str(stage)), "16-true", stage, steps=1, manual=manual)
        moments.append(worlds.run(2, partial(fit, plan))[0][1])
    for key in (f"{key}/{name}" for key in MOMENTS for name in ("first.weight", "last.weight")):
        assert moments[1][key].any()
        # Sums over ranks and micro-batches are rounded to fp16 in another order.
        torch.testing.assert_close(moments[0][key], moments[1][key], rtol=0.05, atol=1e-6)


@pytest.mark.long
def test_each_pass_through_a_kept_graph_uses_the_current_scale(
    worlds: Pools, tmp_path: Path
) -> None:
    """The scale doubles between two steps of a micro-batch."""
    ends = []
    for stage in (0, 1):
        plan = HalfFit(str(tmp_path / str(stage)), "16-true", stage, steps=4, lr=0.0, manual=True)
        ends.append(worlds.run(2, partial(fit, replace(plan, retained=True)))[0][1])
    assert ends[0]["scaler/cur_scale"] == ends[1]["scaler/cur_scale"] == "512.0"
    for key in (f"{key}/{name}" for key in MOMENTS for name in ("first.weight", "last.weight")):
        assert ends[1][key].any()
        torch.testing.assert_close(ends[0][key], ends[1][key], rtol=0.05, atol=1e-6)
