"""Ranks are real processes over gloo; one launch runs many cases, a test looks at one of them."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination import OneRank, Timeouts, connect_ranks
from lightning_elastic_zero.coordination.store_connection import check_open_file_limit, open_file_limit_warning
from tests.dist._launch import RankResult, run_ranks
from tests.dist._rank_programs import (
    SHORT,
    WORLD,
    calls_on_one_rank,
    first_rank_is_lost,
    many_connections,
    raising,
    steps_of_living_ranks,
    steps_that_take_time,
)
from tests.timeouts import PROMPT_TIMEOUT_S


@pytest.fixture(scope="module")
def living() -> list[RankResult]:
    """Give the results of ``steps_of_living_ranks``."""
    return run_ranks(steps_of_living_ranks, WORLD)


@pytest.fixture(scope="module")
def short() -> list[RankResult]:
    """Give the results of ``steps_that_take_time``."""
    return run_ranks(steps_that_take_time, WORLD)


def notes(results: list[RankResult], case: str) -> list[Any]:
    """Give what each rank noted of a case."""
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
    """Rank 0 alone gathers; everywhere is for all; from_first runs on rank 0 only."""
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


def test_the_class_of_a_known_error_is_kept(living: list[RankResult]) -> None:
    """A mismatch that one rank finds is a mismatch on every rank."""
    message = "step 'write shards' failed on rank 1 of 4: 'w' has 2 elements, 3 are wanted"
    assert raised(living, "known") == ("CheckpointMismatchError", message)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("all alike", "SaveError", "all 4 ranks: nothing to save"),
        ("some alike", "RanksError", "ranks 1, 3 of 4: OSError: disk"),
        ("one class", "SaveError", "ranks 0, 3 of 4:\n  rank 0: this\n  rank 3: that"),
        (
            "two classes",
            "RanksError",
            "ranks 1, 3 of 4:\n  rank 1: SaveError: this\n  rank 3: CheckpointCorruptedError: that",
        ),
    ],
)
def test_failures_of_several_ranks_are_told_as_one(
    living: list[RankResult], case: str, error: str, message: str
) -> None:
    """Equal messages are merged, others listed; only a class that all of them share is kept."""
    assert raised(living, case) == (error, f"step 'write shards' failed on {message}")


@pytest.mark.parametrize(
    "case", ["one", "known", "all alike", "some alike", "one class", "two classes", "all"]
)
def test_a_failure_leaves_the_ranks_in_step(living: list[RankResult], case: str) -> None:
    """After a failure the next step succeeds, with nothing left over from the failed one."""
    assert notes(living, f"after {case}") == [list(range(WORLD))] * WORLD


def test_ranks_in_different_steps_are_told_who_is_where(living: list[RankResult]) -> None:
    """The message places every rank, whether the name of the step or its kind is another."""
    rule = "every rank must make the same calls in the same order, but found "
    assert raised(living, "places")[0] == "RanksError"
    places = raised(living, "places")[1].removeprefix(rule)
    assert "rank 1 at 'start of training' (together)" in places
    assert "ranks 0, 2-3 at 'load last.ckpt' (together)" in places.replace("2, 3", "2-3")
    assert "rank 1 at 'sizes' (everywhere)" in raised(living, "kinds")[1]


def test_a_step_within_a_step_is_refused(living: list[RankResult]) -> None:
    """It could not end before the outer one."""
    assert "'b' was begun within another step" in raised(living, "nested")[1]


def test_a_result_that_cannot_travel_fails_on_all_ranks(living: list[RankResult]) -> None:
    """Neither an object nor too many bytes break the store's connection or leave ranks waiting."""
    assert "Object of type object is not JSON serializable" in raised(living, "object")[1]
    assert "the store takes 8388608 at most" in raised(living, "too long")[1]
    assert [note["value"] for note in notes(living, "long")] == [20_000_000] * WORLD


def test_an_interrupted_rank_does_not_leave_the_others_waiting(living: list[RankResult]) -> None:
    """Its own interrupt goes on as it is; the others raise at once."""
    assert raised(living[:3], "interrupt") == (
        "RanksError",
        "step 'long work' failed on rank 3 of 4: KeyboardInterrupt: ",
    )
    assert living[3].notes["interrupt"] == {"error": "KeyboardInterrupt"}


def test_agreement_is_cheap(living: list[RankResult]) -> None:
    """Steps can be made freely: an empty one costs some milliseconds, and waits for no beat."""
    print("median of an empty step:", notes(living, "latency_ms"), "ms")
    assert max(notes(living, "latency_ms")) < 500 * Timeouts().heartbeat_interval_s


def test_rank_0_does_not_take_the_last_verdict_away(living: list[RankResult]) -> None:
    """It may host the store: the others hear of their last success before it closes."""
    assert [note.get("error") for note in notes(living[1:], "end")] == [None] * (WORLD - 1)


