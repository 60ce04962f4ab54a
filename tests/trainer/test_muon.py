"""Muon under ZeRO-3, where DeepSpeed itself updates the momentum."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Engine, Setup, engine_of, train
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

STEPS, MORE = 3, 3


def momenta(engine: Engine) -> list[tuple[list[float], bool]]:
    """Return DeepSpeed's momentum, and whether the optimizer's state is the same tensor."""
    optimizer = engine.optimizer
    states = [optimizer.optimizer.state.get(f, {}) for f in optimizer.fp32_partitioned_groups_flat]
    held = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {})
    found = []
    for index, state in enumerate(states):
        if "momentum_buffer" in state:
            used = held.get(index, state["momentum_buffer"])
            found.append((used.tolist(), used is state["momentum_buffer"]))
    return found


def continued(setup: Setup, path: str, *, saves: bool) -> dict[str, Any]:
    """Train and save, or load into a run with another seed; then continue training."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with (
        torch.compiler.set_stance("force_eager"),
        engine_of(setup, 0 if saves else 7, tilt=1.0 if saves else 3.0) as engine,
    ):
        if saves:
            train(engine, setup, 0, STEPS)
            save_checkpoint(engine, path)
        else:
            load_checkpoint(engine, path)
        start = momenta(engine)
        losses = train(engine, setup, STEPS, STEPS + MORE)
        return {"start": start, "losses": losses, "end": momenta(engine)}


@pytest.mark.parametrize("in_memory", [False, True])
def test_muon_continues_bit_for_bit(in_memory: bool, pools: Pools, tmp_path: Path) -> None:
    """With `save_muon_momentum_buffer_in_memory`, the optimizer's state is only a reference."""
    setup = Setup(2, "3", optimizer="Muon", muon_in_memory=in_memory)
    path = str(tmp_path / "x.ckpt")
    saved = pools.run(2, partial(continued, setup, path, saves=True))
    resumed = pools.run(2, partial(continued, setup, path, saves=False))
    print("uninterrupted", saved[0]["losses"], "resumed", resumed[0]["losses"])
    for one, other in zip(saved, resumed, strict=True):
        assert any(any(values) for values, _ in one["start"])
        assert other["start"] == one["start"]
        assert other["losses"] == one["losses"]
        assert other["end"] == one["end"]
