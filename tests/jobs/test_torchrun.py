"""Jobs of torchrun's elastic agent that lose and regain workers and nodes."""

from __future__ import annotations

import os
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

from tests.jobs._job import (
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
    repeated_steps,
)
from tests.support.cli_programs import run_cli
from tests.support.launch import output_of_forked
from tests.support.processes import free_port
from tests.support.ranks import ForkServer

SUBNET = f"10.{os.getpid() % 200 + 20}.77"
"""A subnet for this process only."""

NAME = f"ez{os.getpid() % 100_000}"
"""Prefix of device names, which have at most 15 characters."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    """Return whether this process may create network namespaces."""
    if shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"{NAME}t"], check=False, capture_output=True)
    if made.returncode == 0:
        ip("netns", "del", f"{NAME}t")
    return made.returncode == 0


@dataclass
class JobInNamespaces(Job):
    """A job whose nodes have their own network namespaces, connected by a bridge."""

    @override
    def prefix(self, node: int) -> tuple[str, ...]:
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
        """Disconnect a node permanently; return the time. Its agent may exit with any status."""
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
            namespace, device = f"{NAME}n{node}", f"{NAME}v{node}"
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", device, "master", f"{NAME}b", "up")
            ip("-n", namespace, "addr", "add", f"{SUBNET}.{node + 2}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", "eth0", "up")
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
"""Nodes; the one with the lowest address has rank 0."""

TIMEOUT = "--trainer.strategy.init_args.timeout=0:00:20"
"""How long ranks wait for a rank that does not respond; shorter than in real runs."""

MINUTE_S = 60.0


def check_job(nodes: Job, undisturbed: Undisturbed, event: str, since: float) -> None:
    """Check all results of a job whose agents have ended; record the cost of the event."""
    assert set(undisturbed) == set(range(1, STEPS + 1))
    lines = nodes.lines()
    check_steps(lines, undisturbed)
    assert max(repeated_steps(lines).values()) <= SAVE_EVERY
    check_curve(nodes, undisturbed)
    assert nodes.last_step() == STEPS
    assert [path.name for path in nodes.checkpoints.glob("last*")] == ["last.ckpt"]
    assert not nodes.unpublished()
    assert not list(nodes.folder.glob("version_*"))
    count_event(event, lines, since)


def check_curve(nodes: Job, undisturbed: Undisturbed) -> None:
    """Check TensorBoard's files: one for each start of rank 0, with equal repeated steps."""
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
def test_training_restarts_from_step_0_after_a_kill_during_the_first_save(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The log names the variable that joining nodes need."""
    with job(tmp_path / "run") as nodes:
        nodes.own_settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"
        nodes.start(FIRST)
        nodes.stop_in_a_save(FIRST)
        since = nodes.signal(FIRST, signal.SIGKILL, agent=False)
        nodes.finish()
        starts = "No checkpoint was loaded: training starts from step 0."
        assert nodes.log_of(FIRST).count(starts) == 2
        text = "--nnodes=1:4 lets nodes join and leave, but torchrun's agents share one store"
        assert nodes.log_of(FIRST).count(text) == 2
        check_job(nodes, undisturbed, "lose a worker in the first save", since)


def end_the_first_node(nodes: Job) -> float:
    """Send SIGTERM to the agent of rank 0's node, which passes it on to its worker only."""
    nodes.killed.add(FIRST)  # A terminated agent does not exit with status 0.
    now = time.time()
    os.kill(nodes.agents[FIRST].pid, signal.SIGTERM)
    return now


EVENTS: dict[str, tuple[Callable[[Job], float], tuple[int, ...]]] = {
    "end the first node": (end_the_first_node, (FIRST, SECOND)),
    "lose a node": (lambda nodes: nodes.kill(SECOND), (FIRST, SECOND)),
    "lose two nodes": (lambda nodes: nodes.kill(SECOND, THIRD), (FIRST, SECOND, THIRD)),
    # Three nodes, so that the other two need a new rendezvous address.
    "lose the first node": (lambda nodes: nodes.kill(FIRST), (FIRST, SECOND, THIRD)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EVENTS)
def test_the_job_continues_exactly_after_a_loss(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    event, started = EVENTS[name]
    with job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.start(*started)
        nodes.wait_for_step(AT, world=len(started))
        since = event(nodes)
        nodes.release(AT)
        nodes.finish()
        check_job(nodes, undisturbed, name, since)
        assert not nodes.forced()


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_the_job_grows_after_a_loss_and_a_gain(
    workers: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The numbers of nodes and devices are those of torchrun, not of the configuration."""
    with job(tmp_path / "run") as nodes:
        nodes.own_settings["WORKERS"] = str(workers)
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2 * workers)
        nodes.kill(SECOND)
        nodes.release(AT)
        nodes.wait_for_step(LATER, world=workers)
        since, sent = time.time(), nodes.signals_sent(FIRST)
        nodes.start(SECOND)
        # Ranks agree to stop before a batch, so a callback that holds one rank holds all.
        nodes.wait_until(lambda: nodes.signals_sent(FIRST) == sent + workers, "SIGTERM")
        nodes.release(LATER)
        nodes.wait_for_start(world=2 * workers, since=since)
        nodes.finish()
        name = "a node returns" + (", each with 2 workers" if workers > 1 else "")
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
        since = nodes.signal(SECOND, signal.SIGKILL, agent=False)  # Its agent restarts the worker.
        nodes.release(AT)
        nodes.finish()
        check_job(nodes, undisturbed, event, since)
        yield nodes, since


@pytest.mark.long
def test_the_saved_configuration_is_sufficient_to_continue_the_run(
    undisturbed: Undisturbed, fork_server: ForkServer, tmp_path: Path
) -> None:
    with job_that_lost_a_worker(tmp_path / "run", undisturbed, "lose a worker") as (nodes, since):
        pass
    (saved,) = nodes.folder.rglob("fit.yaml")
    assert saved.stat().st_mtime > since
    command = ["fit", f"--config={saved}", f"--trainer.max_epochs={EPOCHS + 1}"]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    output_of_forked(fork_server, tmp_path, partial(run_cli, command, tmp_path, rendezvous))
    continued = [line for line in nodes.lines() if line.step > STEPS and line.is_step]
    assert {(line.step, line.world) for line in continued} == {
        (step, 1) for step in range(STEPS + 1, STEPS + STEPS // EPOCHS + 1)
    }


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_kill_of_the_publishing_node_falls_back_to_the_previous_checkpoint(
    background: bool, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    option = f"--trainer.strategy.init_args.async_save={str(background).lower()}"
    with job(tmp_path / "run", option) as nodes:
        nodes.start(FIRST, SECOND)
        nodes.wait_until(lambda: nodes.last_step() == 2 * SAVE_EVERY, "checkpoint")
        nodes.stop_in_a_save(FIRST)
        since = nodes.kill(FIRST)
        nodes.finish()
        kind = "background" if background else "blocking"
        check_job(nodes, undisturbed, f"lose the first node in a {kind} save", since)


@pytest.mark.long
def test_a_stopped_node_is_excluded_and_rejoins(undisturbed: Undisturbed, tmp_path: Path) -> None:
    with job(tmp_path / "run", TIMEOUT) as nodes:
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = nodes.signal(SECOND, signal.SIGSTOP)
        nodes.release(AT)
        nodes.wait_for_step(LATER, world=1)
        time.sleep(max(0.0, since + MINUTE_S - time.time()))
        continued = nodes.signal(SECOND, signal.SIGCONT)
        nodes.wait_for_start(world=2, since=continued)
        nodes.release(LATER)
        nodes.finish()
        check_job(nodes, undisturbed, "a node stops for a minute", since)


@pytest.mark.long
@pytest.mark.skipif(not can_make_namespaces(), reason="no rights to create network namespaces")
def test_a_node_without_network_neither_trains_nor_saves(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with job_in_namespaces(tmp_path / "run", (FIRST, SECOND), TIMEOUT) as nodes:
        nodes.hold(AT)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        since = nodes.cut_off(SECOND)
        nodes.release(AT)
        nodes.finish()
        # Its agent is blocked on its lost connection to the store, and does not reap its workers.
        workers = nodes.processes(SECOND, agent=False)
        assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in workers)
        check_job(nodes, undisturbed, "a node's network is cut", since)
        # All later starts and steps belong to a world at the first node's address.
        later = [line for line in nodes.lines() if line.time > since]
        address = nodes.settings(FIRST)["ADDRESS"]
        assert {(line.world, line.met_at.partition(":")[0]) for line in later} == {(1, address)}


@pytest.mark.long
def test_agents_can_share_their_store(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """This is torchrun's default: a world must not read the keys of an earlier one."""
    event, share = "lose a worker, the store shared", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    with job_that_lost_a_worker(tmp_path / "run", undisturbed, event, **share):
        pass
