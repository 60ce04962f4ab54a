"""torch's ``capturable``, which counts steps on the device, is a setting of the live run.

On a CPU, torch refuses such steps, except those of the fused kernel, which trains, saves and
resumes like any other. The others load, and save the loaded state without a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import (
    STEPS,
    Saved,
    assert_continues,
    assert_restored,
    load,
)
from tests.support.engines import CAPTURABLE, EngineCase, engine_of, inner_of, train
from tests.support.oracle import flat_buffers
from tests.support.ranks import Pools

OPTIONS = ("capturable", "foreach", "fused")


@dataclass(frozen=True)
class LoadedSteps:
    counts: list[object]
    """Of each flat buffer: value, type, dimensions, and whether it is on the masters' device."""
    shared: bool
    """Whether two flat buffers share a count, so that each step would count twice."""
    options: list[tuple[object, ...]]
    """``OPTIONS`` of each parameter group."""


def steps_after_load(setup: EngineCase, saved: Saved) -> LoadedSteps:
    """Load; return the step counts, and the options of the parameter groups."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        load_checkpoint(engine, saved.path)
        inner = inner_of(engine)
        steps = [(flat, inner.state[flat]["step"]) for flat in flat_buffers(engine, setup)]
        return LoadedSteps(
            [(float(s), s.dtype, s.ndim, s.device == flat.device) for flat, s in steps],
            len({s.data_ptr() for _, s in steps}) != len(steps),
            [tuple(group[option] for option in OPTIONS) for group in inner.param_groups],
        )


def first_step(setup: EngineCase) -> str:
    """Train a step; return its error."""
    with engine_of(setup, 0) as engine:
        try:
            train(engine, setup, 0, 1)
        except AssertionError as error:
            return str(error)
    return ""


EXPECTED_COUNT = (float(STEPS), torch.float32, 0, True)
"""The count of a run saved after its first steps; on a CPU all tensors are on one device."""


pytestmark = pytest.mark.engine

FUSED = EngineCase(2, "2", optimizer="fused capturable")
OTHERS = ("AdamW", "fused", "foreach")
ENABLED = {name: tuple(option in name for option in OPTIONS) for name in (*CAPTURABLE, *OTHERS)}


@pytest.mark.parametrize("other", [*OTHERS, "fused capturable"])
@pytest.mark.parametrize("saves", [True, False], ids=["saved by it", "loaded by it"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_capturable_optimizer_is_restored_on_other_devices_and_stages(
    steps_before: int,
    other: str,
    saves: bool,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    others = EngineCase(3, "3", optimizer=other, sub_group=700)
    source, target = (FUSED, others) if saves else (others, FUSED)
    assert_restored(pools.run, target, saved_by(source), steps_before=steps_before)


@pytest.mark.long
@pytest.mark.parametrize("name", CAPTURABLE)
@pytest.mark.parametrize("zero", ["0", "1", "3"])
def test_state_loaded_before_the_first_step_is_saved_again(
    name: str, zero: str, pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    middle = EngineCase(2, zero, optimizer=name)
    saved, copy = saved_by(EngineCase(3, "2")), Saved(middle, str(tmp_path / "copy.ckpt"))
    verdicts = [
        pools.run(2, partial(load, middle, saved, copy_to=copy))[0],
        pools.run(1, partial(load, EngineCase(1, "1"), copy, steps_before=1))[0],
    ]
    for verdict in verdicts:
        assert verdict is not None
        verdict.assert_same()


@pytest.mark.long
@pytest.mark.parametrize("name", [*CAPTURABLE, "AdamW"])
def test_capturable_and_fused_are_those_configured(
    name: str, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    source = replace(FUSED, optimizer="AdamW" if name in CAPTURABLE else "fused capturable")
    target = EngineCase(3, "3", optimizer=name, sub_group=700)
    for found in pools.run(3, partial(steps_after_load, target, saved_by(source))):
        assert set(found.counts) == {EXPECTED_COUNT}
        assert not found.shared
        assert [tuple(map(bool, options)) for options in found.options] == [ENABLED[name]] * 2


@pytest.mark.long
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_a_fused_run_continues_bit_for_bit(zero: str, pools: Pools, tmp_path: Path) -> None:
    setup = replace(FUSED, zero=zero)
    assert_continues(pools.run, setup, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", CAPTURABLE)
def test_torch_refuses_capturable_steps_on_a_cpu(name: str, pools: Pools) -> None:
    refused = pools.run(1, partial(first_step, EngineCase(1, "2", optimizer=name)))[0]
    assert ("capturable=True" in refused) == ("fused" not in name), refused
