"""A file that is written as saves write theirs, without anything else that a save does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lightning_elastic_zero.storage.checksums import Writeback

MOST_S = 60.0
"""For how long it writes: a disk that takes less than this is not timed any further."""


def write_raw(
    path: Path,
    size_bytes: int,
    block: bytes,
    on_progress: Callable[[], None],
    most_s: float = MOST_S,
) -> int:
    """Write a new file and bring it to the disk, piece by piece, so that no wait is a long one.

    Args:
        path: where nothing is.
        size_bytes: its size, at most a block more.
        block: what it is filled with.
        on_progress: called between the waits.
        most_s: after so long no more is written.

    Returns:
        int: the bytes that are on the disk: fewer than wanted where the time was up.

    Raises:
        OSError: the disk did not take them.
    """
    stop_s = time.monotonic() + most_s
    written_bytes = 0
    with path.open("xb", buffering=0) as file:
        writeback = Writeback(file.fileno(), on_progress)
        while written_bytes < size_bytes and time.monotonic() < stop_s:
            count = file.write(block)
            written_bytes += count
            writeback.wrote(count)
            on_progress()
        writeback.finish()
    return written_bytes
