"""A rank's part in the steps of a job: what it writes to the store, and what it reads.

All calls are made by one thread, which a store that falls silent may hold. After it such a thread
does in their order all things that it was told to. So these hold, whoever was stopped:

- Steps are numbered by the session, and each call of the caller's is one, given up or not. Ranks
  that make the same calls have the same numbers, without asking each other.
- A step that a rank has given up without a verdict gets one from this rank: it has failed. So it
  fails on all ranks, whether they have come to it or not, and the next one is the same for all.
- Where there is a verdict by then, that stands. If it is a success, this rank raised what the
  others have finished, and is *behind*: they may be waiting for it in steps that it will not come
  to. Rank 0 ends such a step (``leader``), and this rank passes it by when it comes to its next.

Nothing here sleeps or starts anything, and the clock is passed in.

Rank 0's verdict on a step: which ranks failed or are lost, and what all ranks are told.

It sees the job through a key-value store only (``messages`` has the keys), and time through a clock
that is passed in: it starts nothing and never sleeps.

The cost is in proportion to the ranks: two counters are read while the step runs, the beats of all
ranks once per ``heartbeat_interval_s``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_elastic_zero.coordination.liveness import (
    DECIDED_BY_LEADER,
    MISMATCH,
    ROLL,
    Clock,
    Heartbeat,
    IdleTimer,
    RankMonitor,
    StateOf,
    Timeouts,
    lost_ranks_failure,
    mismatch_report,
    pack,
    ranks_on_roll,
    roll_entry,
    unpack,
)
from lightning_elastic_zero.core.processes import ProcessKey
from lightning_elastic_zero.core.text import format_by_rank, format_ranks
from lightning_elastic_zero.errors import ElasticZeroError, error_class

log = logging.getLogger(__name__)


def warn_late(name: str, late: Sequence[int], world_size: int, times: Timeouts) -> None:
    """Log which ranks have not entered a step that others wait in."""
    log.warning(
        "%s of %d: not at step %r after %g s. Saves and loads must be called on every rank, not "
        "within `if rank == 0:`. Late ranks are waited for up to %g s in all (absent_timeout_s); "
        "then this fails on all ranks.",
        format_ranks(late),
        world_size,
        name,
        times.late_warning_s,
        times.absent_timeout_s,
    )


class Leader:
    """Rank 0's part: one verdict for each step, in their order."""

    def __init__(
        self,
        store: Store,
        world_size: int,
        times: Timeouts,
        clock: Clock = time.monotonic,
        state_of: StateOf = ProcessKey.state,
    ) -> None:
        """Start with the first step."""
        self.values: list[Any] = []
        self._store = store
        self._world_size = world_size
        self._times, self._clock = times, clock
        self._seq = 1
        self._kind, self._name = "", ""
        self._passed: list[int] = []  # judged, but a rank may still come to read of it
        self._unseen = set(range(world_size))
        self._monitors = [RankMonitor(times, clock, state_of) for _ in range(world_size)]
        self._open = IdleTimer(2 * times.heartbeat_interval_s, clock)
        self._failing = IdleTimer(2 * times.heartbeat_interval_s, clock)
        self._next_liveness_check_s = 0.0
        self._warned_late = 0
        self._polled_s = self._clock()

    def poll(self) -> None:
        """Post the verdict on the open step, if it can be given now."""
        suspended_s = self._suspended_s()
        self._polled_s = self._clock()
        if not (self._kind or self._is_open()):
            return
        if suspended_s:
            self._post(self._suspended_failure(suspended_s))
            return
        open_s = self._open.poll(self._seq)
        # In this order: a rank counts its failure before it counts itself done.
        done = self._store.add(f"{self._seq}/done", 0)
        failed = self._store.add(f"{self._seq}/failed", 0)
        all_in = done >= self._world_size
        if all_in and not failed:
            self._post(self._success(), all_in=True)
        elif failed:
            if all_in or self._failing.poll(self._seq) >= self._times.failure_grace_s:
                self._post(self._failure(), all_in=all_in)
        elif self._clock() >= self._next_liveness_check_s:
            self._next_liveness_check_s = self._clock() + self._times.heartbeat_interval_s
            self._check_liveness(open_s)

    def _suspended_s(self) -> float:
        """Return how long rank 0 was stopped itself, where the others have given it up meanwhile.

        With rank 0 the store may have been stopped: nobody could post that he has given up.
        """
        gap_s = self._clock() - self._polled_s
        return (
            gap_s
            if gap_s > self._times.heartbeat_timeout_s - 2 * self._times.heartbeat_interval_s
            else 0.0
        )

    def _suspended_failure(self, suspended_s: float) -> dict[str, str]:
        return lost_ranks_failure(
            self._name, {0: f"it was stopped for {suspended_s:.0f} s"}, self._world_size
        )

    def all_read(self) -> bool:
        """Whether every rank has read the last verdict."""
        last = self._seq - 1
        return last == 0 or all(
            heartbeat is not None
            and (
                heartbeat.seq > last
                or (heartbeat.seq == last and heartbeat.activity in {"done", "gone", "closed"})
            )
            for heartbeat in self._heartbeats()
        )

    def _is_open(self) -> bool:
        key = f"{self._seq}/step"
        if self._store.check([key]):
            self._kind, self._name = unpack(self._store.get(key))
        return bool(self._kind)

    def _heartbeats(self) -> list[Heartbeat | None]:
        # To get a key that is not there would wait for it. A beat, once there, is never deleted.
        if self._unseen and self._store.check([ROLL]):
            self._unseen -= ranks_on_roll(self._store.get(ROLL))
        seen = [r for r in range(self._world_size) if r not in self._unseen]
        texts = self._store.multi_get([f"beat/{r}" for r in seen])
        heartbeats = {r: Heartbeat.unpacked(text) for r, text in zip(seen, texts, strict=True)}
        return [heartbeats.get(r) for r in range(self._world_size)]

    def _check_liveness(self, open_s: float) -> None:
        lost, heartbeats = {}, self._heartbeats()
        for rank, (heartbeat, monitor) in enumerate(zip(heartbeats, self._monitors, strict=True)):
            why = monitor.lost_reason(heartbeat) or (
                heartbeat and monitor.stall_reason(heartbeat, self._seq, open_s)
            )
            if why:
                lost[rank] = why
        if lost:
            self._post(lost_ranks_failure(self._name, lost, self._world_size))
        elif self._store.check([f"{self._seq}/verdict"]):
            self._advance(all_in=False, by_leader=False)  # another rank has given up rank 0
        elif open_s >= self._times.late_warning_s and self._warned_late != self._seq:
            self._warned_late = self._seq
            late = [
                r
                for r, heartbeat in enumerate(heartbeats)
                if heartbeat is None or heartbeat.seq < self._seq
            ]
            if late:
                warn_late(self._name, late, self._world_size, self._times)

    def _success(self) -> dict[str, list[Any]]:
        ranks = {"run_all": 0, "broadcast": 1}.get(self._kind, self._world_size)
        held = self._store.multi_get([f"{self._seq}/report/{r}" for r in range(ranks)])
        self.values = [unpack(text)["value"] for text in held]
        # What rank 0 gathers for itself need not travel again.
        return {"values": [] if self._kind == "gather" else self.values}

    def _failure(self) -> dict[str, str]:
        keys = {r: f"{self._seq}/report/{r}" for r in range(self._world_size)}
        held = {r: unpack(self._store.get(k)) for r, k in keys.items() if self._store.check([k])}
        reports = {r: report for r, report in held.items() if "error" in report}
        if any(report["type"] == MISMATCH for report in reports.values()):
            return self._mismatch()
        classes = {report["error"] for report in reports.values()}
        error = classes.pop() if len(classes) == 1 else "RanksError"
        texts = {
            r: report["message"]
            if report["type"] == error
            else f"{report['type']}: {report['message']}"
            for r, report in reports.items()
        }
        where = format_by_rank(texts, self._world_size)
        return {"error": error, "message": f"step {self._name!r} failed on {where}"}

    def _mismatch(self) -> dict[str, str]:
        places: dict[str, list[int]] = {}
        for rank, heartbeat in enumerate(self._heartbeats()):
            if heartbeat is not None and heartbeat.seq == self._seq:
                places.setdefault(f"{heartbeat.name!r} ({heartbeat.kind})", []).append(rank)
        found = ", ".join(f"{format_ranks(ranks)} at {place}" for place, ranks in places.items())
        message = f"every rank must make the same calls in the same order, but found {found}"
        return {"error": "RanksError", "message": message}

    def _post(self, decision: dict[str, Any], *, all_in: bool = False) -> None:
        if suspended_s := self._suspended_s():
            # In the midst of a look: what it has come to is no longer so.
            decision, all_in = self._suspended_failure(suspended_s), False
        try:
            text = pack({**decision, DECIDED_BY_LEADER: True})
        except ValueError as error:
            why = {"error": "RanksError", "message": f"step {self._name!r}: {error}"}
            text = pack({**why, DECIDED_BY_LEADER: True})
        # Whoever comes first decides, so that no two ranks hear different things.
        held = self._store.compare_set(f"{self._seq}/verdict", "", text)
        self._advance(all_in=all_in, by_leader=held == text.encode())

    def _advance(self, *, all_in: bool, by_leader: bool) -> None:
        if not by_leader:  # ranks have left their reports, which might have been read here
            for rank in range(self._world_size):
                self._store.delete_key(f"{self._seq}/report/{rank}")
        if all_in:  # so all ranks have read the verdicts before this one
            parts = ("step", "done", "failed", "verdict")
            for seq, part in itertools.product(self._passed, parts):
                self._store.delete_key(f"{seq}/{part}")
            self._passed = []
        self._polled_s = self._clock()  # a stop until now is no matter of the next step
        self._passed.append(self._seq)
        self._seq += 1
        self._kind, self._name = "", ""


