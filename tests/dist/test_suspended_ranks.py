"""Whoever is stopped and goes on: afterwards all ranks can do steps again.

Which rank may be stopped at which instant is run through in ``tests/core/test_session``;
here are real processes, whose calls do not return while the store's host is stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.errors import RanksError, SaveError
from tests.dist._rank_programs import SHORT, WORLD, attempt, open_ranks, raising
from tests.dist.test_coordination import notes
from tests.support.launch import Job, RankResult, run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer

STOP_S = 4.5
"""Longer than it takes the others to give up a step."""


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


def first_rank_is_lost(job: Job) -> None:
    """Rank 0, which hosts the store, is stopped for long and goes on, twice; then it is killed."""
    ranks = open_ranks(job)
    job.note("at work", attempt(lambda: ranks.run_all("write", lost_work(ranks, suspend))))
    dist.barrier()
    job.note("after at work", run_every_step_kind(ranks))
    dist.barrier()
    job.note("at once", attempt(lambda: not_there_yet(ranks)))
    job.note("after at once", run_every_step_kind(ranks))
    dist.barrier()
    job.note("killed", attempt(lambda: ranks.run_all("publish", lost_work(ranks, kill))))
    job.note("again", attempt(lambda: ranks.run_all("more", lambda: None)))


def kill(pid: int) -> None:
    """Kill a process, this one."""
    time.sleep(0.5)  # the others may have to read the last verdict yet
    os.kill(pid, signal.SIGKILL)


def lost_work(ranks: StoreRanks, lose: Callable[[int], None]) -> Callable[[], None]:
    """Return work in which rank 0 is lost; rank 1 has much to do, the others nothing."""

    def work() -> None:
        if ranks.rank == 0:
            lose(os.getpid())
        for _ in range(100 * (ranks.rank == 1)):
            time.sleep(0.1)
            ranks.progress.check()

    return work


def not_there_yet(ranks: StoreRanks) -> None:
    """Rank 0 is stopped before it comes to the step that the others give up."""
    if ranks.rank == 0:
        suspend(os.getpid())
    ranks.gather("sizes", lambda: 1)


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
