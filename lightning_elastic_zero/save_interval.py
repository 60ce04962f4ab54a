"""The interval between saves that loses the least time to saves and failures."""

from __future__ import annotations

import math


def optimal_save_interval(save_stall_s: float, mean_time_between_failures_s: float) -> float:
    """Return the save interval in seconds that loses the least time.

    It is the value for ``ModelCheckpoint(train_time_interval=...)``: Daly's optimal compute time
    between two saves, plus the stall of one. If failures are random and independent, it costs at
    most 0.2 % more time than the best interval. The duration of a restart, and of a background save
    until publication, does not depend on the interval and does not change it.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22 (2006), 303-312.

    Args:
        save_stall_s: Seconds for which a save stops training (``checkpoint/save_stall_s`` of
            ``CheckpointMonitor``, ``CheckpointStats.waited_s``), greater than 0.
        mean_time_between_failures_s: Seconds, of the whole job with all nodes, greater than 0.
            docs/saving.md gives the cost of a wrong estimate.

    Returns:
        Seconds, more than the stall. If a background save takes longer than this until publication,
        the next save waits for it: then save no more often than that.

    Raises:
        ValueError: An argument is not a finite number greater than 0.
    """
    given = {
        "save_stall_s": save_stall_s,
        "mean_time_between_failures_s": mean_time_between_failures_s,
    }
    for name, seconds in given.items():
        if not (seconds > 0 and math.isfinite(seconds)):
            msg = f"{name}={seconds!r}: expected a finite number of seconds greater than 0"
            raise ValueError(msg)
    if save_stall_s >= 2 * mean_time_between_failures_s:
        return save_stall_s + mean_time_between_failures_s
    ratio = math.sqrt(save_stall_s / (2 * mean_time_between_failures_s))
    first_order = math.sqrt(2 * save_stall_s * mean_time_between_failures_s)
    return first_order * (1 + ratio / 3 + ratio**2 / 9)
