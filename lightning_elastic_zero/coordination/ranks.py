"""Steps on all ranks that fail on all ranks: how ranks agree during saves and loads.

A collective is the wrong tool: it hangs for half an hour after one rank raised, died or never
entered it. Ranks agree through the key-value store of the job instead. One step::

    every rank    sets the name of the step in the store, works, and reports the outcome
    rank 0        counts the reports and posts one verdict, also if a rank is lost
    every rank    polls for the verdict, then returns or raises it

``client`` is the caller's side and the thread that makes all calls to the store. ``session`` is
what that thread does, and ``liveness`` has timeouts, messages and the detection of lost ranks.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.coordination.client import (
    StoreRanks,
    check_open_file_limit,
    store_of_this_world,
)
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import ElasticZeroError

T = TypeVar("T")
J = TypeVar("J")

MOST_CHARACTERS = 150
"""Length to which ranks other than rank 0 shorten the message of a common error."""


def any_rank(*, flag: bool, device: torch.device) -> bool:
    """Whether any rank's flag is set; collective over the default process group.

    For use before each batch, where the store is too slow. The group's backend must be able to
    reduce tensors of ``device``.
    """
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def is_of_all_ranks(group: Any) -> bool:
    """Whether a process group is that of all ranks, which None stands for."""
    return group is None or group == dist.group.WORLD


def gather_from_group(value: T, group: Any) -> list[T]:
    """Return the values of the ranks of a process group, by rank; collective in this group.

    For ranks that make the same steps while others may make none.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Register ``wait_for_gloo_workers`` as an exit hook, to run after those registered later."""
    atexit.register(wait_for_gloo_workers)


def wait_for_gloo_workers() -> None:
    """Wait until the threads of gloo groups have released the tensors of their last collective.

    Such a thread needs Python's lock to release them, shortly after the collective has ended. On a
    busy machine the interpreter may be finalizing by then: CPython ends the thread inside C++,
    which aborts the process (``terminate called without an active exception``). This is torch issue
    190489, and also happens without this library. Only the destructor of an unreferenced group
    waits for these threads, and DeepSpeed's engines refer to their groups. So this waits from
    outside, until all of them sleep: for a collective, or for other ranks within one.
    """
    end_s = time.monotonic() + 5.0  # A thread that is busy for longer is within a collective.
    before, now = None, _gloo_workers()
    while now and (now != before or not all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > end_s:
            return
        # Releases Python's lock, for which a thread tries every 5 ms.
        time.sleep(0.02)
        before, now = now, _gloo_workers()


@functools.cache
def print_common_errors_once() -> None:
    """Have rank 0 print an error that all ranks raise, when it ends their processes.

    Otherwise each rank prints a traceback, the message last. torch also replaces this hook.
    """
    print_error = sys.excepthook

    def print_once(kind: Any, error: BaseException, trace: Any) -> None:
        if text := format_common_error(error):
            sys.stderr.write(text)
        else:
            print_error(kind, error, trace)

    sys.excepthook = print_once


def format_common_error(error: BaseException) -> str:
    """Return the text of an error that all ranks raise; empty if other tracebacks are needed.

    Rank 0's has the message first, then one traceback. The others refer to it in one line. The
    message contains that of this rank's own error, but neither the place of an unexpected one, nor
    an error that was being handled.
    """
    if not isinstance(error, ElasticZeroError) or error.rank is None:
        return ""
    cause = error.__cause__
    is_expected = cause is None or isinstance(cause, ElasticZeroError)
    if not is_expected or error.__context__ not in (None, cause):
        return ""
    name, (first, *more) = type(error).__name__, str(error).splitlines() or [""]
    if error.rank:
        rest = "..." if more or len(first) > MOST_CHARACTERS else ""
        return f"[rank{error.rank}]: {name}: {first[:MOST_CHARACTERS]}{rest} (see rank 0)\n"
    trace = "".join(traceback.format_tb(error.__traceback__))
    return f"{name}: {error}\nTraceback of rank 0 (most recent call last):\n{trace}"


def _gloo_workers() -> dict[str, tuple[str, ...]]:
    """Return the state and the context switches of each worker thread of this process."""
    workers = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # The thread has ended.
            lines = (task / "status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines)
            if status["Name"] == "pt_gloo_runloop":
                switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
                workers[task.name] = (status["State"][0], *(status[key] for key in switches))
    return workers


class Ranks(Protocol):
    """Steps on all ranks of a job. Every rank makes the same calls in the same order.

    A step that fails on one rank raises the same class on every rank, and the message names the
    failed ranks. The next step can then be made. The results that ``gather``, ``broadcast`` and
    ``all_gather`` exchange are plain data of at most 8 MiB, and come back as JSON represents them:
    tuples as lists.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def run_all(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; return its own result once it has succeeded on all."""

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        """Run ``work`` on every rank; return all results, by rank, on rank 0, None elsewhere."""

    def broadcast(
        self, step: str, work: Callable[[], J], others: Callable[[], object] | None = None
    ) -> J:
        """Run ``work`` on rank 0; return its result on every rank.

        ``others`` is the work of the other ranks at the same time.
        """

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        """Run ``work`` on every rank; return all results, by rank, on every rank."""

    @property
    def progress(self) -> Progress:
        """Shows the other ranks long work; raises if the step has failed on another rank."""

    def close(self) -> None:
        """End the session of this rank. May be called twice; never raises."""


class OneRank:
    """A job of one rank: it runs the work, and errors pass through unchanged."""

    rank = 0
    world_size = 1
    progress = NO_PROGRESS

    def run_all(self, step: str, work: Callable[[], T]) -> T:  # noqa: ARG002
        return work()

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        return [self.broadcast(step, work)]

    def broadcast(
        self,
        step: str,  # noqa: ARG002
        work: Callable[[], J],
        others: Callable[[], object] | None = None,  # noqa: ARG002
    ) -> J:
        result: J = json.loads(json.dumps(work()))
        return result

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        return [self.broadcast(step, work)]

    def close(self) -> None: ...


def connect_ranks(
    times: Timeouts = Timeouts(),  # noqa: B008 - frozen
    name: str = "elastic-zero",
    call: str = "",
) -> Ranks:
    """Return the ranks of the default process group, or the single rank of a job without one.

    ``name`` is their namespace in the store. ``call`` identifies a user's call that may be made on
    one rank only by mistake: equal on all ranks in one call, and different in the next.
    """
    if not dist.is_initialized():
        return OneRank()
    wait_for_gloo_at_exit()
    if dist.get_world_size() == 1:
        return OneRank()
    print_common_errors_once()
    # There is no public access to the store of the default group.
    store, rank, world_size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        check_open_file_limit(store, world_size)
    store = store_of_this_world(store, rank, world_size, times.absent_timeout_s)
    return StoreRanks(store, rank, world_size, name=name, times=times, call=call)
