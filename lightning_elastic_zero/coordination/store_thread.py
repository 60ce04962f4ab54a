"""The one thread of a rank that talks to the store of the job.

A store may fall silent and answer again: its host was stopped, and goes on. Meanwhile a caller who
waits gives its step up and raises, but the thread only waits, in the call that is not answered
(``rank_session`` says what follows). Only a connection that breaks, a process group that is
destroyed or ``close`` end the thread for good.

The thread may also be held up although the store's host runs, by a machine under pressure or by a
finalizer that the garbage collector happens to run in it. Where the system says that the host runs,
the caller waits on, and the log says where the thread is.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.coordination.command_queue import CommandQueue
from lightning_elastic_zero.coordination.liveness import unresponsive_reason
from lightning_elastic_zero.coordination.rank_session import (
    CHECK_INTERVAL_S,
    LONGEST_POLL_S,
    RankSession,
    Step,
    join_session,
    poll_pauses_s,
)
from lightning_elastic_zero.coordination.rendezvous import SHARED
from lightning_elastic_zero.coordination.store_connection import shared_connection
from lightning_elastic_zero.coordination.timeouts import Timeouts
from lightning_elastic_zero.errors import RanksError
from lightning_elastic_zero.processes import ProcessKey, ProcessState

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
