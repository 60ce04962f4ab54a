"""One rank's part in the steps of a job, and rank 0's verdict on each step.

All calls to the store are made by one thread per rank (``client.StoreThread``), which a silent
store may block. Afterwards that thread executes its queued commands in order. These rules hold
whichever rank was suspended:

- The session numbers the steps. Each call of the caller is one step, whether given up or not, so
  ranks that make the same calls have the same numbers without asking each other.
- A step that a rank gives up without a verdict gets a verdict from this rank: it has failed. So it
  fails on all ranks, whether they have entered it or not, and the next step is the same for all.
- If there is a verdict by then, it stands. If it is a success, this rank raised although the others
  finished, and is *behind*: they may wait for it in steps that it will not enter. Rank 0 ends such
  a step, and this rank skips it on its way to its next one.

Nothing here sleeps or starts anything, and the clock is a parameter, so that tests run whole jobs
in one process. The cost for rank 0 is in proportion to the ranks: it reads two counters per poll
while a step runs, and all heartbeats once per ``heartbeat_interval_s``.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_elastic_zero.coordination.liveness import (
    ROLL,
    Clock,
    Heartbeat,
    IdleTimer,
    RankMonitor,
    Report,
    StateOf,
    Timeouts,
    Verdict,
    pack,
    ranks_on_roll,
    roll_entry,
    unpack,
)
from lightning_elastic_zero.core.process_state import ProcessKey
from lightning_elastic_zero.core.text import format_by_rank, format_ranks
from lightning_elastic_zero.errors import ElasticZeroError, common_error, error_class

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Interval at which a working rank checks whether the step has failed meanwhile."""

