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
    AT,
    EPOCHS,
    LATER,
    SAVE_EVERY,
    STEPS,
    Job,
    Undisturbed,
    check_steps,
    count_event,
    job,
    steps_taken_again,
)
from tests.examples._cli_programs import run_cli
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ForkServer

SUBNET = f"10.{os.getpid() % 200 + 20}.77"
"""Of this process's own."""

NAME = f"ez{os.getpid() % 100_000}"
"""Begins the names of devices, which may have 15 characters."""


def ip(*words: str) -> None:
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
    """A job whose nodes have their own network namespaces at a bridge of this process."""

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
        """Remove a node's network for good; return the time. Its agent may end in any way."""
        self.killed.add(node)
        ip("-n", f"{NAME}n{node}", "link", "set", "eth0", "down")
        return time.time()


@contextmanager
def job_in_namespaces(folder: Path, nodes: Sequence[int], *more: str) -> Iterator[JobInNamespaces]:
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

TIMEOUT = "--trainer.strategy.init_args.timeout=0:00:20"
"""How long ranks wait for one whose node is silent: shorter than anybody would set it."""

MINUTE_S = 60.0


def check_job(nodes: Job, undisturbed: Undisturbed, event: str, since: float) -> None:
    """Check all results of a job whose agents have ended; record the cost of the event."""
    assert set(undisturbed) == set(range(1, STEPS + 1))
    lines = nodes.lines()
    check_steps(lines, undisturbed)
    assert max(steps_taken_again(lines).values()) <= SAVE_EVERY
    check_curve(nodes, undisturbed)
    assert nodes.last_step() == STEPS
    assert [path.name for path in nodes.checkpoints.glob("last*")] == ["last.ckpt"]
    assert not nodes.unpublished()
    assert not list(nodes.folder.glob("version_*"))
    count_event(event, lines, since)


def check_curve(nodes: Job, undisturbed: Undisturbed) -> None:
    """Check TensorBoard's files, one for each start of a rank 0; repeated steps are equal."""
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
def test_a_kill_in_the_first_save_leads_to_a_fresh_start(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The log also names the variable that joining nodes need."""
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


def end_the_first_node(nodes: Job) -> float:
    """Send SIGTERM to the agent of rank 0's node, which passes it on to its worker only."""
    nodes.killed.add(FIRST)  # an agent that is told to stop does not end by 0
    now = time.time()
    os.kill(nodes.agents[FIRST].pid, signal.SIGTERM)
    return now


EVENTS: dict[str, tuple[Callable[[Job], float], tuple[int, ...]]] = {
    "end the first node": (end_the_first_node, (FIRST, SECOND)),
    "lose a node": (lambda nodes: nodes.kill(SECOND), (FIRST, SECOND)),
    "lose two nodes": (lambda nodes: nodes.kill(SECOND, THIRD), (FIRST, SECOND, THIRD)),
    # Of three, so that the rest has to learn of another meeting place.
    "lose the first node": (lambda nodes: nodes.kill(FIRST), (FIRST, SECOND, THIRD)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EVENTS)
def test_the_job_continues_exactly_after_a_loss(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    event, begun = EVENTS[name]
    with job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.start(*begun)
        nodes.wait_for_step(AT, world=len(begun))
        since = event(nodes)
        nodes.go_on(AT)
        nodes.finish()
        check_job(nodes, undisturbed, name, since)
        assert not nodes.forced()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_the_job_grows_after_a_loss_and_a_gain(
    workers: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Nodes and devices are those of torchrun, not of the configuration."""
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


@contextmanager
def job_that_lost_a_worker(
    folder: Path, undisturbed: Undisturbed, event: str, **settings: str
) -> Iterator[tuple[Job, float]]:
    with job(folder) as nodes:
        nodes.own_settings.update(settings)
        nodes.hold(AT)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = nodes.signal(SECOND, signal.SIGKILL, agent=False)  # its agent starts another one
        nodes.go_on(AT)
        nodes.finish()
        check_job(nodes, undisturbed, event, since)
        yield nodes, since


@pytest.mark.long
def test_the_saved_configuration_alone_continues_the_run(
    undisturbed: Undisturbed, fork_server: ForkServer, tmp_path: Path
) -> None:
    with job_that_lost_a_worker(tmp_path / "run", undisturbed, "lose a worker") as (nodes, since):
        pass
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
def test_a_kill_of_the_publishing_node_falls_back_to_the_checkpoint_before(
    background: bool, undisturbed: Undisturbed, tmp_path: Path
) -> None:
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
def test_a_stopped_node_is_left_behind_and_joins_again(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
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
def test_a_node_without_network_neither_trains_nor_saves(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
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
def test_agents_can_share_their_store(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """As by torchrun's default: a world must not read the keys of an earlier one."""
    event, share = "lose a worker, the store shared", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    with job_that_lost_a_worker(tmp_path / "run", undisturbed, event, **share):
        pass
