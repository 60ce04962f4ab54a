"""Paths that are checked, made absolute or resolved, and fsync of the names in a directory.

Opening what has to be a regular file, whatever lies in its place.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from lightning_elastic_zero.errors import UnsupportedError

_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")

NO_ENTRY = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
}
"""What a system says of a path that leads nowhere, or where this user may not go."""

_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


def check_local_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, its links not resolved.

    Raises:
        UnsupportedError: it is the address of a remote storage.
    """
    text = os.fspath(path)
    url = _URL.match(text)
    if url is not None and url[1].lower() != "file":
        msg = (
            f"{text} is on a remote storage, which is not supported yet: a checkpoint is many "
            "files that appear in one step, and ranges of them are read. Give a path on a "
            "filesystem that all ranks share, and copy the checkpoint from there."
        )
        raise UnsupportedError(msg)
    local = text[url.end() :] if url is not None else text
    return Path(os.path.abspath(local))  # noqa: PTH100 - Path.absolute() would keep ".."


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, its links resolved as far as they lead to something.

    Nothing need be there. A link that leads to itself stays as it is, in every release of Python:
    ``Path.resolve`` raises ``RuntimeError`` before 3.13.
    """
    return Path(os.path.realpath(path))


def existing_path(path: str | os.PathLike[str]) -> Path:
    """Return ``real_path``, but the path itself where nothing is there, or the system does not say.

    Whoever opens it then says why.
    """
    return real_path(path) if os.path.exists(path) else Path(path)  # noqa: PTH110 (never raises)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk (fsync).

    Filesystems that do not offer this for directories are left to their own ways.

    Raises:
        OSError: the system failed in doing so.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
    finally:
        os.close(descriptor)


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
