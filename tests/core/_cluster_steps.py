"""What tests of steps on all ranks share: ranks at work, and what they heard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_elastic_zero.coordination.session import Step
from tests.core._cluster import Cluster, Pauses, Rank

WORLD = 4
EVERYONE = list(range(WORLD))
STOP_S = 4.5
"""Longer than it takes the others to give up a step."""
LATE_S = STOP_S + 1
KINDS = ("run_all", "gather", "broadcast", "all_gather")


def failure(found: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the class and the message that every one of these ranks raised."""
    (same,) = {(outcome.get("error", ""), outcome.get("message", "")) for outcome in found}
    assert same[0], found
    return same


def assert_in_step(job: Cluster) -> None:
    """Check that the very next step succeeds on all ranks, and each after it."""
    assert {tuple(tries) for tries in job.run(meet)} == {()}
    for number in range(3):
        for kind in KINDS:
            found = [outcome["value"] for outcome in job.run_step(kind, f"{kind} {number}")]
            everyone = list(range(job.world_size))
            assert found[0] == {"run_all": [], "broadcast": [0]}.get(kind, everyone)
            assert found[1:] == [[] if kind in {"run_all", "gather"} else found[0]] * (
                job.world_size - 1
            )


def meet(rank: Rank) -> Pauses[list[str]]:
    """Try a step until it works; return what failed before."""
    failed: list[str] = []
    while "error" in (found := (yield from rank.step("run_all", "meet"))):
        failed.append(found["message"])
        assert len(failed) < 50
    return failed


def at_work(step: Step, rank: Rank, seconds: float, *, progress: bool = True) -> Pauses[None]:
    """Be at work until the step has been decided, for so long at most."""
    until = rank.cluster.now_s + seconds
    while rank.cluster.now_s < until and not (progress and step.decided.is_set()):
        step.work_count += progress
        yield