def test_a_process_ends_quietly_without_close(
    living: list[RankResult], short: list[RankResult]
) -> None:
    """The thread neither keeps a process alive nor meets a store that has gone away.

    Here rank 0 hosts the store, and is the last one; there it has gone before the others.
    """
    ends = [(result.returncode, result.stderr) for result in (*living[1:], short[0])]
    assert ends == [(0, "")] * WORLD


def test_progress_raises_early_when_another_rank_failed(short: list[RankResult]) -> None:
    """Work of an hour ends when it has become pointless."""
    message = "step 'write' failed on rank 3 of 4: OSError: [Errno 5] Input/output error"
    assert raised(short, "early") == ("RanksError", message)


def test_work_with_progress_does_not_stall(short: list[RankResult]) -> None:
    """Work may take longer than ``stall_timeout_s`` as long as it shows progress."""
    assert all(note["seconds"] > SHORT.stall_timeout_s for note in notes(short[:3], "steady"))
    assert all("error" not in note for note in notes(short[:3], "steady"))


def test_keys_do_not_accumulate(short: list[RankResult]) -> None:
    """However many steps succeed or fail, the store does not grow."""
    counts = short[0].notes["keys"]
    # A few keys come and go while ranks are on their way; 60 steps lie between two counts.
    assert max(counts) - min(counts) < 10


def test_a_stalled_rank_is_named(short: list[RankResult]) -> None:
    """It beats, but makes no progress, until the others have raised; then it hears the same."""
    error, message = raised(short, "stalled")
    assert error == "RanksError"
    assert message.startswith(
        "step 'read shards' cannot be finished without rank 3 of 4: alive, but without progress"
    )


def test_ranks_that_never_come_are_named(short: list[RankResult]) -> None:
    """The others learn where they are, and that the call is for every rank; so do they, when late.

    One of them is rank 0: it judges also while it is elsewhere itself.
    """
    message = raised(short, "absent")[1]
    assert "without ranks 0, 3 of 4: alive, but not here after" in message
    assert "last seen after step 'meet'" in message
    assert "must be made on every rank: `trainer.save_checkpoint(...)`" in message
    # Nor is a verdict lost that came while they were away.
    assert raised(short, "missed too")[1].endswith("rank 1 of 4: OSError: disk")


def test_a_stopped_rank_is_named(short: list[RankResult]) -> None:
    """It does not beat; when it goes on it hears that the others have gone on without it."""
    message = raised(short, "stopped")[1]
    assert "without rank 3 of 4: no sign of life for 1.6 s (it died or is stopped)" in message
    assert "last seen at work in step 'sync files'" in message


@pytest.mark.parametrize("case", ["stalled", "absent", "stopped"])
def test_ranks_that_come_back_are_in_step_again(short: list[RankResult], case: str) -> None:
    """A lost rank that hears of the failed step can make the next one with the others."""
    assert notes(short[:3], f"after {case}") == [list(range(WORLD))] * 3


def test_a_killed_rank_is_named(short: list[RankResult]) -> None:
    """The others raise once its beats stay away."""
    assert short[3].returncode == -signal.SIGKILL
    message = raised(short[:3], "killed")[1]
    assert "step 'publish' cannot be finished without rank 3 of 4: no sign of life" in message


def test_a_closed_rank_is_named_at_once(short: list[RankResult]) -> None:
    """Who has ended its part will not come; closing twice is fine, use after it an error."""
    message = raised(short[:2], "closed")[1]
    assert "rank 2: it has ended its part, last seen after step 'publish'" in message
    assert "closed" in short[2].notes["used when closed"]["message"]


def test_a_rank_that_ended_is_named(short: list[RankResult]) -> None:
    """A process that comes to its end without ``close`` says so to the others."""
    assert "rank 1: it has ended its part" in raised(short[:1], "left")[1]


@pytest.fixture(scope="module")
def alone() -> list[RankResult]:
    """Return the results of ``calls_on_one_rank``."""
    return run_ranks(calls_on_one_rank, 3)


def test_a_call_on_one_rank_fails_on_that_rank(alone: list[RankResult]) -> None:
    """It learns that the call is for every rank, or is interrupted as it asked for."""
    assert "without ranks 1, 2 of 3: never seen" in alone[0].notes["alone"]["message"]
    assert alone[0].notes["interrupted"]


