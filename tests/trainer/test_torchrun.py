"""Jobs of torchrun that lose and gain nodes: the samples and losses of one that never did."""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trainer._torchrun_nodes import Nodes, job
from tests.trainer._torchrun_script import GLOBAL_BATCH, SAVE_EVERY, STEPS

pytestmark = [pytest.mark.engine, pytest.mark.long]

Line = dict[str, Any]


def by_start(lines: Iterable[Line]) -> dict[tuple[str, int], list[Line]]:
    """Return what each world's ranks have noted, by world and step."""
    found: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        found[line["start"], line["step"]].append(line)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Line]:
    """Return samples and loss by step of a job to which nothing happens."""
    with job(tmp_path_factory.mktemp("undisturbed") / "run", workers=2, most=1) as nodes:
        nodes.start(0)
        assert nodes.finish() == [0], nodes.said()
        lines = nodes.lines()
    steps = by_start(lines)
    assert len(steps) == STEPS
    return {step: summed(found) for (_, step), found in steps.items()}


def summed(lines: list[Line]) -> Line:
    """Return a step of all ranks."""
    return {
        "samples": sorted(sample for line in lines for sample in line["samples"]),
        "loss": lines[0]["loss"],
    }


def check(nodes: Nodes, undisturbed: dict[int, Line], worlds: set[int]) -> None:
    """Check that each step, also one that was taken twice, is that of the undisturbed job."""
    lines = nodes.lines()
    whole = [found for found in by_start(lines).values() if len(found) == found[0]["world"]]
    assert {found[0]["step"] for found in whole} == set(range(1, STEPS + 1))
    for found in whole:
        here, wanted = summed(found), undisturbed[found[0]["step"]]
        assert here["samples"] == wanted["samples"]
        assert len(here["samples"]) == GLOBAL_BATCH
        assert math.isclose(here["loss"], wanted["loss"], rel_tol=1e-3, abs_tol=1e-5)
    assert {line["world"] for line in lines} >= worlds
    first: dict[str, int] = {}
    last = 0
    for line in lines:
        if line["start"] not in first:
            first[line["start"]] = line["step"]
            # At most one interval is done again; the line of a step may be missing where it ended.
            assert last - line["step"] <= SAVE_EVERY
        last = max(last, line["step"])
    events = EventAccumulator(str(nodes.folder))
    events.Reload()
    assert {event.step for event in events.Scalars("loss")} == set(range(STEPS))


def lose_a_worker(nodes: Nodes) -> set[int]:
    """A worker of the second node is killed; its agent starts it again."""
    nodes.hold(12)
    nodes.wait_for(12, world=2)
    nodes.signal(1, signal.SIGKILL, agent=False)
    nodes.go_on(12)
    return {2}


def lose_a_node(nodes: Nodes) -> set[int]:
    """The second node goes, with its agent."""
    nodes.hold(12)
    nodes.wait_for(12, world=2)
    nodes.signal(1, signal.SIGKILL)
    nodes.go_on(12)
    return {1, 2}


def gain_a_node(nodes: Nodes) -> set[int]:
    """A third node joins: all workers are stopped by SIGTERM, and started again."""
    nodes.hold(12)
    nodes.wait_for(12, world=2)
    nodes.start(2)
    nodes.wait_for(11, world=3)
    nodes.go_on(12)
    return {2, 3}


@pytest.mark.parametrize("happens", [lose_a_worker, lose_a_node, gain_a_node])
def test_a_job_ends_as_if_nothing_had_happened(
    happens: Callable[[Nodes], set[int]], undisturbed: dict[int, Line], tmp_path: Path
) -> None:
    """Each step's samples are the same, its loss up to the order of a sum; little is done twice."""
    with job(tmp_path / "run") as nodes:
        nodes.start(0)
        nodes.start(1)
        worlds = happens(nodes)
        ended = nodes.finish()
        assert 0 in ended, nodes.said()
        check(nodes, undisturbed, worlds)
