"""The costs of a call on all ranks: seconds, bytes, host memory, disk."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import distributed

Cost = dict[str, float]
"""``seconds`` until the slowest rank is done; ``system``, the seconds that all ranks spent in the
system, and ``faults``, their page faults, which hardly depend on other programs; ``read`` and
``written``, bytes of all ranks through the system; ``disk_read``, bytes of ``read`` that came from
the disk; ``memory``, the maximum of one rank above its memory before the call."""

_IO = {"read": "rchar:", "written": "wchar:", "disk_read": "read_bytes:"}


def _field(file: str, name: str) -> float:
    for line in Path(file).read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1])
    return 0.0


def _anonymous() -> float:
    return _field("/proc/self/status", "RssAnon:") * 1024


def folder_bytes(folder: Path) -> float:
    """Return the bytes that all files below a folder use on the disk, also while they change."""
    found = 0
    # Not rglob, which raises an error if a folder is renamed during the walk.
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118
    return float(found)


@contextmanager
def temporary_disk(folder: Path) -> Iterator[list[float]]:
    """Watch a folder; when the context ends, append the peak of its size to the list.

    The peak is relative to the larger one of the sizes before and after.
    """
    found: list[float] = []
    before = highest = folder_bytes(folder)
    over = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.01):
            highest = max(highest, folder_bytes(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found.append(max(highest - max(before, folder_bytes(folder)), 0.0))


class _Watch:
    """Watches the memory of this rank during a call."""

    def __init__(self) -> None:
        self.before = self.highest = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.highest = max(self.highest, _anonymous())

    def stop(self) -> float:
        """Return the peak above the memory before the call."""
        self._over.set()
        self._thread.join()
        return max(self.highest, _anonymous()) - self.before


def cost_of(work: Callable[[], object]) -> Cost:
    """Make the call on all ranks, and return its cost. Collective."""
    watch = _Watch()
    distributed.barrier()
    before = _used()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    memory = watch.stop()
    summed = [now - before[name] for name, now in _used().items()]
    slowest = _reduced([seconds, memory], distributed.ReduceOp.MAX)
    found = dict(zip(("seconds", "memory"), slowest, strict=True))
    return {**found, **dict(zip(before, _reduced(summed, distributed.ReduceOp.SUM), strict=True))}


def _used() -> dict[str, float]:
    """Return what this process has used so far: time and page faults of the system, and bytes."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    io = {name: _field("/proc/self/io", key) for name, key in _IO.items()}
    return {"system": found.ru_stime, "faults": float(found.ru_minflt), **io}


def _reduced(values: list[float], how: distributed.ReduceOp.RedOpType) -> list[float]:
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor, op=how)
    found: list[float] = tensor.tolist()
    return found
