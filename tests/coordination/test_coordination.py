"""Steps of all ranks in real processes over gloo, with ranks that are lost, suspended or killed.

One launch runs many cases, and each test checks one of them. test_session checks far
more cases without processes.
"""

from __future__ import annotations

import atexit
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    TCPStore,
)
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.coordination.client import (
    StoreRanks,
    check_open_file_limit,
    open_file_limit_warning,
)
from lightning_elastic_zero.coordination.liveness import STALL_TIMEOUT_S, Timeouts
from lightning_elastic_zero.coordination.ranks import (
    OneRank,
    Ranks,
    connect_ranks,
    format_common_error,
)
from lightning_elastic_zero.errors import RanksError, SaveError
from tests.support.launch import Job, RankResult, run_ranks, run_side_by_side
from tests.support.outcome import captured_log
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer

WORLD = 4
LINES = 3
SILENT = Timeouts(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.6, failure_grace_s=0.3)
"""For ranks that are stopped or killed."""

ABSENT = Timeouts(heartbeat_interval_s=0.2, absent_timeout_s=2.4)
"""For ranks that do not enter a step."""


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        found: dict[str, Any] = {"value": call()}
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the test checks it)
        cause = type(error.__cause__).__name__ if error.__cause__ else None
        printed = format_common_error(error)
        found = {"error": type(error).__name__, "message": str(error), "cause": cause}
        found["printed"] = printed
    return {**found, "seconds": time.monotonic() - start}


def raising(errors: dict[int, BaseException], rank: int) -> Callable[[], None]:
    def work() -> None:
        if rank in errors:
            raise errors[rank]

    return work


def open_ranks(job: Job, name: str = "ranks") -> StoreRanks:
    """Return ranks that have read a heartbeat of rank 0: they ask the system for its process."""
    ranks = StoreRanks(_get_default_store(), job.rank, job.world_size, name=name, times=SILENT)
    while not hasattr(ranks._thread, "session"):
        time.sleep(0.01)
    dist.barrier()
    ranks._thread.session._leader_heartbeat()
    return ranks


def steps_of_living_ranks(job: Job) -> None:
    """Results and failures without lost ranks; it ends as under Lightning, without ``close``."""
    atexit.register(dist.destroy_process_group)
    many_connections(job)
    ranks = connect_ranks()
    job.note("type", type(ranks).__name__)
    for name in ("run_all", "gather", "broadcast", "all_gather"):
        job.note(name, getattr(ranks, name)("results", lambda: (job.rank, "é")))
    worked: list[int] = []
    job.note("shared", ranks.broadcast("a", lambda: "first", lambda: worked.append(job.rank)))
    job.note("worked", worked)
    follower = raising({2: OSError("x")}, job.rank)
    job.note("follower", attempt(lambda: ranks.broadcast("make", lambda: "made", follower)))
    disk = OSError(28, "No space left on device")
    failing = partial(ranks.run_all, "write shards", raising({2: disk}, job.rank))
    job.note("one", attempt(failing))
    job.note("after one", ranks.all_gather("next", lambda: job.rank))
    mine = "a" if job.rank == 1 else "b"
    job.note("places", attempt(lambda: ranks.run_all(mine, lambda: None)))
    refused(job, ranks)
    interrupt = raising({3: KeyboardInterrupt()}, job.rank)
    job.note("interrupt", attempt(lambda: ranks.run_all("long work", interrupt)))
    job.note("while waiting", interrupted_while_waiting(ranks))
    calls_of_some(job)
    held_up(job)
    job.note("after all", ranks.all_gather("last", lambda: job.rank))
    times = [attempt(lambda: ranks.run_all("empty", lambda: None)) for _ in range(200)]
    job.note("latency_ms", 1000 * statistics.median(t["seconds"] for t in times))
    # Rank 0 finishes last, and removes the store while the others poll slowly.
    end = attempt(lambda: ranks.run_all("end", lambda: time.sleep(job.rank == 0)))
    if job.rank == 0:
        ranks.close()
        os._exit(0)
    job.note("end", end)


def refused(job: Job, ranks: Ranks) -> None:
    inner = raising({0: OSError("x")}, 0)
    job.note("nested", attempt(lambda: ranks.run_all("a", lambda: ranks.run_all("b", inner))))

    job.note("object", attempt(lambda: ranks.gather("names", lambda: {job.rank: object()})))
    noise = random.Random(0).randbytes(8_000_000).hex()  # compresses badly
    job.note("too long", attempt(lambda: ranks.broadcast("noise", lambda: noise)))
    long = attempt(lambda: len(ranks.broadcast("zeros", lambda: "0" * 20_000_000)))
    job.note("long", long)


