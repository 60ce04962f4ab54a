"""What a step on all ranks came to: who failed, who is lost, and how long that may take."""

from __future__ import annotations

from lightning_elastic_zero.verdicts.judge import (
    JUDGED,
    Beat,
    Judge,
    Store,
    Watch,
    failure_report,
    loss,
    mismatch_report,
    pack,
    tell_late,
    unpack,
)
from lightning_elastic_zero.verdicts.times import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, RankTimes

__all__ = [
    "ABSENT_TIMEOUT_S",
    "JUDGED",
    "STALL_TIMEOUT_S",
    "Beat",
    "Judge",
    "RankTimes",
    "Store",
    "Watch",
    "failure_report",
    "loss",
    "mismatch_report",
    "pack",
    "tell_late",
    "unpack",
]
