"""Jobs of torchrun's elastic agent whose workers and nodes are lost and come back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from tests.elastic._job import (
    EPOCHS,
    SAVE_EVERY,
    STEPS,
    Job,
    Undisturbed,
    check_steps,
    job,
    seconds_to_next_step,
    steps_taken_again,
)
from tests.examples._cli_programs import run_cli
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ForkServer
from tests.support.tables import ELASTIC

SUBNET = f"10.{os.getpid() % 200 + 20}.77"
"""Of this process's own."""

NAME = f"ez{os.getpid() % 100_000}"
"""Begins the names of devices, which may have 15 characters."""


def ip(*words: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    """Whether this process may make networks."""
    if shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"{NAME}t"], check=False, capture_output=True)
    if made.returncode == 0:
        ip("netns", "del", f"{NAME}t")
    return made.returncode == 0


@dataclass
class JobInNamespaces(Job):
    """A job's nodes, each with a network namespace, at a bridge of this process's."""

    @override
    def entered(self, node: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", f"{NAME}n{node}")

    @override
    def settings(self, node: int) -> dict[str, str]:
        return {
            **super().settings(node),
            "STORE": f"{SUBNET}.1:{self.port}",
            "ADDRESS": f"{SUBNET}.{node + 2}",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def cut_off(self, node: int) -> float:
        """Take a node's network away for good; return when. How its agent ends, nobody asks."""
        self.killed.add(node)
        ip("-n", f"{NAME}n{node}", "link", "set", "eth0", "down")
        return time.time()


@contextmanager
def job_in_namespaces(folder: Path, nodes: Sequence[int], *more: str) -> Iterator[JobInNamespaces]:
    """Yield a job that has no agents yet, but a network for each node."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        ip("link", "add", f"{NAME}b", "type", "bridge")
        stack.callback(ip, "link", "del", f"{NAME}b")
        ip("addr", "add", f"{SUBNET}.1/24", "dev", f"{NAME}b")
        ip("link", "set", f"{NAME}b", "up")
        for node in nodes:
            space, here = f"{NAME}n{node}", f"{NAME}v{node}"
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", here, "master", f"{NAME}b", "up")
            ip("-n", space, "addr", "add", f"{SUBNET}.{node + 2}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")
        port = free_port()
        store = TCPStore(
            f"{SUBNET}.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=15),
        )
        job = JobInNamespaces(folder, port, more)
        stack.callback(job.end)
        yield job
        del store


pytestmark = pytest.mark.engine

FIRST, SECOND, THIRD = 0, 1, 2
"""Nodes; the first one that starts has rank 0, by its address."""

AT = 12
"""The step after which things happen; the last save was at step 10."""

LATER = 22
"""A step after which something happens for a second time; the last save was at step 20."""

TIMEOUT = "--trainer.strategy.init_args.timeout=0:00:20"
"""How long ranks wait for one whose node is silent: shorter than anybody would set it."""

MINUTE_S = 60.0


def check_job(nodes: Job, undisturbed: Undisturbed, event: str, since: float) -> None:
    """Check all that a job leaves, once its agents have ended; note what the event cost."""
    assert set(undisturbed) == set(range(1, STEPS + 1))
    lines = nodes.lines()
    check_steps(lines, undisturbed)
    again = steps_taken_again(lines)
    assert max(again.values()) <= SAVE_EVERY
    check_curve(nodes, undisturbed)
    assert nodes.last_step() == STEPS
    assert [path.name for path in nodes.checkpoints.glob("last*")] == ["last.ckpt"]
    assert not nodes.unpublished()
    assert not list(nodes.folder.glob("version_*"))
    ELASTIC.count(event, "tried")
    lost = next(steps for start, steps in again.items() if start > since)
    ELASTIC.count(event, "steps taken again", lost)
    ELASTIC.count(event, "seconds to the next step", round(seconds_to_next_step(lines, since)))


def check_curve(nodes: Job, undisturbed: Undisturbed) -> None:
    """Check TensorBoard's files: one for each start of a rank 0, all in the one folder.

    A step that was taken twice stands in two of them, likewise; each has the undisturbed loss.
    """
    lines = nodes.lines()
    starts = [line for line in lines if not line.is_step and line.rank == 0]
    assert len(list(nodes.folder.rglob("events.out.tfevents.*"))) == len(starts)
    events = EventAccumulator(str(nodes.folder), size_guidance={"scalars": 0})
    events.Reload()
    logged: dict[int, list[float]] = defaultdict(list)
    for event in sorted(events.Scalars("train_loss"), key=lambda event: event.wall_time):
        logged[event.step + 1].append(event.value)
    assert set(logged) == set(undisturbed)
    for step, values in logged.items():
        assert len(values) <= len({line.met_at for line in lines if line.step == step})
        assert values == pytest.approx([undisturbed[step].loss] * len(values), rel=1e-5)


@pytest.mark.long
def test_a_worker_killed_in_the_first_save(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """A new folder, and one that holds an unpublished save alone: a fresh start, which is said.

    So is the variable without which a node that joins would be waited for in vain.
    """
    with job(tmp_path / "run") as nodes:
        nodes.own_settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
        nodes.start(FIRST)
        nodes.stop_in_a_save(FIRST)
        since = nodes.signal(FIRST, signal.SIGKILL, agent=False)
        nodes.finish()
        first, second = re.findall("No checkpoint was loaded: .*", nodes.log_of(FIRST))
        assert first == "No checkpoint was loaded: training starts from step 0."
        lies = f" Unfinished saves are in {nodes.checkpoints}."
        assert second == first + lies
        named = "--nnodes=1:4 lets nodes join and leave, but torchrun's agents share one store"
        assert nodes.log_of(FIRST).count(named) == 2
        check_job(nodes, undisturbed, "lose a worker in the first save", since)


def lose_a_worker(nodes: Job) -> float:
    """Kill the worker of a node; its agent starts another one."""
    return nodes.signal(SECOND, signal.SIGKILL, agent=False)


def lose_a_node(nodes: Job) -> float:
    """Kill a node, agent and worker at once."""
    return nodes.kill(SECOND)


def lose_the_first_node(nodes: Job) -> float:
    """Kill the node of rank 0."""
    return nodes.kill(FIRST)


def lose_two_nodes(nodes: Job) -> float:
    """Kill two nodes at once."""
    return nodes.kill(SECOND, THIRD)


def end_the_first_node(nodes: Job) -> float:
    """End the agent of rank 0's node by SIGTERM, which it passes on to its worker, and no other."""
    nodes.killed.add(FIRST)  # an agent that is told to stop does not end by 0
    now = time.time()
    os.kill(nodes.agents[FIRST].pid, signal.SIGTERM)
    return now


EVENTS = [
    (end_the_first_node, (FIRST, SECOND)),
    (lose_a_node, (FIRST, SECOND)),
    (lose_two_nodes, (FIRST, SECOND, THIRD)),
    # Of three, so that the rest has to learn of another meeting place.
    (lose_the_first_node, (FIRST, SECOND, THIRD)),
]


@pytest.mark.long
@pytest.mark.parametrize(("event", "begun"), EVENTS, ids=[event.__name__ for event, _ in EVENTS])
def test_what_is_lost(
    event: Callable[[Job], float],
    begun: tuple[int, ...],
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    """The rest goes on from the last checkpoint, with the samples and losses of each step."""
    with job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.start(*begun)
        nodes.wait_for_step(AT, world=len(begun))
        since = event(nodes)
        nodes.go_on(AT)
        nodes.finish()
        check_job(nodes, undisturbed, event.__name__.replace("_", " "), since)
        assert not nodes.forced()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_node_that_comes_back(workers: int, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """All ranks are stopped, and a larger world goes on, twice: after a loss and a gain.

    Nodes and devices are those of torchrun, whatever the configuration says of them.
    """
    with job(tmp_path / "run") as nodes:
        nodes.own_settings["WORKERS"] = str(workers)
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2 * workers)
        nodes.kill(SECOND)
        nodes.go_on(AT)
        nodes.wait_for_step(LATER, world=workers)
        since, sent = time.time(), nodes.signals_sent(FIRST)
        nodes.start(SECOND)
        # Several ranks agree before a batch that they end: a callback that holds one holds all.
        nodes.wait_until(lambda: nodes.signals_sent(FIRST) == sent + workers, "SIGTERM")
        nodes.go_on(LATER)
        nodes.wait_for_start(world=2 * workers, since=since)
        nodes.finish()
        name = "a node comes back" + (", each with 2 workers" if workers > 1 else "")
        check_job(nodes, undisturbed, name, since)
        assert not nodes.forced()


@pytest.mark.long
def test_the_saved_configuration_is_of_use(
    undisturbed: Undisturbed, fork_server: ForkServer, tmp_path: Path
) -> None:
    """It is written again by each start; alone, it goes on with the run, without torchrun."""
    with job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = lose_a_worker(nodes)
        nodes.go_on(AT)
        nodes.finish()
        check_job(nodes, undisturbed, "lose a worker", since)
    (saved,) = nodes.folder.rglob("fit.yaml")
    assert saved.stat().st_mtime > since
    command = ["fit", f"--config={saved}", f"--trainer.max_epochs={EPOCHS + 1}"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    alone = fork_server.start_program(partial(run_cli, command, tmp_path, meeting), tmp_path, "on")
    try:
        status = alone.wait(time.monotonic() + HANG_TIMEOUT_S)
        assert status == 0, alone.stderr.read_text()[-4000:]
    finally:
        alone.kill()
    went_on = [line for line in nodes.lines() if line.step > STEPS and line.is_step]
    assert {(line.step, line.world) for line in went_on} == {
        (step, 1) for step in range(STEPS + 1, STEPS + STEPS // EPOCHS + 1)
    }


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_node_killed_in_a_save(
    background: bool, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The one of rank 0, which publishes: the rest goes on from the checkpoint before."""
    way = f"--trainer.strategy.init_args.async_save={str(background).lower()}"
    with job(tmp_path / "run", way) as nodes:
        nodes.start(FIRST, SECOND)
        nodes.wait_until(lambda: nodes.last_step() == 2 * SAVE_EVERY, "checkpoint")
        nodes.stop_in_a_save(FIRST)
        since = nodes.kill(FIRST)
        nodes.finish()
        kind = "background" if background else "blocking"
        check_job(nodes, undisturbed, f"lose the first node in a {kind} save", since)


@pytest.mark.long
def test_a_node_that_stops_for_a_minute(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The rest goes on without it when a collective times out; it joins again when it wakes."""
    with job(tmp_path / "run", TIMEOUT) as nodes:
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = nodes.signal(SECOND, signal.SIGSTOP)
        nodes.go_on(AT)
        nodes.wait_for_step(LATER, world=1)
        time.sleep(max(0.0, since + MINUTE_S - time.time()))
        woken = nodes.signal(SECOND, signal.SIGCONT)
        nodes.wait_for_start(world=2, since=woken)
        nodes.go_on(LATER)
        nodes.finish()
        check_job(nodes, undisturbed, "a node stops for a minute", since)


@pytest.mark.long
@pytest.mark.skipif(not can_make_namespaces(), reason="no rights to make network namespaces")
def test_a_node_that_is_cut_off(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The rest goes on without it; its worker neither trains nor saves, and has ended by then."""
    with job_in_namespaces(tmp_path / "run", (FIRST, SECOND), TIMEOUT) as nodes:
        nodes.hold(AT)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = nodes.cut_off(SECOND)
        nodes.go_on(AT)
        nodes.finish()
        # Its agent reads from its lost connection to the store, and does not look after its dead.
        workers = nodes.processes(SECOND, agent=False)
        assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in workers)
        check_job(nodes, undisturbed, "a node's network is cut", since)
        # Whatever has begun or taken a step since has met at the first node's address.
        later = [line for line in nodes.lines() if line.time > since]
        here = nodes.settings(FIRST)["ADDRESS"]
        assert {(line.world, line.met_at.partition(":")[0]) for line in later} == {(1, here)}


@pytest.mark.long
def test_agents_that_share_their_store(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """As torchrun has it by default: a world does not take for its own what one before it wrote."""
    with job(tmp_path / "run") as nodes:
        nodes.own_settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
        nodes.hold(AT)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = lose_a_worker(nodes)
        nodes.go_on(AT)
        nodes.finish()
        check_job(nodes, undisturbed, "lose a worker, the store shared", since)
