"""Liveness and progress of ranks, by the times at which their heartbeats were seen to change.

Nothing here sleeps, and the clock is passed in: each answer follows from the readings alone.

Timeouts of ranks that wait for each other.

Messages between ranks in the job's key-value store.

The keys of a session::

    beat/<rank>            what a rank last said of itself, counted up with every sign of life
    roll                   the ranks that have a beat, each appended once
    <seq>/step             kind and name of a step, set by the first rank that comes to it
    <seq>/report/<rank>    a result or a failure, where there is one
    <seq>/done, /failed    how many ranks have reported, and how many of them a failure
    <seq>/verdict          set once, by rank 0, or by a rank that has given up rank 0 or the step

No key stays behind once every rank has come to a later step.
"""

from __future__ import annotations

import base64
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from lightning_elastic_zero.core.processes import ProcessKey, ProcessState
from lightning_elastic_zero.core.text import format_by_rank
from lightning_elastic_zero.errors import error_class

STALL_TIMEOUT_S = 50.0
"""The default of ``stall_timeout_s``: with it, a stall is reported within 60 s."""

ABSENT_TIMEOUT_S = 600.0
"""The default of ``absent_timeout_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long ranks wait for each other, in seconds.

    With the defaults, all ranks raise within 10 s where one raised, and within 60 s where one died
    or stalled; 200 s where a thread of this library is held up in a process that runs.
    """

    heartbeat_interval_s: float = 2.0
    """From one sign of life of a rank to its next."""

    heartbeat_timeout_s: float = 30.0
    """Without a sign of life for so long, a rank died or is stopped, or the store's host is.

    On the same machine the system is asked as well: who has ended is not waited for at all, and who
    runs is waited for longer.
    """

    held_up_timeout_s: float = 200.0
    """The same for a process that the system says runs, but that does not come to say so itself."""

    stall_timeout_s: float = STALL_TIMEOUT_S
    """At work on a step for so long without ``progress()``, a rank has stalled."""

    absent_timeout_s: float = ABSENT_TIMEOUT_S
    """A living rank comes to a step no later than this after the first one.

    Much longer than the others, for to be late is no fault: rank 0 may spend minutes in a logging
    callback before it saves, which must not end a run. Yet a call that is made on one rank only
    must end.
    """

    late_warning_s: float = 30.0
    """After so long the log names the ranks that have not come to a step yet."""

    failure_grace_s: float = 1.0
    """After a first failure, for so long other ranks may add theirs before the verdict."""

    @classmethod
    def of(cls, stall_timeout_s: float, absent_timeout_s: float = ABSENT_TIMEOUT_S) -> Timeouts:
        """Return the times of a user's choice, with signs of life often enough for them.

        Raises:
            ValueError: one is no positive number.
        """
        for name, value, what in (
            ("stall_timeout_s", stall_timeout_s, "a rank may work without progress"),
            ("absent_timeout_s", absent_timeout_s, "ranks wait for one that does not come"),
        ):
            if type(value) not in (int, float) or not 0 < value < math.inf:
                msg = f"{name}={value!r}: it is how many seconds {what}, a positive number"
                raise ValueError(msg)
        shortest_s = min(stall_timeout_s, absent_timeout_s)
        return cls(
            heartbeat_interval_s=min(cls().heartbeat_interval_s, shortest_s / 4),
            stall_timeout_s=float(stall_timeout_s),
            absent_timeout_s=float(absent_timeout_s),
        )

    def __post_init__(self) -> None:
        """Refuse times that would take a living rank for a dead one."""
        if (
            self.heartbeat_interval_s <= 0
            or self.held_up_timeout_s < self.heartbeat_timeout_s
            or min(self.heartbeat_timeout_s, self.stall_timeout_s, self.absent_timeout_s)
            < 4 * self.heartbeat_interval_s
        ):
            msg = (
                f"{self}: heartbeat_timeout_s, stall_timeout_s and absent_timeout_s must be "
                f"at least 4 * heartbeat_interval_s > 0, held_up_timeout_s at least "
                f"heartbeat_timeout_s"
            )
            raise ValueError(msg)


MOST_BYTES = 8 * 1024 * 1024
"""A TCPStore drops the connection of a client that sends a longer value."""

_LONG_BYTES = 16 * 1024
_MOST_CHARACTERS = 4000

MISMATCH = "mismatch"
"""Type of the report of a rank that came to a step under another name."""

DECIDED_BY_LEADER = "judged"
"""Entry of a verdict that is rank 0's own: it reads no report of the step any more."""


ROLL = "roll"
"""The key of the ranks that have said something: one look shows all of them."""


def roll_entry(rank: int) -> str:
    """Return what a rank appends to the roll."""
    return f"{rank},"


def ranks_on_roll(text: bytes) -> set[int]:
    """Return the ranks that have appended their entries."""
    return {int(rank) for rank in text.split(b",") if rank}


def pack(data: object) -> str:
    """Return plain data as text for the store.

    Raises:
        TypeError: it is not plain data.
        ValueError: it is too long for the store.
    """
    text = json.dumps(data)
    if len(text) > _LONG_BYTES:
        text = "z" + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    if len(text) > MOST_BYTES:
        msg = f"the result has {len(text)} bytes when packed, the store takes {MOST_BYTES} at most"
        raise ValueError(msg)
    return text


def unpack(held: bytes) -> Any:
    """Return the plain data of a text in the store."""
    return json.loads(zlib.decompress(base64.b64decode(held[1:])) if held[:1] == b"z" else held)


def failure_report(error: BaseException) -> dict[str, str]:
    """Return an error as plain data, with the nearest class that other ranks know."""
    mro = type(error).__mro__
    known = (cls.__name__ for cls in mro if error_class(cls.__name__) is cls)
    message = str(error)[:_MOST_CHARACTERS]
    return {
        "error": next(known, "RanksError"),
        "type": type(error).__name__,
        "message": message,
    }


