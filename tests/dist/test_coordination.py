"""Ranks are real processes over gloo; one launch runs many cases, a test looks at one of them.

What a job does that needs no process is in ``tests/core/test_session``, in far more cases.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.liveness import STALL_TIMEOUT_S, Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank, connect_ranks
from lightning_elastic_zero.coordination.store import check_open_file_limit, open_file_limit_warning
from tests.dist._rank_programs import (
    WORLD,
    raising,
    ranks_are_lost,
    steps_of_living_ranks,
)
from tests.support.launch import RankResult, run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer


@pytest.fixture(scope="module")
def living(fork_server: ForkServer) -> list[RankResult]:
    """Return the results of ``steps_of_living_ranks``."""
    return run_ranks(steps_of_living_ranks, WORLD, fork_server)


@pytest.fixture(scope="module")
def lost(fork_server: ForkServer) -> list[RankResult]:
    """Return the results of ``ranks_are_lost``."""
    return run_ranks(ranks_are_lost, WORLD, fork_server)


def notes(results: list[RankResult], case: str) -> list[Any]:
    """Return what each rank noted of a case."""
    assert all(case in result.notes for result in results), [r.stderr[-2000:] for r in results]
    return [result.notes[case] for result in results]


def raised(results: list[RankResult], case: str) -> tuple[str, str]:
    """Return the class and the message that every one of these ranks raised in bounded time."""
    found = notes(results, case)
    assert all("error" in note and note["seconds"] < PROMPT_TIMEOUT_S for note in found), found
    (same,) = {(note["error"], note["message"]) for note in found}
    return same


def test_a_rank_gets_its_own_result_of_a_step_together(living: list[RankResult]) -> None:
    """Work of any result is run on every rank, which gets its own back."""
    assert notes(living, "type") == ["StoreRanks"] * WORLD
    assert notes(living, "run_all") == [[r, "é"] for r in range(WORLD)]


def test_results_are_shared_in_rank_order(living: list[RankResult]) -> None:
    """Rank 0 alone gathers; the result of a broadcast is rank 0's."""
    everyone = [[r, "é"] for r in range(WORLD)]
    assert notes(living, "gather") == [everyone, None, None, None]
    assert notes(living, "all_gather") == [everyone] * WORLD
    assert notes(living, "broadcast") == [[0, "é"]] * WORLD


def test_what_one_rank_raises_all_ranks_raise(living: list[RankResult]) -> None:
    """The message names the step, the rank and what it raised; that rank chains its own error."""
    message = (
        "step 'write shards' failed on rank 2 of 4: OSError: [Errno 28] No space left on device"
    )
    assert raised(living, "one") == ("RanksError", message)
    assert [note["cause"] for note in notes(living, "one")] == [None, None, "OSError", None]
    assert notes(living, "after one") == [list(range(WORLD))] * WORLD
    assert "rank 1 at 'a' (run_all)" in raised(living, "places")[1]


def test_a_step_within_a_step_is_refused(living: list[RankResult]) -> None:
    """It could not end before the outer one."""
    assert "'b' was started within another step" in raised(living, "nested")[1]


def test_a_result_that_cannot_travel_fails_on_all_ranks(living: list[RankResult]) -> None:
    """Neither an object nor too many bytes break the store's connection or leave ranks waiting."""
    assert "Object of type object is not JSON serializable" in raised(living, "object")[1]
    assert "the store takes at most 8388608" in raised(living, "too long")[1]
    assert [note["value"] for note in notes(living, "long")] == [20_000_000] * WORLD


def test_an_interrupted_rank_does_not_leave_the_others_waiting(living: list[RankResult]) -> None:
    """Its own interrupt goes on as it is; the others raise at once."""
    assert raised(living[:3], "interrupt") == (
        "RanksError",
        "step 'long work' failed on rank 3 of 4: KeyboardInterrupt: ",
    )
    assert living[3].notes["interrupt"] == {"error": "KeyboardInterrupt"}


