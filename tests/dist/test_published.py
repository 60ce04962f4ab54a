"""What is in its place is told at once, whatever becomes of other ranks."""

from __future__ import annotations

import signal

import pytest

from tests.dist._save_programs import (
    WORLD,
    link_of_one_lost_after_publication,
    lost_after_publication,
    slow_link,
)
from tests.support.launch import run_ranks
from tests.support.ranks import ForkServer


@pytest.mark.long
def test_a_rank_that_is_lost_hides_no_checkpoint(fork_server: ForkServer) -> None:
    """The save fails, as not all agree on it; who makes links has heard before that it is there."""
    first, second, dead = run_ranks(lost_after_publication, WORLD, fork_server)
    assert dead.returncode == -signal.SIGKILL
    assert first.notes["told"] == [True]
    assert second.notes["told"] == []
    for result in (first, second):
        assert result.notes["said"]["error"] == "RanksError"
        assert f"rank {WORLD - 1}" in result.notes["said"]["message"]
        assert result.notes["whole"]


@pytest.mark.long
def test_its_link_follows_though_a_rank_is_lost(fork_server: ForkServer) -> None:
    """A run's manager makes the link then, not when all ranks have agreed that the save ended."""
    first, second, dead = run_ranks(link_of_one_lost_after_publication, WORLD, fork_server)
    assert dead.returncode == -signal.SIGKILL
    assert first.notes["deferred"]
    for result in (first, second):
        assert len(result.notes["told"]) == 3, result.notes["told"]
        assert result.notes["link"] == "new.ckpt"
    told = " ".join(first.notes["told"])
    assert "is in its place, but not all ranks have agreed on it" in told


@pytest.mark.long
def test_a_link_may_take_long(fork_server: ForkServer) -> None:
    """Where the disk has none it is a copy, for which the other ranks wait: work goes on."""
    for result in run_ranks(slow_link, 2, fork_server):
        assert result.notes == {"said": "None", "ended": [True], "whole": True}, result.stderr
