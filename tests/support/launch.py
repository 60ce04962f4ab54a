"""Run a function of a test module on several ranks, in processes that exit normally."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.processes import HANG_TIMEOUT_S, free_port
from tests.support.ranks import ForkServer, Program


@dataclass(frozen=True)
class RankResult:
    notes: dict[str, Any]
    """Values of ``Job.note``, by case."""

    returncode: int
    """Negative if a signal ended the rank."""

    stderr: str


@dataclass(frozen=True)
class Job:
    rank: int
    world_size: int

    def set_environment(self) -> None:
        """Set the variables that torchrun sets; the process group exists already."""
        rank = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.world_size}
        os.environ.update({name: str(value) for name, value in rank.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")

    def note(self, case: str, value: object) -> None:
        """Send plain data to the test immediately, because this process may be killed next."""
        print(json.dumps([case, value]), flush=True)


def run_ranks(
    program: Callable[[Job], None],
    world_size: int,
    fork_server: ForkServer,
    *,
    store_of_launcher: bool = False,
    timeout_s: float = HANG_TIMEOUT_S,
) -> list[RankResult]:
    """Run ``program`` on ``world_size`` ranks.

    Rank 0 hosts the store, as with a plain script; with ``store_of_launcher``, this process does,
    as with torchrun.
    """
    host = None
    if store_of_launcher:
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port if host is not None else free_port()
    return _run(
        [
            partial(
                be_rank,
                program,
                port,
                Job(rank, world_size),
                store_of_launcher=store_of_launcher,
            )
            for rank in range(world_size)
        ],
        fork_server,
        timeout_s,
    )


def run_side_by_side(
    programs: Sequence[Callable[[Job], None]], world_size: int, fork_server: ForkServer
) -> list[list[RankResult]]:
    """Run programs that mostly wait in parallel, each as ``run_ranks`` does."""
    ports = [free_port() for _ in programs]
    results = _run(
        [
            partial(be_rank, program, port, Job(rank, world_size), store_of_launcher=False)
            for program, port in zip(programs, ports, strict=True)
            for rank in range(world_size)
        ],
        fork_server,
        HANG_TIMEOUT_S,
    )
    return [results[at : at + world_size] for at in range(0, len(results), world_size)]


def _run(
    calls: Sequence[Callable[[], None]], fork_server: ForkServer, timeout_s: float
) -> list[RankResult]:
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[Program] = []
        try:
            for number, call in enumerate(calls):
                ranks.append(fork_server.start_program(call, Path(folder), str(number)))
            end = time.monotonic() + timeout_s
            return [result_of(rank.wait(end), rank) for rank in ranks]
        except TimeoutError as error:
            outputs = [path.read_text() for path in sorted(Path(folder).iterdir())]
            msg = f"the ranks took longer than {timeout_s} s:\n" + "\n".join(outputs)
            raise AssertionError(msg) from error
        finally:
            for started in ranks:
                started.kill()


def result_of(returncode: int, rank: Program) -> RankResult:
    """Return the result of an ended rank."""
    lines = rank.stdout.read_text().splitlines()
    # DeepSpeed prints other lines.
    notes = dict(json.loads(line) for line in lines if line.startswith('["'))
    return RankResult(notes, returncode, rank.stderr.read_text())


def be_rank(
    program: Callable[[Job], None], port: int, job: Job, *, store_of_launcher: bool
) -> None:
    """Run a program as one rank."""
    timeout = timedelta(seconds=30)
    host = "127.0.0.1"
    if store_of_launcher:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size)
    else:
        url = f"tcp://{host}:{port}"
        dist.init_process_group(
            "gloo", init_method=url, rank=job.rank, world_size=job.world_size, timeout=timeout
        )
    program(job)


def output_of_forked(fork_server: ForkServer, folder: Path, *calls: Callable[[], None]) -> str:
    """Run processes in parallel, which must all succeed; return the output of the first."""
    programs = []
    try:
        for number, call in enumerate(calls):
            programs.append(fork_server.start_program(call, folder, f"process-{number}"))
        end = time.monotonic() + HANG_TIMEOUT_S
        for program in programs:
            outputs = program.stdout.read_text, program.stderr.read_text
            assert program.wait(end) == 0, "".join(read() for read in outputs)[-6000:]
    finally:
        for program in programs:
            program.kill()
    return programs[0].stdout.read_text() + programs[0].stderr.read_text()
