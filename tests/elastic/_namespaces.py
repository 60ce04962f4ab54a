"""A job whose nodes have a network each, that can be cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from tests.elastic._job import Job
from tests.support.processes import free_port

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