def mismatch_report() -> dict[str, str]:
    """Return the report of a rank that came to a step under another name than the first one."""
    return {"error": "RanksError", "type": MISMATCH, "message": ""}


def lost_ranks_failure(name: str, lost: dict[int, str], world_size: int) -> dict[str, str]:
    """Return the verdict on a step that waits for ranks that will not come."""
    message = f"step {name!r} cannot be finished without {format_by_rank(lost, world_size)}"
    return {"error": "RanksError", "message": message}


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

    work_count: int
    """How often it has shown progress."""

    process: ProcessKey
    """Where it runs: who is on the same machine can ask the system for it."""

    def packed(self) -> str:
        """Return it as text for the store."""
        return pack(astuple(self))

    @classmethod
    def unpacked(cls, held: bytes) -> Heartbeat:
        """Read it from the store."""
        count, seq, kind, name, activity, work_count, process = unpack(held)
        return cls(count, seq, kind, name, activity, work_count, ProcessKey(*process))

    def last_seen(self) -> str:
        """Return where the rank was."""
        if self.seq == 0:
            return "last seen before its first step"
        where = {"working": "at work in", "waiting": "waiting in"}.get(self.activity, "after")
        return f"last seen {where} step {self.name!r}"


Clock: TypeAlias = Callable[[], float]
"""Return seconds that never run backwards."""

StateOf: TypeAlias = Callable[[ProcessKey], ProcessState]
"""Return what the system says of a process."""

_SILENT = (
    "the job's store has not answered for {:g} s: rank 0, or whatever process hosts it, died or is "
    "stopped"
)
_HELD_UP = (
    "this rank's thread that talks to the other ranks has not come to run for {:g} s, although the "
    "store's host runs; the log says where it is"
)


def unresponsive_reason(
    silent_s: float, times: Timeouts, store_host_runs: Callable[[], bool]
) -> str:
    """Return why a caller waits no longer for its own rank's thread, if so; else nothing.

    Args:
        silent_s: for how long the thread has not come back from a turn.
        times: how long it is waited for.
        store_host_runs: whether the store's host is known to run, so that it is the thread that is
            held up. It is asked only of a thread that has been silent for too long.
    """
    if silent_s <= times.heartbeat_timeout_s:
        return ""
    if not store_host_runs():
        return _SILENT.format(times.heartbeat_timeout_s)
    if silent_s <= times.held_up_timeout_s:
        return ""
    return _HELD_UP.format(times.held_up_timeout_s)


class IdleTimer:
    """For how long a thing has not changed, to a watcher that may itself have been stopped."""

    def __init__(self, most_s: float, clock: Clock) -> None:
        """Count at most ``most_s`` per look: time in which nobody looked is held against nobody."""
        self._most_s, self._clock = most_s, clock
        self._value: object = None
        self.idle_s = 0.0
        """As of the last look."""
        self._polled_s = clock()

    def poll(self, value: object) -> float:
        """Return the seconds for which it has been this value."""
        now = self._clock()
        same = value == self._value
        more_s = min(now - self._polled_s, self._most_s)
        self.idle_s = self.idle_s + more_s if same else 0.0
        self._value, self._polled_s = value, now
        return self.idle_s


class RankMonitor:
    """What is known of the life of one rank, from its beats."""

    def __init__(
        self,
        times: Timeouts,
        clock: Clock = time.monotonic,
        state_of: StateOf = ProcessKey.state,
    ) -> None:
        """Watch from now on."""
        self._times, self._state_of = times, state_of
        self.heartbeats = IdleTimer(2 * times.heartbeat_interval_s, clock)
        self._work = IdleTimer(2 * times.heartbeat_interval_s, clock)

    def lost_reason(self, heartbeat: Heartbeat | None) -> str | None:
        """Return why the rank will never answer, if so."""
        idle_s = self.heartbeats.poll(heartbeat.count if heartbeat else None)
        if heartbeat is None:
            wait_s = self._times.absent_timeout_s
            return f"never seen in {wait_s:g} s" if idle_s >= wait_s else None
        if heartbeat.activity == "closed":
            return f"it has ended its part, {heartbeat.last_seen()}"
        return self._silence_reason(heartbeat, idle_s) if idle_s else None

    def _silence_reason(self, heartbeat: Heartbeat, idle_s: float) -> str | None:
        """Return why a rank that has said nothing for so long will never answer, if so.

        Where the system can be asked, a process that has ended need not be waited for, and one that
        runs is not taken for dead because its thread does not come to run: on a machine under
        pressure, or while a finalizer of somebody's holds it.
        """
        state = self._state_of(heartbeat.process)
        if state is ProcessState.ENDED:
            return f"its process {heartbeat.process.pid} has ended, {heartbeat.last_seen()}"
        times, why = self._times, "it died or is stopped"
        wait_s = times.heartbeat_timeout_s
        if state is ProcessState.RUNNING:
            why = f"its process {heartbeat.process.pid} runs, but its heartbeat thread does not"
            wait_s = times.held_up_timeout_s
        elif state is ProcessState.STOPPED:
            why = f"its process {heartbeat.process.pid} is stopped"
        if idle_s < wait_s:
            return None
        return f"no sign of life for {wait_s:g} s ({why}), {heartbeat.last_seen()}"

    def stall_reason(self, heartbeat: Heartbeat, seq: int, open_s: float) -> str | None:
        """Return why step ``seq``, open for ``open_s``, waits in vain for a living rank, if so."""
        still_s = self._work.poll((heartbeat.seq, heartbeat.activity, heartbeat.work_count))
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
