"""What the ranks of ``test_ranks`` do: each function is run by all ranks of one launch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointMismatchError,
    SaveError,
)
from lightning_elastic_zero.coordination import Timeouts, StoreRanks, connect_ranks
from tests.dist._launch import Job

WORLD = 4
LINES = 3
SHORT = Timeouts(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.6, stall_timeout_s=1.6, absent_timeout_s=2.4, failure_grace_s=0.3)


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    """Give what became of a call as plain data."""
    start = time.monotonic()
    try:
        found: dict[str, Any] = {"value": call()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        cause = type(error.__cause__).__name__ if error.__cause__ else None
        found = {"error": type(error).__name__, "message": str(error), "cause": cause}
    return {**found, "seconds": time.monotonic() - start}


def raising(errors: dict[int, BaseException], rank: int) -> Callable[[], None]:
    """Give work that raises on some ranks."""

    def work() -> None:
        if rank in errors:
            raise errors[rank]

    return work


def open_ranks(job: Job) -> StoreRanks:
    """Give the ranks of the default group, with short times."""
    return StoreRanks(_get_default_store(), job.rank, job.world_size, times=SHORT)


def steps_of_living_ranks(job: Job) -> None:
    """Results and failures, with nobody lost; at last an end as Lightning's, without ``close``."""
    atexit.register(dist.destroy_process_group)
    ranks = connect_ranks()
    job.note("type", type(ranks).__name__)
    for name in ("run_all", "gather", "broadcast", "all_gather"):
        job.note(name, getattr(ranks, name)("results", lambda: (job.rank, "é")))
    failures: dict[str, dict[int, BaseException]] = {
        "one": {2: OSError(28, "No space left on device")},
        "known": {1: CheckpointMismatchError("'w' has 2 elements, 3 are wanted")},
        "all alike": dict.fromkeys(range(WORLD), SaveError("nothing to save")),
        "some alike": {1: OSError("disk"), 3: OSError("disk")},
        "one class": {0: SaveError("this"), 3: SaveError("that")},
        "two classes": {1: SaveError("this"), 3: CheckpointCorruptedError("that")},
    }
    for case, errors in failures.items():
        work = raising(errors, job.rank)
        job.note(case, attempt(partial(ranks.run_all, "write shards", work)))
        job.note(f"after {case}", ranks.all_gather("next", lambda: job.rank))

    here = "start of training" if job.rank == 1 else "load last.ckpt"
    job.note("places", attempt(lambda: ranks.run_all(here, lambda: None)))
    kind = ranks.all_gather if job.rank == 1 else ranks.gather
    job.note("kinds", attempt(lambda: kind("sizes", lambda: 1)))
    inner = raising({0: OSError("x")}, 0)
    job.note("nested", attempt(lambda: ranks.run_all("a", lambda: ranks.run_all("b", inner))))

    job.note("object", attempt(lambda: ranks.gather("names", lambda: {job.rank: object()})))
    noise = random.Random(0).randbytes(8_000_000).hex()  # packs badly
    job.note("too long", attempt(lambda: ranks.broadcast("noise", lambda: noise)))
    long = attempt(lambda: len(ranks.broadcast("zeros", lambda: "0" * 20_000_000)))
    job.note("long", long)
    job.note("interrupt", interrupted(job, ranks.run_all))
    job.note("after all", ranks.all_gather("last", lambda: job.rank))
    times = [attempt(lambda: ranks.run_all("empty", lambda: None)) for _ in range(200)]
    job.note("latency_ms", 1000 * statistics.median(t["seconds"] for t in times))
    # Rank 0 is the last to be done, and takes the store away while the others poll slowly.
    end = attempt(lambda: ranks.run_all("end", lambda: time.sleep(job.rank == 0)))
    if job.rank == 0:
        ranks.close()
        os._exit(0)
    job.note("end", end)


