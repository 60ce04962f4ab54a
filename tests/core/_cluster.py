"""A job of ranks on a simulated clock: every message, delay and death is chosen by the test."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import run_work
from lightning_elastic_zero.coordination.liveness import Timeouts, unresponsive_reason
from lightning_elastic_zero.coordination.session import (
    CHECK_INTERVAL_S,
    RankSession,
    Step,
    join_session,
)
from lightning_elastic_zero.core.processes import ProcessState
from lightning_elastic_zero.errors import RanksError

T = TypeVar("T")
Pauses: TypeAlias = Generator[None, None, T]
Work: TypeAlias = Callable[[], object]
Command: TypeAlias = Callable[[], None]

TICK_S = 0.1
SHORT = Timeouts(
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.6,
    stall_timeout_s=1.6,
    absent_timeout_s=2.4,
    held_up_timeout_s=5.0,
    failure_grace_s=0.3,
    late_warning_s=1.0,
)


def raising(error: BaseException | None) -> Work:
    def work() -> None:
        if error is not None:
            raise error

    return work


class Rank:
    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.open()
        self.program: Pauses[Any] = self.sleep(0)
        self.done, self.result = True, None

    def open(self, name: str = "s", call: str = "") -> None:
        cluster, self.orders = self.cluster, deque[Command]()
        keys = join_session(cluster.store, name, self.rank, call)
        size, times = cluster.world_size, cluster.times
        self.session = RankSession(
            keys, self.rank, size, times, lambda: cluster.now_s, lambda _: cluster.state
        )
        self.answered_s = cluster.now_s

    def talk(self) -> None:
        self.session.take_turn(self.orders.popleft() if self.orders else None)
        self.answered_s = self.cluster.now_s

    def go_on(self) -> None:
        try:
            next(self.program)
        except StopIteration:
            self.done = True

    def sleep(self, seconds: float) -> Pauses[None]:
        until = self.cluster.now_s + seconds
        while self.cluster.now_s < until:
            yield

    def step(
        self,
        kind: str,
        name: str,
        work: Work | None = None,
        busy_s: float = 0.0,
        *,
        progress: bool = True,
        abort_after_s: float = float("inf"),
    ) -> Pauses[dict[str, Any]]:
        """Do a step; return its result or error, and the seconds that it took.

        Args:
            kind: the method that is called.
            name: the step's name.
            work: the work, after ``busy_s``.
            busy_s: for how long this rank is at work at most.
            progress: whether it shows progress meanwhile, and stops once the step is decided.
            abort_after_s: how long after its report this rank is interrupted.
        """
        step, began_s = Step(kind, name), self.cluster.now_s
        self.orders.append(partial(self.session.enter_step, step))
        try:
            yield from self._wait(step, step.arrived)
            if not (step.decided.is_set() or step.reported.is_set()):
                until_s = self.cluster.now_s + busy_s
                while self.cluster.now_s < until_s and not (progress and step.decided.is_set()):
                    step.work_count += progress
                    yield
                error, text = run_work(kind, work if work is not None else lambda: self.rank)
                failed = error is not None
                self.orders.append(partial(self.session.report, step, text, failed=failed))
            yield from self._wait(step, step.decided, abort_after_s)
        except (RanksError, KeyboardInterrupt) as error:
            why = f"it gave up this step ({str(error) or type(error).__name__})"
            self.orders.append(partial(self.session.abort_step, step, why))
            found: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
        else:
            found = {"value": step.values}
            if step.failure is not None:
                kind = type(step.failure).__name__
                found = {"error": kind, "message": str(step.failure)}
        return {**found, "seconds": self.cluster.now_s - began_s}

    def _wait(
        self, step: Step, event: threading.Event, abort_after_s: float = float("inf")
    ) -> Pauses[None]:
        """Wait as ``StoreThread.wait`` does: the pauses are ours, what ends it is not."""
        now_s = self.cluster.now_s
        until_s, check_s = now_s + abort_after_s, now_s + CHECK_INTERVAL_S
        while not event.is_set():
            if self.cluster.now_s >= until_s:
                raise KeyboardInterrupt
            if self.cluster.now_s >= check_s:
                silent_s = yield from self._silent_s()
                why = unresponsive_reason(silent_s, self.cluster.times, self._store_host_runs)
                if why and not step.decided.is_set():
                    raise RanksError(why)
                check_s = self.cluster.now_s + CHECK_INTERVAL_S
            yield

    def _silent_s(self) -> Pauses[float]:
        """Return how long the thread has taken no turn, unless it takes one in the next moment."""
        answered_s, times = self.answered_s, self.cluster.times
        silent_s = self.cluster.now_s - answered_s
        if silent_s > times.heartbeat_timeout_s:
            yield from self.sleep(2 * times.heartbeat_interval_s)
        return silent_s if self.answered_s == answered_s else 0.0

    def _store_host_runs(self) -> bool:
        return self.cluster.state is ProcessState.RUNNING


class Cluster:
    """A job whose time passes only when the test advances it."""

    def __init__(self, world_size: int, times: Timeouts = SHORT) -> None:
        self.world_size, self.times, self.now_s = world_size, times, 1000.0
        self.state = ProcessState.UNKNOWN
        """What the system says of each rank's process."""
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=1))  # a key that is not there would be waited for
        self.stopped: set[int] = set()
        """Ranks that do nothing: stopped, or dead."""
        self.held: set[int] = set()
        """Ranks whose thread waits for the store, and whose caller goes on."""
        self.ranks = [Rank(self, rank) for rank in range(world_size)]

    def tick(self, order: Iterable[int] = ()) -> None:
        self.now_s += TICK_S
        for rank in list(order) or range(self.world_size):
            if rank not in self.stopped:
                if rank not in self.held:
                    self.ranks[rank].talk()
                self.ranks[rank].go_on()

    def pass_time(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.tick()

    def start(self, program: Callable[[Rank], Pauses[Any]]) -> None:
        for rank in self.ranks:
            rank.program, rank.done, rank.result = self._noting(rank, program), False, None

    def _noting(self, rank: Rank, program: Callable[[Rank], Pauses[Any]]) -> Pauses[None]:
        rank.result = yield from program(rank)

    def finish(self, most_s: float = 120.0) -> list[Any]:
        """Run until all ranks that are not stopped have ended; return their results."""
        until = self.now_s + most_s
        while not all(rank.done for rank in self.ranks if rank.rank not in self.stopped):
            self.tick()
            assert self.now_s < until, [(rank.rank, rank.done) for rank in self.ranks]
        return [rank.result if rank.done else None for rank in self.ranks]

    def run(self, program: Callable[[Rank], Pauses[Any]]) -> list[Any]:
        self.start(program)
        return self.finish()

    def run_step(
        self, kind: str = "run_all", name: str = "write", works: dict[int, Work] | None = None
    ) -> list[dict[str, Any]]:
        return self.run(lambda rank: rank.step(kind, name, (works or {}).get(rank.rank)))


WORLD = 4
EVERYONE = list(range(WORLD))
STOP_S = 4.5
"""Longer than it takes the others to give up a step."""
LATE_S = STOP_S + 1
KINDS = ("run_all", "gather", "broadcast", "all_gather")


def failure(found: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the class and the message that every one of these ranks raised."""
    (same,) = {(outcome.get("error", ""), outcome.get("message", "")) for outcome in found}
    assert same[0], found
    return same


def assert_in_step(job: Cluster) -> None:
    """Check that the very next step succeeds on all ranks, and each after it."""
    assert {tuple(tries) for tries in job.run(meet)} == {()}
    for number in range(3):
        for kind in KINDS:
            found = [outcome["value"] for outcome in job.run_step(kind, f"{kind} {number}")]
            everyone = list(range(job.world_size))
            assert found[0] == {"run_all": [], "broadcast": [0]}.get(kind, everyone)
            assert found[1:] == [[] if kind in {"run_all", "gather"} else found[0]] * (
                job.world_size - 1
            )


def meet(rank: Rank) -> Pauses[list[str]]:
    """Try a step until it works; return what failed before."""
    failed: list[str] = []
    while "error" in (found := (yield from rank.step("run_all", "meet"))):
        failed.append(found["message"])
        assert len(failed) < 50
    return failed
