"""A slow disk for processes: ``slow_disk.c`` delays the C library's calls that wait for a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import HANG_TIMEOUT_S

SOURCE = Path(__file__).with_name("slow_disk.c")


class SlowDisk:
    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        """Create the folder, and compile the library that slows its disk.

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
        """Environment variables for processes that use the disk."""
        self.set_speed(bytes_per_s)

    def set_speed(self, bytes_per_s: float, *, latency_s: float = 0.0) -> None:
        """Change the speed (0 stops the disk), and the latency of opening a file."""
        for name, number in (("speed", bytes_per_s), ("latency", latency_s)):
            new = self.folder / f"{name}.{os.getpid()}"
            new.write_text(str(number))
            new.rename(self.folder / name)

    def waits(self) -> list[int]:
        log = self.folder / "waits"
        return [int(line.split()[1]) for line in log.read_text().splitlines()]
