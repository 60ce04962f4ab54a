"""Nodes of a torchrun job on one machine: an agent each, with its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.engine._worker_pool import ROOT, environment
from tests.ports import free_port
from tests.timeouts import HANG_TIMEOUT_S
from tests.trainer import _torchrun_script

RENDEZVOUS = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
"""The store is nobody's of the nodes': any of them may be lost. Lost nodes are noticed in 3 s."""


@dataclass
class Nodes:
    """A job's nodes, by number."""

    folder: Path
    port: int
    workers: int = 1
    most: int = 3
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, node: int) -> None:
        """Start a node, or start it again."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes=1:{self.most}",
            f"--nproc-per-node={self.workers}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=job",
            f"--rdzv-conf={RENDEZVOUS}",
            "--local-addr=127.0.0.1",
            "--max-restarts=20",
            "--monitor-interval=0.2",
            _torchrun_script.__file__,
            str(self.folder),
        ]
        with (self.folder / f"node-{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self, node: int, *, agent: bool) -> list[int]:
        """Return a node's workers, and its agent if asked for."""
        pid = self.agents[node].pid
        with suppress(psutil.NoSuchProcess):
            found = [child.pid for child in psutil.Process(pid).children()]
            return [*found, pid] if agent else found
        return []

    def hold(self, step: int) -> None:
        """Let ranks wait once they have taken a step, until ``go_on``."""
        (self.folder / f"hold-{step}").touch()

    def go_on(self, step: int) -> None:
        """Let ranks go on from a step that was held."""
        (self.folder / f"hold-{step}").unlink()

    def signal(self, node: int, number: int, *, agent: bool = True) -> None:
        """Send a signal to a node's processes."""
        for pid in self.processes(node, agent=agent):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def lines(self) -> list[dict[str, Any]]:
        """Return what ranks have noted so far; a line that is cut was never finished."""
        found = []
        with suppress(FileNotFoundError):
            for line in (self.folder / "steps.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def wait_for(self, step: int, world: int | None = None, after_line: int = 0) -> None:
        """Wait until a step has been taken, by a world of this size, if one is given.

        Raises:
            TimeoutError: it was not, or the job has ended.
        """
        until = time.monotonic() + HANG_TIMEOUT_S
        while time.monotonic() < until:
            if any(
                line["step"] >= step and world in (None, line["world"])
                for line in self.lines()[after_line:]
            ):
                return
            if all(agent.poll() is not None for agent in self.agents.values()):
                break
            time.sleep(0.05)
        raise TimeoutError(self.said())

    def finish(self) -> list[int]:
        """Wait for all agents that were not killed; return their exit statuses."""
        until = time.monotonic() + HANG_TIMEOUT_S
        return [agent.wait(until - time.monotonic()) for agent in self.agents.values()]

    def log_of(self, node: int) -> str:
        """Return what a node has printed so far."""
        return (self.folder / f"node-{node}.log").read_text(errors="replace")

    def said(self) -> str:
        """Return the end of what each node has printed."""
        return "\n".join(f"-- node {node}\n{self.log_of(node)[-4000:]}" for node in self.agents)

    def end(self) -> None:
        """Kill whoever is left."""
        for node in self.agents:
            self.signal(node, signal.SIGCONT)
            self.signal(node, signal.SIGKILL)


@contextmanager
def job(folder: Path, workers: int = 1, most: int = 3) -> Iterator[Nodes]:
    """Yield a job without nodes, and kill what is left of it."""
    folder.mkdir(parents=True)
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=60))
    nodes = Nodes(folder, port, workers, most)
    try:
        yield nodes
    finally:
        nodes.end()
        del store
