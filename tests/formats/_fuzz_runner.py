"""Readers with invalid input, in separate processes: a crash there fails the test.

A program is a module with ``cases()``, a strategy of bytes, and ``check(data)``, which raises
unless a reader reads the value or refuses it. The process stores each case before trying it, so
that a crash can be reported with its case.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
import warnings
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.ranks import ForkServer, Program

SPARE_BYTES = 256 << 20
"""Memory that a reader of a few kilobytes may allocate, above the initial size of the process."""

TIMEOUT_S = 3000

CASES_PER_PROCESS = 5_000
"""Hypothesis keeps about 20 KB of each case, which count as ``SPARE_BYTES``."""


def fuzz(program: str, count: int, first: int, folder: Path, server: ForkServer) -> None:
    """Try ``count`` cases of a program, with seeds from ``first`` on.

    Each process tries at most ``CASES_PER_PROCESS`` cases.

    Raises:
        AssertionError: a process failed; the message contains the last case.
    """
    for at in range(0, count, CASES_PER_PROCESS):
        number = min(CASES_PER_PROCESS, count - at)
        call = partial(try_cases, program, number, first + at, folder / "case")
        _run(server.start_program(call, folder, "fuzz"), number, first + at, folder / "case")


def _run(process: Program, count: int, seed_number: int, case: Path) -> None:
    code = process.wait(time.monotonic() + TIMEOUT_S)
    output = f"{process.stdout.read_text()}\n{process.stderr.read_text()}"
    if code:
        tried = case.read_bytes() if case.exists() else b""
        status = f"signal {-code}" if code < 0 else f"code {code}"
        msg = f"seed {seed_number}: ended with {status}; tried last:\n{tried!r}\n{output}"
        raise AssertionError(msg)
    assert f"{count} cases" in output


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def refuse_much_memory(error: BaseException | None) -> None:
    """Fail if an error or its cause reports a failed allocation."""
    while error is not None:
        out_of_memory = isinstance(error, MemoryError) or "allocate" in str(error)
        assert not out_of_memory, f"tried to allocate too much memory: {error!r}"
        error = error.__cause__ or error.__context__


def try_cases(name: str, count: int, seed_number: int, path: Path) -> None:
    warnings.simplefilter("ignore")
    program = importlib.import_module(f"tests.formats.{name}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    tried = [0]

    @seed(seed_number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(program.cases())
    def run(data: bytes) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        tried[0] += 1
        program.check(data)

    limit_memory()
    run()
    print(f"{count} cases, {tried[0]} tried")
