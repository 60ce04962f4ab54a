"""Timeouts of ranks, their messages in the job's key-value store, and detection of lost ranks.

The keys of a session::

    beat/<rank>            last heartbeat of a rank
    roll                   ranks that have sent a heartbeat, each appended once
    <seq>/step             kind and name of a step, set by the first rank that enters it
    <seq>/report/<rank>    result or failure of a rank, where there is one
    <seq>/done, /failed    number of ranks that have reported, and that have reported a failure
    <seq>/verdict          set once: by rank 0, or by a rank that gave up rank 0 or the step

The keys of a step are deleted once all ranks have entered a later one.

Nothing here sleeps, and the clock is a parameter: each answer follows from the readings alone.
"""

from __future__ import annotations

import base64
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any, TypeAlias

from lightning_elastic_zero.core.process_state import ProcessKey, ProcessState
from lightning_elastic_zero.core.text import format_by_rank
from lightning_elastic_zero.errors import error_class

STALL_TIMEOUT_S = 50.0
"""Default of ``stall_timeout_s``: a stall is then reported within 60 s."""

ABSENT_TIMEOUT_S = 600.0
"""Default of ``absent_timeout_s``."""

MOST_BYTES = 8 * 1024 * 1024
"""A TCPStore drops the connection of a client that sends a longer value."""

_COMPRESSED_FROM_BYTES = 16 * 1024

_MOST_CHARACTERS = 4000

ROLL = "roll"
"""Key of the ranks that have sent a heartbeat: one read shows all of them."""

Clock: TypeAlias = Callable[[], float]
"""A monotonic clock, in seconds."""

StateOf: TypeAlias = Callable[[ProcessKey], ProcessState]
"""Return the state of a process according to the operating system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long ranks wait for each other, in seconds.

    With the defaults, all ranks raise within 10 s after one raised, within 60 s after one died or
    stalled, and within 200 s if a thread of this library is blocked in a running process.
    """

    heartbeat_interval_s: float = 2.0
    """Interval between two heartbeats of a rank."""
    heartbeat_timeout_s: float = 30.0
    """Without a heartbeat for this long, a rank or the store's host is considered lost.

    On the same machine the operating system is asked as well: a process that has ended is reported
    at once, and a running one is given ``held_up_timeout_s``.
    """
    held_up_timeout_s: float = 200.0
    """Heartbeat timeout for a process that runs according to the operating system."""
    stall_timeout_s: float = STALL_TIMEOUT_S
    """A rank that works on a step for this long without progress has stalled."""
    absent_timeout_s: float = ABSENT_TIMEOUT_S
    """A living rank must enter a step within this time after the first one.

    Much longer than the others, because being late is legitimate: rank 0 may spend minutes in a
    logging callback before it saves. But a call that is made on one rank only must end.
    """
    late_warning_s: float = 30.0
    """After this time the ranks that have not entered a step are logged."""
    failure_grace_s: float = 1.0
    """After a first failure, other ranks may add theirs for this long before the verdict."""

    @classmethod
    def of(cls, stall_timeout_s: float, absent_timeout_s: float = ABSENT_TIMEOUT_S) -> Timeouts:
        """Return the user's timeouts, with a heartbeat interval that is short enough for them."""
        timeouts = {"stall_timeout_s": stall_timeout_s, "absent_timeout_s": absent_timeout_s}
        for name, value in timeouts.items():
            if type(value) not in (int, float) or not 0 < value < math.inf:
                msg = f"{name}={value!r}, expected a positive number of seconds"
                raise ValueError(msg)
        shortest_s = min(stall_timeout_s, absent_timeout_s)
        return cls(
            heartbeat_interval_s=min(cls().heartbeat_interval_s, shortest_s / 4),
            stall_timeout_s=float(stall_timeout_s),
            absent_timeout_s=float(absent_timeout_s),
        )

    def __post_init__(self) -> None:
        if (
            self.heartbeat_interval_s <= 0
            or self.held_up_timeout_s < self.heartbeat_timeout_s
            or min(self.heartbeat_timeout_s, self.stall_timeout_s, self.absent_timeout_s)
            < 4 * self.heartbeat_interval_s
        ):
            msg = (
                f"{self}: expected heartbeat_timeout_s, stall_timeout_s and absent_timeout_s of at "
                "least 4 * heartbeat_interval_s > 0, and held_up_timeout_s of at least "
                "heartbeat_timeout_s"
            )
            raise ValueError(msg)


