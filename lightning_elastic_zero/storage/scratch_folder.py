"""A folder to try a directory out in, and what is left of it: nothing."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.errors import ElasticZeroError, SaveError

_TRIES, _PAUSE_S = 5, 1.0

log = logging.getLogger(__name__)


@contextmanager
def scratch_folder(
    directory: Path, prefix: str, on_progress: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Make a new folder in a directory, and remove it with all that is in it, however this ends.

    Args:
        directory: where it is made.
        prefix: beginning of its name, to which a random part is added.
        on_progress: called while it is removed; what it raises of the library's is no matter then.

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
        _remove(folder, on_progress)


def leave_token(folder: Path, rank: int) -> None:
    """Leave a file for the other ranks to see."""
    with (folder / token_name(rank)).open("xb"):
        pass


def token_name(rank: int) -> str:
    """Return the name of what a rank leaves for the others."""
    return f"seen-by-{rank}"


def _remove(folder: Path, on_progress: Callable[[], None]) -> None:
    """Remove it; a file that another host has open comes back under another name for a while."""
    for left in reversed(range(_TRIES)):
        for inner in _folders_in(folder):
            shutil.rmtree(inner, ignore_errors=True)
            with suppress(ElasticZeroError):  # Others have given up: it is removed all the same.
                on_progress()
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
