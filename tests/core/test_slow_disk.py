"""Files on a slow disk: no call waits for much of it, and each is followed by a sign of life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANG_TIMEOUT_S
from tests.support.slow_disk import SlowDisk

ROOT = Path(__file__).parents[2]

MB = 1 << 20

PROGRAM = """
import sys
from pathlib import Path
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.storage import leftovers as copying
from lightning_elastic_zero.storage.checksums import ChecksummedWriter

from tests.support.processes import HANG_TIMEOUT_S

way, folder, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
signs = 0
def note():
    global signs
    signs += 1
progress = Progress(note)
if way == "write":
    with ChecksummedWriter(folder, "shard.pt", progress) as file:
        for _ in range(4):
            file.write(bytes(size // 4))
        file.finish("5a7e")
else:
    copying._copy_file(folder.parent / "source", folder / "shard.pt", progress)
print(signs)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stands in front of glibc's calls")
@pytest.mark.parametrize("way", ["write", "copy"])
def test_no_call_waits_for_much_of_a_slow_disk(way: str, tmp_path: Path) -> None:
    """Of 24 MiB, however they are written, no call waits for more than one; each gives a sign.

    A disk of 20 kB/s is then no stall for users, who wait for 50 s.
    """
    disk = SlowDisk(tmp_path, 32 * MB)
    (tmp_path / "source").write_bytes(bytes(24 * MB))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, str(disk.folder), str(24 * MB)],
        env={**os.environ, **disk.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    waits = disk.waits()
    assert sum(waits) >= 24 * MB
    assert max(waits) <= MB
    assert int(done.stdout) >= len([wait for wait in waits if wait == MB])
