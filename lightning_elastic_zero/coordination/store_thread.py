"""The line from a rank to the store of the job, and the thread that serves it.

A store may fall silent and answer again: its host was stopped, and goes on. Meanwhile a caller who
waits gives its step up and raises, but the thread only waits, in the call that is not answered, and
then does in their order all things that it was told to. So these hold, whoever was stopped:

- Steps are numbered by the thread, and each call of the caller's is one, given up or not. Ranks
  that make the same calls have the same numbers, without asking each other.
- A step that a rank has given up without a verdict gets one from this rank: it has failed. So it
  fails on all ranks, whether they have come to it or not, and the next one is the same for all.
- Where there is a verdict by then, that stands. Is it a success, this rank raised what the others
  have finished, and is *behind*: they may be waiting for it in steps that it will not come to. Rank
  0 ends such a step (``verdicts``), and this rank passes it by when it comes to its next one.

Only a connection that breaks, a process group that is destroyed or ``close`` end a line for good.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_elastic_zero.coordination import messages
from lightning_elastic_zero.coordination.messages import (
    Heartbeat,
    Leader,
    RankMonitor,
    Store,
    Timeouts,
)
from lightning_elastic_zero.coordination.store_connection import shared_connection
from lightning_elastic_zero.errors import ElasticZeroError, RanksError, error_class

LINGER_S = 2.0
"""The longest wait for others to read a last word: two glances."""

_CHECK_INTERVAL_S = 1.0
"""How often a rank at work looks whether the step has failed meanwhile."""

_FIRST_POLL_S, _LAST_POLL_S = 0.001, 0.05
"""The first and the longest pause between two looks of a rank that waits."""

_MOST_POLLS_PER_S = 5000
"""What the waiting ranks, however many, may ask of the store together."""

_SILENT = (
    "the job's store has not answered for {:g} s: rank 0, or whatever process hosts it, died or is "
    "stopped"
)


@dataclass(slots=True, eq=False)
class Step:
    """One step as this rank sees it, shared by the caller's thread and the line's."""

    kind: str
    """The method that was called."""

    name: str

    seq: int = 0
    """Counted from 1, alike on all ranks, when the line's thread comes to it."""

    arrived: threading.Event = field(default_factory=threading.Event)
    """The store knows that this rank is here; a verdict that is there already has been read."""

    reported: threading.Event = field(default_factory=threading.Event)
    """The store knows how this rank's work went, or nobody needs to know any more."""

    decided: threading.Event = field(default_factory=threading.Event)
    """There is a verdict."""

    report_held: bool = False
    """The store holds a report of this rank, to be deleted by it once rank 0 has judged."""

    failed_here: bool = False
    """This rank has reported a failure."""

    failure: ElasticZeroError | None = None
    """The verdict, if the step has failed."""

    values: list[Any] = field(default_factory=list)
    """The verdict, if it has succeeded and there are results for this rank."""

    def end(self, failure: ElasticZeroError | None) -> None:
        """Let the caller go, to return or to raise."""
        self.failure = failure
        self.decided.set()
        self.arrived.set()


