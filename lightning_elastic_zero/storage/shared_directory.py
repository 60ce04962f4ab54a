"""Files that rank 0 writes into a directory for the other ranks to read.

An empty token proves that a rank sees the same directory. Tables are what ranks compare themselves
with. Both are found in the same way, on network filesystems too.

Neither is brought to the disk: both are gone before the checkpoint is published, so that none
outlives a power cut that anybody would read. A network filesystem shows them to others once they
are closed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import as_save_error

TOKEN_PREFIX, TABLE_PREFIX = ".seen-", ".compared-"
"""Prefixes of the names of tokens and tables: a directory with such a file is this library's."""

_POLL_S = 0.1


def await_shared(
    directory: Path,
    name: str,
    is_whole: Callable[[bytes], bool] = lambda _: True,
    wait_s: float = 10.0,
    writer: int = 0,
) -> bytes:
    """Read what another rank left in the directory.

    Args:
        directory: the directory, as this rank names it.
        name: the name of the file that was left.
        is_whole: whether data are what was written.
        wait_s: how long to look: network filesystems show the work of others with a delay.
        writer: the rank that left it.

    Raises:
        SaveError: the file is not there, or is something else. The directory may be another one,
            or be missing.
    """
    stop_s = time.monotonic() + wait_s
    while True:
        with suppress(OSError):
            if (data := _read(directory / name)) is not None and is_whole(data):
                return data
        if time.monotonic() >= stop_s:
            unseen = (
                f"what rank {writer} wrote into {directory} ({name})"
                if writer
                else f"the directory that rank 0 made, {directory}, with what rank 0 wrote into it "
                f"({name})"
            )
            msg = (
                f"{socket.gethostname()} does not see {unseen}, after {wait_s:g} s. All ranks must "
                "write into one directory: save on a filesystem that all machines share, that "
                "shows all of them the same, and give it the same path on each."
            )
            raise SaveError(msg)
        time.sleep(_POLL_S)


def leave_shared(directory: Path, name: str, data: bytes = b"") -> None:
    """Leave a file for the other ranks to see, until ``remove_shared``.

    Raises:
        SaveError: the file exists, or cannot be written.
    """
    path = directory / name
    with as_save_error(path), path.open("xb") as file:
        file.write(data)


def remove_shared(directory: Path, *names: str) -> None:
    """Remove what rank 0 left under these names, where it is there.

    Raises:
        SaveError: the directory cannot be written.
    """
    try:
        for name in names:
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        msg = f"Could not remove a file of ours from {directory}: {error.strerror}."
        raise SaveError(msg) from error


def _read(path: Path) -> bytes | None:
    # Opening a directory makes a network filesystem ask its server again; a mere look-up of the
    # name may be answered from what was cached, for as long as a minute.
    with os.scandir(path.parent.parent), os.scandir(path.parent) as entries:
        is_there = any(entry.name == path.name for entry in entries)
    return path.read_bytes() if is_there else None
