"""torchao's and bitsandbytes' optimizers, where they are installed.

Those with few bits are refused: ``tests/trainer/test_refused_setups.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.engine.test_optimizers import RUNS, state_kinds
from tests.support.checkpoints import (
    Loading,
    Saved,
    assert_continues,
    assert_restored,
    refusal,
)
from tests.support.engines import Setup
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

STATES = {
    "torchao.optim.adam._AdamW": {"exp_avg", "exp_avg_sq"},
    "bitsandbytes.optim.AdamW": {"state1", "state2"},
    "bitsandbytes.optim.Lion": {"state1"},
    "bitsandbytes.optim.SGD": {"state1"},
}
"""By optimizer, what it keeps of each element: torchao's with the bits of the masters (its name is
private; it is what its 8-bit optimizers are compared with), and bitsandbytes' with 32."""

EACH = pytest.mark.parametrize("name", STATES)


def need(name: str) -> None:
    """Skip a test whose package is not installed."""
    pytest.importorskip(name.partition(".")[0])


@EACH
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_every_state_survives(
    name: str, runs: tuple[Setup, Setup], pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Moments, and steps in the optimizer's own type, in another stage and another world."""
    need(name)
    source, target = (replace(run, optimizer=name) for run in runs)
    saved = saved_by(source)
    assert state_kinds(saved) == STATES[name]
    assert_restored(pools.run, target, saved, steps_before=1)


@EACH
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_it_goes_on_bit_for_bit(name: str, zero: str, pools: Pools, tmp_path: Path) -> None:
    """What was restored is what the optimizer's own code steps with."""
    need(name)
    setup = Setup(2, zero, optimizer=name)
    assert_continues(pools.run, setup, tmp_path)


def test_lars_goes_on_where_nothing_is_cut(
    pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """In stage 0 its norms are of whole parameters, on any number of ranks."""
    name = "bitsandbytes.optim.PytorchLARS"
    need(name)
    source, target = (Setup(world, "0", optimizer=name) for world in (2, 3))
    saved = saved_by(source)
    assert state_kinds(saved) == {"momentum_buffer"}
    assert_restored(pools.run, target, saved, steps_before=1)
    assert_continues(pools.run, source, tmp_path)


@pytest.mark.cases(2)
@pytest.mark.parametrize("saves_torchs", [True, False])
def test_one_of_the_same_name_is_refused(
    saves_torchs: bool, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Both packages have an AdamW, and neither can step with the other's states."""
    name = "bitsandbytes.optim.AdamW"
    need(name)
    names = ("AdamW", name) if saves_torchs else (name, "AdamW")
    source, target = (Setup(2, "2", optimizer=each) for each in names)
    saved = saved_by(source)
    for refused in pools.run(2, partial(refusal, target, Loading(saved.path))):
        assert refused.error == "CheckpointMismatchError", refused
        here = "bitsandbytes.AdamW" if saves_torchs else "torch.AdamW"
        assert f"another package than this run's {here}" in refused.message
        assert "load_optimizer_state=False" in refused.message
        assert refused.unchanged
