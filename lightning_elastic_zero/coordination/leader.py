"""Rank 0's verdict on a step: which ranks failed or are lost, and what all ranks are told.

It sees the job through a key-value store only (``messages`` has the keys), and time through a clock
that is passed in: it starts nothing and never sleeps.

The cost is in proportion to the ranks: two counters are read while the step runs, the beats of all
ranks once per ``heartbeat_interval_s``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.coordination.liveness import Clock, IdleTimer, RankMonitor, StateOf
from lightning_elastic_zero.coordination.messages import (
    DECIDED_BY_LEADER,
    MISMATCH,
    ROLL,
    Heartbeat,
    lost_ranks_failure,
    pack,
    ranks_on_roll,
    unpack,
)
from lightning_elastic_zero.coordination.timeouts import Timeouts
from lightning_elastic_zero.processes import ProcessKey
from lightning_elastic_zero.text import format_by_rank, format_ranks

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
