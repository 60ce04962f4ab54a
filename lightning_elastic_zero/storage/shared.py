"""Files that a rank writes for the other ranks to read, and temporary folders.

An empty token proves that a rank sees the same directory. Tables are compared between ranks. Both
are removed before the checkpoint is published, so they are not synced to disk. A network file
system shows them to other hosts once they are closed.
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
from lightning_elastic_zero.storage.stores import AnyPath, StorePath

TOKEN_PREFIX, TABLE_PREFIX = ".seen-", ".compared-"
"""Prefixes of the names of tokens and tables, in directories of this library."""

_POLL_S = 0.1


def await_shared(
    directory: AnyPath,
    name: str,
    is_whole: Callable[[bytes], bool] = lambda _: True,
    wait_s: float = 10.0,
    writer: int = 0,
) -> bytes:
    """Wait for a file of another rank, and read it.

    Network file systems show the files of other hosts with a delay. ``is_whole`` checks that the
    data are complete; ``writer`` is the rank that wrote them, for the message.
    """
    stop_s = time.monotonic() + wait_s
    while True:
        with suppress(OSError):
            if (data := _read(directory / name)) is not None and is_whole(data):
                return data
        if time.monotonic() >= stop_s:
            msg = (
                f"{directory}: {socket.gethostname()} does not see the file {name} that rank "
                f"{writer} wrote there, after {wait_s:g} s. Save on a file system that all "
                "machines share, under the same path on each, or to an object store."
            )
            raise SaveError(msg)
        time.sleep(_POLL_S)


def leave_shared(directory: AnyPath, name: str, data: bytes = b"") -> None:
    """Write a new file for the other ranks, until ``remove_shared``."""
    path = directory / name
    with as_save_error(path):
        if isinstance(path, StorePath):
            path.store.put(path.key, data)
            return
        with path.open("xb") as file:
            file.write(data)


def remove_shared(directory: AnyPath, *names: str) -> None:
    """Remove files of ``leave_shared``, where they exist."""
    try:
        if isinstance(directory, StorePath):
            directory.store.delete([(directory / name).key for name in names])
            return
        for name in names:
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        msg = f"{directory}: could not remove a file of this save ({error.strerror})."
        raise SaveError(msg) from error


def _read(path: AnyPath) -> bytes | None:
    if isinstance(path, StorePath):
        return path.store.get(path.key)[0]
    # Opening a directory makes a network file system ask its server. A lookup of the name may be
    # answered from a cache for up to a minute.
    with os.scandir(path.parent.parent), os.scandir(path.parent) as entries:
        is_there = any(entry.name == path.name for entry in entries)
    return path.read_bytes() if is_there else None


log = logging.getLogger(__name__)


@contextmanager
def scratch_folder(
    directory: Path, prefix: str, progress: Progress = NO_PROGRESS
) -> Iterator[Path]:
    """Make a new folder in a directory; at the end of the context, remove it with its content.

    The name has a random part after ``prefix``. ``progress`` is checked during the removal; errors
    of this library from it are ignored.
    """
    folder = directory / f"{prefix}{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        msg = (
            f"{directory} cannot be written ({error.strerror or error}), expected a directory for "
            "checkpoints: check its permissions, and whether it is mounted read-only"
        )
        raise SaveError(msg) from error
    try:
        yield folder
    finally:
        _remove(folder, progress)


def _remove(folder: Path, progress: Progress) -> None:
    # A file that another host has open reappears under another name for a while.
    for left in reversed(range(5)):
        for inner in _folders_in(folder):
            shutil.rmtree(inner, ignore_errors=True)
            with suppress(ElasticZeroError):  # The step has failed: remove the folder all the same.
                progress.check()
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        if left:
            time.sleep(1.0)
    log.warning("%s could not be removed. It can be deleted.", folder)


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return []