def calls_of_some(job: Job) -> None:
    """Make a call on rank 0 only, then one on every rank."""
    for call in ("save at step 1", "save at step 2"):
        if job.rank == 0 or call.endswith("2"):
            job.note(call, attempt(partial(make_call, call)))
        dist.barrier()


def make_call(call: str) -> list[int]:
    """Make a call with its own ranks."""
    ranks = connect_ranks(ABSENT, name="calls", call=call)
    try:
        return ranks.all_gather("look", dist.get_rank)
    finally:
        ranks.close()


def many_connections(job: Job) -> None:
    """Agree in several sessions at once, and count their connections to the store."""
    lines = [connect_ranks(name=f"line {number}") for number in range(LINES)]
    for line in lines:
        line.run_all("come", lambda: None)
    job.note("connections", len({id(line._thread._connection) for line in lines}))  # type: ignore[attr-defined]
    for line in lines[1:]:
        line.close()
    job.note("first continues", lines[0].all_gather("meet", lambda: job.rank))
    lines[0].close()
    again = connect_ranks()
    job.note("again", again.all_gather("meet", lambda: job.rank))
    again.close()


def held_up(job: Job) -> None:
    """Delay the thread of one rank for longer than the timeout of a silent rank; rank 0's last."""
    for rank in (2, 0):
        ranks = open_ranks(job, f"held {rank}")
        ranks.run_all("meet", lambda: None)
        if job.rank == rank:
            ranks._thread._commands.put(lambda: time.sleep(2.5))
        with captured_log("lightning_elastic_zero.coordination.client") as lines:
            note = attempt(lambda: ranks.all_gather("write", lambda: job.rank))  # noqa: B023
        job.note(f"held {rank}", {**note, "log": lines})
        ranks.close()


