"""A disk that is slow, or does not answer, for processes that are started with it.

Slow file systems need rights that tests do not have. So the calls are slow by which a process waits
for its disk: ``slow_disk.c`` stands in front of the C library's, for any program, unchanged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import HANG_TIMEOUT_S

SOURCE = Path(__file__).with_name("slow_disk.c")


class SlowDisk:
    """A folder on a disk of some speed."""

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        """Make the folder, and the library that makes its disk slow.

        Raises:
            pytest.skip.Exception: There is no C compiler.
        """
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("a slow disk needs a C compiler")
        self.folder = folder / "disk"
        self.folder.mkdir()
        library = folder / "slow_disk.so"
        options = ["-shared", "-fPIC", "-O1", "-o", str(library)]
        command = [compiler, *options, str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True, timeout=HANG_TIMEOUT_S)
        self.environment = {"LD_PRELOAD": str(library), "SLOW_DISK": str(self.folder)}
        """What a process has to be started with."""
        self.set_speed(bytes_per_s)

    def set_speed(self, bytes_per_s: float, *, latency_s: float = 0.0) -> None:
        """Go on at another speed; 0: not at all.

        Args:
            bytes_per_s: of what is written.
            latency_s: of opening a file.
        """
        for name, number in (("speed", bytes_per_s), ("latency", latency_s)):
            new = self.folder / f"{name}.{os.getpid()}"
            new.write_text(str(number))
            new.rename(self.folder / name)

    def waits(self) -> list[int]:
        """Return how many bytes each call has waited for."""
        log = self.folder / "waits"
        return [int(line.split()[1]) for line in log.read_text().splitlines()]
