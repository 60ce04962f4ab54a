"""The last step of an epoch may be of fewer micro-batches: schedulers and validation count it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.engine._worker_pool import Pools
from tests.trainer._recorded_runs import RunSpec, fit

pytestmark = pytest.mark.engine

RUN = RunSpec(kind="seeks", batch_size=1, schedule="lambda", validate=True, epochs=2)
"""On two ranks, data without a length, of which a step takes 12 samples in 6 micro-batches."""

LIKE_LIGHTNING: dict[str, Any] = {"global_batch": None}
"""Two micro-batches to a step; Lightning's integers count micro-batches."""


def two(**trainer: Any) -> dict[str, Any]:
    """Return the trainer's settings with two micro-batches to a step."""
    return {"accumulate_grad_batches": 2, **trainer}


CASES: dict[str, tuple[RunSpec, list[int]]] = {
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
def test_each_step_counts(case: str, worlds: Pools) -> None:
    """The rate of step k is that after k steps of the scheduler, and validation is at its steps."""
    run, validations = CASES[case]
    seen = worlds.run(2, partial(fit, run))[0]
    assert seen.global_step == len(seen.rates)
    assert seen.rates == pytest.approx({step: 0.01 / (1 + step) for step in seen.rates})
    validated = [int(event.split()[-1]) for event in seen.events if "validate" in event]
    assert validated == validations


def test_no_batch_beyond_the_limit_is_fetched(worlds: Pools) -> None:
    """A stream that goes on would lose it: three batches of each rank in each epoch, in a row."""
    trainer = {"limit_train_batches": 3, "accumulate_grad_batches": 2}
    run = replace(RUN, kind="goes on", length=100, global_batch=None, trainer=trainer)
    seen = worlds.run(2, partial(fit, run))[0]
    assert sorted(index for ids in seen.steps.values() for index in ids) == list(range(12))
