"""Steps on all ranks through the job's key-value store: the caller's side, and its thread.

``StoreRanks`` runs the work of a step in the caller's thread. A ``StoreThread`` makes all calls to
the store, because a call to a store whose host is stopped never returns.

A store may fall silent and answer again, for instance when its host is stopped and continued.
Meanwhile a waiting caller gives up its step and raises, but the thread stays in its unanswered call
(``session`` states what follows). Only a broken connection, the destruction of the process group or
``close`` end the thread.

The thread may also be blocked although the store's host runs, on an overloaded machine or by a
finalizer that the garbage collector runs in it. If the operating system reports that the host runs,
the caller keeps waiting, and the log shows the thread's stack.

The store is one process, and each connection to it is one of its open files, which many systems
limit to 1,024. torch opens one connection per rank. It cannot be used here: a call that waits for a
key occupies it, for minutes if need be, and a rank that cannot send heartbeats meanwhile would be
considered dead. So a process opens one more, which all of its threads share: none of their calls
waits for anything.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import resource
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.coordination.launchers import SHARED, agree_on_meeting
from lightning_elastic_zero.coordination.liveness import Report, Timeouts, unresponsive_reason
from lightning_elastic_zero.coordination.session import (
    CHECK_INTERVAL_S,
    LONGEST_PAUSE_S,
    RankSession,
    Step,
    join_session,
    poll_pauses_s,
)
from lightning_elastic_zero.core.process_state import ProcessState
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import RanksError

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""Longest wait for other ranks to read the last verdict: two of their polls at work."""

CONNECTIONS_PER_RANK = 2
"""Connections of each rank: torch's, and this library's."""

_CALL_TIMEOUT_S = 7 * 86400.0
"""Timeout of reading an existing key: only the store's host can delay it."""

_opening = threading.Lock()
_open: WeakKeyDictionary[Any, WeakValueDictionary[str, Any]] = WeakKeyDictionary()
"""This library's connection to each store, as long as a thread refers to it."""

_parts: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The part of each process group's store that no earlier world has used, if they share it."""

Command: TypeAlias = Callable[[], None]
T = TypeVar("T")
J = TypeVar("J")


class StoreRanks:
    """Several ranks that agree through a store, over a connection of their own.

    Every rank creates its instances of one ``name`` in the same order, does all steps of an
    instance in one thread, and closes it before it destroys the process group of the store. An
    instance that only some ranks have created, and whose steps have failed, is skipped on the
    others if they create theirs for another ``call``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "elastic-zero",
        times: Timeouts = Timeouts(),  # noqa: B008 - frozen
        call: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._running = threading.Lock()
        self._thread = StoreThread(store, rank, world_size, name, times, call)
        self._thread.serve()
        self._close = weakref.finalize(self, self._thread.close)
        self._close.atexit = False  # The thread has its own exit hook.

    def run_all(self, step: str, work: Callable[[], T]) -> T:
        results: list[T] = []
        self._run("run_all", step, lambda: results.append(work()))
        return results[0]

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        values = self._run("gather", step, work)
        return values if self.rank == 0 else None

    def broadcast(
        self, step: str, work: Callable[[], J], others: Callable[[], object] | None = None
    ) -> J:
        value: J = self._run("broadcast", step, work if self.rank == 0 else others)[0]
        return value

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        return self._run("all_gather", step, work)

    @property
    def progress(self) -> Progress:
        return Progress(self._report_progress)  # Not kept: a cycle would delay the finalizer.

    def _report_progress(self) -> None:
        step = self._thread.step
        step.work_count += 1
        if not step.reported.is_set():
            if step.failure is not None:
                raise step.failure
            self._thread.check()

    def close(self) -> None:
        self._close()

    def _run(self, kind: str, name: str, work: Callable[[], object] | None) -> list[Any]:
        if not self._running.acquire(blocking=False):
            msg = f"step {name!r} was started within another step; use one StoreRanks per thread"
            raise RanksError(msg)
        step = Step(kind, name)
        try:
            cause = self._do(step, work)
        except BaseException as error:
            self._thread.abort_step(step, error)
            raise
        finally:
            step.reported.set()  # No work is left that the progress could end.
            self._running.release()
        if step.failure is None:
            return step.values
        # If the progress raised the verdict, it is not its own cause. "from None" would hide
        # an error that is being handled, such as the one after which a run saves and ends.
        if cause is None or cause is step.failure:
            raise step.failure
        raise step.failure from cause

    def _do(self, step: Step, work: Callable[[], object] | None) -> Exception | None:
        """Enter a step, run this rank's work and wait for the verdict; return the work's error."""
        self._thread.enter_step(step)
        failure = None
        if not (step.decided.is_set() or step.reported.is_set()):
            failure = self._work(step, work)
        self._thread.wait(step.decided)
        return failure

    def _work(self, step: Step, work: Callable[[], object] | None) -> Exception | None:
        try:
            shares_result = step.kind != "run_all" and not (step.kind == "broadcast" and self.rank)
            failure, report = run_work(work, shares_result=shares_result)
        except BaseException as error:
            self._thread.report(step, Report.of_error(error).packed(), failed=True)
            step.reported.wait(LINGER_S)
            raise
        self._thread.report(step, report, failed=failure is not None)
        return failure


def run_work(
    work: Callable[[], object] | None, *, shares_result: bool
) -> tuple[Exception | None, str]:
    """Run a rank's work; return its error, and the packed report, with its result if it is sent."""
    if work is None:
        return None, ""
    try:
        result = work()
        return None, Report(result).packed() if shares_result else ""
    except Exception as error:  # noqa: BLE001 - all ranks raise it after the verdict
        return error, Report.of_error(error).packed()


