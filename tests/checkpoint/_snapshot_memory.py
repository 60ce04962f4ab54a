"""Memory of snapshots: ``python -m tests.checkpoint._snapshot_memory fork`` prints bytes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.snapshot import HostBuffer, Snapshotter
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.tensors import FlatState, RankState
from lightning_elastic_zero.formats.client_state import SplitState

MB = 1_000_000


def field_bytes(file: str, name: str) -> int:
    (line,) = (ln for ln in Path(file).read_text().splitlines() if ln.startswith(name))
    return int(line.split()[1]) * 1024


def share_bytes(pid: int | str) -> int:
    """Return the memory of a process, with its share of shared memory."""
    return field_bytes(f"/proc/{pid}/smaps_rollup", "Pss:")


def fork() -> int:
    """Fill a block, fork, fill it again; return the additional memory of both processes."""
    memory = HostBuffer()
    memory.allocate(64 * MB).fill_(0)
    before = share_bytes("self")
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        memory.allocate(64 * MB).fill_(1)
        return share_bytes("self") + share_bytes(child) - before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def grow() -> int:
    """Take a snapshot, then a larger one; return the process's additional peak memory."""
    snapshotter, before = Snapshotter(), field_bytes("/proc/self/status", "VmRSS:")
    for size_bytes in (128 * MB, 192 * MB):
        snapshotter.take(_contents(torch.zeros(1).expand(size_bytes // 4)))
    return field_bytes("/proc/self/status", "VmHWM:") - before


def _contents(tensor: torch.Tensor) -> ShardContents:
    manifest = Manifest("", 1, 1, "fp32", "float32", (), (), (), (), ())
    state = RankState((FlatState((), tensor, {}, {}),), {}, {}, {}, {})
    return ShardContents(Path(), manifest, state, SplitState())


if __name__ == "__main__":
    print({"fork": fork, "grow": grow}[sys.argv[1]]())
