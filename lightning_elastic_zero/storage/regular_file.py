"""Opening what has to be a regular file, whatever lies in its place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, or a pipe that lies in its place without waiting for who writes into it.

    It is what ``open`` takes as ``opener``.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        # Somebody has a lease on it (a Samba or NFS server on this host), which the system takes
        # back from him while one waits: fcntl(2), "Leases".
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise
        return os.open(path, flags)


def open_file(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; return its descriptor and its status.

    Anything else is refused without waiting: a pipe that lies in a file's place would be opened
    when somebody writes into it, which is never.

    Raises:
        OSError: it cannot be opened, or is no file.
    """
    descriptor = open_descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor, status


def read_file(path: Path) -> bytes:
    """Read a small file.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    with os.fdopen(open_file(path)[0], "rb") as file:
        return file.read()
