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
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.coordination.any_rank import any_rank
from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.gloo_shutdown import wait_for_gloo_at_exit
from lightning_elastic_zero.coordination.rendezvous import (
    SHARED,
    leave_shared_store,
    size_of_process_group,
)
from lightning_elastic_zero.coordination.store_connection import check_open_file_limit
from lightning_elastic_zero.coordination.timeouts import (
    ABSENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    Timeouts,
)

__all__ = [
    "ABSENT_TIMEOUT_S",
    "SHARED",
    "STALL_TIMEOUT_S",
    "OneRank",
    "Ranks",
    "StoreRanks",
    "Timeouts",
    "any_rank",
    "connect_ranks",
    "leave_shared_store",
    "size_of_process_group",
]

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

    def report_progress(self) -> None:
        """Show that long work goes on; raises what has failed the step elsewhere."""

    def has_failed(self) -> bool:
        """Whether the step that goes on has failed elsewhere already; asked in any thread."""

    def close(self) -> None:
        """End this rank's part. May be called twice, raises nothing."""


class OneRank:
    """A job of one rank: work is just run, and what it raises is raised as it is."""

    rank = 0
    world_size = 1

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

    def report_progress(self) -> None:
        """Do nothing: nobody waits."""

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
