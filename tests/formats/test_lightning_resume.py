"""``trainer.fit(ckpt_path=...)`` continues from checkpoints of Lightning's DeepSpeedStrategy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.formats._resume_programs import Resumed, resume, validate
from tests.formats._trainer_writers import DECAY
from tests.support.foreign_checkpoints import names, unpack
from tests.support.oracle import same_bits
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

LIGHTNING = [name for name in names() if name.startswith("lightning")]


@pytest.mark.parametrize("name", LIGHTNING)
@pytest.mark.parametrize("other", [False, True], ids=["same", "other"])
def test_fit_continues_from_lightnings_deepspeed_checkpoint(
    name: str, other: bool, pools: Pools, tmp_path: Path
) -> None:
    fixture = unpack(name, tmp_path)
    target = fixture.setup
    if other:
        target = replace(target, world=3, zero="3" if target.zero != "3" else "2", sub_group=10**9)
    resumed = pools.run(target.world, partial(resume, fixture, target, str(fixture.checkpoint)))[0]
    assert isinstance(resumed, Resumed)
    assert not resumed.differing
    assert resumed.step == fixture.setup_steps
    assert resumed.callback == {"rank": 0, "common": [1, 2.5, "three"]}
    assert resumed.mine["tensor"].tolist() == [0, 1, 2]
    assert resumed.rates[0] == pytest.approx(1e-3 * DECAY**fixture.setup_steps)
    assert f"Loaded {fixture.checkpoint} (a stock DeepSpeed checkpoint of " in resumed.log
    assert "without RNG states" in resumed.log
    assert f" at step {resumed.step}, epoch 0: " in resumed.log
    resumed.compare_with_reference.assert_same()


@pytest.mark.parametrize(("name", "world"), [("lightning2", 3), ("lightning3", 1)])
def test_validate_uses_the_writers_weights_on_other_devices(
    name: str, world: int, pools: Pools, tmp_path: Path
) -> None:
    fixture = unpack(name, tmp_path)
    target = replace(fixture.setup, world=world)
    for weights in pools.run(world, partial(validate, fixture, target)):
        truth = fixture.truth()
        for name_, weight in weights.items():
            held = truth.get(f"weight/{name_}", truth.get(f"frozen/{name_}"))
            assert isinstance(held, torch.Tensor)
            assert same_bits(held, weight), name_