CHECK_INTERVAL_S = 1.0
"""How often a rank at work looks whether the step has failed meanwhile."""

_FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.05
"""The first and the longest pause between two looks of a rank that waits."""

_MOST_POLLS_PER_S = 5000
"""What the waiting ranks, however many, may ask of the store together."""

_MOST_FIRST_POLLS_PER_S = 40_000
"""The same at first. Where nobody is late the answer is there in a fraction of a millisecond, and
the pauses are most of what a step of few ranks costs. From 40 ranks on they begin as ever."""


_LATE_SHARE = 0.1
"""How late a rank may see an answer, as a share of the time that it has waited: half of it on the
average, and as much again where rank 0 waited too. So long as the store can bear it."""


def poll_pauses_s(world_size: int) -> Iterator[float]:
    """Yield the pauses between the looks of a rank that waits, without end: short ones first."""
    pause_s = min(_FIRST_POLL_S, world_size / _MOST_FIRST_POLLS_PER_S)
    bearable_s = world_size / _MOST_POLLS_PER_S
    longest_s = max(LONGEST_POLL_S, bearable_s)
    while True:
        growth = 1.5 if pause_s < bearable_s else 1 / (1 - _LATE_SHARE)
        pause_s = min(growth * pause_s, longest_s)
        yield pause_s


