"""What a step on all ranks came to: who failed, who is lost, and how long that may take."""

from __future__ import annotations

from lightning_elastic_zero.coordination.leader import (
    DECIDED_BY_LEADER,
    Heartbeat,
    Leader,
    RankMonitor,
    Store,
    failure_report,
    lost_ranks_failure,
    mismatch_report,
    pack,
    unpack,
    warn_late,
)
from lightning_elastic_zero.coordination.timeouts import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, Timeouts

__all__ = [
    "ABSENT_TIMEOUT_S",
    "DECIDED_BY_LEADER",
    "STALL_TIMEOUT_S",
    "Heartbeat",
    "Leader",
    "RankMonitor",
    "Store",
    "Timeouts",
    "failure_report",
    "lost_ranks_failure",
    "mismatch_report",
    "pack",
    "unpack",
    "warn_late",
]