class StoreThread(threading.Thread):
    """Takes the turns of a session and executes the caller's commands, over its own connection."""

    session: RankSession
    """Created by the thread once it is connected, and used by no other thread."""

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
        self._commands = CommandQueue()
        self._lost = ""  # Why this rank cannot reach the store any more.
        self._closing = False
        self._grouped = dist.is_initialized()
        self._answered_at = time.monotonic()
        self._logged_at = 0.0

    def enter_step(self, step: Step) -> None:
        """Enter a step; return when it is known whether it has failed already."""
        self.step = step
        self._commands.put(lambda: self.session.enter_step(step))
        self.wait(step.arrived)

    def report(self, step: Step, text: str, *, failed: bool) -> None:
        """Report the outcome of the work; return at once."""
        self._commands.put(lambda: self.session.report(step, text, failed=failed))

    def abort_step(self, step: Step, error: BaseException) -> None:
        """Fail a step for whose verdict the caller has stopped waiting; return at once."""
        why = f"it gave up this step ({str(error) or type(error).__name__})"
        self._commands.put(lambda: self.session.abort_step(step, why))

    def wait(self, event: threading.Event) -> None:
        """Wait for an event of the thread; raise RanksError if the thread will not answer."""
        while not event.wait(0.0 if self._lost else CHECK_INTERVAL_S):
            self.check()

    def check(self) -> None:
        """Raise RanksError if the store does not answer, is lost, or the thread is blocked."""
        why = self._lost or self._unresponsive_reason()
        if why and not self.step.decided.is_set():
            raise RanksError(why)

    def _unresponsive_reason(self) -> str:
        silent_s = self._silent_s()
        why = unresponsive_reason(silent_s, self._times, self._store_host_runs)
        if silent_s > self._times.heartbeat_timeout_s and not why:
            self._log_stack(silent_s)
        return why

    def _silent_s(self) -> float:
        answered_at = self._answered_at
        silent_s = time.monotonic() - answered_at
        if silent_s > self._times.heartbeat_timeout_s:
            # This whole process may have been stopped: give the thread time to continue.
            time.sleep(2 * self._times.heartbeat_interval_s)
        return silent_s if self._answered_at == answered_at else 0.0

    def _store_host_runs(self) -> bool:
        """Whether the store's host is known to run, so that this thread itself is blocked."""
        if os.environ.get(SHARED) == str(True):
            return False  # The launcher may host the store, and its process is not known.
        if self._rank == 0:
            return True
        process = self.session.leader_process if hasattr(self, "session") else None
        return process is not None and process.state() is ProcessState.RUNNING

    def _log_stack(self, silent_s: float) -> None:
        if self._logged_at == self._answered_at:
            return
        self._logged_at = self._answered_at
        frame = sys._current_frames().get(self.ident or 0)  # noqa: SLF001 - documented
        stack = "".join(traceback.format_stack(frame)) if frame else "unknown"
        log.warning(
            "rank %d: the coordination thread was not scheduled for %.0f s, although the store's "
            "host runs. Waiting. Its stack:\n%s",
            self._rank,
            silent_s,
            stack,
        )

    def serve(self) -> None:
        """Start; the end of the process ends the thread at the latest."""
        self.start()
        # Exit hooks run in reverse order: this one runs before one that destroys the group.
        atexit.register(self.end)

    def close(self) -> None:
        """Stop, unless an unanswered call to the store blocks the thread."""
        self._closing = True
        self._commands.put(lambda: None)
        if threading.current_thread() is not self:
            self.join(2 * LINGER_S)
            if not self.is_alive():
                atexit.unregister(self.end)

    def end(self) -> None:
        """Stop at the end of the process, and wait for the thread while the store may answer.

        A thread that returned from C++ to a finalized interpreter would abort the process.
        """
        self.close()
        while self.is_alive() and self._silent_s() <= self._times.heartbeat_timeout_s:
            self.join(CHECK_INTERVAL_S)

    def run(self) -> None:
        try:
            self._open()
            while not (self._closing or self._lost):
                self._run_once()
            if not self._lost:
                self._leave()
        except Exception as error:  # noqa: BLE001 - the waiting caller raises it
            reason = str(error).partition("\n")[0]
            self._lost = self._lost or (
                "the job's store is lost: its host (rank 0 or the launcher) died or has ended "
                f"({type(error).__name__}: {reason})"
            )
        self._lost = self._lost or "these ranks were closed"
        if not self.step.decided.is_set():
            self.step.end(RanksError(f"step {self.step.name!r}: {self._lost}"))

    def _open(self) -> None:
        store, self._source = self._source, None  # Else it would outlive its process group.
        # Kept as long as this thread, so that other threads share it.
        self._connection = shared_connection(store)
        keys = join_session(self._connection, self._prefix, self._rank, self._call)
        self.session = RankSession(keys, self._rank, self._world_size, self._times)
        self._answered_at = time.monotonic()

    def _run_once(self) -> None:
        command = self._commands.get(self.session.pause_s())
        if self._grouped and not dist.is_initialized():
            # The store may be gone: a call to it would make torch print a warning.
            self._lost = "the process group was destroyed"
            return
        self.session.take_turn(command)
        self._answered_at = time.monotonic()

    def _leave(self) -> None:
        # The store often ends with rank 0: let the others read the last verdict before.
        until, pauses_s = time.monotonic() + LINGER_S, poll_pauses_s(self._world_size)
        while not self.session.all_read() and time.monotonic() < until:
            time.sleep(min(next(pauses_s), LONGEST_PAUSE_S))
        step = self.step
        self.session.leave(failed=not step.decided.is_set() or step.failure is not None)


