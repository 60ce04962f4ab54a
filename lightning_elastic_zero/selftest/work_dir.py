"""The one folder that a selftest writes into."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.paths import check_local_path
from lightning_elastic_zero.storage.shared import scratch_folder

PREFIX = "zero-selftest-"
"""Beginning of the folder's name: visible, so that a kill leaves nothing that nobody sees."""


def usable_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the directory's absolute path, its links not resolved.

    Raises:
        SaveError: it is not there, or is no directory.
        UnsupportedError: it is the address of a remote storage.
    """
    path = check_local_path(directory)
    if not path.is_dir():
        found = "is no directory" if os.path.lexists(path) else "is not there"
        if path.is_symlink():
            found = f"is a link to {path.readlink()}, which is no directory, or not there"
        msg = f"{path} {found}: name a directory in which a run would save its checkpoints"
        raise SaveError(msg)
    return path


def work_dir(
    directory: Path, on_progress: Callable[[], None] = lambda: None
) -> AbstractContextManager[Path]:
    """Make a new folder in a directory, removed with its contents; ``scratch_folder``."""
    return scratch_folder(directory, PREFIX, on_progress)
