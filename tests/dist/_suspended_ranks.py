"""What ranks do that stop and go on: each function is run by all ranks of one launch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.errors import RanksError, SaveError
from lightning_elastic_zero.coordination import StoreRanks
from tests.dist._launch import Job
from tests.dist._rank_programs import SHORT, attempt, open_ranks, raising

STOP_S = 4.5
"""Longer than it takes the others to give up a step."""

LATE_S = STOP_S + 1


def suspend(pid: int) -> None:
    """Stop a process, maybe this one, and let it go on in a while; it is gone for no longer."""
    wakes = subprocess.Popen(["/bin/sh", "-c", f"sleep {STOP_S}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)
    wakes.wait()


def run_every_step_kind(ranks: StoreRanks) -> list[str]:
    """Do all that ranks can do, again and again; say what failed before the first step worked."""
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


Scenario = Callable[[StoreRanks], object]


def at_work(ranks: StoreRanks) -> None:
    """Rank 0 is stopped at work; of the others one works, one waits, one looks away."""

    def work() -> None:
        for _ in range(100 * (ranks.rank == 1)):
            time.sleep(0.1)
            ranks.progress()
        if ranks.rank == 0:
            suspend(os.getpid())
        time.sleep(LATE_S * (ranks.rank == 3))

    ranks.run_all("write", work)


def waiting(ranks: StoreRanks) -> None:
    """Rank 0 is stopped when it has done its part."""
    if ranks.rank == 0:
        threading.Timer(0.5, lambda: suspend(os.getpid())).start()
    ranks.all_gather("compare", lambda: time.sleep(1.5 * (ranks.rank == 1)))


def not_there_yet(ranks: StoreRanks) -> None:
    """Rank 0 is stopped before it comes to the step that the others give up."""
    if ranks.rank == 0:
        suspend(os.getpid())
    ranks.gather("sizes", lambda: 1)


def not_all_there_yet(ranks: StoreRanks) -> None:
    """So is it, and rank 1 comes when it has gone on: it never notices that anything was wrong."""
    time.sleep(LATE_S * (ranks.rank == 1))
    not_there_yet(ranks)


def between(ranks: StoreRanks) -> None:
    """Rank 0 is stopped while nobody waits for it."""
    if ranks.rank == 0:
        suspend(os.getpid())
    else:
        time.sleep(LATE_S)
    ranks.broadcast("where", lambda: "it")


SCENARIOS: dict[str, Scenario] = {
    "at work": at_work,
    "waiting": waiting,
    "not there yet": not_there_yet,
    "not all there yet": not_all_there_yet,
    "between": between,
}
"""After these, ranks wait for each other before the next step, as training does."""


def first_rank_is_suspended(job: Job) -> None:
    """Rank 0, which may host the store, is stopped for long, and goes on."""
    ranks = open_ranks(job)
    for case, scenario in SCENARIOS.items():
        dist.barrier()  # all have read the last verdict
        job.note(case, attempt(lambda: scenario(ranks)))  # noqa: B023
        dist.barrier()
        job.note(f"after {case}", run_every_step_kind(ranks))
    dist.barrier()
    job.note("at once", attempt(lambda: not_there_yet(ranks)))
    job.note("after at once", run_every_step_kind(ranks))
    ranks.close()


def store_host_is_suspended(job: Job) -> None:
    """The store's host, which is no rank, is stopped for long, and goes on."""
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
    ranks = StoreRanks(store, job.rank, job.world_size, times=SHORT)

    stopping = threading.Thread(target=suspend, args=(host.pid if host is not None else 0,))

    def work() -> None:
        if job.rank == 0:
            stopping.start()
        time.sleep(0.5 * (job.rank == 1))

    job.note("stopped", attempt(lambda: ranks.run_all("publish", work)))
    if job.rank == 0:
        stopping.join()
    dist.barrier()
    job.note("after stopped", run_every_step_kind(ranks))
    ranks.close()
    dist.barrier()
    if host is not None:
        host.kill()
        host.wait()


def a_rank_gives_up_alone(job: Job) -> None:
    """The last rank gives up what the others have finished, and is interrupted in a step."""
    ranks = open_ranks(job)
    job.note("finished", attempt(lambda: finished(ranks)))
    dist.barrier()
    job.note("after finished", run_every_step_kind(ranks))

    job.note("before left", attempt(lambda: finished(ranks)))
    if job.rank != 3:
        job.note("left", attempt(lambda: ranks.run_all("write", lambda: None)))
    dist.barrier()
    job.note("after left", run_every_step_kind(ranks))

    for name in ("interrupt", "just before the end"):
        if name != "interrupt":
            look_when_all_is_said(ranks)
        job.note(name, attempt(lambda: interrupted(ranks)))
        dist.barrier()
        job.note(f"after {name}", run_every_step_kind(ranks))
    ranks.close()


def look_when_all_is_said(ranks: StoreRanks) -> None:
    """Let the last rank give the next step up before anybody else looks at it."""
    thread = ranks._thread
    leader, store, look_at = thread._leader, thread._store, thread._poll_decision

    def look_late(step: Any, **options: Any) -> None:  # noqa: ANN401 - the line's own
        if step.reported.is_set():
            look_at(step, **options)

    if ranks.rank != 3:
        thread._poll_decision = look_late  # type: ignore[method-assign]
    if leader is None:
        return
    poll, seq = leader.poll, leader._seq

    def late() -> None:
        all_in = store.add(f"{seq}/done", 0) == ranks.world_size
        if all_in and store.check([f"{seq}/verdict"]):
            time.sleep(0.3)
            leader.poll = poll  # type: ignore[method-assign]
            leader._polled_s = time.monotonic()
            poll()

    leader.poll = late  # type: ignore[method-assign]


def interrupted(ranks: StoreRanks) -> None:
    """The last rank has a result, and is interrupted a second later; the others take longer."""

    def work() -> int:
        time.sleep(0 if ranks.rank == 3 else 2)
        return ranks.rank

    if ranks.rank == 3:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        ranks.gather("long work", work)
    except KeyboardInterrupt:
        msg = "interrupted"
        raise RanksError(msg) from None


def finished(ranks: StoreRanks) -> None:
    """The last rank's line falls silent just before it reads that the step has succeeded.

    There is no other way to meet that instant than to hold the line's thread in it.
    """
    thread = ranks._thread
    poll = thread._poll_decision

    def late(step: Any, **options: Any) -> None:  # noqa: ANN401 - the line's own
        if step.reported.is_set():
            while not thread._store.check([f"{step.seq}/verdict"]):
                time.sleep(0.001)
            time.sleep(STOP_S)
        poll(step, **options)

    if ranks.rank == 3:
        thread._poll_decision = late  # type: ignore[method-assign]
    try:
        ranks.run_all("finished", lambda: None)
    finally:
        time.sleep(STOP_S)
        thread._poll_decision = poll  # type: ignore[method-assign]
