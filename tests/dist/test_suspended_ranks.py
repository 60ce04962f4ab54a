"""Whoever is stopped and goes on: afterwards all ranks can do steps again.

Which rank may be stopped at which instant is run through in ``tests/core/test_ranks_coming_back``;
here are real processes, whose calls do not return while the store's host is stopped.
"""

from __future__ import annotations

import signal

import pytest

from tests.dist._rank_programs import WORLD
from tests.dist._suspended_ranks import first_rank_is_lost, store_host_is_suspended
from tests.dist.test_coordination import notes
from tests.support.launch import RankResult, run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer


@pytest.fixture(scope="module")
def first_lost(fork_server: ForkServer) -> list[RankResult]:
    """Return the results of ``first_rank_is_lost``."""
    return run_ranks(first_rank_is_lost, WORLD, fork_server)


@pytest.mark.parametrize("case", ["at work", "at once"])
def test_a_step_that_rank_0_missed_fails_on_all_ranks(
    first_lost: list[RankResult], case: str
) -> None:
    """Even a store that does not answer ends the wait; rank 0 does not take it for a success."""
    for note in notes(first_lost, case):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S


@pytest.mark.long
def test_when_rank_0_goes_on_the_ranks_are_in_step(first_lost: list[RankResult]) -> None:
    """The very next step succeeds; where some try again at once, all have made as many tries."""
    assert notes(first_lost, "after at work") == [[]] * WORLD
    tries = set(map(len, notes(first_lost, "after at once")))
    assert len(tries) == 1, tries


def test_a_killed_first_rank_is_noticed(first_lost: list[RankResult]) -> None:
    """The others raise by themselves, at work or waiting, though the store is gone."""
    first, *others = first_lost
    assert first.returncode == -signal.SIGKILL
    for note in notes(others, "killed") + notes(others, "again"):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S


@pytest.mark.long
def test_when_the_stores_host_goes_on_the_ranks_are_in_step(fork_server: ForkServer) -> None:
    """The host need not be a rank: rank 0 loses the store like the others, and finds it again."""
    results = run_ranks(store_host_is_suspended, 3, fork_server)
    for note in notes(results, "stopped"):
        assert note["error"] == "RanksError"
        assert note["seconds"] < PROMPT_TIMEOUT_S
    assert notes(results, "after stopped") == [[]] * 3
