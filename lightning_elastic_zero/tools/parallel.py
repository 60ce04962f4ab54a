"""Shares of work in threads: reading, checksums and sums all let other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MOST_THREADS = 16


def run_parts(work: Callable[[int, int], T], threads: int = 0) -> list[T]:
    """Run ``work(part, parts)`` for each part; return the results in order.

    Args:
        work: does one part; the parts share nothing.
        threads: how many; 0: as many as there are processors.

    Raises:
        Exception: what a part raised first, once all have ended.
    """
    parts = threads or min(_processors(), MOST_THREADS)
    if parts == 1:
        return [work(0, 1)]
    with ThreadPoolExecutor(parts, thread_name_prefix="elastic-zero-tool") as pool:
        futures = [pool.submit(work, part, parts) for part in range(parts)]
    return [future.result() for future in futures]


def _processors() -> int:
    """Return how many processors this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
