"""Ranks that agree through a key-value store: the caller's side.

A queue of commands to one thread, which finalizers too may fill.

Not ``queue.SimpleQueue``: in CPython 3.10 to 3.13 its ``get(timeout)`` waits for good where its
thread is held up for longer than the timeout, between its first try and the wait for what is left
of it: that is negative then, and taken for no limit (``Modules/_queuemodule.c``). With a timeout of
a millisecond, on a machine under load, that ended a rank's heartbeats now and then.
And not ``queue.Queue``, whose ``put`` takes a lock: a finalizer that the garbage collector runs
while its own thread holds that lock would never return.

The one thread of a rank that talks to the store of the job.

A store may fall silent and answer again: its host was stopped, and goes on. Meanwhile a caller who
waits gives its step up and raises, but the thread only waits, in the call that is not answered
(``rank_session`` says what follows). Only a connection that breaks, a process group that is
destroyed or ``close`` end the thread for good.

The thread may also be held up although the store's host runs, by a machine under pressure or by a
finalizer that the garbage collector happens to run in it. Where the system says that the host runs,
the caller waits on, and the log says where the thread is.

The ranks that a launcher has started, without a process group: their store is enough.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lightning_elastic_zero.coordination.liveness import (
    Timeouts,
    failure_report,
    pack,
    unresponsive_reason,
)
from lightning_elastic_zero.coordination.session import (
    CHECK_INTERVAL_S,
    LONGEST_POLL_S,
    RankSession,
    Step,
    join_session,
    poll_pauses_s,
)
from lightning_elastic_zero.coordination.store import SHARED, shared_connection
from lightning_elastic_zero.core.processes import ProcessKey, ProcessState
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import RanksError

Command: TypeAlias = Callable[[], None]


class CommandQueue:
    """Orders of many threads for one, in their order."""

    def __init__(self) -> None:
        """Begin empty."""
        self._commands: deque[Command] = deque()
        self._none_given = threading.Lock()
        self._none_given.acquire()

    def put(self, command: Command) -> None:
        """Append an order; never waits, and may be called within another call of it."""
        self._commands.append(command)
        with suppress(RuntimeError):  # released already
            self._none_given.release()

    def get(self, timeout_s: float) -> Command | None:
        """Return the next order; None if there is none within so many seconds, or now and then."""
        if not self._commands:
            self._none_given.acquire(timeout=timeout_s)
        return self._commands.popleft() if self._commands else None


log = logging.getLogger(__name__)

LINGER_S = 2.0
"""The longest wait for others to read a last word: two glances."""


class StoreThread(threading.Thread):
    """Takes the turns of a session, with a connection of its own, and does what the caller orders.

    A call to a store whose host is stopped never returns: so the caller makes none.
    """

    session: RankSession
    """Made by the thread, once it is connected; used by no other one."""

    def __init__(
        self, store: Store, rank: int, world_size: int, name: str, times: Timeouts, call: str
    ) -> None:
        super().__init__(name=f"{name} rank {rank}", daemon=True)
        self.step = Step("", "")
        self.step.end(None)
        self.step.reported.set()
        self._source: Any = store
        self._rank, self._world_size, self._prefix, self._times = rank, world_size, name, times
        self._call = call
        self._orders = CommandQueue()
        self._lost = ""  # why this rank can talk no more
        self._closing = False
        self._grouped = dist.is_initialized()
        self._answered_at = time.monotonic()
        self._told_at = 0.0

    def enter_step(self, step: Step) -> None:
        """Enter a step; return once it is known whether it has failed already."""
        self.step = step
        self._orders.put(lambda: self.session.enter_step(step))
        self.wait(step.arrived)

    def report(self, step: Step, text: str, *, failed: bool) -> None:
        """Report how the work went; return at once."""
        self._orders.put(lambda: self.session.report(step, text, failed=failed))

    def abort_step(self, step: Step, error: BaseException) -> None:
        """Make a step fail whose verdict the caller does not wait for any more; return at once."""
        why = f"it has given this step up ({str(error) or type(error).__name__})"
        self._orders.put(lambda: self.session.abort_step(step, why))

    def wait(self, event: threading.Event) -> None:
        """Wait for the thread, but not for one that will not answer."""
        while not event.wait(0.0 if self._lost else CHECK_INTERVAL_S):
            self.check()

    def check(self) -> None:
        """Raise if the store does not answer."""
        why = self._lost or self._unresponsive_reason()
        if why and not self.step.decided.is_set():
            raise RanksError(why)

    def _unresponsive_reason(self) -> str:
        """Return why not to wait for the thread any more, if so; after a while, log where it is."""
        silent_s = self._silent_s()
        why = unresponsive_reason(silent_s, self._times, self._store_host_runs)
        if silent_s > self._times.heartbeat_timeout_s and not why:
            self._log_where_it_is(silent_s)
        return why

    def _silent_s(self) -> float:
        """Return for how long the thread has not come back from a turn."""
        answered_at = self._answered_at
        silent_s = time.monotonic() - answered_at
        if silent_s > self._times.heartbeat_timeout_s:
            # All of this process may have been stopped: give the thread the time to go on.
            time.sleep(2 * self._times.heartbeat_interval_s)
        return silent_s if self._answered_at == answered_at else 0.0

    def _store_host_runs(self) -> bool:
        """Whether the store's host is known to run: then it is this thread that is held up."""
        if os.environ.get(SHARED) == str(True) or not hasattr(self, "session"):
            return False  # an agent hosts the store, of which nothing is known
        process = ProcessKey.of_this_process() if self._rank == 0 else self.session.leader_process
        return process is not None and process.state() is ProcessState.RUNNING

    def _log_where_it_is(self, silent_s: float) -> None:
        if self._told_at == self._answered_at:
            return
        self._told_at = self._answered_at
        frame = sys._current_frames().get(self.ident or 0)  # noqa: SLF001 - it is documented
        stack = "".join(traceback.format_stack(frame)) if frame else "unknown"
        log.warning(
            "rank %d: the thread that talks to the other ranks has not come to run for %.0f s, "
            "although the store's host runs; waiting on. It is at:\n%s",
            self._rank,
            silent_s,
            stack,
        )

    def serve(self) -> None:
        """Start, to be ended with the process at the latest."""
        self.start()
        # Registered late, this runs before an exit hook that destroys the process group.
        atexit.register(self.end)

    def close(self) -> None:
        """Stop, unless the thread is held by a store that does not answer."""
        self._closing = True
        self._orders.put(lambda: None)
        if threading.current_thread() is not self:
            self.join(2 * LINGER_S)
            if not self.is_alive():
                atexit.unregister(self.end)

    def end(self) -> None:
        """Stop when the process ends, and wait for the thread as long as the store may answer.

        A thread that came back from C++ to a finalized interpreter would abort the process.
        """
        self.close()
        while self.is_alive() and self._silent_s() <= self._times.heartbeat_timeout_s:
            self.join(CHECK_INTERVAL_S)

    def run(self) -> None:
        """Serve the session, a turn at a time, until closed or cut off."""
        try:
            self._open()
            while not (self._closing or self._lost):
                self._run_once()
            if not self._lost:
                self._leave()
        except Exception as error:  # noqa: BLE001 - raised by the caller, who waits for it
            reason = str(error).partition("\n")[0]
            self._lost = self._lost or (
                "the job's store is lost: rank 0, or whatever process hosts it, died or has ended "
                f"({type(error).__name__}: {reason})"
            )
        self._lost = self._lost or "these ranks are closed"
        if not self.step.decided.is_set():
            self.step.end(RanksError(f"step {self.step.name!r}: {self._lost}"))

    def _open(self) -> None:
        store, self._source = self._source, None  # held, it would outlive its process group
        # Kept as long as this thread is: others find it by that.
        self._connection = shared_connection(store)
        keys = join_session(self._connection, self._prefix, self._rank, self._call)
        self.session = RankSession(keys, self._rank, self._world_size, self._times)
        self._answered_at = time.monotonic()

    def _run_once(self) -> None:
        order = self._orders.get(self.session.pause_s())
        if self._grouped and not dist.is_initialized():
            # The store may be gone: a call to it would have torch print a warning.
            self._lost = "the process group has been destroyed"
            return
        self.session.take_turn(order)
        self._answered_at = time.monotonic()

    def _leave(self) -> None:
        # With rank 0 the store often ends: let the others read the last verdict before that.
        until, pauses_s = time.monotonic() + LINGER_S, poll_pauses_s(self._world_size)
        while not self.session.all_read() and time.monotonic() < until:
            time.sleep(min(next(pauses_s), LONGEST_POLL_S))
        step = self.step
        self.session.leave(failed=not step.decided.is_set() or step.failure is not None)


