"""How often to save: the interval at which saves and failures together cost least."""

from __future__ import annotations

import math


def optimal_save_interval(save_stall_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds from one save's call to the next one's that lose the least time.

    It is what ``ModelCheckpoint(train_time_interval=...)`` counts: Daly's compute time between two
    saves, plus the stall of one. Where failures come at random, independently of each other, it
    costs at most 0.2 % more time than the best interval there is. What a restart takes, and a save
    in the background until it is published, are lost at any interval and do not change it.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22 (2006), 303-312.

    Args:
        save_stall_s: seconds that training stands still for a save (``checkpoint/save_stall_s`` of
            ``CheckpointMonitor``, ``CheckpointStats.waited_s``), greater than 0.
        mean_time_between_failures_s: seconds, of the whole job, all nodes together, greater than 0;
            it may be a guess (docs/saving.md says what a wrong one costs).

    Returns:
        Seconds, more than the stall. A save in the background that takes longer than this until it
        is published is waited for by the next one: then save no more often than that.

    Raises:
        ValueError: one of them is no finite number greater than 0.
    """
    given = {
        "save_stall_s": save_stall_s,
        "mean_time_between_failures_s": mean_time_between_failures_s,
    }
    for name, seconds in given.items():
        if not (seconds > 0 and math.isfinite(seconds)):
            msg = f"{name}={seconds!r}: it must be a finite number of seconds, greater than 0"
            raise ValueError(msg)
    if save_stall_s >= 2 * mean_time_between_failures_s:
        return save_stall_s + mean_time_between_failures_s
    ratio = math.sqrt(save_stall_s / (2 * mean_time_between_failures_s))
    first_order = math.sqrt(2 * save_stall_s * mean_time_between_failures_s)
    return first_order * (1 + ratio / 3 + ratio**2 / 9)
