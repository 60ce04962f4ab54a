"""How rank 0 judges a step: which ranks failed, which are lost, and what all ranks hear of it.

It sees the job through a key-value store only, in which these keys are::

    beat/<rank>            what a rank last said of itself, counted up with every sign of life
    <seq>/step             kind and name of a step, set by the first rank that comes to it
    <seq>/report/<rank>    a result or a failure, where there is one
    <seq>/done, /failed    how many ranks have reported, and how many of them a failure
    <seq>/verdict          set once, by rank 0, or by a rank that has given up rank 0 or the step

The cost is in proportion to the ranks: two counters are read while the step runs, the beats of all
ranks once per ``heartbeat_interval_s``. No key stays behind once every rank has come to a later
step.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from lightning_elastic_zero.coordination.timeouts import Timeouts
from lightning_elastic_zero.errors import error_class
from lightning_elastic_zero.text import format_by_rank, format_ranks

MOST_BYTES = 8 * 1024 * 1024
"""A TCPStore drops the connection of a client that sends a longer value."""

_LONG_BYTES = 16 * 1024
_MOST_CHARACTERS = 4000
_MISMATCH = "mismatch"

DECIDED_BY_LEADER = "judged"
"""Entry of a verdict that is rank 0's own: it reads no report of the step any more."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Give the value of a key that is there; it would wait for another one."""

    def add(self, key: str, value: int, /) -> int:
        """Count up, from 0 where the key is not there, and give the new count."""

    def check(self, keys: list[str], /) -> bool:
        """Say whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it holds what is expected ("" where it is not there); give what it holds."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key, if it is there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Give the values of keys that are there."""


def pack(data: object) -> str:
    """Give plain data as text for the store.

    Raises:
        TypeError: It is not plain data.
        ValueError: It is too long for the store.
    """
    text = json.dumps(data)
    if len(text) > _LONG_BYTES:
        text = "z" + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    if len(text) > MOST_BYTES:
        msg = f"the result has {len(text)} bytes when packed, the store takes {MOST_BYTES} at most"
        raise ValueError(msg)
    return text


def unpack(held: bytes) -> Any:  # noqa: ANN401 - any plain data
    """Give the plain data of a text in the store."""
    return json.loads(zlib.decompress(base64.b64decode(held[1:])) if held[:1] == b"z" else held)


def failure_report(error: BaseException) -> dict[str, str]:
    """Give an error as plain data, with the nearest class that other ranks know."""
    mro = type(error).__mro__
    known = (cls.__name__ for cls in mro if error_class(cls.__name__) is cls)
    message = str(error)[:_MOST_CHARACTERS]
    return {
        "error": next(known, "RanksError"),
        "type": type(error).__name__,
        "message": message,
    }


def mismatch_report() -> dict[str, str]:
    """Give the report of a rank that came to a step under another name than the first one."""
    return {"error": "RanksError", "type": _MISMATCH, "message": ""}


def lost_ranks_failure(name: str, lost: dict[int, str], world_size: int) -> dict[str, str]:
    """Give the verdict on a step that waits for ranks that will not come."""
    message = f"step {name!r} cannot be finished without {format_by_rank(lost, world_size)}"
    return {"error": "RanksError", "message": message}


