"""Which paths can be used, and whether all ranks see the same directory."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.checksums import write_durably

_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")

_TABLE = ".compared-"
"""Prefix of what rank 0 leaves for others to compare themselves with."""

_POLL_S = 0.1

_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


def check_local_path(path: str | os.PathLike[str]) -> Path:
    """Give the absolute path, its links not resolved.

    Raises:
        UnsupportedError: It is the address of a remote storage.

    """
    text = os.fspath(path)
    url = _URL.match(text)
    if url is None:
        return Path(os.path.abspath(text))  # noqa: PTH100 - Path.absolute() would keep ".."
    if url[1].lower() == "file":
        return Path(os.path.abspath(text[url.end() :]))  # noqa: PTH100 - as above
    msg = (
        f"{text} is on a remote storage, which is not supported yet: a checkpoint is many files "
        "that appear in one step, and ranges of them are read. Give a path on a filesystem that "
        "all ranks share, and copy the checkpoint from there."
    )
    raise UnsupportedError(msg)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk.

    Filesystems that do not offer this for directories are left to their own ways.

    Raises:
        OSError: The system failed in doing so.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
    finally:
        os.close(descriptor)


def write_visibility_token(directory: Path, token: str) -> None:
    """Leave a sign in the directory, for the other ranks to see: what rank 0 does.

    Raises:
        SaveError: The directory cannot be written.

    """
    write_durably(_token_path(directory, token), b"")


def await_visible(directory: Path, token: str, wait_s: float = 10.0) -> None:
    """Prove that this rank sees the directory in which rank 0 left the token.

    Args:
        directory: The directory, as this rank names it.

        token: What rank 0 left there.

        wait_s: How long to look: network filesystems show the work of others with a delay.

    Raises:
        SaveError: The token is not there. The directory is another one, or is missing.

    """
    stop_s = time.monotonic() + wait_s
    while not _has_name(directory, _token_path(directory, token).name):
        if time.monotonic() >= stop_s:
            msg = (
                f"{socket.gethostname()} does not see the directory that rank 0 made, {directory}, "
                f"after {wait_s:g} s. All ranks must write into one directory: save on a "
                "filesystem that all machines share, and give it the same path on each."
            )
            raise SaveError(msg)
        time.sleep(_POLL_S)


def remove_visibility_token(directory: Path, token: str) -> None:
    """Take the token away again, if it is there.

    Raises:
        SaveError: The directory cannot be written.

    """
    try:
        _token_path(directory, token).unlink(missing_ok=True)
    except OSError as error:
        msg = f"Could not remove a file of ours from {directory}: {error.strerror}."
        raise SaveError(msg) from error


def write_table(directory: Path, name: str, data: bytes) -> None:
    """Leave data in the directory, for the ranks that need it: what rank 0 does.

    Raises:
        SaveError: The directory cannot be written.

    """
    path = _table_path(directory, name)
    try:
        with path.open("xb") as new:
            new.write(data)
    except OSError as error:
        msg = f"Could not write {path}: {error.strerror}. The last published checkpoint is intact."
        raise SaveError(msg) from error


def await_table(
    directory: Path, name: str, is_whole: Callable[[bytes], bool], wait_s: float = 10.0
) -> bytes:
    """Read what rank 0 left in the directory.

    Args:
        directory: The directory.

        name: What was left.

        is_whole: Whether data are what rank 0 wrote.

        wait_s: How long to look: network filesystems show the work of others with a delay.

    Raises:
        SaveError: It is not there, or is something else.

    """
    path = _table_path(directory, name)
    stop_s = time.monotonic() + wait_s
    while True:
        with suppress(OSError):
            if is_whole(data := path.read_bytes()):
                return data
        if time.monotonic() >= stop_s:
            msg = (
                f"{socket.gethostname()} does not see what rank 0 wrote into {path}, after "
                f"{wait_s:g} s: save on a filesystem that shows all machines the same."
            )
            raise SaveError(msg)
        time.sleep(_POLL_S)


def remove_tables(directory: Path, names: Iterable[str]) -> None:
    """Take the tables of these names away again.

    Raises:
        SaveError: The directory cannot be written.

    """
    try:
        for name in names:
            _table_path(directory, name).unlink(missing_ok=True)
    except OSError as error:
        msg = f"Could not remove a file of ours from {directory}: {error.strerror}."
        raise SaveError(msg) from error


def _table_path(directory: Path, name: str) -> Path:
    return directory / f"{_TABLE}{name}"


def _token_path(directory: Path, token: str) -> Path:
    return directory / f".seen-{token}"


def _has_name(directory: Path, name: str) -> bool:
    # Opening a directory makes a network filesystem ask its server again; a mere look-up of the
    # name may be answered from what was cached, for as long as a minute.
    try:
        with os.scandir(directory.parent), os.scandir(directory) as entries:
            return any(entry.name == name for entry in entries)
    except OSError:
        return False
