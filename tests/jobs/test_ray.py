"""A run on Ray Train that loses and regains workers and nodes."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from typing_extensions import override

from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.jobs._job import (
    AT,
    LATER,
    SAVE_EVERY,
    STEPS,
    Job,
    Undisturbed,
    check_steps,
    count_event,
    repeated_steps,
    start_process,
)
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, environment

HEAD = 0
"""The node that hosts the cluster and the driver, in addition to its worker."""

DRIVER = -1
"""The driver's key in ``Job.agents``."""

PORTS = (
    "dashboard-agent-listen",
    "dashboard-agent-grpc",
    "runtime-env-agent",
    "metrics-export",
    "node-manager",
    "object-manager",
)
"""Ports passed to a node: without them, agents choose ports, and a node exits if it takes 15 s."""

STARTED = "runtime started"
"""A node prints this after it has joined."""

SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # Otherwise Ray writes a token to the home directory.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray may still count a lost node; after this time it checks again.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "GLOO_SOCKET_IFNAME": "lo",
}


def is_ray_installed() -> bool:
    return find_spec("ray") is not None and find_spec("ray.train.v2") is not None


@dataclass
class RayJob(Job):
    """A cluster; each node has its own address and one CPU, for one worker."""

    session: str = ""
    """Folder for Ray's files; a short path, because Ray creates sockets in it."""

    @override
    def start(self, *nodes: int) -> None:
        """Start nodes, the head first; retry if Ray's timeouts of 15 and 30 s were too short."""
        for node in nodes:
            self.killed.discard(node)
            until = time.monotonic() + HANG_TIMEOUT_S
            while not self._starts(node):
                if time.monotonic() > until:
                    msg = f"node {node} does not start\n{self.output_tail()}"
                    raise TimeoutError(msg)

    def _starts(self, node: int) -> bool:
        rendezvous = (
            [
                *("--head", f"--port={self.port}", f"--temp-dir={self.session}"),
                *("--include-dashboard=false", f"--ray-client-server-port={free_port()}"),
            ]
            if node == HEAD
            else [f"--address={self._address}"]
        )
        self._run(
            node,
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *rendezvous),
                f"--node-ip-address=127.0.0.{node + 2}",
                *("--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000"),
                *("--min-worker-port=0", "--max-worker-port=0", "--log-style=record"),
                *(f"--{name}-port={free_port()}" for name in PORTS),
            ],
        )
        before = self.log_of(node).count(STARTED)
        while self.agents[node].poll() is None:
            if self.log_of(node).count(STARTED) > before:
                return True
            time.sleep(0.1)
        return False

    def drive(self) -> None:
        script = str(Path(__file__).with_name("_ray_driver.py"))
        self._run(DRIVER, [sys.executable, script, self._address, str(self.folder)])

    @property
    def _address(self) -> str:
        return f"127.0.0.2:{self.port}"  # Ray replaces 127.0.0.1 by the machine's own address.

    def _run(self, node: int, command: list[str]) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
        settings = {**environment(), **SETTINGS, "PYTHONPATH": path}
        self.agents[node] = start_process(command, self.folder / f"node-{node}.log", settings)

    def kill_worker(self, rank: int, world: int) -> float:
        """Kill only the process of a worker's actor; return the time."""
        of_rank = [line for line in self.lines() if (line.rank, line.world) == (rank, world)]
        now = time.time()
        os.kill(of_rank[-1].pid, signal.SIGKILL)
        return now

    @property
    @override
    def checkpoints(self) -> Path:
        """The example's folder in the run's folder of Ray's storage."""
        return self.folder / "run" / "checkpoints"

    @override
    def finish(self) -> None:
        """Wait for the driver, which must succeed."""
        status = self.agents[DRIVER].wait(HANG_TIMEOUT_S)
        assert status == 0, f"the driver ended with {status}\n{self.output_tail()}"

    @override
    def end(self) -> None:
        """Kill all processes; each worker has its own process group."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self.session in " ".join(process.cmdline()):
                    process.kill()
        for line in self.lines():  # Workers change their command lines.
            with suppress(psutil.Error, ProcessLookupError):
                if psutil.Process(line.pid).create_time() < line.time:
                    os.kill(line.pid, signal.SIGKILL)
        for node, agent in self.agents.items():
            self.signal(node, signal.SIGKILL)
            agent.wait(HANG_TIMEOUT_S)


@contextmanager
def ray_job(folder: Path) -> Iterator[RayJob]:
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as session:
        nodes = RayJob(folder, free_port(), session=session)
        try:
            yield nodes
        finally:
            nodes.end()


pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not is_ray_installed(), reason="the extra `ray` is not installed"),
]

SECOND = 1


def check_run(nodes: RayJob, undisturbed: Undisturbed) -> None:
    lines = nodes.lines()
    check_steps(lines, undisturbed)
    assert max(repeated_steps(lines).values()) <= SAVE_EVERY
    result = json.loads((nodes.folder / "result.json").read_text())
    assert result["metrics"]["step"] == STEPS
    assert result["metrics"]["train_loss"] == pytest.approx(undisturbed[STEPS].loss, rel=1e-5)
    assert sorted(result["kept"].values()) == [STEPS - SAVE_EVERY, STEPS]
    paths = {str(path) for path in nodes.checkpoints.iterdir() if not path.name.startswith("last")}
    assert paths == set(result["kept"])
    assert Path(result["checkpoint"]) == (nodes.checkpoints / "last.ckpt").resolve()
    for path in paths:
        assert verify_checkpoint(path).is_sound


def test_a_ray_run_continues_after_a_node_is_killed_and_after_it_returns(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with ray_job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(HEAD, SECOND)
        nodes.drive()
        nodes.wait_for_step(AT, world=2)
        lost = nodes.kill(SECOND)
        nodes.release(AT)
        nodes.wait_for_step(LATER, world=1)
        gained = time.time()
        nodes.start(SECOND)
        nodes.wait_for_start(world=2, since=gained)
        nodes.release(LATER)
        nodes.finish()
        check_run(nodes, undisturbed)
        count_event("Ray loses a node", nodes.lines(), lost)
        count_event("Ray gains a node", nodes.lines(), gained)


def test_ray_restarts_all_workers_when_one_is_killed(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with ray_job(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.start(HEAD, SECOND)
        nodes.drive()
        nodes.wait_for_step(AT, world=2)
        since = nodes.kill_worker(rank=1, world=2)
        nodes.release(AT)
        nodes.finish()
        check_run(nodes, undisturbed)
        count_event("Ray loses a worker", nodes.lines(), since)
