"""Resumes at the end of an epoch start the next epoch, also for data that count epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fits import FitCase
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import assert_continued, from_step, record, recorded, records

pytestmark = pytest.mark.engine

POINTS = {"step 1.3": 8, "validated 10": 10, "epoch 1": 10}
"""Moments inside an epoch, after its validation and at its end, with the next step."""

RUN = recorded(
    length=60,
    batch_size=6,
    epochs=4,
    validate=True,
    save=tuple(POINTS),
    trainer={"use_distributed_sampler": False},
)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["counting", "counting, sized", "counting, batches"])
@pytest.mark.parametrize("point", POINTS)
def test_positioned_data_yield_each_epoch_once(
    point: str, kind: str, world: int, worlds: Pools, tmp_path: Path
) -> None:
    run = replace(RUN, kind=kind, save=(point,), root=str(tmp_path))
    reference = record(worlds, 2, run)
    # All epochs have different orders.
    assert len({tuple(reference.steps[step]) for step in range(0, 20, 5)}) == 4
    begin = {point: POINTS[point]}
    assert_continued(worlds, world, run, reference, begin, batch_size=12 // world)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["counting, kept", "counting, kept and ended", "counting, torchdata"]
)
def test_stateful_loaders_begin_the_next_epoch(kind: str, worlds: Pools, tmp_path: Path) -> None:
    if "torchdata" in kind:
        pytest.importorskip("torchdata")
    run = replace(RUN, kind=kind, epochs=3, root=str(tmp_path))
    run = replace(run, strategy={"logging_batch_size_per_gpu": 6})
    assert_continued(worlds, 2, run, record(worlds, 2, run), POINTS)
    on_three = {"batch_size": 4, "strategy": {"logging_batch_size_per_gpu": 4}}
    text = "one state per rank, saved on 2 devices, and this run has 3 devices"
    for seen in records(worlds, 3, [run.resumed(point, **on_three) for point in [*POINTS][1:]]):
        assert any(text in message for message in seen.messages)


@pytest.mark.long
def test_torchdatas_loader_starts_the_next_epoch_after_a_limited_one(
    worlds: Pools, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata")
    trainer = {**RUN.trainer, "limit_train_batches": 3}
    points = {"step 0.2": 2, "validated 3": 3, "epoch 0": 3}
    run = replace(RUN, kind="counting, torchdata", length=240, epochs=2, trainer=trainer)
    run = replace(run, save=tuple(points), root=str(tmp_path))
    assert_continued(worlds, 2, run, record(worlds, 2, run), points)


@pytest.mark.long
@pytest.mark.parametrize("other", ["shorter", "longer"])
def test_torchdatas_loader_restarts_when_another_loader_ends_the_epoch(
    other: str, worlds: Pools, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata")
    save = ("epoch 0", "starting 1")
    run = recorded(kind=f"torchdata and a {other} one", length=48, global_batch=None, save=save)
    run = replace(run, root=str(tmp_path))
    reference = record(worlds, 2, run)
    assert_continued(worlds, 2, run, reference, dict.fromkeys(save, reference.global_step // 2))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_an_incomplete_window_do_not_reach_the_next_epoch(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    run = recorded(kind="skips", stage=stage, save=("epoch 0",), root=str(tmp_path), length=60)
    reference = record(worlds, 2, run)
    seen = record(worlds, 2, run.resumed("epoch 0"))
    assert seen.buffer == reference.buffer
    # Computed with the weights after step 2, the first step of the epoch.
    assert seen.losses[3] == reference.losses[3]
    (warning,) = [m for m in reference.messages if "ended within an accumulation window" in m]
    assert "gradients of its last 1 micro-batches are dropped" in warning


UNCUT = recorded(length=48, batch_size=4, global_batch=8, epochs=3, noise=0.1)
"""Two micro-batches per step, on one rank."""

KEPT: dict[str, FitCase] = {
    "a stream": replace(UNCUT, kind="seeks", loader={"num_workers": 1}),
    "batches in order": replace(UNCUT, kind="noisy batches", loader={"num_workers": 1}),
    "shuffled by the process": replace(UNCUT, loader={"num_workers": 1}),
    "shuffled by a generator": replace(UNCUT, kind="own generator", loader={"num_workers": 1}),
    "without workers": replace(UNCUT, kind="own generator"),
    "made anew": replace(
        UNCUT,
        kind="seeks",
        loader={"num_workers": 1},
        trainer={"reload_dataloaders_every_n_epochs": 1},
    ),
}
"""Loaders that keep their samplers, and draw random numbers when a sample is fetched."""


@pytest.mark.parametrize("name", KEPT)
def test_kept_loaders_repeat_order_and_random_numbers_of_workers(
    name: str, worlds: Pools, tmp_path: Path
) -> None:
    trainer = {**KEPT[name].trainer, "use_distributed_sampler": False}
    save, root = ("starting 1", "epoch 1"), str(tmp_path)
    run = replace(KEPT[name], trainer=trainer, save=save, root=root)
    second = run.resumed("starting 1", save=("starting 2",), root=f"{root}/2")
    runs = [run, second, second.resumed("starting 2"), run.resumed("epoch 1")]
    reference, *resumed = records(worlds, 1, runs)
    for seen, begin in zip(resumed, (6, 12, 12), strict=True):
        assert seen.steps == from_step(reference.steps, begin)
        assert seen.losses == from_step(reference.losses, begin)


@pytest.mark.parametrize("limit", [None, 4])
def test_a_batch_that_was_fetched_ahead_repeats_its_random_numbers(
    limit: int | None, worlds: Pools, tmp_path: Path
) -> None:
    """Lightning fetches the next batch of a stream before it trains on this one."""
    save: tuple[str, ...] = ("step 0.1", "step 1.1", "step 1.2", "step 2.3")
    save = save if limit is None else save[:2]
    length = 6 if limit is None else limit // 2
    limits = {} if limit is None else {"limit_train_batches": length}
    run = replace(UNCUT, kind="seeks", dropout=0.2, save=save, root=str(tmp_path), trainer=limits)
    reference, *resumed = records(worlds, 1, [run, *map(run.resumed, save)])
    begins = (1, length + 1, length + 2, 2 * length + 3)
    for seen, begin in zip(resumed, begins, strict=False):
        assert seen.steps == from_step(reference.steps, begin)
        assert seen.losses == from_step(reference.losses, begin)
        assert seen.drawn == reference.drawn


@pytest.mark.long
@pytest.mark.parametrize("end", ["validating 6", "validated 3", "step 0.5"])
def test_workers_of_a_validation_repeat_their_random_numbers(
    end: str, worlds: Pools, tmp_path: Path
) -> None:
    """Each validation draws other numbers, whether or not the run was resumed."""
    every = {"val_check_interval": 3, "limit_val_batches": 1}
    run = replace(
        UNCUT, epochs=2, validate=True, validation={"num_workers": 1}, trainer=every, save=(end,)
    )
    run = replace(run, root=str(tmp_path), rate=0.0)
    reference, seen = records(worlds, 1, [run, run.resumed(end)])
    assert sorted(reference.validated) == [3, 6, 9, 12]
    assert len({*reference.validated.values()}) == 4
    assert seen.validated == from_step(reference.validated, 4)


@pytest.mark.long
def test_persistent_workers_cause_one_warning(worlds: Pools, tmp_path: Path) -> None:
    """Their random numbers continue over epochs, but restart after a resume."""
    options = {"num_workers": 1, "persistent_workers": True}
    run = replace(UNCUT, kind="seeks", loader=options, save=("epoch 0",), root=str(tmp_path))
    _, seen = records(worlds, 1, [run, run.resumed("epoch 0")])
    (warning,) = [text for text in seen.messages if "draw other random numbers" in text]
    assert "persistent_workers" in warning
