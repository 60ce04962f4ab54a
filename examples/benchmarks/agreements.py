"""Time the agreements of simulated ranks over a real store, and count their requests.

    python examples/benchmarks/agreements.py [--worlds 4 64 256 1024] [--processes 4] [--steps 20]

The ranks are threads of a few processes. As in a job, each has its own connection to one
``TCPStore``, and its own liveness thread. A step is one agreement: every rank enters it, reports a
result and gets the verdict. A save takes three steps, a load four. No rank is late. Here one
processor does the work of all ranks. The seconds are thus an upper bound for a cluster with a
processor per rank, and so are operations and bytes, since waiting ranks poll.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

# The store's host resolves the name of each connecting rank, one after the other. If reverse DNS
# drops requests, each lost one would delay all ranks by 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import StoreRanks

KINDS = ("run_all", "broadcast", "gather", "all_gather")
VALUE = {"bytes": 123_456_789, "path": "checkpoints/last.ckpt"}
"""The value of a step, about as long as in a save."""

TIMEOUT_S = 600.0


@dataclass
class Count:
    """Requests of one rank to the store."""

    operations: int = 0
    bytes: int = 0
    """Size of keys and values in both directions, without the overhead of the protocol."""

    def add(self, data: Any) -> None:
        """Count keys and values."""
        if isinstance(data, (str, bytes)):
            self.bytes += len(data)
        elif isinstance(data, (list, tuple)):
            for item in data:
                self.add(item)
        elif isinstance(data, int):
            self.bytes += 8


class CountingStore:
    """A store that counts its calls."""

    def __init__(self, store: Any, count: Count) -> None:
        self._store, self._count = store, count

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a counting method of the store."""
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            found = method(*arguments)
            self._count.operations += 1
            self._count.add(arguments)
            self._count.add(found)
            return found

        return call


@dataclass
class Job:
    """Data shared by the ranks of one process."""

    port: int
    world_size: int
    ranks: range
    steps: int
    counted: bool
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations of steps on rank 0, by kind."""
    counts: dict[tuple[str, int], Count] = field(default_factory=dict)
    """Requests of all steps, by kind and rank."""


def run_rank(job: Job, rank: int) -> None:
    """Run all steps as one rank."""
    store = TCPStore("127.0.0.1", job.port, timeout=timedelta(seconds=TIMEOUT_S))
    with closing(StoreRanks(store, rank, job.world_size, name="agreements")) as ranks:
        ranks.run_all("begin", lambda: None)
        for kind in KINDS:
            count = Count()
            if job.counted:
                _count_calls(ranks, count)
            agree = getattr(ranks, kind)
            for number in range(job.steps):
                began = time.perf_counter()
                agree(f"{kind} {number}", lambda: VALUE)
                if rank == 0:
                    job.seconds.setdefault(kind, []).append(time.perf_counter() - began)
            job.counts[kind, rank] = count


def _count_calls(ranks: StoreRanks, count: Count) -> None:
    """Count the requests of a rank from now on."""
    session: Any = ranks._thread.session  # noqa: SLF001 (no public access)
    bare = getattr(session.store, "_store", session.store)
    session.store = CountingStore(bare, count)
    if session.leader is not None:
        session.leader._store = session.store  # noqa: SLF001


def run_process(job: Job, results: Any) -> None:
    """Run the ranks of one process; return their measurements in a queue."""
    threads = [threading.Thread(target=run_rank, args=(job, rank)) for rank in job.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((job.seconds, job.counts))


def run_world(world_size: int, processes: int, steps: int, *, counted: bool) -> Job:
    """Run a world; return the measurements of its ranks.

    Raises:
        SystemExit: a process has failed, or did not end in time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = min(processes, world_size)
    cuts = [world_size * i // processes for i in range(processes + 1)]
    parts = [range(first, last) for first, last in pairwise(cuts)]
    jobs = [Job(store.port, world_size, part, steps, counted) for part in parts]
    started = [context.Process(target=run_process, args=(job, results)) for job in jobs]
    found = Job(store.port, world_size, range(world_size), steps, counted)
    try:
        for process in started:
            process.start()
        _collect(started, results, found)
    finally:
        for process in started:
            process.kill()
            process.join()
    return found


def _collect(started: list[Any], results: Any, found: Job) -> None:
    until = time.monotonic() + TIMEOUT_S
    remaining = len(started)
    while remaining:
        if results.empty():
            failed = [process.exitcode for process in started if process.exitcode]
            if failed or time.monotonic() > until:
                why = f"exit codes {failed}" if failed else f"no end within {TIMEOUT_S:.0f} s"
                sys.exit(f"{found.world_size} ranks: {why}")
            time.sleep(0.01)
            continue
        seconds, counts = results.get()
        found.seconds |= seconds
        found.counts |= counts
        remaining -= 1


def report(timed: Job, counted: Job) -> None:
    """Print the cost of one world's steps."""
    for kind in KINDS:
        seconds = timed.seconds[kind]
        counts = [counted.counts[kind, rank] for rank in counted.ranks]
        first, others = counts[0], counts[1:] or counts
        least, middle, greatest = (
            f"{pick(seconds) * 1e3:.1f}" for pick in (min, statistics.median, max)
        )
        figures = (
            f"{middle} ({least} to {greatest})",
            f"{first.operations / counted.steps:.0f}",
            f"{first.bytes / counted.steps / 1e3:.1f}",
            f"{statistics.mean(c.operations for c in others) / counted.steps:.1f}",
            f"{statistics.mean(c.bytes for c in others) / counted.steps / 1e3:.2f}",
        )
        print(f"| {timed.world_size} | {kind} | " + " | ".join(figures) + " |", flush=True)


def main() -> None:
    """Run worlds of several sizes, once for the time and once for the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 64, 256, 1024])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    titles = "ranks", "kind of step", "ms: median (least to greatest)"
    rank_0 = "rank 0: operations", "rank 0: kB"
    print("| " + " | ".join((*titles, *rank_0, "another: operations", "another: kB")) + " |")
    print("|" + "---|" * 7)
    for world_size in options.worlds:
        timed, counted = (
            run_world(world_size, options.processes, options.steps, counted=flag)
            for flag in (False, True)
        )
        report(timed, counted)


if __name__ == "__main__":
    main()
