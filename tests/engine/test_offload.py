"""Offloaded optimizers: in part, to files, or to the host for some time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import (
    Saved,
    StateComparison,
    assert_continues,
    assert_refused,
    assert_restored,
    load,
)
from tests.support.engines import Engine, EngineCase, engine_of, swap_folder, train
from tests.support.ranks import Pools, skip_without


@dataclass(frozen=True)
class OffloadedSave:
    """A run that saved before, during and after the offload of its states."""

    refusal: str
    """The error of a load while the states were offloaded."""
    losses: list[float]
    """Losses after the reload."""


def save_offloaded(setup: EngineCase, folder: str, states: tuple[str, ...]) -> OffloadedSave:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import offload_adam_states, reload_adam_states

    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    model = setup.model(0)
    if setup.zero == "3":  # DeepSpeed's ``offload_states`` fails with frozen weights.
        model.frozen = torch.nn.Identity()
    with engine_of(setup, 0, model=model) as engine:
        train(engine, setup, 0, 2)
        save_checkpoint(engine, f"{folder}/before.ckpt")
        engine.offload_states(include=[OffloadStateTypeEnum(state) for state in states])
        if setup.zero == "3":  # DeepSpeed itself does so for FusedAdam only.
            offload_adam_states(engine.optimizer.optimizer, "cpu")
        save_checkpoint(engine, f"{folder}/while.ckpt")
        try:
            load_checkpoint(engine, f"{folder}/before.ckpt")
        except ElasticZeroError as error:
            refusal = f"{type(error).__name__}: {error}"
        engine.reload_states()
        if setup.zero == "3":
            reload_adam_states(engine.optimizer.optimizer, "cpu")
        save_checkpoint(engine, f"{folder}/after.ckpt")
        load_checkpoint(engine, f"{folder}/while.ckpt")
        return OffloadedSave(refusal, train(engine, setup, 2, 4))


def rates_of_both(setup: EngineCase, path: str, *, saves: bool) -> list[tuple[float, float]]:
    """Save a run slowed by a schedule, or load it; return the rates of both optimizers."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 0 if saves else 7, tilt=1.0 if saves else 3.0) as engine:
        optimizer = engine.optimizer
        if saves:
            for group in optimizer.optimizer.param_groups:
                group["lr"] /= 2
            train(engine, setup, 0, 1)
            save_checkpoint(engine, path)
        else:
            load_checkpoint(engine, path)
        main = optimizer.optimizer.param_groups
        backup = getattr(optimizer, "backup_optimizer", optimizer.optimizer).param_groups
        return [(one["lr"], other["lr"]) for one, other in zip(main, backup, strict=True)]


def called_before_any_change(setup: EngineCase) -> tuple[list[bool], bool]:
    """Return whether each step's hook ran before the masters changed."""
    from lightning_elastic_zero.engine.live import LiveEngine

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        # Compared as bits, since padding is NaN.
        flats = engine.optimizer.fp32_partitioned_groups_flat
        masters = [flat.detach().view(torch.int32) for flat in flats]
        before = [flat.clone() for flat in masters]

        def as_before() -> bool:
            return all(torch.equal(flat, was) for flat, was in zip(masters, before, strict=True))

        found: list[bool] = []

        def look() -> None:
            if not found:
                found.append(as_before())

        remove = LiveEngine(engine).add_step_pre_hook(look)
        train(engine, setup, 1, 2)
        remove()
        return found, not as_before()


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{place}/{key}")
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                walk(inner, f"{place}/{index}")

    for path in sorted(checkpoint.rglob("*_states.pt")):
        walk(torch.load(path, weights_only=True), path.name)
    return found


def elements_in_memory(setup: EngineCase, path: str) -> list[int]:
    """Load over a run; count swapped elements in memory before, after, and a step later."""
    from lightning_elastic_zero.api import load_checkpoint

    def held() -> int:
        optimizer = engine.optimizer
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        swapped = [flat for i, flat in flats if optimizer._swappable_optimizer_subgroup(i)]
        assert swapped
        states = [v for f in swapped for v in optimizer.optimizer.state[f].values()]
        return sum(t.numel() for t in (*swapped, *states) if torch.is_tensor(t) and t.ndim)

    with engine_of(setup, 7) as engine:
        train(engine, setup, 0, 1)
        found = [held()]
        load_checkpoint(engine, path)
        found.append(held())
        train(engine, setup, 3, 4)
        return [*found, held()]


def save_without_swap_files(engine: Engine, path: str) -> object:
    from lightning_elastic_zero.api import save_checkpoint

    if engine.global_rank == 1:
        shutil.rmtree(swap_folder())
    return save_checkpoint(engine, path)


pytestmark = pytest.mark.engine

PARTLY = EngineCase(2, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700)
WHOLLY = EngineCase(3, "3", "bf16", offload=True, optimizer="CPUAdam")
SWAPPED = EngineCase(2, "3", nvme="plain", sub_group=1500)
PIPELINED = EngineCase(3, "3", nvme="pipelined", sub_group=700)

