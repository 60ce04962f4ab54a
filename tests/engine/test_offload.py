"""Optimizers that are elsewhere: in part on the device, in files, or on the host for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engine._offload_programs import (
    called_before_any_change,
    elements_in_memory,
    rates_of_both,
    save_offloaded,
    save_without_swap_files,
    tensors_of,
)
from tests.support.checkpoints import Saved, StateComparison, load, refusal, same_world
from tests.support.engines import Setup
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine

PARTLY = Setup(2, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700)
WHOLLY = Setup(3, "3", "bf16", offload=True, optimizer="CPUAdam")
SWAPPED = Setup(2, "3", nvme="plain", sub_group=1500)
PIPELINED = Setup(3, "3", nvme="pipelined", sub_group=700)

TORCH_KEYS = ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled")
"""What torch's AdamW puts into the groups of the optimizer beside it."""


def of_adam(verdict: StateComparison) -> StateComparison:
    """Return what is said of all but the hyperparameters that only torch's AdamW has."""
    differing = {
        key: bits
        for key, bits in verdict.differing.items()
        if not (key.startswith("group/") and key.split("/")[2].startswith(TORCH_KEYS))
    }
    return replace(verdict, differing=differing)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (PARTLY, replace(PARTLY, world=3, ratio=0.3)),
        (PARTLY, WHOLLY),
        (PARTLY, Setup(1, "1", offload=True, optimizer="CPUAdam")),
        (WHOLLY, PARTLY),
    ],
    ids=str,
)
def test_what_the_second_optimizer_holds_survives(
    source: Setup, target: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Partial offload has two optimizers; whichever steps a parameter later has its states."""
    skip_without("CPUAdamBuilder", pools)
    call = partial(load, target, saved_by(source), steps_before=1)
    verdict = pools.run(target.world, call)[0]
    assert verdict is not None
    of_adam(verdict).assert_same()


@pytest.mark.long
def test_a_save_behind_training_is_told_before_either_steps(pools: Pools) -> None:
    """The second optimizer steps first: what is copied behind training is not torn by it."""
    skip_without("CPUAdamBuilder", pools)
    assert pools.run(2, partial(called_before_any_change, PARTLY)) == [([True], True)] * 2


@pytest.mark.long
def test_the_rates_of_both_optimizers_survive(pools: Pools, tmp_path: Path) -> None:
    """Where a schedule has changed those of one, each goes on with its own."""
    skip_without("CPUAdamBuilder", pools)
    path = str(tmp_path / "slow.ckpt")
    saved = pools.run(2, partial(rates_of_both, PARTLY, path, saves=True))
    loaded = pools.run(2, partial(rates_of_both, PARTLY, path, saves=False))
    assert loaded == saved
    (main, backup), *others = saved[0]
    assert backup == 2 * main
    assert all(one == other for one, other in others)
    # A run that has no second one goes on with the first one's.
    for target in (WHOLLY, Setup(2, "1")):
        alone = pools.run(2, partial(rates_of_both, replace(target, world=2), path, saves=False))
        assert alone[0] == [(rate, rate) for rate, _ in saved[0]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SWAPPED, PIPELINED),
        (PIPELINED, replace(SWAPPED, precision="bf16")),
        (SWAPPED, Setup(1, "2")),
        (Setup(4, "1"), PIPELINED),
        (replace(SWAPPED, precision="bf16"), Setup(2, "B", "bf16")),
        (replace(SWAPPED, optimizer="Muon"), Setup(3, "1", optimizer="Muon")),
        (replace(SWAPPED, optimizer="AMSGrad"), replace(PIPELINED, optimizer="AMSGrad")),
        (Setup(2, "2", nvme="plain"), SWAPPED),
    ],
    ids=str,
)
def test_swapped_states_survive(
    source: Setup, target: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """From files into files, into memory, and from memory; ZeRO-1/2 takes "nvme" for "cpu"."""
    skip_without("AsyncIOBuilder", pools)
    saved = saved_by(source)
    for steps in (0, 1):
        verdict = pools.run(target.world, partial(load, target, saved, steps_before=steps))[0]
        assert verdict is not None
        verdict.assert_same()


@pytest.mark.long
@pytest.mark.parametrize(
    "setup",
    [
        SWAPPED,
        replace(PIPELINED, precision="bf16"),
        replace(SWAPPED, optimizer="Muon"),
        replace(SWAPPED, optimizer="Muon", muon_in_memory=True),
    ],
    ids=str,
)
def test_a_swapped_run_goes_on_bit_for_bit(setup: Setup, pools: Pools, tmp_path: Path) -> None:
    """Where stock DeepSpeed resumes without moments."""
    skip_without("AsyncIOBuilder", pools)
    saved = Saved(setup, str(tmp_path / "half.ckpt"))
    for continued in pools.run(setup.world, partial(same_world, setup, saved)):
        uninterrupted, resumed = continued.losses
        assert resumed == uninterrupted
        assert not continued.differing


@pytest.mark.long
def test_what_is_loaded_is_swapped_out(pools: Pools, saved_by: Callable[..., Saved]) -> None:
    """A load leaves none of it in memory, and DeepSpeed goes on to swap it.

    With a pipeline DeepSpeed itself leaves its tensors views of buffers that it uses again.
    """
    skip_without("AsyncIOBuilder", pools)
    call = partial(elements_in_memory, SWAPPED, saved_by(SWAPPED).path)
    assert pools.run(SWAPPED.world, call) == [[0, 0, 0]] * SWAPPED.world


@pytest.mark.long
def test_lost_swap_files_are_named(pools: Pools, tmp_path: Path) -> None:
    """A save whose state has been removed fails on every rank, and names the file."""
    skip_without("AsyncIOBuilder", pools)
    act = partial(save_without_swap_files, path=str(tmp_path / "never.ckpt"))
    for refused in pools.run(2, partial(refusal, SWAPPED, act, look=False)):
        assert refused.error == "UnsupportedError", refused
        for said in ("tensor.swp", "nvme_path", "removed or truncated", "rank 1"):
            assert said in refused.message, refused
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "states"),
    [
        (Setup(2, "1", "bf16"), ("hp_params", "lp_params", "optim_states", "lp_grads")),
        (Setup(2, "2"), ("lp_params", "optim_states")),
        (Setup(2, "3", "bf16", grouping="one"), ("lp_params", "lp_grads")),
    ],
    ids=str,
)
def test_offloaded_states_are_saved(
    setup: Setup, states: tuple[str, ...], pools: Pools, tmp_path: Path
) -> None:
    """``engine.offload_states()`` changes nothing of what is saved; a load asks for a reload."""
    found = pools.run(setup.world, partial(save_offloaded, setup, str(tmp_path), states))
    for rank in found:
        assert rank.refusal.startswith("UnsupportedError"), rank
        assert "reload_states" in rank.refusal, rank
        assert all(state in rank.refusal for state in states), rank
        assert all(loss == loss for loss in rank.losses), rank  # noqa: PLR0124 (NaN)
    before, during, after = (
        tensors_of(tmp_path / f"{name}.ckpt") for name in ("before", "while", "after")
    )
    assert before
    for other in (during, after):
        assert before.keys() == other.keys()
        assert all(torch.equal(value, other[place]) for place, value in before.items())
