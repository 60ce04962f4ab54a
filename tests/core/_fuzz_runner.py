"""Readers given what nobody would write, in a process of their own: a crash there is a failed test.

A program is a module with ``cases()``, a strategy of bytes, and ``check(data)``, which raises where
a reader did something else than to read the value or to refuse it. The process notes each case
before it is tried, so that the one that ended it is known.
"""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).parents[2]

SPARE_BYTES = 256 << 20
"""Memory that a reader of a few kilobytes may ask for at once, beyond what the process has."""

TIMEOUT_S = 3000

AT_ONCE = 5_000
"""Cases of a process: Hypothesis keeps some 20 KB of each, which count as ``SPARE_BYTES``."""


def fuzz(program: str, count: int, first: int, folder: Path) -> None:
    """Try cases of a program in processes of their own, each with other cases, from a seed on.

    Raises:
        AssertionError: a process did not end well; with the case that it tried last.
    """
    for at in range(0, count, AT_ONCE):
        _fuzz(program, min(AT_ONCE, count - at), first + at, folder / "case")


def _fuzz(program: str, count: int, seeded: int, case: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.core._fuzz_runner", program]
    done = subprocess.run(
        [*command, str(count), str(seeded), str(case)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        tried = case.read_bytes() if case.exists() else b""
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        said = f"{done.stdout}\n{done.stderr}"
        msg = f"seed {seeded}: ended with {how}; tried last:\n{tried!r}\n{said}"
        raise AssertionError(msg)
    assert f"{count} cases" in done.stdout


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def refuse_much_memory(error: BaseException | None) -> None:
    """Fail where an error, or its cause, says that there was no memory."""
    while error is not None:
        asked = isinstance(error, MemoryError) or "allocate" in str(error)
        assert not asked, f"asked for much memory: {error!r}"
        error = error.__cause__ or error.__context__


def main() -> None:
    name, count, seeded, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    program = importlib.import_module(f"tests.core.{name}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    tried = [0]

    @seed(seeded)
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


if __name__ == "__main__":
    main()
