"""What the tests' own clean-up removes of the memory of killed worlds, and what it leaves."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from tests.support import processes


def test_what_nobody_uses_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's, once it is old and no process has mapped it; one of a port of ours at once."""
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    mine = processes.free_port()
    name = "deepspeed_allreduce_buffer_0_10.0.0.1_{}_0"
    old, used, new, own = (tmp_path / name.format(p) for p in (40000, 40001, 40002, mine))
    other = tmp_path / "somebody_elses_40003_0"
    for path in (old, used, new, own, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    for path in (old, used, other):
        os.utime(path, (time.time() - 100.0,) * 2)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
        processes.remove_shared_memory()
        assert {*tmp_path.iterdir()} == {used, new, other}
    processes.remove_shared_memory()
    assert not used.exists()
