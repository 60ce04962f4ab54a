"""The checks of the job tests detect wrong samples, losses and missing steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.jobs._job import (
    Step,
    StepRecord,
    check_steps,
    repeated_steps,
    seconds_to_next_step,
)


def line(
    time: float, step: int, rank: int, met_at: str = "first", event: str = "step"
) -> StepRecord:
    """Return the record of one of two ranks, which have one sample each."""
    return StepRecord(time, event, step, rank, 2, met_at, rank, (10 * step + rank,), float(step))


LINES = [
    *(line(0.0, 0, rank, event="start") for rank in (0, 1)),
    *(line(float(step), step, rank) for step in (1, 2, 3) for rank in (0, 1)),
    *(line(10.0, 1, rank, "second", "start") for rank in (0, 1)),
    *(line(9.0 + step, step, rank, "second") for step in (2, 3, 4) for rank in (0, 1)),
]
UNDISTURBED = {step: Step((10 * step, 10 * step + 1), float(step)) for step in (1, 2, 3, 4)}


def test_equal_steps_pass_even_if_repeated_or_incomplete() -> None:
    check_steps(LINES, UNDISTURBED)
    check_steps([other for other in LINES if other != line(3.0, 3, 1)], UNDISTURBED)


@pytest.mark.parametrize(
    "wrong", [{"samples": (99,)}, {"samples": ()}, {"loss": 4.001}], ids=["other", "none", "loss"]
)
def test_a_rank_with_wrong_samples_or_loss_is_found(
    wrong: dict[str, tuple[int, ...] | float],
) -> None:
    last = line(13.0, 4, 0, "second")
    changed = [replace(last, **wrong) if other == last else other for other in LINES]  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="step 4"):
        check_steps(changed, UNDISTURBED)


def test_a_missing_step_is_found() -> None:
    with pytest.raises(AssertionError):
        check_steps([other for other in LINES if other.step != 4], UNDISTURBED)


def test_repeated_steps_and_the_time_to_the_next_step_are_counted() -> None:
    assert repeated_steps(LINES) == {10.0: 2}
    assert seconds_to_next_step(LINES, since=3.5) == 7.5
