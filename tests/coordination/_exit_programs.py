"""Worlds of ranks that end: one process forks the ranks of one world after another.

Called with the names of functions below, and a number of worlds for each, it prints the exit
statuses of their ranks as JSON, by name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.errors import RanksError
from tests.support.processes import free_port

WORLD = 2
SPIN_S = 0.2
HELD_S = 7.0
"""Longer than closed ranks wait for their thread."""


def stock() -> None:
    """End while a worker of gloo waits for Python's lock, which it needs to free a tensor.

    On a busy machine this happens by itself, if the worker is not scheduled for a moment. Here,
    this thread keeps the lock: it computes without system calls.
    """
    tensor = torch.ones(3)
    seen = tensor.numpy()
    dist.barrier()
    sys.setswitchinterval(1000.0)
    dist.all_reduce(tensor, async_op=True)
    while seen[0] != dist.get_world_size():
        pass
    end = time.perf_counter() + SPIN_S
    while time.perf_counter() < end:
        pass


def left_open() -> None:
    """End like ``stock`` after steps of this library, without closing anything."""
    ranks = connect_ranks()
    assert ranks.all_gather("meet", dist.get_rank) == [*range(dist.get_world_size())]
    stock()


def closed() -> None:
    """End like ``stock``, with closed ranks."""
    ranks = connect_ranks()
    ranks.run_all("meet", lambda: None)
    ranks.close()
    stock()


def destroyed() -> None:
    """End like ``stock``, with a reference to the destroyed process group."""
    closed()
    sys.modules["__main__"].__dict__["kept"] = dist.group.WORLD
    dist.destroy_process_group()


def exits() -> None:
    """End like ``stock``, through ``sys.exit``."""
    left_open()
    sys.exit(0)


def raises() -> None:
    """End like ``stock``, with an exception, for which Python's status is 1."""
    left_open()
    sys.stderr.close()
    raise SystemExit(1) from OSError("disk")


def host_is_stopped() -> None:
    """Rank 1 exits while its thread waits for the store, whose host continues meanwhile."""
    times = Timeouts(heartbeat_interval_s=0.1)
    ranks = StoreRanks(_get_default_store(), dist.get_rank(), dist.get_world_size(), times=times)
    host = ranks.broadcast("host", os.getpid)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))

    def stop() -> None:
        if ranks.rank == 1:
            sys.modules["__main__"].__dict__["last"] = _LastOfAll(host)
            subprocess.Popen(["/bin/sh", "-c", f"sleep {HELD_S}; kill -CONT {host}"])
            os.kill(host, signal.SIGSTOP)
            signal.alarm(1)  # ten beats: the thread asks for the verdict by then

    with suppress(RanksError):
        ranks.run_all("stop", stop)


class _LastOfAll:
    """Delays the end of the interpreter while a process is stopped, and a little longer."""

    def __init__(self, pid: int) -> None:
        self._look = Path(f"/proc/{pid}/stat").read_text
        self._sleep = time.sleep

    def __del__(self) -> None:
        """Sleep, without Python's lock."""
        for _ in range(300):
            try:
                state = self._look().rpartition(")")[2].split()[0]
            except OSError:
                break
            if state != "T":
                break
            self._sleep(0.1)
        self._sleep(0.5)


def main(wanted: dict[str, int]) -> None:
    """Run worlds, one after another; only the first process returns to print."""
    found: dict[str, list[int]] = {}
    for name, worlds in wanted.items():
        for _ in range(worlds):
            port = free_port()
            pids = []
            for rank in range(WORLD):
                pid = os.fork()
                if not pid:
                    _be_rank(globals()[name], rank, port)
                    return
                pids.append(pid)
            ended = [os.waitstatus_to_exitcode(_wait(pid)) for pid in pids]
            found.setdefault(name, []).extend(ended)
    print(json.dumps(found), flush=True)


def _wait(pid: int, timeout_s: float = 90.0) -> int:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _be_rank(program: Callable[[], None], rank: int, port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=WORLD)
    program()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
