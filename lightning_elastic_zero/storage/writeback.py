"""Writeback of a file while it is written, so that no wait for the disk is a long one."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of ``sync_file_range``."""

_PIECE_BYTES = 1 << 20
"""What is waited for at a time: 50 s without progress are then a disk of 20 kB/s."""

_FIRST_SYNC_BYTES, _MOST_SYNC_BYTES = 8 << 20, 256 << 20
"""How much is written before the first sync of a file, and at most before any other."""

_SYNC_S = 1.0
"""How long a sync should take. Each has a price beside its bytes (a journal, the disk's cache), so
that a fast disk is asked rarely; of a slow one, it is the longest time without progress."""

_NOT_OFFERED = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.ENOTSUP}


class Writeback:
    """Brings one file to the disk.

    A sync is one system call, silent while it lasts, and a disk that 64 ranks share may give each
    of them a few MB/s: so the bytes are waited for in small pieces, and syncs come often enough to
    be short on this disk. What they cost is measured, because no file system tells its speed.
    """

    def __init__(self, descriptor: int, on_progress: Callable[[], None]) -> None:
        """Write back an empty file, open for writing.

        Args:
            descriptor: the file's.
            on_progress: called between the waits.
        """
        self._descriptor = descriptor
        self._on_work = on_progress
        self._size_bytes = 0
        self._started_bytes = 0
        self._synced_bytes = 0
        self._sync_bytes = _FIRST_SYNC_BYTES

    def wrote(self, size_bytes: int) -> None:
        """Count bytes that were written to the file; wait where too many are on their way.

        Raises:
            OSError: the disk did not take what was written.
        """
        self._size_bytes += size_bytes
        begun_bytes = self._size_bytes - self._started_bytes
        if begun_bytes >= _PIECE_BYTES:
            # Not waited for: a file is written and synced 10 % faster (400 MB, local disk).
            _sync_range(self._descriptor, self._started_bytes, begun_bytes, _WRITE)
            self._started_bytes = self._size_bytes
        if self._size_bytes - self._synced_bytes >= self._sync_bytes:
            began = time.monotonic()
            self._wait()
            os.fdatasync(self._descriptor)
            self._on_work()
            self._adapt(time.monotonic() - began)

    def finish(self) -> None:
        """Wait until all of the file is on the disk.

        Raises:
            OSError: the disk did not take what was written.
        """
        self._wait()
        os.fsync(self._descriptor)
        self._on_work()

    def _wait(self) -> None:
        """Wait for the bytes piece by piece, where the system offers that."""
        first, self._synced_bytes = self._synced_bytes, self._size_bytes
        for start in range(first, self._size_bytes, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, self._size_bytes - start)
            all_flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
            if not _sync_range(self._descriptor, start, size_bytes, all_flags):
                return
            self._on_work()

    def _adapt(self, seconds: float) -> None:
        if seconds > _SYNC_S:
            self._sync_bytes = max(self._sync_bytes // 2, _PIECE_BYTES)
        elif seconds < _SYNC_S / 4:
            self._sync_bytes = min(2 * self._sync_bytes, _MOST_SYNC_BYTES)


def _sync_range(descriptor: int, start_byte: int, size_bytes: int, flags: int) -> bool:
    """Ask the system to bring bytes of a file to the disk; return whether it offers that.

    Raises:
        OSError: it could not. It says so once: the ``fsync`` that follows may succeed.
    """
    if (call := _sync_file_range()) is None:
        return False
    start, size = ctypes.c_int64(start_byte), ctypes.c_int64(size_bytes)
    if call(ctypes.c_int(descriptor), start, size, ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number))


@cache
def _sync_file_range() -> Any | None:  # noqa: ANN401 (a C function)
    try:
        return ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
