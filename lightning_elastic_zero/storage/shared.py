"""Files that rank 0 writes into a directory for the other ranks to read.

An empty token proves that a rank sees the same directory. Tables are what ranks compare themselves
with. Both are found in the same way, on network filesystems too.

Neither is brought to the disk: both are gone before the checkpoint is published, so that none
outlives a power cut that anybody would read. A network filesystem shows them to others once they
are closed.

A folder to try a directory out in, and what is left of it: nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
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


_TRIES, _PAUSE_S = 5, 1.0

log = logging.getLogger(__name__)


@contextmanager
def scratch_folder(
    directory: Path, prefix: str, progress: Progress = NO_PROGRESS
) -> Iterator[Path]:
    """Make a new folder in a directory, and remove it with all that is in it, however this ends.

    Args:
        directory: where it is made.
        prefix: beginning of its name, to which a random part is added.
        progress: checked during removal, where its errors are ignored.

    Raises:
        SaveError: it cannot be made.
    """
    folder = directory / f"{prefix}{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        msg = (
            f"{directory} cannot be written ({error.strerror or error}): no checkpoint can be "
            "saved there; see its permissions, and whether it is mounted read-only"
        )
        raise SaveError(msg) from error
    try:
        yield folder
    finally:
        _remove(folder, progress)


def leave_token(folder: Path, rank: int) -> None:
    """Leave a file for the other ranks to see."""
    with (folder / token_name(rank)).open("xb"):
        pass


def token_name(rank: int) -> str:
    """Return the name of what a rank leaves for the others."""
    return f"seen-by-{rank}"


def _remove(folder: Path, progress: Progress) -> None:
    """Remove it; a file that another host has open comes back under another name for a while."""
    for left in reversed(range(_TRIES)):
        for inner in _folders_in(folder):
            shutil.rmtree(inner, ignore_errors=True)
            with suppress(ElasticZeroError):  # Others have given up: it is removed all the same.
                progress.check()
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        if left:
            time.sleep(_PAUSE_S)
    log.warning("%s could not be removed: it may be deleted.", folder)


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder; none where it cannot be read."""
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return []