TORCH_KEYS = ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled")
"""Keys that torch's AdamW adds to the groups of the second optimizer."""


def of_adam(verdict: StateComparison) -> StateComparison:
    """Return a comparison without the hyperparameters that only torch's AdamW has."""
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
        (PARTLY, EngineCase(1, "1", offload=True, optimizer="CPUAdam")),
        (WHOLLY, PARTLY),
    ],
    ids=str,
)
def test_states_of_both_optimizers_of_partial_offload_are_restored(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    skip_without("CPUAdamBuilder", pools)
    call = partial(load, target, saved_by(source), steps_before=1)
    verdict = pools.run(target.world, call)[0]
    assert verdict is not None
    of_adam(verdict).assert_same()


@pytest.mark.long
def test_a_background_save_is_notified_before_either_optimizer_steps(pools: Pools) -> None:
    """The second optimizer steps first."""
    skip_without("CPUAdamBuilder", pools)
    assert pools.run(2, partial(called_before_any_change, PARTLY)) == [([True], True)] * 2


@pytest.mark.long
def test_the_rates_of_both_optimizers_are_restored(pools: Pools, tmp_path: Path) -> None:
    skip_without("CPUAdamBuilder", pools)
    path = str(tmp_path / "slow.ckpt")
    saved = pools.run(2, partial(rates_of_both, PARTLY, path, saves=True))
    loaded = pools.run(2, partial(rates_of_both, PARTLY, path, saves=False))
    assert loaded == saved
    (main, backup), *others = saved[0]
    assert backup == 2 * main
    assert all(one == other for one, other in others)
    # A run without a second optimizer continues with the rates of the first one.
    for target in (WHOLLY, EngineCase(2, "1")):
        alone = pools.run(2, partial(rates_of_both, replace(target, world=2), path, saves=False))
        assert alone[0] == [(rate, rate) for rate, _ in saved[0]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SWAPPED, PIPELINED),
        (PIPELINED, replace(SWAPPED, precision="bf16")),
        (SWAPPED, EngineCase(1, "2")),
        (EngineCase(4, "1"), PIPELINED),
        (replace(SWAPPED, precision="bf16"), EngineCase(2, "B", "bf16")),
        (replace(SWAPPED, optimizer="Muon"), EngineCase(3, "1", optimizer="Muon")),
        (replace(SWAPPED, optimizer="AMSGrad"), replace(PIPELINED, optimizer="AMSGrad")),
        (EngineCase(2, "2", nvme="plain"), SWAPPED),
    ],
    ids=str,
)
def test_swapped_states_are_restored_to_and_from_memory(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """ZeRO-1/2 treats "nvme" as "cpu"."""
    skip_without("AsyncIOBuilder", pools)
    saved = saved_by(source)
    for steps in (0, 1):
        assert_restored(pools.run, target, saved, steps_before=steps)


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
def test_a_swapped_run_continues_bit_for_bit(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Stock DeepSpeed resumes without moments."""
    skip_without("AsyncIOBuilder", pools)
    assert_continues(pools.run, setup, tmp_path)


@pytest.mark.long
def test_loaded_states_are_swapped_out(pools: Pools, saved_by: Callable[..., Saved]) -> None:
    """With a pipeline, DeepSpeed's tensors stay views of buffers that it reuses."""
    skip_without("AsyncIOBuilder", pools)
    call = partial(elements_in_memory, SWAPPED, saved_by(SWAPPED).path)
    assert pools.run(SWAPPED.world, call) == [[0, 0, 0]] * SWAPPED.world


@pytest.mark.long
def test_missing_swap_files_are_named_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    skip_without("AsyncIOBuilder", pools)
    act = partial(save_without_swap_files, path=str(tmp_path / "never.ckpt"))
    names = ("tensor.swp", "nvme_path", "removed or truncated", "rank 1")
    assert_refused(pools.run, SWAPPED, act, *names, error="UnsupportedError", look=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "states"),
    [
        (EngineCase(2, "1", "bf16"), ("hp_params", "lp_params", "optim_states", "lp_grads")),
        (EngineCase(2, "2"), ("lp_params", "optim_states")),
        (EngineCase(2, "3", "bf16", grouping="one"), ("lp_params", "lp_grads")),
    ],
    ids=str,
)
def test_offload_states_does_not_change_a_save_and_a_load_requires_a_reload(
    setup: EngineCase, states: tuple[str, ...], pools: Pools, tmp_path: Path
) -> None:
    found = pools.run(setup.world, partial(save_offloaded, setup, str(tmp_path), states))
    for rank in found:
        assert rank.refusal.startswith("UnsupportedError"), rank
        assert "reload_states" in rank.refusal, rank
        assert all(state in rank.refusal for state in states), rank
        assert all(loss == loss for loss in rank.losses), rank
    before, during, after = (
        tensors_of(tmp_path / f"{name}.ckpt") for name in ("before", "while", "after")
    )
    assert before
    for other in (during, after):
        assert before.keys() == other.keys()
        assert all(torch.equal(value, other[place]) for place, value in before.items())