_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""First and longest pause between two polls of a waiting rank."""

_MOST_POLLS_PER_S = 5000
"""Polls of the store by all waiting ranks together."""

_MOST_FIRST_POLLS_PER_S = 40_000
"""The same for first polls. If no rank is late, the answer comes within a fraction of a
millisecond, and the pauses are most of the cost of a step of few ranks. From 40 ranks on, the first
pause is ``_FIRST_PAUSE_S``."""

_LATE_SHARE = 0.1
"""How late a rank may read an answer, as a share of its waiting time: half of it on average, and as
much again if rank 0 waited too. It applies while the store can bear it."""


def _warn_late(name: str, late: Sequence[int], world_size: int, times: Timeouts) -> None:
    log.warning(
        "%s of %d: not in step %r after %g s. Call saves and loads on every rank, not within `if "
        "rank == 0:`. After %g s (absent_timeout_s) the step fails on all ranks.",
        format_ranks(late),
        world_size,
        name,
        times.late_warning_s,
        times.absent_timeout_s,
    )


class Leader:
    """Rank 0's part: one verdict for each step, in order."""

    def __init__(
        self,
        store: Store,
        world_size: int,
        times: Timeouts,
        clock: Clock = time.monotonic,
        state_of: StateOf = ProcessKey.state,
    ) -> None:
        self.values: list[Any] = []
        """Results of the last step, for rank 0."""
        self._store = store
        self._world_size = world_size
        self._times, self._clock = times, clock
        self._seq = 1
        self._kind, self._name = "", ""
        self._decided: list[int] = []  # Steps whose verdict a rank may still have to read.
        self._unseen = set(range(world_size))
        self._monitors = [RankMonitor(times, clock, state_of) for _ in range(world_size)]
        self._open = IdleTimer(2 * times.heartbeat_interval_s, clock)
        self._failing = IdleTimer(2 * times.heartbeat_interval_s, clock)
        self._next_liveness_check_s = 0.0
        self._warned_late = 0
        self._polled_s = self._clock()
        self._yields_until_s = 0.0

    def poll(self) -> None:
        """Post the verdict on the open step, if there can be one now."""
        self._yield_if_delayed()
        if not (self._kind or self._is_open()):
            self._yields_until_s = 0.0
            return
        if self._clock() < self._yields_until_s:
            if self._store.check([f"{self._seq}/verdict"]):
                self._advance(all_in=False, by_leader=False)
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

    def _yield_if_delayed(self) -> bool:
        """Leave the verdict to the others for a while if they may have given up the step.

        They have if rank 0 was stopped. Its process may also have run, but not this thread. The
        store may have been suspended too, so that a rank that gave up could not post a verdict: it
        does so as soon as the store answers.
        """
        now_s, interval_s = self._clock(), self._times.heartbeat_interval_s
        is_delayed = now_s - self._polled_s > self._times.heartbeat_timeout_s - 2 * interval_s
        self._polled_s = now_s
        if is_delayed:
            self._yields_until_s = now_s + 2 * interval_s
        return is_delayed

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
        # Reading a missing key would wait for it. A heartbeat is never deleted.
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
            self._post(Verdict.lost_ranks(self._name, lost, self._world_size))
        elif self._store.check([f"{self._seq}/verdict"]):
            self._advance(all_in=False, by_leader=False)  # Another rank gave up rank 0.
        elif open_s >= self._times.late_warning_s and self._warned_late != self._seq:
            self._warned_late = self._seq
            late = [
                r
                for r, heartbeat in enumerate(heartbeats)
                if heartbeat is None or heartbeat.seq < self._seq
            ]
            if late:
                _warn_late(self._name, late, self._world_size, self._times)

    def _success(self) -> Verdict:
        ranks = {"run_all": 0, "broadcast": 1}.get(self._kind, self._world_size)
        texts = self._store.multi_get([f"{self._seq}/report/{r}" for r in range(ranks)])
        self.values = [Report.unpacked(text).value for text in texts]
        # Rank 0 has its gathered results already.
        return Verdict([] if self._kind == "gather" else self.values)

    def _failure(self) -> Verdict:
        keys = {r: f"{self._seq}/report/{r}" for r in range(self._world_size)}
        reports = {
            r: Report.unpacked(self._store.get(key))
            for r, key in keys.items()
            if self._store.check([key])
        }
        failures = {r: report for r, report in reports.items() if report.error}
        if any(report.is_mismatch for report in failures.values()):
            return self._mismatch()
        error = common_error({report.error for report in failures.values()})
        texts = {
            r: report.message
            if report.error_type == error
            else f"{report.error_type}: {report.message}"
            for r, report in failures.items()
        }
        where = format_by_rank(texts, self._world_size)
        return Verdict([], error, f"step {self._name!r} failed on {where}")

    def _mismatch(self) -> Verdict:
        places: dict[str, list[int]] = {}
        for rank, heartbeat in enumerate(self._heartbeats()):
            if heartbeat is not None and heartbeat.seq == self._seq:
                places.setdefault(f"{heartbeat.name!r} ({heartbeat.kind})", []).append(rank)
        listed = ", ".join(f"{format_ranks(ranks)} at {place}" for place, ranks in places.items())
        message = f"every rank must make the same calls in the same order, but found {listed}"
        return Verdict([], "RanksError", message)

    def _post(self, verdict: Verdict, *, all_in: bool = False) -> None:
        if self._yield_if_delayed():
            return  # Delayed during this poll: its readings are out of date.
        try:
            text = replace(verdict, by_leader=True).packed()
        except ValueError as error:  # The results are too long.
            message = f"step {self._name!r}: {error}"
            text = Verdict([], "RanksError", message, by_leader=True).packed()
        # The first verdict stands, so that all ranks read the same one.
        verdict_text = self._store.compare_set(f"{self._seq}/verdict", "", text)
        self._advance(all_in=all_in, by_leader=verdict_text == text.encode())

    def _advance(self, *, all_in: bool, by_leader: bool) -> None:
        if not by_leader:  # The ranks have left their reports, which rank 0 might have read.
            for rank in range(self._world_size):
                self._store.delete_key(f"{self._seq}/report/{rank}")
        if all_in:  # So all ranks have read the verdicts before this one.
            parts = ("step", "done", "failed", "verdict")
            for seq, part in itertools.product(self._decided, parts):
                self._store.delete_key(f"{seq}/{part}")
            self._decided = []
        # A delay until now does not concern the next step.
        self._polled_s, self._yields_until_s = self._clock(), 0.0
        self._decided.append(self._seq)
        self._seq += 1
        self._kind, self._name = "", ""


def poll_pauses_s(world_size: int) -> Iterator[float]:
    """Yield the pauses between the polls of a waiting rank: infinitely many, short ones first."""
    pause_s = min(_FIRST_PAUSE_S, world_size / _MOST_FIRST_POLLS_PER_S)
    bearable_s = world_size / _MOST_POLLS_PER_S
    longest_s = max(LONGEST_PAUSE_S, bearable_s)
    while True:
        growth = 1.5 if pause_s < bearable_s else 1 / (1 - _LATE_SHARE)
        pause_s = min(growth * pause_s, longest_s)
        yield pause_s