def interrupted_while_waiting(ranks: Ranks) -> dict[str, Any]:
    """Interrupt rank 3, which has finished its part; the others work until they notice."""

    def work() -> None:
        while ranks.rank != 3:
            time.sleep(0.1)
            ranks.progress.check()

    def interrupt() -> None:
        assert isinstance(ranks, StoreRanks)
        while not (ranks._thread.step.name == "wait" and ranks._thread.step.reported.is_set()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    if ranks.rank == 3:
        threading.Thread(target=interrupt, daemon=True).start()
    return attempt(lambda: ranks.run_all("wait", work))


def ranks_are_lost(job: Job) -> None:
    """One rank fails early, one is stopped and continues, one is killed, one closes, one ends."""
    ranks = open_ranks(job)

    def long_work(error: Exception | None) -> None:
        if error is not None:
            raise error
        while True:
            time.sleep(0.1)
            ranks.progress.check()

    error = OSError(5, "Input/output error") if job.rank == 3 else None
    job.note("early", attempt(lambda: ranks.run_all("write", lambda: long_work(error))))
    pids = ranks.all_gather("pids", os.getpid)
    if job.rank == 0:
        threading.Thread(target=wake, args=(pids[3],), daemon=True).start()
    job.note("stopped", attempt(partial(ranks.run_all, "sync", signalled(job, signal.SIGSTOP))))
    _get_default_store().add("heard", 1)
    while _get_default_store().add("heard", 0) < WORLD:
        time.sleep(0.05)
    job.note("after stopped", ranks.all_gather("meet", lambda: job.rank))
    job.note("killed", attempt(partial(ranks.run_all, "publish", signalled(job, signal.SIGKILL))))
    if job.rank == 2:
        ranks.close()
        ranks.close()
        job.note("used when closed", attempt(lambda: ranks.run_all("x", lambda: None)))
    else:
        job.note("closed", attempt(lambda: ranks.run_all("too late", lambda: None)))
    if job.rank == 0:
        time.sleep(2)  # rank 1 ends meanwhile
        job.note("left", attempt(lambda: ranks.run_all("alone", lambda: None)))


def signalled(job: Job, number: signal.Signals) -> Callable[[], None]:
    return partial(os.kill, os.getpid(), number) if job.rank == 3 else lambda: None


def wake(pid: int) -> None:
    """Continue a stopped process once the others have noticed that it is stopped."""
    while _get_default_store().add("heard", 0) < WORLD - 1:
        time.sleep(0.05)
    os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def results(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> list[list[RankResult]]:
    first_is_lost = partial(first_rank_is_lost, tmp_path_factory.mktemp("gave up"))
    programs = (steps_of_living_ranks, ranks_are_lost, first_is_lost)
    return run_side_by_side(programs, WORLD, fork_server)


@pytest.fixture(scope="module")
def living(results: list[list[RankResult]]) -> list[RankResult]:
    return results[0]


@pytest.fixture(scope="module")
def lost(results: list[list[RankResult]]) -> list[RankResult]:
    return results[1]


@pytest.fixture(scope="module")
def first_lost(results: list[list[RankResult]]) -> list[RankResult]:
    return results[2]


def notes(results: list[RankResult], case: str) -> list[Any]:
    """Return the note of each rank for a case."""
    assert all(case in result.notes for result in results), [r.stderr[-2000:] for r in results]
    return [result.notes[case] for result in results]


def raised(results: list[RankResult], case: str) -> tuple[str, str]:
    """Return the class and the message that all these ranks raised in bounded time."""
    found = notes(results, case)
    assert all("error" in note and note["seconds"] < PROMPT_TIMEOUT_S for note in found), found
    (same,) = {(note["error"], note["message"]) for note in found}
    return same


def test_a_rank_gets_its_own_result_of_a_step_together(living: list[RankResult]) -> None:
    assert notes(living, "type") == ["StoreRanks"] * WORLD
    assert notes(living, "run_all") == [[r, "é"] for r in range(WORLD)]


def test_results_are_shared_in_rank_order(living: list[RankResult]) -> None:
    """Only rank 0 gathers; the result of a broadcast is rank 0's."""
    everyone = [[r, "é"] for r in range(WORLD)]
    assert notes(living, "gather") == [everyone, None, None, None]
    assert notes(living, "all_gather") == [everyone] * WORLD
    assert notes(living, "broadcast") == [[0, "é"]] * WORLD


def test_other_ranks_may_work_in_a_broadcast(living: list[RankResult]) -> None:
    """Their results are not sent; their errors are raised on all ranks."""
    assert notes(living, "shared") == ["first"] * WORLD
    assert notes(living, "worked") == [[], [1], [2], [3]]
    error, message = raised(living, "follower")
    assert (error, message) == ("RanksError", "step 'make' failed on rank 2 of 4: OSError: x")


def test_an_error_of_one_rank_is_raised_on_all(living: list[RankResult]) -> None:
    message = (
        "step 'write shards' failed on rank 2 of 4: OSError: [Errno 28] No space left on device"
    )
    assert raised(living, "one") == ("RanksError", message)
    assert [note["cause"] for note in notes(living, "one")] == [None, None, "OSError", None]
    assert notes(living, "after one") == [list(range(WORLD))] * WORLD
    assert "rank 1 at 'a' (run_all)" in raised(living, "places")[1]


def test_an_error_of_all_ranks_is_printed_by_rank_0(living: list[RankResult]) -> None:
    """Its message comes first. Rank 2 prints the traceback of its own error, as usual."""
    printed = [note["printed"] for note in notes(living, "one")]
    first, title, *trace = printed[0].splitlines()
    assert first == "RanksError: " + raised(living, "one")[1]
    assert title == "Traceback of rank 0 (most recent call last):"
    assert trace
    assert not any("RanksError:" in line for line in trace)
    assert printed[2] == ""
    for rank in (1, 3):
        (line,) = printed[rank].splitlines()
        assert line.startswith(f"[rank{rank}]: RanksError: step 'write shards' failed on rank 2")
        assert line.endswith(" (see rank 0)")


def test_a_step_within_a_step_is_refused(living: list[RankResult]) -> None:
    """It could not end before the outer step."""
    assert "'b' was started within another step" in raised(living, "nested")[1]


def test_a_result_that_cannot_travel_fails_on_all_ranks(living: list[RankResult]) -> None:
    assert "Object of type object is not JSON serializable" in raised(living, "object")[1]
    assert "the store takes at most 8388608" in raised(living, "too long")[1]
    assert [note["value"] for note in notes(living, "long")] == [20_000_000] * WORLD


def test_an_interrupted_rank_does_not_leave_the_others_waiting(living: list[RankResult]) -> None:
    assert raised(living[:3], "interrupt") == (
        "RanksError",
        "step 'long work' failed on rank 3 of 4: KeyboardInterrupt: ",
    )
    assert living[3].notes["interrupt"]["error"] == "KeyboardInterrupt"


def test_a_rank_that_is_interrupted_while_it_waits_is_named(living: list[RankResult]) -> None:
    message = raised(living[:3], "while waiting")[1]
    assert "rank 3 of 4: it gave up this step (KeyboardInterrupt)" in message
    assert living[3].notes["while waiting"]["error"] == "KeyboardInterrupt"


def test_a_call_on_one_rank_leaves_later_calls_in_step(living: list[RankResult]) -> None:
    message = living[0].notes["save at step 1"]["message"]
    assert "without ranks 1-3 of 4: never seen in 2.4 s" in message
    found = [note["value"] for note in notes(living, "save at step 2")]
    assert found == [list(range(WORLD))] * WORLD


def test_a_delayed_thread_is_waited_for(living: list[RankResult]) -> None:
    """Its process is reported to run, so it may be silent longer than a rank that may be dead."""
    for rank in (2, 0):
        found = notes(living, f"held {rank}")
        assert [note.get("value") for note in found] == [list(range(WORLD))] * WORLD, found
        assert min(note["seconds"] for note in found) > 2.0
    (line,) = notes(living, "held 2")[2]["log"]
    assert "rank 2: the coordination thread was not scheduled" in line
    assert "time.sleep(2.5)" in line, "the position of the thread is missing"


def test_a_process_has_one_connection_besides_torchs(living: list[RankResult]) -> None:
    """For any number of ranks in it; closing some does not affect the others."""
    assert notes(living, "connections") == [1] * WORLD
    assert notes(living, "first continues") == [list(range(WORLD))] * WORLD
    assert notes(living, "again") == [list(range(WORLD))] * WORLD


def test_agreement_is_cheap(living: list[RankResult]) -> None:
    """Steps are cheap: an empty one takes some milliseconds, and waits for no heartbeat."""
    print("median of an empty step:", notes(living, "latency_ms"), "ms")
    assert max(notes(living, "latency_ms")) < 500 * Timeouts().heartbeat_interval_s


def test_the_last_verdict_reaches_all_ranks(living: list[RankResult]) -> None:
    """Rank 0 may host the store: the others learn of their last success before it closes."""
    assert [note.get("error") for note in notes(living[1:], "end")] == [None] * (WORLD - 1)


def test_a_process_ends_quietly_without_close(
    living: list[RankResult], lost: list[RankResult]
) -> None:
    """The thread neither keeps a process alive nor fails on a missing store.

    In ``lost``, rank 0 hosts the store and ends last; in ``living``, it ends before the others.
    """
    ends = [(result.returncode, result.stderr) for result in (*living[1:], lost[0])]
    assert ends == [(0, "")] * WORLD


def test_progress_raises_early_when_another_rank_failed(lost: list[RankResult]) -> None:
    message = "step 'write' failed on rank 3 of 4: OSError: [Errno 5] Input/output error"
    assert raised(lost, "early") == ("RanksError", message)


def test_a_stopped_rank_is_named_and_continues(lost: list[RankResult]) -> None:
    """It sends no heartbeats; when it continues, it learns that the others went on without it."""
    message = raised(lost, "stopped")[1]
    assert "without rank 3 of 4: no heartbeat for 1.6 s (its process" in message
    assert "is stopped), last seen" in message
    assert notes(lost[:3], "after stopped") == [list(range(WORLD))] * 3


def test_a_killed_rank_is_named(lost: list[RankResult]) -> None:
    assert lost[3].returncode == -signal.SIGKILL
    message = raised(lost[:3], "killed")[1]
    assert "step 'publish' cannot be finished without rank 3 of 4: its process" in message
    assert "has ended, last seen working in" in message


def test_a_closed_rank_is_named_at_once(lost: list[RankResult]) -> None:
    message = raised(lost[:2], "closed")[1]
    assert "rank 2: it has ended its session, last seen after step 'publish'" in message
    assert "closed" in lost[2].notes["used when closed"]["message"]


def test_a_rank_that_ended_is_named(lost: list[RankResult]) -> None:
    """A process that ends without ``close`` reports its end to the others."""
    assert "rank 1: it has ended its session" in raised(lost[:1], "left")[1]


def test_a_limit_that_is_too_low_causes_a_warning() -> None:
    assert open_file_limit_warning(400, 1024, 100, "rank 0") == ""
    text = open_file_limit_warning(1024, 1024, 50, "rank 0, process 7,")
    for part in ("1024 ranks", "rank 0, process 7,", "1024 open files", "2098", "ulimit -n 8192"):
        assert part in text


def test_the_limit_is_that_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
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


def test_timeouts_that_would_fail_living_ranks_are_refused() -> None:
    """A rank must be able to miss some heartbeats."""
    with pytest.raises(ValueError, match="at least 4"):
        Timeouts(heartbeat_interval_s=10)
    with pytest.raises(ValueError, match="held_up_timeout_s of at least"):
        Timeouts(held_up_timeout_s=29)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "50", None])