def warn_late(name: str, late: Sequence[int], world_size: int, times: Timeouts) -> None:
    """Log which ranks have not come to a step that others wait in."""
    log.warning(
        "%s of %d: not at step %r after %g s. Saves and loads must be called on every rank, not "
        "within `if rank == 0:`. Who is only late is waited for, %g s in all (absent_timeout_s); "
        "then this fails on all ranks.",
        format_ranks(late),
        world_size,
        name,
        times.late_warning_s,
        times.absent_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank last said of itself."""

    count: int
    """How many times it has said something."""

    seq: int
    """The step it came to last, 0 before its first one."""

    kind: str
    name: str

    activity: str
    """``working`` or ``waiting`` in that step, ``done`` with it, ``gone`` although the
    others have finished it, or ``closed``."""

    progress: int
    """How often it has shown progress."""

    def packed(self) -> str:
        """Give it as text for the store."""
        return pack(astuple(self))

    @classmethod
    def unpacked(cls, held: bytes) -> Heartbeat:
        """Read it from the store."""
        return cls(*unpack(held))

    def last_seen(self) -> str:
        """Say where the rank was."""
        if self.seq == 0:
            return "last seen before its first step"
        where = {"working": "at work in", "waiting": "waiting in"}.get(self.activity, "after")
        return f"last seen {where} step {self.name!r}"


class IdleTimer:
    """For how long a thing has not changed, to a watcher that may itself have been stopped."""

    def __init__(self, most_s: float) -> None:
        """Count at most ``most_s`` per look: time in which nobody looked is held against nobody."""
        self._most_s = most_s
        self._value: object = None
        self.idle_s = 0.0
        """As of the last look."""
        self._polled_s = time.monotonic()

    def poll(self, value: object) -> float:
        """Give the seconds for which it has been this value."""
        now = time.monotonic()
        same = value == self._value
        more_s = min(now - self._polled_s, self._most_s)
        self.idle_s = self.idle_s + more_s if same else 0.0
        self._value, self._polled_s = value, now
        return self.idle_s


class RankMonitor:
    """What is known of the life of one rank, from its beats."""

    def __init__(self, times: Timeouts) -> None:
        """Watch from now on."""
        self._times = times
        self.heartbeats = IdleTimer(2 * times.heartbeat_interval_s)
        self._work = IdleTimer(2 * times.heartbeat_interval_s)

    def lost_reason(self, heartbeat: Heartbeat | None) -> str | None:
        """Say why the rank will never answer, if so."""
        idle_s = self.heartbeats.poll(heartbeat.count if heartbeat else None)
        if heartbeat is None:
            wait_s = self._times.absent_timeout_s
            return f"never seen in {wait_s:g} s" if idle_s >= wait_s else None
        if heartbeat.activity == "closed":
            return f"it has ended its part, {heartbeat.last_seen()}"
        if idle_s >= self._times.heartbeat_timeout_s:
            wait_s = self._times.heartbeat_timeout_s
            return (
                f"no sign of life for {wait_s:g} s (it died or is stopped), {heartbeat.last_seen()}"
            )
        return None

    def stall_reason(self, heartbeat: Heartbeat, seq: int, open_s: float) -> str | None:
        """Say why step ``seq``, open for ``open_s``, waits in vain for this living rank, if so."""
        still_s = self._work.poll((heartbeat.seq, heartbeat.activity, heartbeat.progress))
        if heartbeat.seq < seq and open_s >= self._times.absent_timeout_s:
            return (
                f"alive, but not here after {open_s:.0f} s, {heartbeat.last_seen()}; this call "
                f"must be "
                "made on every rank: `trainer.save_checkpoint(...)` on one rank only cannot work"
            )
        if (
            heartbeat.seq < seq
            and heartbeat.activity == "gone"
            and open_s >= self._times.stall_timeout_s
        ):
            return f"alive, but it has given up step {heartbeat.name!r}, which others have finished"
        if (
            heartbeat.seq == seq
            and heartbeat.activity == "working"
            and still_s >= self._times.stall_timeout_s
        ):
            return f"alive, but without progress for {still_s:.0f} s, {heartbeat.last_seen()}"
        return None


class Leader:
    """Rank 0's part: one verdict for each step, in their order."""

    def __init__(self, store: Store, world_size: int, times: Timeouts) -> None:
        """Judge from the first step on."""
        self.values: list[Any] = []
        self._store = store
        self._world_size = world_size
        self._times = times
        self._seq = 1
        self._kind, self._name = "", ""
        self._passed: list[int] = []  # judged, but a rank may still come to read of it
        self._unseen = set(range(world_size))
        self._monitors = [RankMonitor(times) for _ in range(world_size)]
        self._open = IdleTimer(2 * times.heartbeat_interval_s)
        self._failing = IdleTimer(2 * times.heartbeat_interval_s)
        self._next_liveness_check_s = 0.0
        self._warned_late = 0
        self._polled_s = time.monotonic()

    def poll(self) -> None:
        """Give the verdict on the open step, if it can be given now."""
        suspended_s = self._suspended_s()
        self._polled_s = time.monotonic()
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
        elif time.monotonic() >= self._next_liveness_check_s:
            self._next_liveness_check_s = time.monotonic() + self._times.heartbeat_interval_s
            self._check_liveness(open_s)

    def _suspended_s(self) -> float:
        """Tell how long rank 0 was stopped itself, where the others have given it up meanwhile.

        With rank 0 the store may have been stopped: nobody could post that he has given up.
        """
        gap_s = time.monotonic() - self._polled_s
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
        """Say whether every rank has read the last verdict."""
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
        self._unseen -= {r for r in self._unseen if self._store.check([f"beat/{r}"])}
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
        if any(report["type"] == _MISMATCH for report in reports.values()):
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
        self._polled_s = time.monotonic()  # a stop until now is no matter of the next step
        self._passed.append(self._seq)
        self._seq += 1
        self._kind, self._name = "", ""