@dataclass(slots=True, eq=False)
class Step:
    """One step on this rank, shared by the caller's thread and the session's thread."""

    kind: str
    """The method that was called."""
    name: str
    seq: int = 0
    """Counted from 1, equal on all ranks; set when the session enters the step."""
    arrived: threading.Event = field(default_factory=threading.Event)
    """The store shows that this rank has entered; an existing verdict has been read."""
    reported: threading.Event = field(default_factory=threading.Event)
    """The store has this rank's report, or nobody needs it any more."""
    decided: threading.Event = field(default_factory=threading.Event)
    """There is a verdict."""
    work_count: int = 0
    """Number of progress reports."""
    has_stored_report: bool = False
    """The store has a report of this rank, which this rank deletes after rank 0's verdict."""
    failed_here: bool = False
    """This rank has reported a failure."""
    failure: ElasticZeroError | None = None
    """The verdict, if the step has failed."""
    values: list[Any] = field(default_factory=list)
    """The verdict, if the step has succeeded and there are results for this rank."""

    def end(self, failure: ElasticZeroError | None) -> None:
        """End the step for the caller, which then returns or raises."""
        self.failure = failure
        self.decided.set()
        self.arrived.set()


def join_session(store: Store, name: str, rank: int, call: str) -> Store:
    """Return the keys of the next session of all ranks; skip abandoned sessions.

    A session is abandoned if it failed without this rank and was for another call: some ranks made
    a call that was not made on every rank.
    """
    counters = PrefixStore(name, store)
    while True:
        number = counters.add(f"made/{rank}", 1)
        session = PrefixStore(f"{name}/{number}", store)
        agreed = session.compare_set("call", "", f"for {call}").decode()
        if agreed == f"for {call}" or not session.check(["failed"]):
            return session