@dataclass(slots=True, eq=False)
class Step:
    """One step as this rank sees it, shared by the caller's thread and the session's."""

    kind: str
    """The method that was called."""

    name: str

    seq: int = 0
    """Counted from 1, alike on all ranks, when the session comes to it."""

    arrived: threading.Event = field(default_factory=threading.Event)
    """The store knows that this rank is here; a verdict that is there already has been read."""

    reported: threading.Event = field(default_factory=threading.Event)
    """The store knows how this rank's work went, or nobody needs to know any more."""

    decided: threading.Event = field(default_factory=threading.Event)
    """There is a verdict."""

    work_count: int = 0
    """How often the caller has shown progress in it."""

    report_held: bool = False
    """The store holds a report of this rank, to be deleted by it once rank 0 has judged."""

    failed_here: bool = False
    """This rank has reported a failure."""

    failure: ElasticZeroError | None = None
    """The verdict, if the step has failed."""

    values: list[Any] = field(default_factory=list)
    """The verdict, if it has succeeded and there are results for this rank."""

    def end(self, failure: ElasticZeroError | None) -> None:
        """End the step for the caller, who then returns or raises."""
        self.failure = failure
        self.decided.set()
        self.arrived.set()


def join_session(store: Store, name: str, rank: int, call: str) -> Store:
    """Return the keys of the next session of all ranks, after those that are in vain.

    A session that has failed without this rank, and was for another call, was of ranks that made a
    call which was not made on every rank: nobody is there any more.
    """
    made = PrefixStore(name, store)
    while True:
        number = made.add(f"made/{rank}", 1)
        session = PrefixStore(f"{name}/{number}", store)
        held = session.compare_set("call", "", f"for {call}").decode()
        if held == f"for {call}" or not session.check(["failed"]):
            return session