T = TypeVar("T")
J = TypeVar("J")


class StoreRanks:
    """Several ranks that agree through a store, over a connection of their own.

    Every rank makes its instances of one ``name`` in the same order, does all steps of an instance
    from one thread, and closes it before it destroys the process group that the store is of. One
    that only some ranks have made, and whose steps have failed, is passed by on the others, if they
    make theirs for another ``call``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "elastic-zero",
        times: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
        call: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._running = threading.Lock()
        self._thread = StoreThread(store, rank, world_size, name, times, call)
        self._thread.serve()
        self._close = weakref.finalize(self, self._thread.close)
        self._close.atexit = False  # the thread has a hook of its own

    def run_all(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; see ``Ranks``."""
        own: list[T] = []
        self._run("run_all", step, lambda: own.append(work()))
        return own[0]

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        """Return all results on rank 0; see ``Ranks``."""
        values = self._run("gather", step, work)
        return values if self.rank == 0 else None

    def broadcast(self, step: str, work: Callable[[], J]) -> J:
        """Return the result of rank 0; see ``Ranks``."""
        value: J = self._run("broadcast", step, work if self.rank == 0 else None)[0]
        return value

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        """Return all results; see ``Ranks``."""
        return self._run("all_gather", step, work)

    @property
    def progress(self) -> Progress:
        """The progress of long work; see ``Ranks``."""
        return Progress(self._report_progress)  # not kept: a cycle would delay the finalizer

    def _report_progress(self) -> None:
        step = self._thread.step
        step.work_count += 1
        if not step.reported.is_set():
            if step.failure is not None:
                raise step.failure
            self._thread.check()

    def has_failed(self) -> bool:
        """Whether the step that goes on has failed; see ``Ranks``."""
        step = self._thread.step
        return not step.reported.is_set() and step.failure is not None

    def close(self) -> None:
        """Stop the thread; see ``Ranks``."""
        self._close()

    def _run(self, kind: str, name: str, work: Callable[[], object] | None) -> list[Any]:
        if not self._running.acquire(blocking=False):
            msg = f"step {name!r} was begun within another step; a thread needs its own StoreRanks"
            raise RanksError(msg)
        step = Step(kind, name)
        try:
            own = self._do(step, work)
        except BaseException as error:
            self._thread.abort_step(step, error)
            raise
        finally:
            step.reported.set()  # no work goes on that progress() could end
            self._running.release()
        if step.failure is None:
            return step.values
        # Where progress() raised it in the midst of work, it is no cause of itself. "from None"
        # would hide what is being handled, such as the error for which a run saves and ends.
        if own is None or own is step.failure:
            raise step.failure
        raise step.failure from own

    def _do(self, step: Step, work: Callable[[], object] | None) -> Exception | None:
        """Enter a step, do this rank's part and wait for the verdict; return what was raised."""
        self._thread.enter_step(step)
        own = None
        if not (step.decided.is_set() or step.reported.is_set()):
            own = self._work(step, work)
        self._thread.wait(step.decided)
        return own

    def _work(self, step: Step, work: Callable[[], object] | None) -> Exception | None:
        """Run this rank's work and report how it went; return what it raised."""
        try:
            own, report = run_work(step.kind, work)
        except BaseException as error:
            self._thread.report(step, pack(failure_report(error)), failed=True)
            step.reported.wait(LINGER_S)
            raise
        self._thread.report(step, report, failed=own is not None)
        return own


def run_work(kind: str, work: Callable[[], object] | None) -> tuple[Exception | None, str]:
    """Run a rank's work for a kind of step; return what it raised, and the report of it."""
    if work is None:
        return None, ""
    try:
        result = work()
        return None, "" if kind == "run_all" else pack({"value": result})
    except Exception as error:  # noqa: BLE001 - all ranks raise it, after the verdict
        return error, pack(failure_report(error))


VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and others like it, tell each rank."""


def launched_world_size() -> int:
    """Return how many ranks a launcher has started; 0: none has."""
    if not all(os.environ.get(name) for name in VARIABLES):
        return 0
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def launched_ranks(times: Timeouts, name: str) -> Iterator[StoreRanks]:
    """Connect to the other ranks in the launcher's store, as long as the context lasts.

    Args:
        times: how long ranks wait for each other, also in the store.
        name: ranks that meet by one name agree with each other only.
    """
    timeout = timedelta(seconds=times.absent_timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    ranks = StoreRanks(store, rank, world_size, name=name, times=times)
    with closing(ranks):
        yield ranks
