"""Deleting directories so that none is ever half there under its own name."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from lightning_elastic_zero.storage.places import sync_directory

DOOMED = ".zero-removed-"
"""Prefix of a checkpoint that is being deleted: renamed first, so that none is half there."""


def delete(path: Path) -> None:
    """Delete a file, a link, or a directory, which vanishes at once and is then emptied.

    Raises:
        OSError: It is still there, whole.

    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for left_over in path.parent.glob(f"{DOOMED}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    doomed = path.parent / f"{DOOMED}{uuid.uuid4().hex}"
    path.rename(doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)