def many_connections(job: Job) -> None:
    """Agree over several lines at once, and count their connections to the store."""
    lines = [connect_ranks(name=f"line {number}") for number in range(LINES)]
    for line in lines:
        line.run_all("come", lambda: None)
    job.note("connections", len({id(line._thread._connection) for line in lines}))  # type: ignore[attr-defined]
    for line in lines[1:]:
        line.close()
    job.note("first goes on", lines[0].all_gather("meet", lambda: job.rank))
    lines[0].close()
    anew = connect_ranks()
    job.note("anew", anew.all_gather("meet", lambda: job.rank))
    anew.close()


def interrupted(job: Job, run_all: Callable[[str, Callable[[], None]], None]) -> dict[str, Any]:
    """Let rank 3 be interrupted at work."""
    work = raising({3: KeyboardInterrupt()}, job.rank)
    try:
        return attempt(lambda: run_all("long work", work))
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt"}


def steps_that_take_time(job: Job) -> None:
    """Long work with progress, keys, and then ranks that are lost, each in a harder way."""
    ranks = open_ranks(job)

    def long_work(error: Exception | None = None, seconds: float = 3600) -> None:
        if error is not None:
            raise error
        for _ in range(round(10 * seconds)):
            time.sleep(0.1)
            ranks.progress()

    error = OSError(5, "Input/output error") if job.rank == 3 else None
    job.note("early", attempt(lambda: ranks.run_all("write", lambda: long_work(error))))
    job.note("steady", attempt(lambda: ranks.run_all("write", lambda: long_work(seconds=2))))
    job.note("keys", [count_keys(ranks) for _ in range(3)])
    ranks_are_lost(job, ranks, ranks.all_gather("pids", os.getpid))
    if job.rank == 2:
        ranks.close()
        ranks.close()
        job.note("used when closed", attempt(lambda: ranks.run_all("x", lambda: None)))
    else:
        job.note("closed", attempt(lambda: ranks.run_all("too late", lambda: None)))
    if job.rank == 0:
        time.sleep(2)  # rank 1 ends meanwhile
        job.note("left", attempt(lambda: ranks.run_all("alone", lambda: None)))


