"""Timeouts of ranks that wait for each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
