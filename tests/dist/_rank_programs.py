"""What the ranks of ``test_coordination`` do: each function is run by all ranks of one launch."""

from __future__ import annotations

import atexit
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import override

from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from tests.support.launch import Job

WORLD = 4
LINES = 3
SHORT = Timeouts(
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.6,
    stall_timeout_s=1.6,
    absent_timeout_s=2.4,
    failure_grace_s=0.3,
)


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    """Return what became of a call as plain data."""
    start = time.monotonic()
    try:
        found: dict[str, Any] = {"value": call()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        cause = type(error.__cause__).__name__ if error.__cause__ else None
        found = {"error": type(error).__name__, "message": str(error), "cause": cause}
    return {**found, "seconds": time.monotonic() - start}


def raising(errors: dict[int, BaseException], rank: int) -> Callable[[], None]:
    """Return work that raises on some ranks."""

    def work() -> None:
        if rank in errors:
            raise errors[rank]

    return work


def open_ranks(job: Job) -> StoreRanks:
    """Return the ranks of the default group, with short times."""
    return StoreRanks(_get_default_store(), job.rank, job.world_size, times=SHORT)


def steps_of_living_ranks(job: Job) -> None:
    """Results and failures, with nobody lost; at last an end as Lightning's, without ``close``."""
    atexit.register(dist.destroy_process_group)
    many_connections(job)
    ranks = connect_ranks()
    job.note("type", type(ranks).__name__)
    for name in ("run_all", "gather", "broadcast", "all_gather"):
        job.note(name, getattr(ranks, name)("results", lambda: (job.rank, "é")))
    disk = OSError(28, "No space left on device")
    failing = partial(ranks.run_all, "write shards", raising({2: disk}, job.rank))
    job.note("one", attempt(failing))
    job.note("after one", ranks.all_gather("next", lambda: job.rank))
    mine = "a" if job.rank == 1 else "b"
    job.note("places", attempt(lambda: ranks.run_all(mine, lambda: None)))
    refused(job, ranks)
    job.note("interrupt", interrupted(job, ranks.run_all))
    job.note("while waiting", interrupted_while_waiting(ranks))
    calls_of_some(job)
    held_up(job)
    job.note("after all", ranks.all_gather("last", lambda: job.rank))
    times = [attempt(lambda: ranks.run_all("empty", lambda: None)) for _ in range(200)]
    job.note("latency_ms", 1000 * statistics.median(t["seconds"] for t in times))
    # Rank 0 is the last to be done, and takes the store away while the others poll slowly.
    end = attempt(lambda: ranks.run_all("end", lambda: time.sleep(job.rank == 0)))
    if job.rank == 0:
        ranks.close()
        os._exit(0)
    job.note("end", end)


def refused(job: Job, ranks: Ranks) -> None:
    """Make steps that cannot be made, and one with a long result."""
    inner = raising({0: OSError("x")}, 0)
    job.note("nested", attempt(lambda: ranks.run_all("a", lambda: ranks.run_all("b", inner))))

    job.note("object", attempt(lambda: ranks.gather("names", lambda: {job.rank: object()})))
    noise = random.Random(0).randbytes(8_000_000).hex()  # packs badly
    job.note("too long", attempt(lambda: ranks.broadcast("noise", lambda: noise)))
    long = attempt(lambda: len(ranks.broadcast("zeros", lambda: "0" * 20_000_000)))
    job.note("long", long)


def calls_of_some(job: Job) -> None:
    """Make a call on rank 0 alone, then one on every rank."""
    for call in ("save at step 1", "save at step 2"):
        if job.rank == 0 or call.endswith("2"):
            job.note(call, attempt(partial(look, call)))
        dist.barrier()


def look(call: str) -> list[int]:
    """Make a call with ranks of its own."""
    ranks = connect_ranks(SHORT, name="calls", call=call)
    try:
        return ranks.all_gather("look", dist.get_rank)
    finally:
        ranks.close()


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


def held_up(job: Job) -> None:
    """Hold the thread of one rank for longer than a silent rank is waited for, rank 0's at last."""
    log = logging.getLogger("lightning_elastic_zero.coordination.client")
    lines = LinesKept()
    log.addHandler(lines)
    log.propagate = False
    for rank in (2, 0):
        heartbeat_timeout_s = 1.6 if rank else 6.0  # rank 0 notices itself that it was held up
        times = replace(SHORT, heartbeat_timeout_s=heartbeat_timeout_s, absent_timeout_s=60.0)
        ranks = StoreRanks(
            _get_default_store(), job.rank, job.world_size, name=f"held {rank}", times=times
        )
        ranks.run_all("meet", lambda: None)
        if job.rank == rank:
            ranks._thread._commands.put(lambda: time.sleep(4.0))
        note = attempt(lambda: ranks.all_gather("write", lambda: job.rank))  # noqa: B023
        job.note(f"held {rank}", {**note, "log": lines.lines})
        ranks.close()
    log.removeHandler(lines)
    log.propagate = True


class LinesKept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def interrupted(job: Job, run_all: Callable[[str, Callable[[], None]], None]) -> dict[str, Any]:
    """Make rank 3 be interrupted at work."""
    work = raising({3: KeyboardInterrupt()}, job.rank)
    try:
        return attempt(lambda: run_all("long work", work))
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt"}


def interrupted_while_waiting(ranks: Ranks) -> dict[str, Any]:
    """Interrupt rank 3, which has done its part, by a signal; the others work until they hear."""

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
    try:
        return attempt(lambda: ranks.run_all("wait", work))
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt"}


def ranks_are_lost(job: Job) -> None:
    """One fails early, one is stopped and goes on, one is killed, one closes, one ends."""
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
    """Return work in which the last rank gets a signal."""
    return partial(os.kill, os.getpid(), number) if job.rank == 3 else lambda: None


def wake(pid: int) -> None:
    """Make a stopped process go on when the others have heard that it does not."""
    while _get_default_store().add("heard", 0) < WORLD - 1:
        time.sleep(0.05)
    os.kill(pid, signal.SIGCONT)
