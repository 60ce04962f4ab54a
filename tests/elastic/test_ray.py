"""A run on Ray Train whose workers and nodes are lost and come back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.elastic._job import SAVE_EVERY, STEPS
from tests.elastic._ray import HEAD, RayJob, is_ray_installed, ray_job
from tests.elastic._steps import (
    Undisturbed,
    check_steps,
    seconds_to_next_step,
    steps_taken_again,
)
from tests.support.tables import ELASTIC

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not is_ray_installed(), reason="the extra `ray` is not installed"),
]

SECOND = 1
AT, LATER = 12, 22
"""Steps after which things happen; the last saves were at steps 10 and 20."""


def check_run(nodes: RayJob, undisturbed: Undisturbed) -> None:
    """Check the steps of all worlds, and what Ray returns and keeps."""
    lines = nodes.lines()
    check_steps(lines, undisturbed)
    assert max(steps_taken_again(lines).values()) <= SAVE_EVERY
    result = json.loads((nodes.folder / "result.json").read_text())
    assert result["metrics"]["step"] == STEPS
    assert result["metrics"]["train_loss"] == pytest.approx(undisturbed[STEPS].loss, rel=1e-5)
    assert sorted(result["kept"].values()) == [STEPS - SAVE_EVERY, STEPS]
    here = {str(path) for path in nodes.checkpoints.iterdir() if not path.name.startswith("last")}
    assert here == set(result["kept"])
    assert Path(result["checkpoint"]) == (nodes.checkpoints / "last.ckpt").resolve()
    for path in here:
        assert verify_checkpoint(path).is_sound


def note(nodes: RayJob, event: str, since: float) -> None:
    """Note what an event has cost, for the table."""
    lines = nodes.lines()
    again = next(steps for start, steps in steps_taken_again(lines).items() if start > since)
    ELASTIC.count(event, "tried")
    ELASTIC.count(event, "steps taken again", again)
    ELASTIC.count(event, "seconds to the next step", round(seconds_to_next_step(lines, since)))


def test_fewer_workers_and_more(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """A node is killed with its worker, and the run goes on without; then the node comes back."""
    with ray_job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(HEAD, SECOND)
        nodes.drive()
        nodes.wait_for_step(AT, world=2)
        lost = nodes.kill(SECOND)
        nodes.go_on(AT)
        nodes.wait_for_step(LATER, world=1)
        gained = time.time()
        nodes.start(SECOND)
        nodes.wait_for_start(world=2, since=gained)
        nodes.go_on(LATER)
        nodes.finish()
        check_run(nodes, undisturbed)
        note(nodes, "Ray loses a node", lost)
        note(nodes, "Ray gains a node", gained)


def test_a_worker_alone(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """A worker's actor is killed, and its node stays: all workers are started anew."""
    with ray_job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.start(HEAD, SECOND)
        nodes.drive()
        nodes.wait_for_step(AT, world=2)
        since = nodes.kill_worker(rank=1, world=2)
        nodes.go_on(AT)
        nodes.finish()
        check_run(nodes, undisturbed)
        note(nodes, "Ray loses a worker", since)