def roll_entry(rank: int) -> str:
    """Return the text that a rank appends to the roll."""
    return f"{rank},"


def ranks_on_roll(text: bytes) -> set[int]:
    """Return the ranks that have appended their entries."""
    return {int(rank) for rank in text.split(b",") if rank}


def pack(data: object) -> str:
    """Return plain data as text for the store; refuse text that is too long for it."""
    text = json.dumps(data)
    if len(text) > _COMPRESSED_FROM_BYTES:
        text = "z" + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    if len(text) > MOST_BYTES:
        msg = f"the packed result has {len(text)} bytes, the store takes at most {MOST_BYTES}"
        raise ValueError(msg)
    return text


def unpack(text: bytes) -> Any:
    """Return the plain data of a text in the store."""
    return json.loads(zlib.decompress(base64.b64decode(text[1:])) if text[:1] == b"z" else text)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one rank's work in a step."""

    value: Any = None
    """The result: plain data."""
    error: str = ""
    """Nearest error class of this library that the raised error is of; empty after a success."""
    error_type: str = ""
    """Name of the raised class."""
    message: str = ""
    is_mismatch: bool = False
    """The rank entered the step under another name than the first rank."""

    @classmethod
    def of_error(cls, error: BaseException) -> Report:
        """Describe an error by the nearest class that other ranks can raise."""
        mro = type(error).__mro__
        known = (base.__name__ for base in mro if error_class(base.__name__) is base)
        message = str(error)[:_MOST_CHARACTERS]
        return cls(None, next(known, "RanksError"), type(error).__name__, message)

    def packed(self) -> str:
        return pack(
            [self.value, self.error, self.error_type, self.message, self.is_mismatch]
            if self.error
            else [self.value]
        )

    @classmethod
    def unpacked(cls, text: bytes) -> Report:
        return cls(*unpack(text))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a step for all ranks."""

    values: list[Any] = field(default_factory=list)
    """Results for the ranks, if the step has succeeded."""
    error: str = ""
    """Name of the error class that all ranks raise; empty if the step has succeeded."""
    message: str = ""
    by_leader: bool = False
    """Rank 0 has decided, and will read no report of the step any more."""

    @classmethod
    def lost_ranks(cls, step: str, reasons: dict[int, str], world_size: int) -> Verdict:
        """Return the failure of a step that waits for ranks which will not report."""
        ranks = format_by_rank(reasons, world_size)
        return cls([], "RanksError", f"step {step!r} cannot be finished without {ranks}")

    def packed(self) -> str:
        return pack([self.values, self.error, self.message, self.by_leader])

    @classmethod
    def unpacked(cls, text: bytes) -> Verdict:
        return cls(*unpack(text))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life of a rank, and its position in the session."""

    count: int
    """Number of heartbeats that the rank has sent."""
    seq: int
    """The step that it entered last; 0 before the first one."""
    kind: str
    name: str
    activity: str
    """``working`` or ``waiting`` in that step, ``done`` with it, ``gone``: gave it up although the
    others finished it, or ``closed``."""
    work_count: int
    """Number of progress reports in that step."""
    process: ProcessKey
    """Ranks on the same machine can ask the operating system for this process."""

    def packed(self) -> str:
        return pack(astuple(self))

    @classmethod
    def unpacked(cls, text: bytes) -> Heartbeat:
        count, seq, kind, name, activity, work_count, process = unpack(text)
        return cls(count, seq, kind, name, activity, work_count, ProcessKey(*process))

    def last_seen(self) -> str:
        if self.seq == 0:
            return "last seen before its first step"
        where = {"working": "working in", "waiting": "waiting in"}.get(self.activity, "after")
        return f"last seen {where} step {self.name!r}"


