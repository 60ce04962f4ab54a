"""A step on all ranks that fails on all ranks: the only place where ranks talk to each other.

A collective is no place to agree in: it hangs for half an hour when one rank raised, died or never
came. Ranks agree through the key-value store of the job instead. One step::

    every rank    names the step in the store, works, and reports how its work went
    rank 0        counts the reports and posts one verdict, also about a rank that is lost
    every rank    polls for the verdict, then returns or raises it

One thread per rank makes all calls to the store (``store_thread``), over a connection of its own,
because a call to a store whose host is stopped never returns. It also beats: a rank without beats
died or is stopped, one that beats without progress has stalled or is elsewhere. ``rank_session`` is
what the thread does, ``leader`` what rank 0 makes of it, with ``liveness``: no thread, no sleep and
no clock of their own, so that whole jobs of them run in one process, in tests.

Whether any rank says yes, by a collective: before each batch, the store is too slow.

The end of a process: not before the threads of torch's process groups hold no tensor any more.

A worker thread of a gloo group keeps the tensors of a collective for an instant after the
collective has ended, and needs Python's lock to let go of them. On a busy machine that instant may
last until the interpreter is being finalized. Then CPython ends the thread in the midst of C++,
which may not be left like that: ``terminate called without an active exception``, and SIGABRT after
all is done. It is upstream's (torch issue 190489), and happens without this library as well.
Nothing in torch waits for these threads but the destructor of a group that nobody refers to any
more, and DeepSpeed's engines refer to theirs. So an exit hook waits, from outside.
"""

from __future__ import annotations

import atexit
import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.store import (
    check_open_file_limit,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress


def any_rank(*, flag: bool, device: torch.device) -> bool:
    """Whether any rank's flag is set; collective over the default process group.

    Args:
        flag: this rank's.
        device: one whose tensors the group's backend can reduce.

    Raises:
        RuntimeError: a rank is gone, or the network.
    """
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


_WORKER = "pt_gloo_runloop"
"""How torch names the threads that run a gloo group's collectives."""

_PAUSE_S = 0.02
"""From one look to the next. A thread that waits for Python's lock wakes up every 5 ms, and each
time that this hook sleeps."""

_PATIENCE_S = 5.0
"""A worker that is busy for longer than this is in the midst of a collective."""

_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Register ``wait_for_gloo_workers`` as an exit hook, to run after those registered later."""
    atexit.register(wait_for_gloo_workers)


def wait_for_gloo_workers() -> None:
    """Wait until the workers sleep for good: for a collective, or for other ranks within one."""
    end = time.monotonic() + _PATIENCE_S
    before, now = None, _workers()
    while now and (now != before or not all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > end:
            return
        time.sleep(_PAUSE_S)  # without Python's lock, so that they can have it
        before, now = now, _workers()


def _workers() -> dict[str, tuple[str, ...]]:
    """Return the state of each worker of this process, and how often it has gone to sleep."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            status = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
            )
            if status["Name"] == _WORKER:
                found[task.name] = (status["State"][0], *(status[key] for key in _SWITCHES))
    return found


T = TypeVar("T")
J = TypeVar("J")


class Ranks(Protocol):
    """The ranks of a job, to do steps together. Every rank makes the same calls in the same order.

    A step that fails on one rank raises on every rank, as the same class, naming the ranks that
    failed; after that the next step can be made. The results that ``gather``, ``broadcast`` and
    ``all_gather`` hand around are plain data, small (8 MiB at most, packed) and come as JSON has
    them: tuples as lists.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def run_all(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; return its own result once it has succeeded on all."""

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        """Run ``work`` on every rank; return all results, by rank, on rank 0, None elsewhere."""

    def broadcast(self, step: str, work: Callable[[], J]) -> J:
        """Run ``work`` on rank 0 only; return its result on every rank."""

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        """Run ``work`` on every rank; return all results, by rank, on every rank."""

    @property
    def progress(self) -> Progress:
        """Shows the other ranks that long work goes on; raises a failure of the step elsewhere."""

    def has_failed(self) -> bool:
        """Whether the step that goes on has failed elsewhere already; asked in any thread."""

    def close(self) -> None:
        """End this rank's part. May be called twice, raises nothing."""


class OneRank:
    """A job of one rank: work is just run, and what it raises is raised as it is."""

    rank = 0
    world_size = 1
    progress = NO_PROGRESS

    def run_all(self, step: str, work: Callable[[], T]) -> T:  # noqa: ARG002
        """Run ``work``."""
        return work()

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        """Run ``work`` and return its result as the only one."""
        return [self.broadcast(step, work)]

    def broadcast(self, step: str, work: Callable[[], J]) -> J:  # noqa: ARG002
        """Run ``work`` and return its result as several ranks would get it."""
        result: J = json.loads(json.dumps(work()))
        return result

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        """Run ``work`` and return its result as the only one."""
        return [self.broadcast(step, work)]

    def has_failed(self) -> bool:
        """Return False: there is nobody else."""
        return False

    def close(self) -> None:
        """Do nothing: nothing is open."""


def connect_ranks(
    times: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
    name: str = "elastic-zero",
    call: str = "",
) -> Ranks:
    """Return the ranks of the default process group, or the one rank of a job without one.

    Args:
        times: how long ranks wait for each other.
        name: ranks that are made by one name agree with each other only.
        call: what they are made for, where that may be done on one rank alone by mistake: alike on
            all ranks in one call, and another one in the next.
    """
    if not dist.is_initialized():
        return OneRank()
    wait_for_gloo_at_exit()
    if dist.get_world_size() == 1:
        return OneRank()
    # There is no public way to the store that the ranks met in.
    store, rank, world_size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        check_open_file_limit(store, world_size)
    return StoreRanks(store, rank, world_size, name=name, times=times, call=call)
