"""Whoever is stopped and goes on, or gives a step up: afterwards all ranks can do steps again."""

from __future__ import annotations

import pytest

from tests.dist._suspended_ranks import (
    SCENARIOS,
    a_rank_gives_up_alone,
    first_rank_is_suspended,
    store_host_is_suspended,
)
from tests.dist._launch import RankResult, run_ranks
from tests.dist._rank_programs import WORLD
from tests.dist.test_coordination import notes, raised
from tests.timeouts import PROMPT_TIMEOUT_S

MISSED = [case for case in SCENARIOS if case != "between"]


@pytest.fixture(scope="module", params=[False, True], ids=["own store", "store of launcher"])
def suspended(request: pytest.FixtureRequest) -> list[RankResult]:
    """Give the results of ``first_rank_is_suspended``, where the store stops with rank 0 or does not."""
    return run_ranks(first_rank_is_suspended, WORLD, store_of_launcher=request.param)


@pytest.fixture(scope="module")
def alone() -> list[RankResult]:
    """Give the results of ``a_rank_gives_up_alone``."""
    return run_ranks(a_rank_gives_up_alone, WORLD)


@pytest.mark.parametrize("case", [*MISSED, "at once"])
def test_a_step_that_rank_0_missed_fails_on_all_ranks(
    suspended: list[RankResult], case: str
) -> None:
    """Wherever in the step it was stopped: each rank raises, and hears of rank 0."""
    for note in notes(suspended, case):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S


@pytest.mark.parametrize("case", SCENARIOS)
def test_when_rank_0_goes_on_the_ranks_are_in_step(suspended: list[RankResult], case: str) -> None:
    """Whoever gave up, and whoever did not: the very next step succeeds, and each after it."""
    assert notes(suspended, f"after {case}") == [[]] * WORLD


def test_a_stop_that_nobody_noticed_fails_nothing(suspended: list[RankResult]) -> None:
    """Between two steps ranks may be away for as long as they like."""
    assert [note.get("message") for note in notes(suspended, "between")] == [None] * WORLD


def test_ranks_that_try_again_at_once_stay_in_step(suspended: list[RankResult]) -> None:
    """Each try that some of them give up fails on all, so that all have made as many."""
    tries = set(map(len, notes(suspended, "after at once")))
    assert len(tries) == 1, tries


def test_when_the_stores_host_goes_on_the_ranks_are_in_step() -> None:
    """The host need not be a rank: rank 0 loses the store like the others, and finds it again."""
    results = run_ranks(store_host_is_suspended, 3)
    for note in notes(results, "stopped"):
        assert note["error"] == "RanksError"
        assert note["seconds"] < PROMPT_TIMEOUT_S
    assert notes(results, "after stopped") == [[]] * 3


def test_a_rank_that_missed_the_end_is_in_the_next_step(alone: list[RankResult]) -> None:
    """It raises what the others have finished; where no step is left to fail, none does."""
    assert "the job's store has not answered" in raised(alone[3:], "finished")[1]
    assert [note.get("message") for note in notes(alone[:3], "finished")] == [None] * 3
    assert notes(alone, "after finished") == [[]] * WORLD


def test_a_rank_that_left_in_the_midst_is_not_waited_for(alone: list[RankResult]) -> None:
    """The others' next step fails as soon as a stalled rank's does; then all are in step."""
    assert [note.get("message") for note in notes(alone[:3], "before left")] == [None] * 3
    message = raised(alone[:3], "left")[1]
    assert "rank 3 of 4: alive, but it has given up step 'finished'" in message
    assert notes(alone, "after left") == [[]] * WORLD


@pytest.mark.parametrize("case", ["interrupt", "just before the end"])
def test_a_rank_that_is_interrupted_while_it_waits_is_named(
    alone: list[RankResult], case: str
) -> None:
    """It will not come to hear the verdict; the others do not go on as if it had.

    That holds where rank 0 is about to read the result that the rank has left.
    """
    assert raised(alone[3:], case)[1] == "interrupted"
    message = raised(alone[:3], case)[1]
    assert "rank 3 of 4: it has given this step up (KeyboardInterrupt)" in message
    assert notes(alone, f"after {case}") == [[]] * WORLD