def test_stall_and_absent_timeouts_are_positive_numbers(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"stall_timeout_s=.* a positive number"):
        Timeouts.of(wrong)
    with pytest.raises(ValueError, match=r"absent_timeout_s=.* a positive number"):
        Timeouts.of(STALL_TIMEOUT_S, wrong)


@pytest.mark.parametrize("seconds", [0.5, 2, 50, 3600.0])
def test_stall_and_absent_timeouts_change_nothing_else(seconds: float) -> None:
    """A rank may miss some heartbeats, and a dead rank is still noticed as early."""
    default = Timeouts()
    beats = replace(default, heartbeat_interval_s=min(default.heartbeat_interval_s, seconds / 4))
    assert Timeouts.of(seconds) == replace(beats, stall_timeout_s=seconds)
    assert Timeouts.of(STALL_TIMEOUT_S, seconds) == replace(beats, absent_timeout_s=seconds)


def test_one_rank_needs_no_process_group() -> None:
    """It runs the work, returns the results that several ranks would, and raises its errors."""
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


def suspend(pid: int, gave_up: Path, others: int) -> None:
    """Stop a process, maybe this one, until the others have given up (for a minute at most)."""
    count = f'$(ls "{gave_up}" | wc -l)'
    code = f"for i in $(seq 600); do [ {count} -ge {others} ] && break; sleep 0.1; done"
    wakes = subprocess.Popen(["/bin/sh", "-c", f"{code}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)
    wakes.wait()


def give_up(rank: int, gave_up: Path, call: Callable[[], object]) -> dict[str, Any]:
    """Make a call in which the store is suspended until the other ranks have raised."""
    note = attempt(call)
    (gave_up / str(rank)).touch()
    return note


def run_every_step_kind(ranks: StoreRanks) -> list[str]:
    """Run steps of every kind; return the failures before the first step succeeded."""
    failed: list[str] = []
    while True:
        try:
            ranks.run_all("meet", lambda: None)
        except RanksError as error:
            failed.append(str(error))
            if len(failed) > 50:
                raise
        else:
            break
    everyone = list(range(ranks.world_size))
    for number in range(3):
        found = [
            ranks.run_all(f"together {number}", lambda: ranks.rank),
            ranks.gather(f"gather {number}", lambda: ranks.rank),
            ranks.broadcast(f"from first {number}", lambda: "it"),
            ranks.all_gather(f"everywhere {number}", lambda: ranks.rank),
        ]
        wanted = [ranks.rank, everyone if ranks.rank == 0 else None, "it", everyone]
        assert found == wanted, found
        failing = raising({1: SaveError("x")}, ranks.rank)
        assert attempt(lambda: ranks.run_all("fails", failing))["error"] == "SaveError"  # noqa: B023
    return failed


def first_rank_is_lost(folder: Path, job: Job) -> None:
    """Rank 0, which hosts the store, is stopped for long and continues, twice; then killed."""
    ranks = open_ranks(job)
    at_work, at_once = folder / "at work", folder / "at once"
    at_work.mkdir(exist_ok=True)
    at_once.mkdir(exist_ok=True)
    stop = partial(suspend, gave_up=at_work, others=WORLD - 1)
    write = partial(ranks.run_all, "write", lost_work(ranks, stop))
    job.note("at work", give_up(job.rank, at_work, write))
    dist.barrier()
    job.note("after at work", run_every_step_kind(ranks))
    dist.barrier()
    job.note("at once", give_up(job.rank, at_once, lambda: not_there_yet(ranks, at_once)))
    job.note("after at once", run_every_step_kind(ranks))
    dist.barrier()
    job.note("killed", attempt(lambda: ranks.run_all("publish", lost_work(ranks, kill))))
    job.note("again", attempt(lambda: ranks.run_all("more", lambda: None)))


def kill(pid: int) -> None:
    time.sleep(0.5)  # the others may still read the last verdict
    os.kill(pid, signal.SIGKILL)


def lost_work(ranks: StoreRanks, lose: Callable[[int], None]) -> Callable[[], None]:
    """Return work in which rank 0 is lost; rank 1 has much to do, and the others nothing."""

    def work() -> None:
        if ranks.rank == 0:
            lose(os.getpid())
        for _ in range(100 * (ranks.rank == 1)):
            time.sleep(0.1)
            ranks.progress.check()

    return work


def not_there_yet(ranks: StoreRanks, gave_up: Path) -> None:
    """Rank 0 is stopped before it enters the step that the others give up."""
    if ranks.rank == 0:
        suspend(os.getpid(), gave_up, WORLD - 1)
    ranks.gather("sizes", lambda: 1)


def store_host_is_suspended(gave_up: Path, job: Job) -> None:
    """The host of the store, which is not a rank, is stopped for long, and continues."""
    code = (
        "import sys; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); sys.stdin.read()"
    )
    found: list[Any] = [None]
    host = None
    if job.rank == 0:
        call = [sys.executable, "-c", code]
        host = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert host.stdout is not None
        found = [int(host.stdout.readline())]
    dist.broadcast_object_list(found)
    store = TCPStore("127.0.0.1", found[0], is_master=False)
    ranks = StoreRanks(store, job.rank, job.world_size, times=SILENT)

    args = (host.pid if host is not None else 0, gave_up, job.world_size - 1)
    stopping = threading.Thread(target=suspend, args=args)

    def work() -> None:
        if job.rank == 0:
            stopping.start()
        time.sleep(0.5 * (job.rank == 1))

    job.note("stopped", give_up(job.rank, gave_up, lambda: ranks.run_all("publish", work)))
    if job.rank == 0:
        stopping.join()
    dist.barrier()
    job.note("after stopped", run_every_step_kind(ranks))
    ranks.close()
    dist.barrier()
    if host is not None:
        host.kill()
        host.wait()


@pytest.mark.parametrize("case", ["at work", "at once"])
def test_a_step_that_rank_0_missed_fails_on_all_ranks(
    first_lost: list[RankResult], case: str
) -> None:
    """The wait ends even if the store does not answer; rank 0 does not take it for a success."""
    for note in notes(first_lost, case):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S


class SlowStore(TCPStore):
    """A store to which it takes long to connect."""

    def clone(self) -> TCPStore:
        time.sleep(SILENT.heartbeat_timeout_s + 1)
        clone: TCPStore = super().clone()  # type: ignore[misc] # the stubs lack it
        return clone


def test_the_stores_host_waits_for_its_own_connection() -> None:
    """Rank 0 knows that the host runs before it has asked the store for anything."""
    store = SlowStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(StoreRanks(store, 0, 1, times=SILENT)) as ranks:
        assert ranks.run_all("late", lambda: 1) == 1


@pytest.mark.long
def test_ranks_are_in_step_after_rank_0_continues(first_lost: list[RankResult]) -> None:
    """The next step succeeds. If some ranks retry at once, all need the same number of retries."""
    assert notes(first_lost, "after at work") == [[]] * WORLD
    tries = set(map(len, notes(first_lost, "after at once")))
    assert len(tries) == 1, tries


def test_a_killed_first_rank_is_noticed(first_lost: list[RankResult]) -> None:
    """The others raise by themselves, working or waiting, although the store is gone."""
    first, *others = first_lost
    assert first.returncode == -signal.SIGKILL
    for note in notes(others, "killed") + notes(others, "again"):
        assert note["error"] == "RanksError"
        assert "rank 0" in note["message"]
        assert note["seconds"] < PROMPT_TIMEOUT_S


@pytest.mark.long
def test_ranks_are_in_step_after_the_stores_host_continues(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The host need not be a rank: rank 0 loses the store like the others, and reconnects."""
    results = run_ranks(partial(store_host_is_suspended, tmp_path), 3, fork_server)
    for note in notes(results, "stopped"):
        assert note["error"] == "RanksError"
        assert note["seconds"] < PROMPT_TIMEOUT_S
    assert notes(results, "after stopped") == [[]] * 3
