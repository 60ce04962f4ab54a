"""A resumed run continues as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import (
    Saved,
    assert_continues,
    resumed_masters,
    uninterrupted_masters,
)
from tests.support.engines import EngineCase
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "1"),
        EngineCase(3, "2", "bf16", round_robin=True),
        EngineCase(2, "2", offload=True, alignment=True),
        EngineCase(3, "3", sub_group=700),
        EngineCase(2, "3", "bf16", persistence=100),
        EngineCase(2, "3", "bf16", offload=True, optimizer="RMSprop"),
        EngineCase(3, "B", "bf16"),
        EngineCase(3, "0"),
        EngineCase(2, "0", "bf16", optimizer="Momentum"),
    ],
    ids=str,
)
def test_the_same_world_continues_bit_for_bit(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    assert_continues(pools.run, setup, tmp_path)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (EngineCase(3, "1", "bf16"), EngineCase(1, "3", "bf16")),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in [
                (EngineCase(2, "2"), EngineCase(3, "2")),
                (EngineCase(4, "3", sub_group=700), EngineCase(2, "3", sub_group=700)),
                (EngineCase(2, "0"), EngineCase(3, "0")),
                (EngineCase(3, "0"), EngineCase(2, "1")),
                (EngineCase(2, "3"), EngineCase(3, "0")),
            ]
        ),
    ],
    ids=str,
)
def test_another_world_continues_up_to_the_order_of_sums(
    source: EngineCase,
    target: EngineCase,
    pools: Pools,
    saved_by: Callable[..., Saved],
    tmp_path: Path,
) -> None:
    """A run that was given the restored state is equal; others differ by the order of sums."""
    source, target = (
        replace(source, steady=True),
        replace(target, steady=True),
    )
    paths = {name: str(tmp_path / name) for name in ("source", "target", "resumed")}
    pools.run(source.world, partial(uninterrupted_masters, source, paths["source"]))
    pools.run(target.world, partial(uninterrupted_masters, target, paths["target"]))
    saved = saved_by(source)
    call = partial(resumed_masters, target, saved, paths["resumed"])
    other = pools.run(target.world, call)[0]
    assert other is not None
    other.assert_same()
    runs = {name: torch.load(path, weights_only=True) for name, path in paths.items()}
    apart = distance(runs["source"], runs["target"])
    print(f"apart {apart:.3g}, resumed {distance(runs['resumed'], runs['source']):.3g}")
    # A step changes elements by some thousandths, the rate. In bf16, rounding can reverse a step.
    bound = 1e-4 if target.precision == "fp32" else 0.05
    assert apart < bound
    assert distance(runs["resumed"], runs["source"]) < bound
    assert distance(runs["resumed"], runs["target"]) < bound


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two masters."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)
