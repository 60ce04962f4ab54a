"""Liveness and progress of ranks, by the times at which their heartbeats were seen to change.

Nothing here sleeps, and the clock is passed in: each answer follows from the readings alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from lightning_elastic_zero.coordination.messages import Heartbeat
from lightning_elastic_zero.coordination.timeouts import Timeouts
from lightning_elastic_zero.processes import ProcessKey, ProcessState

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
