"""Schedulers and validation count the last step of an epoch, also with fewer micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.fits import FitCase
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import (
    assert_continued,
    assert_refused,
    from_step,
    record,
    recorded,
    records,
)

pytestmark = pytest.mark.engine

RUN = recorded(kind="seeks", batch_size=1, schedule="lambda", validate=True, epochs=2)
"""On two ranks; data without a length, with 12 samples in 6 micro-batches per step."""

LIKE_LIGHTNING: dict[str, Any] = {"global_batch": None}
"""Without a global batch, Lightning's integers count micro-batches."""


def two(**trainer: Any) -> dict[str, Any]:
    """Return the trainer's settings with two micro-batches per step."""
    return {"accumulate_grad_batches": 2, **trainer}


CASES: dict[str, tuple[FitCase, list[int]]] = {
    "a last window of two": (replace(RUN, length=52), [5, 10]),
    "a limit": (
        replace(RUN, **LIKE_LIGHTNING, length=14, trainer=two(limit_train_batches=5)),
        [3, 6],
    ),
    "a limit beyond the data": (
        replace(RUN, **LIKE_LIGHTNING, length=10, trainer=two(limit_train_batches=7)),
        [3, 6],
    ),
    "a limit beyond the data, each batch a step": (
        replace(RUN, global_batch=None, length=6, trainer={"limit_train_batches": 7}),
        [3, 6],
    ),
    "a limit on map-style data": (
        replace(RUN, **LIKE_LIGHTNING, kind="plain", length=48, trainer=two(limit_train_batches=3)),
        [2, 4],
    ),
    "less than a window": (replace(RUN, length=4), [1, 2]),
    "a limit within a window": (
        replace(RUN, **LIKE_LIGHTNING, length=8, trainer=two(limit_train_batches=1)),
        [1, 2],
    ),
    "every second step": (
        replace(RUN, length=52, stage=1, trainer={"val_check_interval": 2}),
        [2, 4, 7, 9],
    ),
    "every third step, over epochs": (
        replace(
            RUN,
            length=52,
            trainer={"val_check_interval": 3, "check_val_every_n_epoch": None},
        ),
        [3, 6, 9],
    ),
    "half an epoch": (
        replace(RUN, length=40, trainer={"limit_train_batches": 4, "val_check_interval": 0.5}),
        [2, 4, 6, 8],
    ),
    "half an epoch of loaders made anew": (
        recorded(
            schedule="lambda",
            validate=True,
            epochs=3,
            trainer={"val_check_interval": 0.5, "reload_dataloaders_every_n_epochs": 1},
        ),
        [2, 4, 7, 9, 12, 14],
    ),
    "a user's batches, less than a window": (
        replace(
            RUN,
            kind="own batches",
            length=6,
            stage=3,
            trainer={"use_distributed_sampler": False, "val_check_interval": 1},
        ),
        [1, 2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rates_and_validation_follow_optimizer_steps(case: str, worlds: Pools) -> None:
    run, validations = CASES[case]
    seen = record(worlds, 2, run)
    assert seen.global_step == len(seen.rates)
    assert seen.rates == pytest.approx({step: 0.01 / (1 + step) for step in seen.rates})
    validated = [int(event.split()[-1]) for event in seen.events if "validate" in event]
    assert validated == validations


def test_no_batch_beyond_the_limit_is_fetched(worlds: Pools) -> None:
    """A stream that continues over epochs would lose it."""
    trainer = {"limit_train_batches": 3, "accumulate_grad_batches": 2}
    run = replace(RUN, kind="continuing", length=100, global_batch=None, trainer=trainer)
    seen = record(worlds, 2, run)
    assert sorted(index for ids in seen.steps.values() for index in ids) == list(range(12))


ONE = recorded(length=60, global_batch=6, batch_size=6, epochs=2, validate=True)
"""On one rank, each batch is a step; with batch_size=2, a step has three micro-batches."""

EPOCHS: dict[str, FitCase] = {
    "a fraction": replace(ONE, length=180, epochs=1, trainer={"limit_train_batches": 0.7}),
    "a fraction of the shorter loader": replace(
        ONE, kind="two, as long as the shorter", trainer={"limit_train_batches": 0.5}
    ),
    "a number": replace(ONE, trainer={"limit_train_batches": 3}),
    "validated at every step": replace(
        ONE, trainer={"limit_train_batches": 2, "val_check_interval": 1}
    ),
    "validated once an epoch": replace(
        ONE, trainer={"limit_train_batches": 2, "val_check_interval": 1.0}
    ),
    "validated every second step": replace(
        ONE, trainer={"limit_train_batches": 4, "val_check_interval": 2}
    ),
    "a user's batches": replace(
        ONE, kind="own batches", length=52, trainer={"use_distributed_sampler": False}
    ),
}


STEPS = (21, 4, 6, 4, 4, 8, 18)
"""Of each, as with Lightning's other strategies."""


@pytest.mark.parametrize(("case", "steps"), [*zip(EPOCHS, STEPS, strict=True)])
def test_accumulation_does_not_change_steps_validations_and_saves(
    case: str, steps: int, worlds: Pools, tmp_path: Path
) -> None:
    runs = []
    for size in (6, 2):
        saves = partial(ModelCheckpoint, tmp_path / f"{size}", "{step}", save_top_k=-1)
        runs.append(replace(EPOCHS[case], batch_size=size, callbacks=(saves,)))
    one, three = records(worlds, 1, runs)
    assert three.events == one.events
    assert three.steps == one.steps
    assert len(one.steps) == steps
    saved = [sorted(path.name for path in tmp_path.glob(f"{n}/*")) for n in (6, 2)]
    assert saved[0] == saved[1]


@pytest.mark.long
def test_intervals_without_a_global_batch(worlds: Pools) -> None:
    """Fractions refer to optimizer steps; Lightning's integers count micro-batches."""
    run = replace(EPOCHS["a fraction"], global_batch=None)
    three = {"limit_train_batches": 0.7, "accumulate_grad_batches": 3}
    one, other = records(worlds, 1, [run, replace(run, batch_size=2, trainer=three)])
    assert one.steps == other.steps
    assert len(one.steps) == 21


def test_an_interval_beyond_the_epoch_is_refused(worlds: Pools) -> None:
    """With Lightning's error, and with any accumulation."""
    run = replace(ONE, trainer={"limit_train_batches": 2, "val_check_interval": 3})
    text = "`val_check_interval` (3) must be less than or equal"
    for size in (6, 2):
        assert_refused(worlds, 1, replace(run, batch_size=size), "ValueError", text)


def test_a_fraction_of_less_than_a_step_is_refused(worlds: Pools) -> None:
    run = replace(ONE, batch_size=2, trainer={"limit_train_batches": 0.05})
    text = "limit_train_batches=0.05 of an epoch of 10 optimizer steps"
    assert_refused(worlds, 1, run, "UnsupportedError", text)


SHORT_WINDOW = {"step 0.2": 2, "step 0.3": 3, "validated 3": 3, "epoch 0": 3, "step 1.1": 4}
"""Moments before and after the short step of an epoch, with the next step."""


@pytest.mark.parametrize(
    "names", [("step 0.3", "epoch 0"), pytest.param((*SHORT_WINDOW,), marks=pytest.mark.long)]
)
def test_a_window_cut_short_by_a_limit_is_resumed(
    names: tuple[str, ...], worlds: Pools, tmp_path: Path
) -> None:
    """Without a global batch, from before and after the short step and the end of the epoch."""
    run = replace(
        RUN, kind="plain", length=48, **LIKE_LIGHTNING, trainer=two(limit_train_batches=5)
    )
    moments = {name: SHORT_WINDOW[name] for name in names}
    saving = replace(run, save=tuple(moments), root=str(tmp_path), dropout=0.3)
    reference = record(worlds, 2, saving)
    assert [len(ids) for ids in reference.steps.values()] == [4, 4, 2] * 2
    resumed = assert_continued(worlds, 2, saving, reference, moments)
    for (moment, first), seen in zip(moments.items(), resumed, strict=True):
        assert seen.losses == from_step(reference.losses, first), moment
        assert seen.rates == from_step(reference.rates, first), moment
        assert seen.events == reference.events[len(reference.events) - len(seen.events) :], moment
        assert seen.loops["end"] == reference.loops["end"], moment
