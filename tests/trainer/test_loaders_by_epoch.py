"""Loaders, seeds and accumulations that depend on the epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Pools
from tests.trainer._recorded_runs import (
    AccumulatesByEpoch,
    assert_continued,
    assert_refused,
    record,
    recorded,
    records,
)

pytestmark = pytest.mark.engine

RELOADED: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "accumulate_grad_batches": 2}

SIZES = recorded(
    kind="by epoch: size", global_batch=None, length=48, batch_size=1, epochs=3, trainer=RELOADED
)
"""On two ranks: epochs of 12, 6 and 4 steps."""

SIZE_POINTS = {"inside 0.3": 3, "step 1.3": 15, "inside 1.2": 14, "epoch 0": 12, "inside 2.0": 18}
SEED_POINTS = {"inside 0.3": 3, "step 1.3": 7, "epoch 0": 4, "inside 2.0": 8, "step 2.4": 12}


@pytest.mark.parametrize(("world", "size"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["size", "size of a stream"])
@pytest.mark.parametrize(
    "points", [("step 1.3",), pytest.param((*SIZE_POINTS,), marks=pytest.mark.long)]
)
def test_a_batch_size_by_epoch_skips_and_repeats_no_sample(
    points: tuple[str, ...],
    kind: str,
    world: int,
    size: int,
    worlds: Pools,
    tmp_path: Path,
) -> None:
    run = replace(SIZES, kind=f"by epoch: {kind}", save=points, root=str(tmp_path))
    reference = record(worlds, 2, run)
    assert reference.global_step == 22
    assert [len(reference.steps[step]) for step in (0, 12, 18)] == [4, 8, 12]
    begins = {point: SIZE_POINTS[point] for point in points}
    seen = assert_continued(worlds, world, run, reference, begins, batch_size=size)
    for resumed, point in zip(seen, points, strict=True):
        reported = any("global batch changes" in text for text in resumed.messages)
        assert reported == (point == "epoch 0")


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_a_seed_by_epoch_is_that_of_the_saved_epoch(
    every: int, world: int, worlds: Pools, tmp_path: Path
) -> None:
    trainer = {"reload_dataloaders_every_n_epochs": every}
    run = recorded(kind="by epoch: seed", length=48, epochs=5, trainer=trainer)
    run = replace(run, save=(*SEED_POINTS,), root=str(tmp_path))
    reference = record(worlds, 2, run)
    assert_continued(worlds, world, run, reference, SEED_POINTS)


@pytest.mark.parametrize("world", [2, 3])
def test_a_new_loader_does_not_get_the_state_of_the_one_before(
    world: int, worlds: Pools, tmp_path: Path
) -> None:
    points = {"epoch 0": 4, **({"step 1.2": 6} if world == 2 else {})}
    run = recorded(
        kind="by epoch: shard",
        length=48,
        batch_size=6,
        trainer={"reload_dataloaders_every_n_epochs": 1},
        save=tuple(points),
        root=str(tmp_path),
    )
    reference = record(worlds, 2, run)
    assert reference.steps[0] != reference.steps[4]
    seen = assert_continued(worlds, world, run, reference, points, batch_size=12 // world)
    for each, point in zip(seen, points, strict=True):
        assert not any("without its saved state" in text for text in each.messages)
        warned = [text for text in each.messages if "was created for epoch 1 " in text]
        assert len(warned) == (point == "epoch 0")


@pytest.mark.long
def test_loaders_created_in_an_earlier_epoch_cause_a_warning(worlds: Pools, tmp_path: Path) -> None:
    """A resume inside their second epoch creates them then, maybe with other values."""
    trainer = {"reload_dataloaders_every_n_epochs": 2}
    points = ("inside 0.2", "epoch 0", "step 1.2", "epoch 1", "step 2.2")
    run = recorded(kind="by epoch: nothing", length=48, epochs=3, trainer=trainer, save=points)
    run = replace(run, root=str(tmp_path))
    record(worlds, 2, run)
    seen = records(worlds, 2, [run.resumed(point) for point in points])
    warned = [any("current_epoch % 2" in text for text in each.messages) for each in seen]
    assert warned == [False, True, True, False, False]


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("point", "begin"), [("inside 0.2", 2), ("epoch 0", 4)])
def test_another_seed_of_the_run_keeps_the_order(
    point: str, begin: int, every: int, worlds: Pools, tmp_path: Path
) -> None:
    """Also with reloaded loaders, and after a second resume inside a window."""
    trainer = {"reload_dataloaders_every_n_epochs": every}
    run = recorded(kind="by epoch: nothing", length=48, trainer=trainer)
    run = replace(run, save=(point,), root=str(tmp_path))
    reference = record(worlds, 2, run)
    second: dict[str, Any] = {"seed": 99, "save": ("inside 1.1",), "root": str(tmp_path / "second")}
    assert_continued(worlds, 1, run, reference, {point: begin}, **second)
    assert_continued(worlds, 2, replace(run, **second), reference, {"inside 1.1": 5}, seed=5)


def test_a_change_of_accumulation_is_refused_before_its_first_step(worlds: Pools) -> None:
    run = recorded(global_batch=None, callbacks=(AccumulatesByEpoch,))
    texts = ("accumulate_grad_batches was changed from 1 to 2 during the fit", "epoch 1")
    assert_refused(worlds, 2, run, "UnsupportedError", *texts)
