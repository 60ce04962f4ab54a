"""Deletion of published checkpoints, each once nothing needs it any more.

``ModelCheckpoint`` decides what is superfluous; it compares paths without resolving links, deletes
before it moves ``last.ckpt`` to the new checkpoint, and knows nothing of the checkpoint that a run
was resumed from through a link. So a deletion waits here while something still needs it. What this
library did not write is never deleted, and nor is a checkpoint in which there is more.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TypeAlias

from lightning_elastic_zero.storage import (
    LINK_PREFIX,
    can_replace,
    check_local_path,
    delete_checkpoint,
    is_checkpoint,
    real_path,
)

log = logging.getLogger(__name__)


class Retention:
    """Deletes checkpoints, unless they are still needed. Used on one rank, by any thread."""

    def __init__(self) -> None:
        self._resumed_from: Path | None = None
        self._waiting: dict[Path, _Identity] = {}
        self._held_for: Path | None = None
        """The last checkpoint that was to be written, while it is not there: nothing is deleted."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Retention], tuple[()]]:
        """Copy as a new one: what waits here is deleted by this one only."""
        return Retention, ()

    def protect(self, path: str | os.PathLike[str]) -> None:
        """Keep the checkpoint that the run was resumed from, behind whatever link."""
        self._resumed_from = real_path(path)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, now or as soon as nothing needs it: no save, and no link."""
        local = check_local_path(path)
        with self._lock:
            self._waiting[local] = _identity(local)
        self.delete_pending()

    def on_save_started(self, path: Path) -> None:
        """Cancel the deletion of a path, and delay all others until its new save is published."""
        with self._lock:
            self._waiting.pop(path, None)
            self._held_for = path

    def on_published(self, path: Path) -> None:
        """Delete what waited for a new checkpoint.

        If it is doomed itself, that was said while it was being written: it is meant, and not what
        was there before.
        """
        with self._lock:
            if path == self._held_for:
                self._held_for = None
            if path in self._waiting:
                self._waiting[path] = _identity(path)
        self.delete_pending()

    def delete_pending(self) -> None:
        """Delete what waited and is free now, unless a save is in flight or has failed.

        What cannot be deleted is left where it is: it takes up room, but a run does not end for it.
        """
        with self._lock:
            for path, identity in [] if self._held_for else list(self._waiting.items()):
                try:
                    waits = _identity(path) == identity and not self._try(path)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", path, error)
                    waits = False
                if not waits:
                    del self._waiting[path]

    def _try(self, path: Path) -> bool:
        """Delete a checkpoint; False: it has to wait."""
        if not path.is_symlink():
            if not path.exists():
                return True
            if real_path(path) == self._resumed_from:
                log.info("%s is kept: this run was resumed from it", path)
                return True
            if _is_only_checkpoint(path):
                log.info("%s is kept: no other checkpoint is there yet", path)
                return False
            if _has_link(path):
                return False
        if refusal_reason := delete_checkpoint(path):
            log.warning(
                "%s is not deleted, and will not be: it %s. Delete it yourself, or move away what "
                "is yours.",
                path,
                refusal_reason,
            )
        return True


_Identity: TypeAlias = "tuple[int, int] | None"
"""Device and inode of a directory: a checkpoint that is saved under its name is another one."""


def _identity(path: Path) -> _Identity:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_only_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, and no other one beside it can take its place."""
    real = real_path(path)
    others = (
        entry
        for entry in path.parent.iterdir()
        # A hidden one is being written, or deleted.
        if not entry.name.startswith(".") and real_path(entry) != real
    )
    return is_checkpoint(path) and not any(can_replace(other, path) for other in others)


def _has_link(path: Path) -> bool:
    """Whether a link beside a checkpoint still names it."""
    real = real_path(path)
    links = (entry for entry in path.parent.iterdir() if entry.is_symlink())
    # What a killed process has left of one that it was making is nobody's.
    mine = (link for link in links if not link.name.startswith(LINK_PREFIX))
    return any(real_path(link) == real for link in mine)
