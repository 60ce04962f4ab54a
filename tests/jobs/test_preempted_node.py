"""A node of a torchrun job is preempted and returns: no step is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.jobs._job import (
    AT,
    LATER,
    NOTICED,
    STEPS,
    Job,
    Undisturbed,
    check_steps,
    count_event,
    job,
    repeated_steps,
)
from tests.support.processes import HANG_TIMEOUT_S

pytestmark = [pytest.mark.engine, pytest.mark.long]

FIRST, SECOND, THIRD = 0, 1, 2

CALLBACK = "--trainer.callbacks+=lightning_elastic_zero.PreemptionCheckpoint"


def wait_for_agreements(nodes: Job, count: int) -> None:
    """Wait until ranks have agreed to stop this many times."""
    nodes.wait_until(
        lambda: sum(nodes.log_of(node).count(NOTICED) for node in nodes.agents) >= count,
        "agreement",
    )


@pytest.mark.parametrize("leaving", [FIRST, SECOND], ids=["rank 0's", "another"])
def test_no_step_is_lost_when_a_node_is_preempted_and_returns(
    leaving: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Agents stop their workers with SIGTERM, also when a node joins."""
    with job(tmp_path / "run", CALLBACK) as nodes:
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(FIRST, SECOND, THIRD)
        nodes.wait_for_step(AT, world=3)
        preempted = time.time()
        nodes.killed.add(leaving)  # A terminated agent does not exit with status 0.
        os.kill(nodes.agents[leaving].pid, signal.SIGTERM)
        wait_for_agreements(nodes, 1)
        nodes.release(AT)
        nodes.wait_for_step(LATER, world=2)
        assert nodes.agents[leaving].wait(HANG_TIMEOUT_S) != 0
        returned = time.time()
        nodes.start(leaving)
        wait_for_agreements(nodes, 2)
        nodes.release(LATER)
        nodes.finish()
        lines = nodes.lines()
        check_steps(lines, undisturbed)
        assert set(repeated_steps(lines).values()) == {0}
        assert {line.world for line in lines if line.step == STEPS} == {3}
        count_event("a node is preempted", lines, preempted)
        count_event("a preempted node joins", lines, returned)