def ranks_are_lost(job: Job, ranks: StoreRanks, pids: list[int]) -> None:
    """Rank 3 stalls, is elsewhere with rank 0, is stopped and goes on, and is killed at last."""

    def on_the_last(act: Callable[[], None]) -> Callable[[], None]:
        return act if job.rank == 3 else lambda: None

    stall = on_the_last(lambda: wait_until_seen_by("stalled", 3))
    job.note("stalled", attempt(lambda: ranks.run_all("read shards", stall)))
    mark_seen("stalled")
    job.note("after stalled", ranks.all_gather("meet", lambda: job.rank))
    if job.rank in {0, 3}:
        wait_until_seen_by("missed too", 2)  # the others have raised twice by then
    job.note("absent", attempt(lambda: ranks.run_all("save", lambda: None)))
    work = raising({1: OSError("disk")}, job.rank)
    job.note("missed too", attempt(lambda: ranks.run_all("another", work)))
    mark_seen("missed too")
    job.note("after absent", ranks.all_gather("meet", lambda: job.rank))
    if job.rank == 0:
        threading.Thread(target=wake, args=(pids[3],), daemon=True).start()
    stop = on_the_last(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    job.note("stopped", attempt(lambda: ranks.run_all("sync files", stop)))
    mark_seen("stopped")
    wait_until_seen_by("stopped", WORLD)
    job.note("after stopped", ranks.all_gather("meet", lambda: job.rank))
    kill = on_the_last(lambda: os.kill(os.getpid(), signal.SIGKILL))
    job.note("killed", attempt(lambda: ranks.run_all("publish", kill)))


def mark_seen(case: str) -> None:
    """Say that this rank has heard what became of a case."""
    _get_default_store().add(f"heard {case}", 1)


def wait_until_seen_by(case: str, count: int) -> None:
    """Wait until so many ranks have."""
    while _get_default_store().add(f"heard {case}", 0) < count:
        time.sleep(0.05)


def wake(pid: int) -> None:
    """Let a stopped process go on when the others have heard that it does not."""
    wait_until_seen_by("stopped", WORLD - 1)
    os.kill(pid, signal.SIGCONT)


def count_keys(ranks: StoreRanks) -> int | None:
    """Do some steps, failures too, and let rank 0 count the keys of the store."""
    for number in range(20):
        ranks.run_all(f"step {number}", lambda: None)
        ranks.gather("sizes", lambda: ranks.rank)
        with contextlib.suppress(SaveError):
            ranks.run_all("fails", raising({1: SaveError("x")}, ranks.rank))
    count = _get_default_store().num_keys() if ranks.rank == 0 else None
    return ranks.broadcast("count", lambda: count)


def calls_on_one_rank(job: Job) -> None:
    """Rank 0 makes calls alone, one in vain and one that it is interrupted in; all make others."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_elastic_zero").addHandler(handler)

    def call(name: str, work: Callable[[], object] = lambda: job.rank) -> object:
        with closing(connect_ranks(replace(SHORT, late_warning_s=1.0), call=name)) as ranks:
            return ranks.all_gather("look", work)

    job.note("first", call("save at step 1"))
    dist.barrier()
    if job.rank == 0:
        said.clear()  # a rank may have come late before, on a busy machine
        job.note("alone", attempt(lambda: call("save at step 2")))
        job.note("told", said)
        signal.signal(signal.SIGALRM, _interrupt)
        signal.alarm(1)
        try:
            call("save at step 3")
        except KeyboardInterrupt:
            job.note("interrupted", True)
    dist.barrier()
    job.note("next", attempt(lambda: call("save at step 4")))
    job.note(
        "fails", attempt(lambda: call("save at step 5", raising({1: OSError("disk")}, job.rank)))
    )
    job.note("after", attempt(lambda: call("save at step 6")))
    # The others are late for a call that rank 0 has given up: they are not left waiting in it.
    if job.rank == 0:
        job.note("given up", attempt(lambda: call("save at step 7")))
    dist.barrier()
    if job.rank:
        job.note("given up", attempt(lambda: call("save at step 7")))
    job.note("last", attempt(lambda: call("save at step 8")))
    dist.barrier()
    said.clear()
    if job.rank:
        job.note("without rank 0", attempt(lambda: call("save at step 9")))
    dist.barrier()
    job.note("told of rank 0", said)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def first_rank_is_lost(job: Job) -> None:
    """Rank 0 is stopped at work, and the store with it where it hosts the store; then killed."""
    ranks = open_ranks(job)
    first_pid = ranks.broadcast("pid", os.getpid)
    job.note("stopped", attempt(lambda: ranks.run_all("publish", lost_work(ranks, "SIGSTOP"))))
    if job.rank == 2:
        time.sleep(1)  # rank 1 may raise a little later
        os.kill(first_pid, signal.SIGCONT)
    anew = open_ranks(job)
    job.note("anew", anew.all_gather("meet", lambda: job.rank))
    job.note("killed", attempt(lambda: anew.run_all("publish", lost_work(anew, "SIGKILL"))))
    job.note("again", attempt(lambda: anew.run_all("more", lambda: None)))


def lost_work(ranks: StoreRanks, name: str) -> Callable[[], None]:
    """Give work in which rank 0 gets a signal; rank 1 has much to do, rank 2 nothing."""

    def work() -> None:
        if ranks.rank == 0:
            time.sleep(0.5)  # the others may have to read the last verdict yet
            os.kill(os.getpid(), getattr(signal, name))
        for _ in range(100 * (ranks.rank == 1)):
            time.sleep(0.1)
            ranks.progress()

    return work