def test_a_rank_that_is_interrupted_while_it_waits_is_named(living: list[RankResult]) -> None:
    """A signal takes it out of its wait; the others hear of it at once."""
    message = raised(living[:3], "while waiting")[1]
    assert "rank 3 of 4: it gave up this step (KeyboardInterrupt)" in message
    assert living[3].notes["while waiting"] == {"error": "KeyboardInterrupt"}


def test_a_call_on_one_rank_leaves_later_calls_in_step(living: list[RankResult]) -> None:
    """It fails there; the next call that every rank makes is one for all of them."""
    message = living[0].notes["save at step 1"]["message"]
    assert "without ranks 1-3 of 4: never seen in 2.4 s" in message
    found = [note["value"] for note in notes(living, "save at step 2")]
    assert found == [list(range(WORLD))] * WORLD


def test_a_thread_that_is_held_up_is_waited_for(living: list[RankResult]) -> None:
    """Its process runs, as the system says: it is longer silent than a rank that may be dead."""
    for rank in (2, 0):
        found = notes(living, f"held {rank}")
        assert [note.get("value") for note in found] == [list(range(WORLD))] * WORLD, found
        assert min(note["seconds"] for note in found) > 3.0
    (line,) = notes(living, "held 2")[2]["log"]
    assert "rank 2: the coordination thread was not scheduled" in line
    assert "time.sleep(4.0)" in line, "it does not say where the thread is"


def test_a_process_has_one_connection_beside_torchs(living: list[RankResult]) -> None:
    """However many ranks are made in it; those that are closed take it from no others."""
    assert notes(living, "connections") == [1] * WORLD
    assert notes(living, "first goes on") == [list(range(WORLD))] * WORLD
    assert notes(living, "anew") == [list(range(WORLD))] * WORLD


def test_agreement_is_cheap(living: list[RankResult]) -> None:
    """Steps can be made freely: an empty one costs some milliseconds, and waits for no beat."""
    print("median of an empty step:", notes(living, "latency_ms"), "ms")
    assert max(notes(living, "latency_ms")) < 500 * Timeouts().heartbeat_interval_s


def test_rank_0_does_not_take_the_last_verdict_away(living: list[RankResult]) -> None:
    """It may host the store: the others hear of their last success before it closes."""
    assert [note.get("error") for note in notes(living[1:], "end")] == [None] * (WORLD - 1)


def test_a_process_ends_quietly_without_close(
    living: list[RankResult], lost: list[RankResult]
) -> None:
    """The thread neither keeps a process alive nor meets a store that has gone away.

    Here rank 0 hosts the store, and is the last one; there it has gone before the others.
    """
    ends = [(result.returncode, result.stderr) for result in (*living[1:], lost[0])]
    assert ends == [(0, "")] * WORLD


def test_progress_raises_early_when_another_rank_failed(lost: list[RankResult]) -> None:
    """Work of an hour ends when it has become pointless."""
    message = "step 'write' failed on rank 3 of 4: OSError: [Errno 5] Input/output error"
    assert raised(lost, "early") == ("RanksError", message)


def test_a_stopped_rank_is_named_and_goes_on(lost: list[RankResult]) -> None:
    """It does not beat; when it goes on it hears that the others have gone on without it."""
    message = raised(lost, "stopped")[1]
    assert "without rank 3 of 4: no heartbeat for 1.6 s (its process" in message
    assert "is stopped), last seen" in message
    assert notes(lost[:3], "after stopped") == [list(range(WORLD))] * 3


def test_a_killed_rank_is_named(lost: list[RankResult]) -> None:
    """The others raise at once: the system says that its process has ended."""
    assert lost[3].returncode == -signal.SIGKILL
    message = raised(lost[:3], "killed")[1]
    assert "step 'publish' cannot be finished without rank 3 of 4: its process" in message
    assert "has ended, last seen working in" in message


