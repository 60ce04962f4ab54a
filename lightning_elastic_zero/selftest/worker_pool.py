"""The processes of a world, as who starts them sees them: started, watched, and ended by their id.

A worker has a session of its own, so that Ctrl-C comes to its starter alone, which ends it. It
ends by itself where its standard input ends: no starter that is killed leaves one behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import IO

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.selftest.worker_protocol import (
    RankReport,
    Request,
    WorldReport,
    read_report,
    to_plain,
    world_report,
)
from lightning_elastic_zero.selftest.worlds import ranks_started_by

WORKER = "lightning_elastic_zero.selftest.worker_main"
"""The module whose ``main`` a worker runs."""

_START = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]), int(sys.argv[4]))"
)

_POLL_S = 0.1

_KILL_S = 10.0

_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_", "SLURM_", "OMPI_", "PMI_")
"""Beginnings of variables that speak of the starter's world, not of the workers'."""

_LOG_BYTES = 1 << 16


class Worker:
    """One rank's process."""

    def __init__(self, rank: int, request: Request, variables: dict[str, str]) -> None:
        """Start it."""
        self.rank = rank
        with ExitStack() as opened:
            files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            asked, self._told, self._log = files
            asked.write(json.dumps(asdict(request)).encode())
            asked.seek(0)
            told = (asked.fileno(), self._told.fileno())
            command = [sys.executable, "-c", _START, json.dumps(sys.path), WORKER, *map(str, told)]
            self.process = subprocess.Popen(  # noqa: S603 (our own module, by this interpreter)
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**_inherited(), **variables},
                pass_fds=told,
                start_new_session=True,
            )
            self._opened = opened.pop_all()

    def end(self) -> None:
        """Kill what is left of it, and release its files."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # The disk may hold it, for ever.
            self.process.wait(_KILL_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._opened.close()

    def report(self) -> RankReport:
        """Return what it has told, once it has ended or was given up."""
        size_bytes = os.fstat(self._told.fileno()).st_size
        return read_report(os.pread(self._told.fileno(), size_bytes, 0), self.rank, self._ended())

    def _ended(self) -> str:
        status, last = self.process.poll(), _last_words(self._log)
        said = f"; its last words: {last}" if last else ""
        if status is None:
            return f"its process did not end in time, and was killed{said}"
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return f"its process ended by {how}{said}"


def _last_words(log: IO[bytes]) -> str:
    """Return the line of a log that says most of how it ended."""
    size_bytes = os.fstat(log.fileno()).st_size
    data = os.pread(log.fileno(), _LOG_BYTES, max(size_bytes - _LOG_BYTES, 0))
    lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
    told = [line for line in lines if line]
    errors = [line for line in told if "Error" in line.split(":")[0]]
    return (errors or told or [""])[-1]


def _inherited() -> dict[str, str]:
    """Return this process's environment without what its own launcher put there."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    return {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **kept}


def run_world(
    ranks: Ranks, world_size: int, request: Request, timeout_s: float, killed: int | None = None
) -> WorldReport:
    """Start a world of workers, and wait for its end; collective for those that start it.

    Args:
        ranks: who start them.
        world_size: how many workers there are.
        request: what they do.
        timeout_s: what has not ended after so long is killed.
        killed: the rank that dies on purpose.

    Raises:
        RanksError: another starter has failed or is lost.
    """
    name = f"selftest: {request.task} on {world_size}"
    with ExitStack() as held:
        address, port = ranks.broadcast(
            f"{name}: meet", lambda: meeting_point(ranks.world_size, held)
        )

        def work() -> list[dict[str, object]]:
            own = ranks_started_by(ranks.rank, ranks.world_size, world_size)
            with _started(own, world_size, request, (address, str(port))) as workers:
                _wait(workers, timeout_s, ranks.report_progress)
                return [to_plain(worker.report()) for worker in workers]

        return world_report(ranks.all_gather(name, work), killed)


@contextmanager
def _started(
    own: range, world_size: int, request: Request, meeting: tuple[str, str]
) -> Iterator[list[Worker]]:
    """Start workers; none outlives the context."""
    workers: list[Worker] = []
    alone = len(own) == world_size
    try:
        for rank in own:
            local = str(rank) if alone else os.environ["LOCAL_RANK"]
            here = str(world_size) if alone else os.environ.get("LOCAL_WORLD_SIZE", "1")
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": here,
                "LOCAL_SIZE": here,  # Without it DeepSpeed starts numactl again and again.
                "MASTER_ADDR": meeting[0],
                "MASTER_PORT": meeting[1],
                "DS_ACCELERATOR": request.device,
            }
            workers.append(Worker(rank, request, variables))
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _wait(workers: list[Worker], timeout_s: float, on_progress: Callable[[], None]) -> None:
    """Wait until all have ended, or the time is up."""
    stop_s = time.monotonic() + timeout_s
    while time.monotonic() < stop_s and any(w.process.poll() is None for w in workers):
        on_progress()
        time.sleep(_POLL_S)


def meeting_point(starters: int, held: ExitStack) -> tuple[str, int]:
    """Rank 0: return where the workers' first rank will listen: on this host.

    A worker listens only when it has imported all that it needs, which takes a minute on a busy
    machine: until ``held`` ends nobody else is given the port, neither who asks for any nor who
    connects. Who names it may bind it beside (``SO_REUSEADDR``, as nobody listens), as stores do.
    """
    kept = held.enter_context(socket.socket())
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))
    port = int(kept.getsockname()[1])
    return os.environ["MASTER_ADDR"] if starters > 1 else "127.0.0.1", port