class RankSession:
    """What one rank does with the store, a turn at a time."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        times: Timeouts,
        clock: Clock = time.monotonic,
        state_of: StateOf = ProcessKey.state,
    ) -> None:
        """Enter the session, and show the others that this rank lives."""
        self.store = store
        self.leader = Leader(store, world_size, times, clock, state_of) if rank == 0 else None
        self.leader_process: ProcessKey | None = None
        """Where rank 0 runs, as soon as this rank has heard of it."""
        self._rank, self._world_size, self._times, self._clock = rank, world_size, times, clock
        self._leader_monitor = RankMonitor(times, clock, state_of)
        self._process = ProcessKey.of_this_process()
        self._behind = self._warned_late = False
        self._at = Step("", "")
        self._at.end(None)
        self._activity, self._count, self._seq = "done", 0, 0
        self._pauses_s = poll_pauses_s(world_size)
        self._send_heartbeat()
        self.store.append(ROLL, roll_entry(rank))  # type: ignore[attr-defined] # stubs lack it

    def take_turn(self, order: Callable[[], None] | None = None) -> None:
        """Decide, on rank 0; do what the caller orders; beat, if it is time; look for a verdict."""
        if self.leader is not None:
            # First: if it was stopped, the step that this rank comes to now has missed nothing.
            self.leader.poll()
        if order is not None:
            order()
            if self.leader is not None and self._at.reported.is_set():
                self.leader.poll()  # this rank may have been the last one that was waited for
        heartbeat = self._clock() >= self._next_heartbeat_s
        if heartbeat:
            self._send_heartbeat()
        if not self._at.decided.is_set():
            self._poll_decision(self._at, heartbeat=heartbeat)

    def pause_s(self) -> float:
        """Return for how long the next turn may wait for an order."""
        pause_s = max(0.0, self._next_heartbeat_s - self._clock())
        if self._at.decided.is_set():
            return pause_s
        if not self._at.reported.is_set():
            return min(pause_s, CHECK_INTERVAL_S)
        return min(pause_s, next(self._pauses_s))

    def all_read(self) -> bool:
        """Whether no rank needs this one any more to read the last verdict."""
        return self.leader is None or self.leader.all_read()

    def leave(self, *, failed: bool) -> None:
        """Record that this rank will do nothing more, and whether its last step has failed."""
        if failed:
            self.store.set("failed", "1")
        self._send_heartbeat("closed")

    def enter_step(self, step: Step) -> None:
        """Enter a step: number it, and find out whether it has failed already."""
        label = pack([step.kind, step.name])
        held = self._next_step(label)
        step.seq = self._seq
        self._at = step
        self._send_heartbeat("working")
        self._poll_decision(step)
        if held != label.encode():
            self.report(step, pack(mismatch_report()), failed=True)
        step.arrived.set()

    def _next_step(self, label: str) -> bytes:
        """Name the step that this rank has come to; return the name that it has."""
        while True:
            self._seq += 1
            held = self.store.compare_set(f"{self._seq}/step", "", label)
            passed = self._behind and held != label.encode()
            if not (passed and self.store.check([f"{self._seq}/verdict"])):
                self._behind = False
                return held

    def abort_step(self, step: Step, why: str) -> None:
        """Fail a step whose verdict the caller has stopped waiting for."""
        if not (step.decided.is_set() or step.failed_here):
            failure = lost_ranks_failure(step.name, {self._rank: why}, self._world_size)
            self.store.compare_set(f"{step.seq}/verdict", "", pack(failure))
            self._poll_decision(step)
        if step.decided.is_set() and step.failure is None:
            self._behind = True
            self._send_heartbeat("gone")

    def report(self, step: Step, text: str, *, failed: bool) -> None:
        """Report how the work went: a packed result or failure, or nothing."""
        step.failed_here = failed
        if step.decided.is_set():
            step.reported.set()
            return
        if text:
            self.store.set(f"{step.seq}/report/{self._rank}", text)
            step.report_held = True
        if failed:
            self.store.add(f"{step.seq}/failed", 1)
        self.store.add(f"{step.seq}/done", 1)
        self._pauses_s = poll_pauses_s(self._world_size)
        self._send_heartbeat("waiting")
        step.reported.set()

    def _send_heartbeat(self, activity: str = "") -> None:
        self._activity = activity or self._activity
        self._count += 1
        at = self._at
        heartbeat = Heartbeat(
            self._count, at.seq, at.kind, at.name, self._activity, at.work_count, self._process
        )
        self.store.set(f"beat/{self._rank}", heartbeat.packed())
        self._next_heartbeat_s = self._clock() + self._times.heartbeat_interval_s

    def _poll_decision(self, step: Step, *, heartbeat: bool = False) -> None:
        """End the step if there is a verdict, or if rank 0 can give none any more."""
        key = f"{step.seq}/verdict"
        if heartbeat and self.leader is None:
            leader_heartbeat = self._leader_heartbeat()
            why = self._leader_monitor.lost_reason(leader_heartbeat)
            if leader_heartbeat is None:
                self._warn_late(step)
            if why:
                failure = lost_ranks_failure(step.name, {0: why}, self._world_size)
                self.store.compare_set(key, "", pack(failure))
        if not self.store.check([key]):
            return
        decision = unpack(self.store.get(key))
        if step.report_held and DECIDED_BY_LEADER in decision:
            self.store.delete_key(f"{step.seq}/report/{self._rank}")
        self._send_heartbeat("done")
        if self.leader is None and self.leader_process is None:
            self._leader_heartbeat()
        if "error" in decision:
            step.end(error_class(decision["error"])(decision["message"]))
        else:
            step.values = self.leader.values if self.leader else decision["values"]
            step.end(None)

    def _leader_heartbeat(self) -> Heartbeat | None:
        """Return what rank 0 last said, and keep where it runs; None before its first word."""
        if not self.store.check(["beat/0"]):
            return None
        heartbeat = Heartbeat.unpacked(self.store.get("beat/0"))
        self.leader_process = heartbeat.process
        return heartbeat

    def _warn_late(self, step: Step) -> None:
        """Log, on one rank, that rank 0 has not come; rank 0 logs the others."""
        if (
            self._leader_monitor.heartbeats.idle_s >= self._times.late_warning_s
            and not self._warned_late
        ):
            self._warned_late = True
            if self.store.add("late", 1) == 1:
                warn_late(step.name, [0], self._world_size, self._times)