def test_a_call_on_one_rank_is_told_before_it_fails(alone: list[RankResult]) -> None:
    """Once, on one rank: who has not come, to which step, and how long that may last."""
    (told,) = alone[0].notes["told"]
    assert told.startswith("ranks 1, 2 of 3: not at step 'look' after 1 s.")
    for part in ("every rank", "`if rank == 0:`", "2.4 s in all (absent_timeout_s)"):
        assert part in told
    without = [message for result in alone for message in result.notes["told of rank 0"]]
    assert [message.split(" after ")[0] for message in without] == [
        "rank 0 of 3: not at step 'look'"
    ]
    assert "rank 0 of 3: never seen" in raised(alone[1:], "without rank 0")[1]


@pytest.mark.parametrize("case", ["next", "after", "last"])
def test_a_call_on_one_rank_leaves_later_calls_in_step(case: str, alone: list[RankResult]) -> None:
    """The next call that every rank makes is one for all of them."""
    assert [note.get("value") for note in notes(alone, case)] == [[0, 1, 2]] * 3, notes(alone, case)


def test_a_rank_hears_of_the_call_that_it_is_late_for(alone: list[RankResult]) -> None:
    """It is not taken for another rank's mistake: this rank makes the call as well."""
    assert raised(alone[1:], "given up")[0] == "RanksError"


@pytest.fixture(scope="module", params=[False, True], ids=["own store", "store of launcher"])
def first_lost(request: pytest.FixtureRequest) -> tuple[bool, list[RankResult]]:
    """Say whether the store outlives rank 0, and give the results of ``first_rank_is_lost``."""
    return request.param, run_ranks(first_rank_is_lost, 3, store_of_launcher=request.param)


def test_a_stopped_first_rank_is_noticed_and_hears_it(
    first_lost: tuple[bool, list[RankResult]],
) -> None:
    """Even a store that does not answer ends the wait; rank 0 does not take it for a success."""
    store_goes_on, results = first_lost
    for note in notes(results, "stopped"):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S
    if store_goes_on:
        # What the others have decided without rank 0 stands, and rank 0 hears just that.
        assert "rank 0 of 3: no sign of life" in raised(results, "stopped")[1]
    assert notes(results, "anew") == [[0, 1, 2]] * 3


def test_a_killed_first_rank_is_noticed(first_lost: tuple[bool, list[RankResult]]) -> None:
    """The others raise by themselves, at work or waiting, whether the store dies too or not."""
    _, (first, *others) = first_lost
    assert first.returncode == -signal.SIGKILL
    for note in notes(others, "killed") + notes(others, "again"):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S


def test_a_process_has_one_connection_beside_torchs() -> None:
    """However many lines it has; one that is closed takes it from no other."""
    results = run_ranks(many_connections, WORLD)
    assert notes(results, "connections") == [1] * WORLD
    assert notes(results, "first goes on") == [list(range(WORLD))] * WORLD
    assert notes(results, "anew") == [list(range(WORLD))] * WORLD


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


def test_the_default_times_keep_the_promise() -> None:
    """All ranks hear within 10 s of what was raised, within 60 s of what died or stalled."""
    times = Timeouts()
    # A beat may have just been seen; the judge looks once per beat, a rank at work likewise.
    delay_s = 3 * times.heartbeat_interval_s + 1
    assert times.failure_grace_s + delay_s < 10
    assert max(times.heartbeat_timeout_s, times.stall_timeout_s) + delay_s < 60


def test_times_that_would_bury_the_living_are_refused() -> None:
    """A rank must be able to miss some beats."""
    with pytest.raises(ValueError, match="at least 4"):
        Timeouts(heartbeat_interval_s=10)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "50", None])
def test_a_stall_timeout_is_a_positive_number(wrong: Any) -> None:
    """What it is, and what was given, is said where the option is given."""
    with pytest.raises(ValueError, match="stall_timeout_s=.* a positive number"):
        Timeouts().with_stall_timeout(wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), True, "600", None])
def test_an_absent_timeout_is_a_positive_number(wrong: Any) -> None:
    """So is that; and no other time changes, but beats for a very short one."""
    with pytest.raises(ValueError, match="absent_timeout_s=.* a positive number"):
        Timeouts().with_absent_timeout(wrong)
    assert Timeouts().with_absent_timeout(60) == replace(Timeouts(), absent_timeout_s=60.0)
    assert Timeouts().with_absent_timeout(2).heartbeat_interval_s == 0.5


@pytest.mark.parametrize("seconds", [0.5, 50, 3600.0])
def test_a_stall_timeout_changes_nothing_else(seconds: float) -> None:
    """A rank must be able to miss some beats; who died is still noticed as early."""
    times, default = Timeouts().with_stall_timeout(seconds), Timeouts()
    assert times.stall_timeout_s == seconds
    assert times.heartbeat_interval_s == min(default.heartbeat_interval_s, seconds / 4)
    assert (times.heartbeat_timeout_s, times.absent_timeout_s) == (default.heartbeat_timeout_s, default.absent_timeout_s)


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
    ranks.progress()
    ranks.close()
