"""A job whose nodes see the checkpoint directory through mounts of their own, as hosts do."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from typing_extensions import override

from tests.elastic._job import Job, job

CACHE_S = 30
"""How long a mount shows names and attributes as it saw them last, what was missing too.

As long as NFS keeps those of directories (``acdirmin``). Opening a file reads it anew.
"""


def in_own_mounts(commands: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return what is put before a command, so that it runs with further mounts that it alone has.

    Args:
        commands: which make the mounts, in this order.
    """
    text = " && ".join(shlex.join(command) for command in commands)
    return ("unshare", "--mount", "sh", "-c", f'{text} && exec "$@"', "sh")


def cached(source: Path, target: Path) -> tuple[str, ...]:
    """Return the command that mounts a directory as a network file system with caches would."""
    times = ",".join(f"{name}_timeout={CACHE_S}" for name in ("attr", "entry", "negative"))
    return ("bindfs", "-o", times, str(source), str(target))


@contextmanager
def caches_end(folder: Path) -> Iterator[None]:
    """End those who serve the mounts below a folder: each holds its mounts, and they hold it."""
    try:
        yield
    finally:
        for process in psutil.process_iter(["name", "cmdline"]):
            of_folder = any(str(folder) in word for word in process.info["cmdline"] or ())
            if process.info["name"] == "bindfs" and of_folder:
                process.kill()


def can_mount(*command: str) -> bool:
    """Whether this process may make mounts of its own, and has what these need."""
    if shutil.which("unshare") is None or not all(map(shutil.which, command)):
        return False
    mounts = in_own_mounts([("mount", "-t", "tmpfs", "none", "/mnt")])
    return subprocess.run([*mounts, "true"], check=False, capture_output=True).returncode == 0


@dataclass
class JobWithCaches(Job):
    """A job whose nodes see the checkpoints late, each through a cache of its own."""

    @property
    @override
    def checkpoints(self) -> Path:
        return self.folder / "server"

    @override
    def entered(self, node: int) -> tuple[str, ...]:
        return in_own_mounts([cached(self.checkpoints, self.folder / "checkpoints")])


@contextmanager
def job_with_caches(folder: Path, *more: str) -> Iterator[Job]:
    """Yield a job that has no nodes yet, whose directory of checkpoints is there."""
    for name in ("server", "checkpoints"):
        (folder / name).mkdir(parents=True)
    with caches_end(folder), job(folder, *more, kind=JobWithCaches) as nodes:
        yield nodes