class StoreThread(threading.Thread):
    """The one thread of a rank that talks to the store; what it does is in the private methods.

    It does what the caller orders, beats in between, and looks for the verdict of the step.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, name: str, times: Timeouts, call: str
    ) -> None:
        super().__init__(name=f"{name} rank {rank}", daemon=True)
        self.step = Step("", "")
        self.step.end(None)
        self.step.reported.set()
        self.progress = 0
        self._source: Any = store
        self._rank, self._world_size, self._prefix, self._times = rank, world_size, name, times
        self._call = call
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lost = ""  # why this rank can talk no more
        self._behind = self._warned_late = False
        self._closing = False
        self._leader: Leader | None = None
        self._leader_monitor = RankMonitor(times)
        self._grouped = dist.is_initialized()
        self._at, self._activity, self._count = self.step, "done", 0
        self._seq = 0
        self._next_heartbeat_s = self._answered_at = time.monotonic()
        self._poll_s = _FIRST_POLL_S

    def enter_step(self, step: Step) -> None:
        """Come to a step; return once it is known whether it has failed already."""
        self.step = step
        self._orders.put(lambda: self._enter_step(step))
        self.wait(step.arrived)

    def report(self, step: Step, text: str, *, failed: bool) -> None:
        """Report how the work went; return at once."""
        self._orders.put(lambda: self._report(step, text, failed=failed))

    def abort_step(self, step: Step, error: BaseException) -> None:
        """Let a step fail whose verdict the caller does not wait for any more; return at once."""
        why = f"it has given this step up ({str(error) or type(error).__name__})"
        self._orders.put(lambda: self._abort_step(step, why))

    def wait(self, event: threading.Event) -> None:
        """Wait for the thread, but not for one that will not answer."""
        while not event.wait(0.0 if self._lost else _CHECK_INTERVAL_S):
            self.check()

    def check(self) -> None:
        """Raise if the store does not answer."""
        why = self._lost or self._unresponsive_reason()
        if why and not self.step.decided.is_set():
            raise RanksError(why)

    def _unresponsive_reason(self) -> str:
        answered_at = self._answered_at
        if time.monotonic() - answered_at <= self._times.heartbeat_timeout_s:
            return ""
        # All of this process may have been stopped: give the thread the time to go on.
        time.sleep(2 * self._times.heartbeat_interval_s)
        return (
            _SILENT.format(self._times.heartbeat_timeout_s)
            if self._answered_at == answered_at
            else ""
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
        while self.is_alive() and not self._unresponsive_reason():
            self.join(_CHECK_INTERVAL_S)

    def run(self) -> None:
        """Serve the caller, beat and look, until closed or cut off."""
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
        # Kept as long as this line is: others find it by that.
        self._connection = store = shared_connection(store)
        self._store: Store = self._join_session(store)
        if self._rank == 0:
            self._leader = Leader(self._store, self._world_size, self._times)
        self._send_heartbeat()
        self._answered_at = time.monotonic()

    def _join_session(self, store: Any) -> Store:  # noqa: ANN401 - typed too narrowly by torch
        """Return the keys of the next meeting of all ranks, one after those that are in vain.

        A meeting that has failed without this rank, and was for another call, was of ranks that
        made a call which was not made on every rank: nobody is there any more.
        """
        made = PrefixStore(self._prefix, store)
        while True:
            number = made.add(f"made/{self._rank}", 1)
            session: Store = PrefixStore(f"{self._prefix}/{number}", store)
            held = session.compare_set("call", "", f"for {self._call}").decode()
            if held == f"for {self._call}" or not session.check(["failed"]):
                return session

    def _run_once(self) -> None:
        order = None
        with contextlib.suppress(queue.Empty):
            order = self._orders.get(timeout=self._poll_timeout_s())
        if self._grouped and not dist.is_initialized():
            # The store may be gone: a call to it would have torch print a warning.
            self._lost = "the process group has been destroyed"
            return
        if self._leader is not None:
            # First: if it was stopped, the step that this rank comes to now has missed nothing.
            self._leader.poll()
        if order is not None:
            order()
        heartbeat = time.monotonic() >= self._next_heartbeat_s
        if heartbeat:
            self._send_heartbeat()
        if not self._at.decided.is_set():
            self._poll_decision(self._at, heartbeat=heartbeat)
        self._answered_at = time.monotonic()

    def _poll_timeout_s(self) -> float:
        pause_s = max(0.0, self._next_heartbeat_s - time.monotonic())
        if self._at.decided.is_set():
            return pause_s
        if not self._at.reported.is_set():
            return min(pause_s, _CHECK_INTERVAL_S)
        longest_s = max(_LAST_POLL_S, self._world_size / _MOST_POLLS_PER_S)
        self._poll_s = min(1.5 * self._poll_s, longest_s)
        return min(pause_s, self._poll_s)

    def _enter_step(self, step: Step) -> None:
        label = messages.pack([step.kind, step.name])
        held = self._next_step(label)
        step.seq = self._seq
        self._at, self._poll_s = step, _FIRST_POLL_S
        self._send_heartbeat("working")
        self._poll_decision(step)
        if held != label.encode():
            self._report(step, messages.pack(messages.mismatch_report()), failed=True)
        step.arrived.set()

    def _next_step(self, label: str) -> bytes:
        """Name the step that this rank has come to; give the name that it has."""
        while True:
            self._seq += 1
            held = self._store.compare_set(f"{self._seq}/step", "", label)
            passed = self._behind and held != label.encode()
            if not (passed and self._store.check([f"{self._seq}/verdict"])):
                self._behind = False
                return held

    def _abort_step(self, step: Step, why: str) -> None:
        if not (step.decided.is_set() or step.failed_here):
            lost_ranks_failure = messages.lost_ranks_failure(
                step.name, {self._rank: why}, self._world_size
            )
            self._store.compare_set(f"{step.seq}/verdict", "", messages.pack(lost_ranks_failure))
            self._poll_decision(step)
        if step.decided.is_set() and step.failure is None:
            self._behind = True
            self._send_heartbeat("gone")

    def _report(self, step: Step, text: str, *, failed: bool) -> None:
        step.failed_here = failed
        if step.decided.is_set():
            step.reported.set()
            return
        if text:
            self._store.set(f"{step.seq}/report/{self._rank}", text)
            step.report_held = True
        if failed:
            self._store.add(f"{step.seq}/failed", 1)
        self._store.add(f"{step.seq}/done", 1)
        self._poll_s = _FIRST_POLL_S
        self._send_heartbeat("waiting")
        step.reported.set()

    def _send_heartbeat(self, activity: str = "") -> None:
        self._activity = activity or self._activity
        self._count += 1
        at = self._at
        heartbeat = Heartbeat(self._count, at.seq, at.kind, at.name, self._activity, self.progress)
        self._store.set(f"beat/{self._rank}", heartbeat.packed())
        self._next_heartbeat_s = time.monotonic() + self._times.heartbeat_interval_s

    def _poll_decision(self, step: Step, *, heartbeat: bool = False) -> None:
        """End the step if there is a verdict, or if rank 0 can give none any more."""
        key = f"{step.seq}/verdict"
        if heartbeat and self._leader is None:
            there = self._store.check(["beat/0"])
            why = self._leader_monitor.lost_reason(
                Heartbeat.unpacked(self._store.get("beat/0")) if there else None
            )
            if not there:
                self._warn_late(step)
            if why:
                lost_ranks_failure = messages.lost_ranks_failure(
                    step.name, {0: why}, self._world_size
                )
                self._store.compare_set(key, "", messages.pack(lost_ranks_failure))
        if not self._store.check([key]):
            return
        decision = messages.unpack(self._store.get(key))
        if step.report_held and messages.DECIDED_BY_LEADER in decision:
            self._store.delete_key(f"{step.seq}/report/{self._rank}")
        self._send_heartbeat("done")
        if "error" in decision:
            step.end(error_class(decision["error"])(decision["message"]))
        else:
            step.values = self._leader.values if self._leader else decision["values"]
            step.end(None)

    def _warn_late(self, step: Step) -> None:
        """Log, on one rank, that rank 0 has not come; it is rank 0 that tells of others."""
        if (
            self._leader_monitor.heartbeats.idle_s >= self._times.late_warning_s
            and not self._warned_late
        ):
            self._warned_late = True
            if self._store.add("late", 1) == 1:
                messages.warn_late(step.name, [0], self._world_size, self._times)

    def _leave(self) -> None:
        # With rank 0 the store often ends: let the others read the last verdict before that.
        until = time.monotonic() + LINGER_S
        while self._leader and not self._leader.all_read() and time.monotonic() < until:
            time.sleep(_LAST_POLL_S)
        if not self.step.decided.is_set() or self.step.failure is not None:
            self._store.set("failed", "1")
        self._send_heartbeat("closed")
