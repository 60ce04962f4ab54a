"""A strategy is sent, copied and used again; a Trainer keeps what its user has set."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.ranks import Pools
from tests.trainer._recorded_runs import from_step
from tests.trainer._trainer_reuse import fit_copied, make_strategy, settings_after

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("stage", [2, 3])
def test_pickled_and_copied_strategies_train_and_resume(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    sent = make_strategy(stage)  # ranks get it as a pickle
    whole = worlds.run(2, partial(fit_copied, sent, root=str(tmp_path)))[0]
    assert sorted(whole.steps) == list(range(6))
    path = str(tmp_path / "step-1.1.ckpt")
    for how in ("strategy", "trainer"):
        seen = worlds.run(2, partial(fit_copied, sent, how))[0]
        assert (seen.steps, seen.losses) == (whole.steps, whole.losses)
    for how in ("", "trainer"):
        seen = worlds.run(2, partial(fit_copied, sent, how, ckpt_path=path))[0]
        assert seen.losses == from_step(whole.losses, 4)


@pytest.mark.parametrize("world", [1, 2])
def test_a_reused_trainer_keeps_its_users_settings(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    for given, found, sizes in worlds.run(world, partial(settings_after, str(tmp_path))):
        assert given["accumulate_grad_batches"] == 1
        assert list(found) == [
            "exception at 0",
            "exception at 4",
            "validate",
            "resumed",
            "fitted again",
            "saved",
        ]
        for moment, settings in found.items():
            assert settings == given, moment
        assert max(sizes) == 3 * 4 - 1
