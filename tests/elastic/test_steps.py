"""What the jobs' tests would find: other samples, another loss, too much work lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.elastic._job import (
    Step,
    StepRecord,
    check_steps,
    seconds_to_next_step,
    steps_taken_again,
)


def line(
    time: float, step: int, rank: int, met_at: str = "first", event: str = "step"
) -> StepRecord:
    """Return what one of two ranks notes, of which each has a sample of its own."""
    return StepRecord(time, event, step, rank, 2, met_at, rank, (10 * step + rank,), float(step))


LINES = [
    *(line(0.0, 0, rank, event="start") for rank in (0, 1)),
    *(line(float(step), step, rank) for step in (1, 2, 3) for rank in (0, 1)),
    *(line(10.0, 1, rank, "second", "start") for rank in (0, 1)),
    *(line(9.0 + step, step, rank, "second") for step in (2, 3, 4) for rank in (0, 1)),
]
UNDISTURBED = {step: Step((10 * step, 10 * step + 1), float(step)) for step in (1, 2, 3, 4)}


def test_a_run_like_the_undisturbed_one_passes() -> None:
    """Also where steps were taken twice, and where a rank's line is missing of one of them."""
    check_steps(LINES, UNDISTURBED)
    check_steps([other for other in LINES if other != line(3.0, 3, 1)], UNDISTURBED)


@pytest.mark.parametrize(
    "wrong", [{"samples": (99,)}, {"samples": ()}, {"loss": 4.001}], ids=["other", "none", "loss"]
)
def test_one_rank_of_one_step_is_found(wrong: dict[str, tuple[int, ...] | float]) -> None:
    """Whether its samples are others, or missing, or its loss is."""
    last = line(13.0, 4, 0, "second")
    changed = [replace(last, **wrong) if other == last else other for other in LINES]  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="step 4"):
        check_steps(changed, UNDISTURBED)


def test_a_step_that_nobody_took_is_found() -> None:
    """The steps are those of the undisturbed run, all of them."""
    with pytest.raises(AssertionError):
        check_steps([other for other in LINES if other.step != 4], UNDISTURBED)


def test_what_was_lost_is_counted() -> None:
    """The steps before a world began that it takes again, and the time to its first one."""
    assert steps_taken_again(LINES) == {10.0: 2}
    assert seconds_to_next_step(LINES, since=3.5) == 7.5
