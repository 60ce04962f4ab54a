"""A disk that refuses some calls, for processes that are started with it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.processes import HANG_TIMEOUT_S

SOURCE = Path(__file__).with_name("bad_disk.c")


def bad_disk_library(folder: Path) -> Path:
    """Compile the library that makes a disk bad; skip without a C compiler."""
    return compiled(SOURCE, folder)


def compiled(source: Path, folder: Path) -> Path:
    """Compile a library that processes are started with, from C; skip without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("what stands before the C library needs a C compiler")
    library = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=HANG_TIMEOUT_S)
    return library


def bad_disk(library: Path, directory: Path, refused: Mapping[str, int]) -> dict[str, str]:
    """Return the environment of a process for which calls fail below a directory."""
    calls = ",".join(f"{call}={number}" for call, number in refused.items())
    return {"LD_PRELOAD": str(library), "BAD_DISK": str(directory), "BAD_CALLS": calls}
