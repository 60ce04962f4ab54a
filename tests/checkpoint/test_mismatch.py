"""Mismatched and damaged checkpoints are refused on all ranks, and the run is unchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import _damaged_checkpoints
from tests.support.checkpoints import (
    Loading,
    LoadingWithoutSchedule,
    Saved,
    Saving,
    Scheduler,
    assert_refused,
    refusal,
)
from tests.support.engines import EngineCase, engine_of
from tests.support.outcome import captured_log
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

RUNS = [
    (EngineCase(2, "2"), EngineCase(3, "3", "bf16", sub_group=700)),
    (EngineCase(3, "3", sub_group=700), EngineCase(2, "1")),
    (EngineCase(2, "B", "bf16"), EngineCase(2, "B", "bf16")),
    (EngineCase(3, "0"), EngineCase(2, "0")),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"renamed": True}, ("b.weight", "b.bias", "c.weight", "c.bias")),
        ({"hidden": 64}, ("a.weight", "(65, 33)", "(64, 33)", "b.weight", "(33, 65)", "(33, 64)")),
        ({"grouping": "swapped"}, ("group 0", "a.bias", "group 1", "a.weight")),
        ({"grouping": "three"}, ("2 parameter groups", "3")),
        ({"optimizer": "Momentum"}, ("AdamW", "SGD", "load_optimizer_state=False")),
    ],
    ids=["renamed", "reshaped", "swapped groups", "another group", "another optimizer"],
)
@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_all_differences_of_another_model_are_listed(
    source: EngineCase,
    target: EngineCase,
    change: dict[str, Any],
    names: tuple[str, ...],
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """The state of another optimizer is also refused with load_hyperparameters=False."""
    saved, here = saved_by(source), replace(target, **change)
    assert_refused(pools.run, here, Loading(saved.path), *names)
    if "optimizer" in change:
        alone = {"load_hyperparameters": False}
        assert_refused(pools.run, here, Loading(saved.path, alone), *names)


@pytest.mark.parametrize(
    "target", [EngineCase(2, "1"), EngineCase(3, "3", "bf16"), EngineCase(2, "0")], ids=str
)
def test_amsgrad_on_states_without_it_is_refused(
    target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved, here = saved_by(RUNS[0][0]), replace(target, optimizer="AMSGrad")
    loading = Loading(saved.path, {"load_hyperparameters": False})
    names = ("max_exp_avg_sq", "amsgrad was False and is True", "load_optimizer_state=False")
    assert_refused(pools.run, here, loading, *names)


RESIZED = ("a", "b", "bn", "frozen", "average")
"""Layers and buffers whose size is ``EngineCase.hidden``."""


def kept_in_a_resized_model(setup: EngineCase, path: str) -> dict[str, bool]:
    """Load as the error advises; return which parameters are unchanged."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 1) as engine:
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        options = {"load_optimizer_state": False, "strict": False}
        rename = {layer: f"saved.{layer}" for layer in RESIZED}
        load_checkpoint(engine, path, rename=rename, **options)
        after = dict(engine.module.named_parameters())
        return {name: torch.equal(value, after[name]) for name, value in before.items()}


@pytest.mark.long
def test_resized_layers_that_are_renamed_away_are_not_loaded(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    source, target = RUNS[1]
    target = replace(target, hidden=64)
    path = saved_by(source).path
    message = "rename={'a': 'saved.a'}, with strict_optimizer=False"
    assert_refused(pools.run, target, Loading(path), message)
    for kept in pools.run(target.world, partial(kept_in_a_resized_model, target, path)):
        resized = {name for name in kept if name.split(".")[0] in RESIZED}
        assert resized
        assert all(kept[name] for name in resized)
        assert not all(kept.values())


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_damaged_checkpoints.lose_shard, "CheckpointCorruptedError"),
        (_damaged_checkpoints.truncate_shard, "CheckpointCorruptedError"),
        (_damaged_checkpoints.flip_bit, "CheckpointCorruptedError"),
        (_damaged_checkpoints.cut_manifest, "CheckpointFormatError"),
        (_damaged_checkpoints.lose_manifest, "CheckpointFormatError"),
    ],
)
@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_a_damaged_file_of_another_rank_is_refused_by_name(
    source: EngineCase,
    target: EngineCase,
    damage: Callable[[Path], str],
    error: str,
    pools: Pools,
    saved_by: Callable[..., Saved],
    tmp_path: Path,
) -> None:
    damaged = _damaged_checkpoints.copied(saved_by(source).path, tmp_path)
    named = damage(damaged)
    assert_refused(pools.run, target, Loading(str(damaged)), named, error=error)


@pytest.mark.parametrize("target", [pair[1] for pair in RUNS], ids=str)
def test_a_missing_checkpoint_is_refused_by_path(
    target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    loading = Loading(str(tmp_path / "nowhere.ckpt"))
    assert_refused(pools.run, target, loading, "nowhere.ckpt", error="CheckpointNotFoundError")


@pytest.mark.long
@pytest.mark.parametrize("target", [pair[1] for pair in RUNS], ids=str)
def test_excluded_frozen_weights_of_another_model_are_refused(
    target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(EngineCase(2, "2"), exclude_frozen_parameters=True)
    assert_refused(pools.run, replace(target, hidden=64), Loading(saved.path), "a.weight")


@pytest.mark.long
@pytest.mark.parametrize("target", [EngineCase(2, "2"), EngineCase(2, "3")], ids=str)
def test_another_scheduler_is_refused_before_any_change(
    target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Without hyperparameters, the engine's own scheduler and rates are kept."""
    path = str(tmp_path / "steps.ckpt")
    saved = partial(refusal, target, Saving(path), prepare=Scheduler("steps"), look=False)
    assert {found.error for found in pools.run(target.world, saved)} == {"NoneType"}
    warm_up = Scheduler("warm-up")
    assert_refused(pools.run, target, Loading(path), "step_size", "WarmupLR", prepare=warm_up)
    allowed = LoadingWithoutSchedule(path, {"load_hyperparameters": False})
    loaded = partial(refusal, target, allowed, prepare=warm_up, look=False)
    assert {found.error for found in pools.run(target.world, loaded)} == {"NoneType"}


def schedule_warnings(setup: EngineCase, folder: Path) -> list[list[str]]:
    """Load a checkpoint without a schedule into an engine with one, and the reverse."""
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    warned = []
    with engine_of(setup, 0) as engine:
        save_checkpoint(engine, folder / "without")
        Scheduler("warm-up")(engine)
        save_checkpoint(engine, folder / "with")
        with captured_log("lightning_elastic_zero", logging.WARNING) as logs:
            load_checkpoint(engine, folder / "without")
        warned.append(logs)
        engine.lr_scheduler = None
        with captured_log("lightning_elastic_zero", logging.WARNING) as logs:
            load_checkpoint(engine, folder / "with")
        warned.append(logs)
    return warned


def test_a_schedule_of_one_side_only_causes_a_warning(pools: Pools, tmp_path: Path) -> None:
    target = EngineCase(2, "1")
    ((one,), (other,)), others = pools.run(2, partial(schedule_warnings, target, tmp_path))
    assert "contains no state of WarmupLR: the learning-rate schedule starts at its first" in one
    assert "contains the state of a learning-rate scheduler, and this engine steps none" in other
    assert others == [[], []]