def unresponsive_reason(
    silent_s: float, times: Timeouts, store_host_runs: Callable[[], bool]
) -> str:
    """Return why the caller gives up waiting for its own rank's thread; empty: it waits on.

    ``silent_s`` is the time since the thread last finished a turn. ``store_host_runs`` tells
    whether the store's host is known to run, so that the thread itself is blocked; it is called
    only after ``heartbeat_timeout_s``.
    """
    if silent_s <= times.heartbeat_timeout_s:
        return ""
    if not store_host_runs():
        return (
            f"the job's store has not answered for {times.heartbeat_timeout_s:g} s: its host "
            "(rank 0 or the launcher) died or is stopped"
        )
    if silent_s <= times.held_up_timeout_s:
        return ""
    return (
        f"the coordination thread of this rank was not scheduled for {times.held_up_timeout_s:g} "
        "s, although the store's host runs; the log shows its stack"
    )


class IdleTimer:
    """Time for which a value has not changed, for a watcher that may itself be suspended.

    At most ``most_s`` are counted per poll: time in which nobody polled counts against nobody.
    """

    def __init__(self, most_s: float, clock: Clock) -> None:
        self._most_s, self._clock = most_s, clock
        self._value: object = None
        self.idle_s = 0.0
        """As of the last poll."""
        self._polled_s = clock()

    def poll(self, value: object) -> float:
        """Return the seconds for which the value has been this one."""
        now = self._clock()
        more_s = min(now - self._polled_s, self._most_s)
        self.idle_s = self.idle_s + more_s if value == self._value else 0.0
        self._value, self._polled_s = value, now
        return self.idle_s


class RankMonitor:
    """Detects that one rank is lost or stalled, from its heartbeats."""

    def __init__(
        self, times: Timeouts, clock: Clock = time.monotonic, state_of: StateOf = ProcessKey.state
    ) -> None:
        self._times, self._state_of = times, state_of
        self.heartbeats = IdleTimer(2 * times.heartbeat_interval_s, clock)
        self._work = IdleTimer(2 * times.heartbeat_interval_s, clock)

    def lost_reason(self, heartbeat: Heartbeat | None) -> str | None:
        """Return why the rank will never answer; None if it may."""
        idle_s = self.heartbeats.poll(heartbeat.count if heartbeat else None)
        if heartbeat is None:
            wait_s = self._times.absent_timeout_s
            return f"never seen in {wait_s:g} s" if idle_s >= wait_s else None
        if heartbeat.activity == "closed":
            return f"it has ended its session, {heartbeat.last_seen()}"
        return self._silence_reason(heartbeat, idle_s) if idle_s else None

    def _silence_reason(self, heartbeat: Heartbeat, idle_s: float) -> str | None:
        # On the same machine, a process that has ended is reported at once. A running one is not
        # considered dead when its thread is not scheduled: under memory pressure, or while a
        # finalizer blocks it.
        state = self._state_of(heartbeat.process)
        process = f"its process {heartbeat.process.pid}"
        if state is ProcessState.ENDED:
            return f"{process} has ended, {heartbeat.last_seen()}"
        why, wait_s = "it died or is stopped", self._times.heartbeat_timeout_s
        if state is ProcessState.RUNNING:
            why, wait_s = (
                f"{process} runs, but its heartbeat thread does not",
                self._times.held_up_timeout_s,
            )
        elif state is ProcessState.STOPPED:
            why = f"{process} is stopped"
        if idle_s < wait_s:
            return None
        return f"no heartbeat for {wait_s:g} s ({why}), {heartbeat.last_seen()}"

    def stall_reason(self, heartbeat: Heartbeat, seq: int, open_s: float) -> str | None:
        """Return why step ``seq``, open for ``open_s``, cannot be finished with this living rank.

        None if it may be.
        """
        still_s = self._work.poll((heartbeat.seq, heartbeat.activity, heartbeat.work_count))
        times = self._times
        if heartbeat.seq < seq:
            if open_s >= times.absent_timeout_s:
                return (
                    f"alive, but it did not enter this step within {open_s:.0f} s, "
                    f"{heartbeat.last_seen()}; call `trainer.save_checkpoint(...)` and the like on "
                    "every rank"
                )
            if heartbeat.activity == "gone" and open_s >= times.stall_timeout_s:
                return f"alive, but it gave up step {heartbeat.name!r}, which the others finished"
        elif (
            heartbeat.seq == seq
            and heartbeat.activity == "working"
            and still_s >= times.stall_timeout_s
        ):
            return f"alive, but without progress for {still_s:.0f} s, {heartbeat.last_seen()}"
        return None