class RankSession:
    """The store operations of one rank, one turn at a time."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        times: Timeouts,
        clock: Clock = time.monotonic,
        state_of: StateOf = ProcessKey.state,
    ) -> None:
        self.store = store
        self.leader = Leader(store, world_size, times, clock, state_of) if rank == 0 else None
        self.leader_process: ProcessKey | None = None
        """The process of rank 0, once this rank has read a heartbeat of it."""
        self._rank, self._world_size, self._times, self._clock = rank, world_size, times, clock
        self._leader_monitor = RankMonitor(times, clock, state_of)
        self._process = ProcessKey.of_this_process()
        self._behind = self._warned_late = False
        self._step = Step("", "")
        self._step.end(None)
        self._activity, self._count, self._seq = "done", 0, 0
        self._pauses_s = poll_pauses_s(world_size)
        self._send_heartbeat()
        self.store.append(ROLL, roll_entry(rank))  # type: ignore[attr-defined] # stubs lack it

    def take_turn(self, command: Callable[[], None] | None = None) -> None:
        """Decide (rank 0), execute a command, send a heartbeat if due, look for a verdict."""
        if self.leader is not None:
            # First: if rank 0 was delayed, a step that it enters now is not affected.
            self.leader.poll()
        if command is not None:
            command()
            if self.leader is not None and self._step.reported.is_set():
                self.leader.poll()  # This rank may have been the last one to report.
        is_due = self._clock() >= self._next_heartbeat_s
        if is_due:
            self._send_heartbeat()
        if not self._step.decided.is_set():
            self._poll_verdict(self._step, check_leader=is_due)

    def pause_s(self) -> float:
        """Return how long the next turn may wait for a command."""
        pause_s = max(0.0, self._next_heartbeat_s - self._clock())
        if self._step.decided.is_set():
            return pause_s
        if not self._step.reported.is_set():
            return min(pause_s, CHECK_INTERVAL_S)
        return min(pause_s, next(self._pauses_s))

    def all_read(self) -> bool:
        """Whether no rank needs this one any more to read the last verdict."""
        return self.leader is None or self.leader.all_read()

    def leave(self, *, failed: bool) -> None:
        """Record that this rank has ended the session, and whether its last step failed."""
        if failed:
            self.store.set("failed", "1")
        self._send_heartbeat("closed")

    def enter_step(self, step: Step) -> None:
        """Number a step, enter it, and find out whether it has failed already."""
        label = pack([step.kind, step.name])
        agreed = self._next_label(label)
        step.seq = self._seq
        self._step = step
        self._send_heartbeat("working")
        self._poll_verdict(step)
        if agreed != label.encode():
            self.report(step, Report(error="RanksError", is_mismatch=True).packed(), failed=True)
        step.arrived.set()

    def _next_label(self, label: str) -> bytes:
        """Advance to the next step, labelled by its first rank; return the label that it has."""
        while True:
            self._seq += 1
            agreed = self.store.compare_set(f"{self._seq}/step", "", label)
            is_skipped = self._behind and agreed != label.encode()
            if not (is_skipped and self.store.check([f"{self._seq}/verdict"])):
                self._behind = False
                return agreed

    def abort_step(self, step: Step, why: str) -> None:
        """Fail a step for whose verdict the caller has stopped waiting."""
        if not (step.decided.is_set() or step.failed_here):
            failure = Verdict.lost_ranks(step.name, {self._rank: why}, self._world_size)
            self.store.compare_set(f"{step.seq}/verdict", "", failure.packed())
            self._poll_verdict(step)
        if step.decided.is_set() and step.failure is None:
            self._behind = True
            self._send_heartbeat("gone")

    def report(self, step: Step, text: str, *, failed: bool) -> None:
        """Report the outcome of the work: a packed ``Report``, or nothing."""
        step.failed_here = failed
        if step.decided.is_set():
            step.reported.set()
            return
        if text:
            self.store.set(f"{step.seq}/report/{self._rank}", text)
            step.has_stored_report = True
        if failed:
            self.store.add(f"{step.seq}/failed", 1)
        self.store.add(f"{step.seq}/done", 1)
        self._pauses_s = poll_pauses_s(self._world_size)
        self._send_heartbeat("waiting")
        step.reported.set()

    def _send_heartbeat(self, activity: str = "") -> None:
        self._activity = activity or self._activity
        self._count += 1
        step = self._step
        heartbeat = Heartbeat(
            self._count,
            step.seq,
            step.kind,
            step.name,
            self._activity,
            step.work_count,
            self._process,
        )
        self.store.set(f"beat/{self._rank}", heartbeat.packed())
        self._next_heartbeat_s = self._clock() + self._times.heartbeat_interval_s

    def _poll_verdict(self, step: Step, *, check_leader: bool = False) -> None:
        """End the step if there is a verdict, or if rank 0 is lost and cannot post one."""
        key = f"{step.seq}/verdict"
        if check_leader and self.leader is None:
            heartbeat = self._leader_heartbeat()
            why = self._leader_monitor.lost_reason(heartbeat)
            if heartbeat is None:
                self._warn_late_leader(step)
            if why:
                failure = Verdict.lost_ranks(step.name, {0: why}, self._world_size)
                self.store.compare_set(key, "", failure.packed())
        if not self.store.check([key]):
            return
        verdict = Verdict.unpacked(self.store.get(key))
        if step.has_stored_report and verdict.by_leader:
            self.store.delete_key(f"{step.seq}/report/{self._rank}")
        self._send_heartbeat("done")
        if self.leader is None and self.leader_process is None:
            self._leader_heartbeat()
        if verdict.error:
            error = error_class(verdict.error)(verdict.message)
            if verdict.by_leader:  # so rank 0 is alive and raises it too
                error.rank = self._rank
            step.end(error)
        else:
            step.values = self.leader.values if self.leader else verdict.values
            step.end(None)

    def _leader_heartbeat(self) -> Heartbeat | None:
        """Return rank 0's last heartbeat, and keep its process; None before its first one."""
        if not self.store.check(["beat/0"]):
            return None
        heartbeat = Heartbeat.unpacked(self.store.get("beat/0"))
        self.leader_process = heartbeat.process
        return heartbeat

    def _warn_late_leader(self, step: Step) -> None:
        # On one rank only. Rank 0 itself logs the other late ranks.
        idle_s = self._leader_monitor.heartbeats.idle_s
        if idle_s >= self._times.late_warning_s and not self._warned_late:
            self._warned_late = True
            if self.store.add("late", 1) == 1:
                _warn_late(step.name, [0], self._world_size, self._times)
