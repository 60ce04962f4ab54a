"""Fabric saves and loads elastic checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations._fabric_programs import FabricCase, run_fabric


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stage", "world"),
    [(3, 3), (1, 3), (2, 1), (2, 3), (3, 1)],
)
def test_a_loop_goes_on_on_other_counts(
    stage: int, world: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """State is equal bit for bit; entries of the state come back in place, others are returned."""
    path = str(tmp_path / "saved")
    whole, *_ = hf_ranks.run(2, partial(run_fabric, FabricCase(stage, save=path)))[0]
    longer, *_ = hf_ranks.run(2, partial(run_fabric, FabricCase(stage, steps=5)))[0]
    case = FabricCase(stage, by_name=world == 1, load=path, steps=5)
    run, kept, left = hf_ranks.run(world, partial(run_fabric, case))[0]
    for name, tensor in whole.states[-1].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert kept == {"step": 5, "last_epoch": 5}
    assert left == {"extra": {"note": "mine"}}
    assert ["no entry 'unsaved'" in warning for warning in run.warnings] == [True]
    for step in (4, 5):
        assert abs(run.losses[step] - longer.losses[step]) < 2e-6
