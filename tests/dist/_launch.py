"""Runs a function of a test module as several ranks: processes of their own, ended by their id."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.timeouts import HANG_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RankResult:
    """What is left of one rank."""

    notes: dict[str, Any]
    """What it noted, by case."""

    returncode: int
    """Negative where a signal ended it."""

    stderr: str


@dataclass(frozen=True)
class Job:
    """What a rank's function is given: a gloo process group has been initialised."""

    rank: int
    world_size: int

    def note(self, case: str, value: object) -> None:
        """Keep plain data for the test, at once: this process may be killed next."""
        print(json.dumps([case, value]), flush=True)


def run_ranks(
    program: Callable[[Job], None],
    world_size: int,
    *,
    store_of_launcher: bool = False,
    timeout_s: float = HANG_TIMEOUT_S,
) -> list[RankResult]:
    """Run ``program`` on so many ranks and give what is left of each.

    Rank 0 hosts the store, as with a plain script, or this process does, as with torchrun.
    """
    host = None
    if store_of_launcher:
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port if host is not None else _free_port()
    call = [
        program.__code__.co_filename,
        program.__name__,
        port,
        world_size,
        int(store_of_launcher),
    ]
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes.extend(
                _start([*map(str, call), str(rank)], Path(folder, str(rank)))
                for rank in range(world_size)
            )
            end = time.monotonic() + timeout_s
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            said = [path.read_text() for path in sorted(Path(folder).iterdir())]
            msg = f"the ranks took longer than {timeout_s} s:\n" + "\n".join(said)
            raise AssertionError(msg) from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_result(p.returncode, Path(folder, str(r))) for r, p in enumerate(processes)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start(arguments: list[str], said: Path) -> subprocess.Popen[bytes]:
    with said.with_suffix(".out").open("wb") as out, said.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=err,
        )


def _result(returncode: int, said: Path) -> RankResult:
    lines = said.with_suffix(".out").read_text().splitlines()
    notes = dict(json.loads(line) for line in lines if line.startswith('["'))  # not DeepSpeed's
    return RankResult(notes, returncode, said.with_suffix(".err").read_text())


def _be_rank(path: str, program: str, *numbers: str) -> None:
    port, world_size, store_of_launcher, rank = map(int, numbers)
    timeout = timedelta(seconds=30)
    host = "127.0.0.1"
    if store_of_launcher:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    else:
        url = f"tcp://{host}:{port}"
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=world_size, timeout=timeout
        )
    runpy.run_path(path)[program](Job(rank, world_size))


if __name__ == "__main__":
    _be_rank(*sys.argv[1:])
