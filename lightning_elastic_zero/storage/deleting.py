"""Deleting directories so that none is ever half there under its own name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.storage.places import sync_directory

DOOMED = ".zero-removed-"
"""Prefix of a checkpoint that is being deleted: renamed first, so that none is half there."""


def no_work() -> None:
    """Take no notice of work that goes on."""


def delete(path: Path, on_work: Callable[[], None] = no_work) -> None:
    """Delete a file, a link, or a directory, which vanishes at once and is then emptied.

    Args:
        path: What is to be deleted, if it is there.
        on_work: Called between files: large directories take long on some disks.

    Raises:
        OSError: It is still there, whole.

    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for left_over in path.parent.glob(f"{DOOMED}*"):
        remove_tree(left_over, on_work)
    doomed = path.parent / f"{DOOMED}{uuid.uuid4().hex}"
    path.rename(doomed)
    sync_directory(path.parent)
    remove_tree(doomed, on_work)


def remove_tree(path: Path, on_work: Callable[[], None] = no_work) -> None:
    """Remove a directory and what is in it, as far as the system lets it; follow no link."""
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            on_work()
            with suppress(OSError):
                (Path(folder) / name).unlink()
        for name in folders:
            inner = Path(folder) / name
            with suppress(OSError):
                inner.unlink() if inner.is_symlink() else inner.rmdir()
    with suppress(OSError):
        path.rmdir()
