"""Worlds of ranks on the device of ``--device``: one GPU per rank or for all, or CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fork_server import Placement
from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ROOT, World, environment, joined_world, listening

KINDS = ("cpu", "cuda")
DEVICE = pytest.StashKey[str]()
"""The kind that the session uses."""
SHARED = pytest.StashKey[bool]()
"""Whether all ranks share a GPU (``--share-gpu``)."""


def chosen_device(requested: str | None) -> str:
    """Return ``--device``, else ``DS_ACCELERATOR``, else ``cuda`` if available."""
    requested = requested or os.environ.get("DS_ACCELERATOR")
    if requested == "cpu":
        return requested
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if requested == "cuda":
        msg = (
            "--device=cuda or DS_ACCELERATOR=cuda requires a CUDA device, but torch found none. "
            "--device=cpu runs the same tests on CPUs (make test-gpu ARGS=--device=cpu)."
        )
        raise pytest.UsageError(msg)
    return "cpu"


def skip_without_devices(placement: Placement, world: int) -> None:
    """Skip a test whose ranks would share a GPU, which NCCL refuses."""
    import torch

    if placement.backend == "nccl" and world > (count := torch.cuda.device_count()):
        pytest.skip(f"NCCL needs one GPU per rank: {world} ranks, {count} GPUs (try --share-gpu)")


class DeviceRanks:
    """Starts each rank as a new process, because CUDA may not work after a fork."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._folder = tempfile.TemporaryDirectory(prefix="ez-device-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._worlds = 0

    def start(self, world: int) -> World:
        self._worlds += 1
        path = Path(self._folder.name) / f"{self._worlds}-of-{world}"
        logs = tuple(path.with_name(f"{path.name}.{rank}.log") for rank in range(world))
        command = [sys.executable, "-m", "tests.support.device_rank", str(path)]
        device, shared = self._placement.device, ["shared"] * self._placement.shared
        port = free_port()
        with ExitStack() as stack:
            listener = stack.enter_context(listening(path))
            ranks = [
                subprocess.Popen(
                    [*command, str(rank), str(world), str(port), device, *shared],
                    cwd=ROOT,
                    env=environment(device),
                    stdin=subprocess.DEVNULL,
                    stdout=stack.enter_context(logs[rank].open("wb")),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for rank in range(world)
            ]
            self._processes += ranks
            return joined_world(listener, tuple(rank.pid for rank in ranks), logs)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(HANG_TIMEOUT_S)
        self._folder.cleanup()