class CommandQueue:
    """A FIFO queue of commands for one thread, which finalizers may fill as well.

    ``queue.SimpleQueue.get(timeout)`` of CPython 3.10 to 3.13 waits forever if its thread is not
    scheduled between the first attempt and the computation of the remaining time, which is negative
    then (``Modules/_queuemodule.c``). ``queue.Queue.put`` takes a lock, which deadlocks in a
    finalizer that the garbage collector runs while the same thread has it.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._is_empty = threading.Lock()
        self._is_empty.acquire()

    def put(self, command: Command) -> None:
        """Append a command; never waits, and is reentrant."""
        self._commands.append(command)
        with suppress(RuntimeError):  # It is released already.
            self._is_empty.release()

    def get(self, timeout_s: float) -> Command | None:
        """Return the next command; None after the timeout, or spuriously."""
        if not self._commands:
            self._is_empty.acquire(timeout=timeout_s)
        return self._commands.popleft() if self._commands else None


def shared_connection(store: Any) -> Any:
    """Return this library's connection of this process to a store; open it if necessary."""
    with _opening:
        known = _open.setdefault(store, WeakValueDictionary())
        connection = known.get("")
        if connection is None:
            try:
                connection = store.clone()
            except AttributeError:  # Other kinds of stores have no clone().
                return store
            connection.set_timeout(timedelta(seconds=_CALL_TIMEOUT_S))
            known[""] = connection
    return connection


def store_of_this_world(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return a store without the sessions of earlier worlds; collective, but only the first time.

    Under torchrun, successive worlds may share a store. The counters of the sessions in it would
    differ by rank if the earlier ranks were killed in different sessions.
    """
    if os.environ.get(SHARED) != str(True):
        return store
    if store not in _parts:
        connection = shared_connection(store)  # not torch's: some calls wait
        meeting = agree_on_meeting(connection, rank, world_size, timeout_s)
        _parts[store] = PrefixStore(meeting.name, store)
    return _parts[store]


def check_open_file_limit(store: Any, world_size: int) -> None:
    """Warn if the store's host may not open as many files as its connections will need.

    Logged on rank 0 before the connections are made: a rank that cannot connect is only reported as
    absent.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        _check_open_file_limit(world_size)


@functools.cache
def _check_open_file_limit(world_size: int) -> None:
    by_launcher = os.environ.get(SHARED) == str(True)
    pid = os.getppid() if by_launcher else os.getpid()
    host = "the launcher (torchrun)" if by_launcher else "rank 0"
    limit, open_files = _files_of(pid)
    text = open_file_limit_warning(world_size, limit, open_files, f"{host} (process {pid})")
    if text:
        log.warning("%s", text)


def open_file_limit_warning(world_size: int, limit: int, open_files: int, host: str) -> str:
    """Return the warning about a limit that is too low; empty if it is high enough.

    ``open_files`` is the number of open files of the store's host, with or without torch's
    connections.
    """
    needed = CONNECTIONS_PER_RANK * world_size + open_files
    if needed <= limit:
        return ""
    raised = 1 << (2 * needed - 1).bit_length()
    return (
        f"{world_size} ranks need {CONNECTIONS_PER_RANK} connections each to the job's store. "
        f"{host} hosts it and may have {limit} open files. It has {open_files}, and will need up "
        f"to {needed}. Ranks without a connection cannot save or load. Raise the limit where the "
        f"job is started: ulimit -n {raised} (SLURM: in the job script, before srun; containers: "
        "--ulimit nofile)."
    )


def _files_of(pid: int) -> tuple[int, int]:
    """Return the limit of open files of a process, and their number."""
    with suppress(OSError):
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return limit, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0