def test_a_closed_rank_is_named_at_once(lost: list[RankResult]) -> None:
    """Who has ended its part will not come; closing twice is fine, use after it an error."""
    message = raised(lost[:2], "closed")[1]
    assert "rank 2: it has ended its session, last seen after step 'publish'" in message
    assert "closed" in lost[2].notes["used when closed"]["message"]


def test_a_rank_that_ended_is_named(lost: list[RankResult]) -> None:
    """A process that comes to its end without ``close`` says so to the others."""
    assert "rank 1: it has ended its session" in raised(lost[:1], "left")[1]


def test_a_limit_that_is_too_low_is_told() -> None:
    """What is needed, who may have how much, and what to type: before the first rank is missing."""
    assert open_file_limit_warning(400, 1024, 100, "rank 0") == ""
    text = open_file_limit_warning(1024, 1024, 50, "rank 0, process 7,")
    for part in ("1024 ranks", "rank 0, process 7,", "1024 open files", "2098", "ulimit -n 8192"):
        assert part in text


def test_the_limit_is_that_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """It is read where it is in force: a process that lowers its own is warned."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrapped = PrefixStore("some", PrefixStore("prefix", store))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
    try:
        check_open_file_limit(wrapped, 1023)
        check_open_file_limit(HashStore(), 1021)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (record,) = caplog.records
    assert "1023 ranks" in record.message
    assert "900 open files" in record.message


def test_times_that_would_bury_the_living_are_refused() -> None:
    """A rank must be able to miss some beats."""
    with pytest.raises(ValueError, match="at least 4"):
        Timeouts(heartbeat_interval_s=10)
    with pytest.raises(ValueError, match="held_up_timeout_s of at least"):
        Timeouts(held_up_timeout_s=29)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "50", None])
def test_a_stall_timeout_is_a_positive_number(wrong: object) -> None:
    """What it is, and what was given, is said where the option is given."""
    with pytest.raises(ValueError, match=r"stall_timeout_s=.* a positive number"):
        Timeouts.of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), True, "600", None])
def test_an_absent_timeout_is_a_positive_number(wrong: object) -> None:
    """So is that; and no other time changes, but beats for a very short one."""
    with pytest.raises(ValueError, match=r"absent_timeout_s=.* a positive number"):
        Timeouts.of(STALL_TIMEOUT_S, wrong)  # type: ignore[arg-type]
    assert Timeouts.of(STALL_TIMEOUT_S, 60) == replace(Timeouts(), absent_timeout_s=60.0)
    assert Timeouts.of(STALL_TIMEOUT_S, 2).heartbeat_interval_s == 0.5


@pytest.mark.parametrize("seconds", [0.5, 50, 3600.0])
def test_a_stall_timeout_changes_nothing_else(seconds: float) -> None:
    """A rank must be able to miss some beats; who died is still noticed as early."""
    times, default = Timeouts.of(seconds), Timeouts()
    assert times.stall_timeout_s == seconds
    assert times.heartbeat_interval_s == min(default.heartbeat_interval_s, seconds / 4)
    assert (times.heartbeat_timeout_s, times.absent_timeout_s) == (
        default.heartbeat_timeout_s,
        default.absent_timeout_s,
    )


def test_one_rank_needs_no_process_group() -> None:
    """It runs the work, gives what several ranks would give, and raises what the work raises."""
    assert not dist.is_initialized()
    ranks = connect_ranks()
    assert isinstance(ranks, OneRank)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    pair: Callable[[], Any] = lambda: (1, 2)  # noqa: E731
    assert ranks.run_all("a", pair) == (1, 2)
    assert ranks.gather("a", pair) == [[1, 2]]
    assert ranks.broadcast("a", pair) == [1, 2]
    assert ranks.all_gather("a", pair) == [[1, 2]]
    with pytest.raises(OSError, match="disk"):
        ranks.run_all("a", raising({0: OSError("disk")}, 0))
    ranks.progress.check()
    ranks.close()
