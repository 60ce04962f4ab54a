"""A load leaves nothing of what a run had: no copies of weights, no gradients, no memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine._damaged_checkpoints import copied
from tests.engine._reload_programs import (
    Change,
    change_nothing,
    changed_during_save,
    copy_last_state,
    evaluated,
    interrupted_load,
    load_public,
    loaded_over,
    set_local_states,
    set_masters,
    within_window,
)
from tests.support.checkpoints import Saved, same_world
from tests.support.engines import Setup
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("setup", "change", "most"),
    [
        pytest.param(Setup(2, "1"), load_public, 0, marks=pytest.mark.essential),
        pytest.param(Setup(2, "1"), set_masters, 0, marks=pytest.mark.essential),
        (Setup(2, "3"), set_masters, 0),
        (Setup(2, "3"), set_masters, None),
        (Setup(2, "3"), copy_last_state, 0),
        (Setup(2, "0"), load_public, None),
        (Setup(2, "0"), copy_last_state, 0),
    ],
)
def test_state_that_changes_during_a_save(
    setup: Setup, change: Change, most: int | None, pools: Pools, tmp_path: Path
) -> None:
    """A load waits for a save in the background; after other changes the save fails by name."""
    program = partial(changed_during_save, setup, str(tmp_path), change, most)
    for error, published in pools.run(setup.world, program):
        if change is load_public or (most is None and published):
            assert published, error
        else:
            assert not published
            assert "changed during a background save" in error
            assert ("exp_avg_sq" if change is copy_last_state else "the master weights") in error
            assert "wait_for_save" in error


PARTLY = Setup(2, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700)
SWAPPED = Setup(2, "3", nvme="plain", sub_group=1500)
PIPELINED = Setup(2, "3", nvme="pipelined", sub_group=700)


@pytest.mark.long
@pytest.mark.parametrize("most", [None, 0])
@pytest.mark.parametrize("change", [change_nothing, set_masters, set_local_states])
@pytest.mark.parametrize("setup", [PARTLY, SWAPPED, PIPELINED], ids=str)
def test_offloaded_state_that_changes_during_a_save(
    setup: Setup, change: Change, most: int | None, pools: Pools, tmp_path: Path
) -> None:
    """Also of two optimizers, and in files: the save fails, or holds what was there."""
    skip_without("AsyncIOBuilder" if setup.nvme else "CPUAdamBuilder", pools)
    program = partial(changed_during_save, setup, str(tmp_path), change, most)
    for error, published in pools.run(setup.world, program):
        assert published == (error == ""), error
        if change is change_nothing:
            assert published
        elif most == 0:
            assert "changed during a background save" in error


HPZ = Setup(4, "3", hpz=2, persistence=100)


@pytest.mark.long
def test_frozen_layers_with_second_copies(pools: Pools, tmp_path: Path) -> None:
    """Second copies of weights (hpZ), which frozen ones keep for good, do not get into training."""
    saved = Saved(HPZ, str(tmp_path / "hpz.ckpt"))
    for rank, continued in enumerate(pools.run(HPZ.world, partial(same_world, HPZ, saved))):
        uninterrupted, resumed = continued.losses
        print(f"rank {rank}: uninterrupted {uninterrupted}, resumed {resumed}")
        assert resumed == uninterrupted
        assert not continued.differing


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_with_second_copies(precision: str, pools: Pools, tmp_path: Path) -> None:
    """Evaluation with hpZ is of the weights that were loaded, not of those that were there."""
    setup = Setup(4, "3", precision, hpz=2, persistence=100)
    saved = Saved(setup, str(tmp_path / "hpz.ckpt"))
    for rank, found in enumerate(pools.run(setup.world, partial(evaluated, setup, setup, saved))):
        print(f"rank {rank}: {found}")
        assert found.loaded == found.saved != found.untrained


@pytest.mark.long
@pytest.mark.parametrize(
    "setup",
    [
        Setup(2, "1", accumulation=2),
        Setup(2, "1", "bf16", accumulation=2),
        Setup(2, "2", accumulation=2),
        Setup(2, "2", "bf16", accumulation=3, offload=True),
        Setup(2, "3", accumulation=2, sub_group=700),
        Setup(2, "3", "bf16", accumulation=3, offload=True),
        Setup(2, "B", "bf16", accumulation=2),
        Setup(2, "0", accumulation=2),
        Setup(2, "0", "bf16", accumulation=3),
    ],
    ids=str,
)
def test_a_load_within_an_accumulation_window(setup: Setup, pools: Pools, tmp_path: Path) -> None:
    """No gradient of the run that is replaced gets into the next step."""
    saved = Saved(setup, str(tmp_path / "whole.ckpt"))
    for rank, continued in enumerate(pools.run(setup.world, partial(within_window, setup, saved))):
        uninterrupted, resumed = continued.losses
        print(f"rank {rank}: uninterrupted {uninterrupted}, resumed {resumed}")
        assert resumed == uninterrupted
        assert not continued.differing


@pytest.mark.parametrize(
    "setup",
    [
        Setup(2, "1"),
        Setup(2, "2", "bf16", offload=True),
        Setup(2, "3", sub_group=700),
        Setup(2, "B", "bf16"),
        Setup(2, "0"),
    ],
    ids=str,
)
def test_a_load_over_live_state_takes_its_place(
    setup: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """States stay the tensors that they are, and memory is held once.

    Those of another type make room. A run without state at the save leaves none behind either.
    """
    saved, stateless = saved_by(setup), saved_by(setup, steps=0)
    for held in pools.run(setup.world, partial(loaded_over, setup, saved, 3)):
        assert not held.replaced, held
        assert max(held.tensor_bytes) <= held.tensor_bytes[0], held
        assert not held.narrow, held
    for held in pools.run(setup.world, partial(loaded_over, setup, stateless, 2)):
        assert max(held.tensor_bytes[1:]) <= held.tensor_bytes[0] - held.state_bytes, held


@pytest.mark.parametrize(
    ("setup", "steps"),
    [
        (Setup(2, "2"), 3),
        (Setup(2, "2", "bf16"), 0),
        (Setup(2, "0"), 3),
        (Setup(2, "0", "bf16"), 3),
    ],
    ids=str,
)
def test_a_load_that_breaks_off_leaves_the_run_as_it_was(
    setup: Setup, steps: int, pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """What was received over live masters is undone on all ranks, where one could not read.

    In bf16 masters are received beside the live ones if a part of them is no rounded weight.
    """
    checkpoint = copied(saved_by(setup, steps=steps).path, tmp_path)
    for found in pools.run(setup.world, partial(interrupted_load, setup, str(checkpoint))):
        assert "CheckpointCorruptedError" in found.error
        assert not found.differing
