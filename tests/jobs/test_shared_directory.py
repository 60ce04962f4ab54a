"""Checkpoint directories on several hosts: one shared directory with caches, or separate ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typing_extensions import override

from tests.jobs._job import AT, LATER, SAVE_EVERY, Job, Undisturbed, in_own_mounts, job
from tests.jobs.test_torchrun import FIRST, SECOND, check_job
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, environment

CACHE_S = 30
"""How long a mount caches names (also missing ones) and attributes.

As long as NFS caches those of directories (``acdirmin``). Opening a file reads it anew.
"""


def cached(source: Path, target: Path) -> tuple[str, ...]:
    """Return the command that mounts a directory with the caches of a network file system."""
    times = ",".join(f"{name}_timeout={CACHE_S}" for name in ("attr", "entry", "negative"))
    return ("bindfs", "-o", times, str(source), str(target))


@contextmanager
def ended_caches(folder: Path) -> Iterator[None]:
    """End the servers of the mounts below a folder, which keep each other alive."""
    try:
        yield
    finally:
        for process in psutil.process_iter(["name", "cmdline"]):
            of_folder = any(str(folder) in word for word in process.info["cmdline"] or ())
            if process.info["name"] == "bindfs" and of_folder:
                process.kill()


def can_mount(*command: str) -> bool:
    """Return whether this process has the rights and programs for its own mounts."""
    if shutil.which("unshare") is None or not all(map(shutil.which, command)):
        return False
    mounts = in_own_mounts([("mount", "-t", "tmpfs", "none", "/mnt")])
    return subprocess.run([*mounts, "true"], check=False, capture_output=True).returncode == 0


@dataclass
class JobWithCaches(Job):
    """A job whose nodes see the checkpoints through their own caches."""

    @property
    @override
    def checkpoints(self) -> Path:
        return self.folder / "server"

    @override
    def prefix(self, node: int) -> tuple[str, ...]:
        return in_own_mounts([cached(self.checkpoints, self.folder / "checkpoints")])


@contextmanager
def job_with_caches(folder: Path, *more: str) -> Iterator[Job]:
    """Yield a job without nodes, whose checkpoint directory exists."""
    for name in ("server", "checkpoints"):
        (folder / name).mkdir(parents=True)
    with ended_caches(folder), job(folder, *more, kind=JobWithCaches) as nodes:
        yield nodes


CHECK = """
import json, sys
from lightning_elastic_zero import ElasticZeroError
from lightning_elastic_zero.checkpoint.directory_check import check_directories
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.client import StoreRanks
from contextlib import closing
from torch.distributed.rendezvous import rendezvous
store, rank, world_size = next(rendezvous("env://"))
with closing(StoreRanks(store, rank, world_size, name="a test", times=Timeouts())) as ranks:
    try:
        result = check_directories([sys.argv[1]], ranks)
    except ElasticZeroError as error:
        result = [type(error).__name__, str(error)]
print(json.dumps(result))
"""


def check_on_ranks(
    directory: Path, mounts: Callable[[int], list[tuple[str, ...]]], world_size: int = 3
) -> list[list[object]]:
    """Return the results of `check_directories` on ranks with their own mounts."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(world_size):
        own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), **rendezvous}
        ranks.append(
            subprocess.Popen(
                [*in_own_mounts([*mounts(rank), ("true",)]), *PYTHON, CHECK, str(directory)],
                cwd=ROOT,
                env={**environment(), **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=HANG_TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in ranks] == [0] * world_size, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


PYTHON = (sys.executable, "-c")

needs_mounts = pytest.mark.skipif(not can_mount(), reason="no rights to make mounts")
needs_bindfs = pytest.mark.skipif(not can_mount("bindfs"), reason="no bindfs, or no rights")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.long
@needs_mounts
def test_a_shared_directory_is_recognized_on_all_hosts(directory: Path) -> None:
    assert check_on_ranks(directory, lambda _: []) == [[]] * 3
    assert list(directory.iterdir()) == []


@pytest.mark.long
@needs_mounts
def test_a_host_with_its_own_disk_is_reported_without_leftovers(directory: Path) -> None:
    def mounts(rank: int) -> list[tuple[str, ...]]:
        return [("mount", "-t", "tmpfs", "none", str(directory))] if rank == 1 else []

    first, *others = check_on_ranks(directory, mounts)
    assert first[0] == "SaveError"
    assert f"{directory}/" in str(first[1])
    assert "that rank 0 wrote there" in str(first[1])
    assert "Save on a file system that all machines share" in str(first[1])
    assert others == [first] * 2
    assert list(directory.iterdir()) == []


@pytest.mark.long
@needs_mounts
def test_an_overlay_that_keeps_a_hosts_writes_is_reported(directory: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"

    def mounts(rank: int) -> list[tuple[str, ...]]:
        if rank != 2:
            return []
        layers = f"lowerdir={directory},upperdir={mine}/upper,workdir={mine}/work"
        return [
            ("mkdir", "-p", str(mine)),
            ("mount", "-t", "tmpfs", "none", str(mine)),
            ("mkdir", f"{mine}/upper", f"{mine}/work"),
            ("mount", "-t", "overlay", "overlay", "-o", layers, str(directory)),
        ]

    first, *others = check_on_ranks(directory, mounts)
    assert first[0] == "SaveError"
    assert f"{directory}/" in str(first[1])
    assert "that rank 2 wrote there" in str(first[1])
    assert others == [first] * 2
    assert list(directory.iterdir()) == []


@pytest.mark.long
@needs_bindfs
def test_a_shared_directory_behind_caches_is_recognized(tmp_path: Path) -> None:
    server, directory = tmp_path / "server", tmp_path / "checkpoints"
    server.mkdir()
    directory.mkdir()
    with ended_caches(tmp_path):
        results = check_on_ranks(directory, lambda _: [cached(server, directory)])
    assert results == [[]] * 3
    assert list(server.iterdir()) == []


@pytest.mark.long
@pytest.mark.engine
@needs_bindfs
def test_a_killed_worker_resumes_although_names_are_cached(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """New checkpoints of other hosts must be found, and deleted ones must not be required."""
    with job_with_caches(tmp_path / "run") as nodes:
        nodes.hold(AT)
        nodes.hold(LATER)
        nodes.start(FIRST, SECOND)
        nodes.wait_for_step(AT, world=2)
        nodes.signal(SECOND, signal.SIGKILL, agent=False)
        nodes.release(AT)
        nodes.wait_for_step(LATER, world=2)
        # Now the other node, so that each host's cache was once the outdated one.
        since = nodes.signal(FIRST, signal.SIGKILL, agent=False)
        nodes.release(LATER)
        nodes.finish()
        assert nodes.last_step() % SAVE_EVERY == 0
        check_job(nodes, undisturbed, "lose a worker where names are cached", since)
