"""Links to checkpoints and their deletion, in a safe order.

During a background save, links and deletions that ``ModelCheckpoint`` requests wait until the
checkpoint is published, and are dropped if the save fails. Links such as ``last.ckpt`` name only
published checkpoints.

``ModelCheckpoint`` compares paths without resolving links, deletes before it moves ``last.ckpt``,
and does not know the checkpoint that a run was resumed from through a link. So a deletion waits
while something still needs the checkpoint. Files that this library did not write are never deleted,
and neither are checkpoints that contain such files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.engine.support import recovery_script
from lightning_elastic_zero.storage.file_write import replace_durably, write_durably
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.own_files import LATEST, RECOVERY_SCRIPT, TAG

log = logging.getLogger(__name__)


class CheckpointLinks:
    """Makes links to checkpoints after publication. Used on rank 0, by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target: Folder | None = None
        self._waiting: list[Folder] = []

    def __reduce__(self) -> tuple[type[CheckpointLinks], tuple[()]]:
        """Copy without the waiting links."""
        return CheckpointLinks, ()

    def on_save_started(self, target: Folder) -> None:
        """Defer links to this checkpoint until its save has ended."""
        with self._lock:
            self._target, self._waiting = target, []

    def is_deferred(self, target: Folder) -> bool:
        """Whether links to this checkpoint wait."""
        with self._lock:
            return target == self._target

    def make(self, target: Folder, link: Folder, progress: Progress = NO_PROGRESS) -> None:
        """Make a link to a checkpoint, now or when it is published.

        After a failed save, the link is unchanged. Raises SaveError if it could not be made.
        """
        with self._lock:
            if target == self._target:
                self._waiting.append(link)
            elif target.exists():
                _make(target, link, progress)
            else:
                log.warning("%s is not linked to %s, which does not exist", link, target)

    def on_save_ended(self, target: Folder, *, published: bool) -> None:
        """Make the links that waited for this checkpoint, or forget them if it failed.

        Raises SaveError if a link could not be made.
        """
        with self._lock:
            if target != self._target:
                return
            waiting = self._waiting
            self._target, self._waiting = None, []
            if published:
                for link in waiting:
                    _make(target, link)


def _make(target: Folder, link: Folder, progress: Progress = NO_PROGRESS) -> None:
    """Make a link, or DeepSpeed's file ``latest`` with the name of the checkpoint."""
    file = link.local
    if file is None or file.name != LATEST:
        link.make_link(target, progress)
        return
    replace_durably(file, f"{target.path.name}/{TAG}".encode())
    source, script = recovery_script(), file.with_name(RECOVERY_SCRIPT)
    if source is not None and not script.exists():
        write_durably(script, source.read_bytes())


class Retention:
    """Deletes checkpoints that nothing needs. Used on rank 0, by any thread."""

    def __init__(self) -> None:
        self._resumed_from: Folder | None = None
        self._waiting: dict[Folder, object] = {}
        self._published: dict[Folder, object] = {}
        """Identity of what this run has published under a name: another run may replace it."""
        self._held_for: Folder | None = None
        """The checkpoint that is being saved. Nothing is deleted until it is published."""
        self.folders: tuple[Folder, ...] = ()
        """Folders of callbacks: a slash in a name puts a checkpoint below, its link stays there."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Retention], tuple[()]]:
        """Copy without the waiting deletions."""
        return Retention, ()

    def protect(self, path: str | os.PathLike[str]) -> None:
        """Keep the checkpoint that the run was resumed from; links are resolved."""
        self._resumed_from = folder_at(path).follow_links()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint as soon as no save and no link needs it."""
        doomed = folder_at(path)
        with self._lock:
            try:
                published = self._published.pop(doomed, None)
                self._waiting[doomed] = published or doomed.identity()
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error)
        self.delete_pending()

    def on_save_started(self, path: Folder) -> None:
        """Cancel the deletion of a path, and delay others until its new save is published."""
        with self._lock:
            self._waiting.pop(path, None)
            self._held_for = path

    def on_published(self, path: Folder) -> None:
        """Delete what waited for a new checkpoint.

        A deletion of the new checkpoint itself was requested during the save, so it applies to the
        new one.
        """
        with self._lock:
            if path == self._held_for:
                self._held_for = None
            with suppress(OSError):
                self._published[path] = path.identity()
            if path in self._waiting:
                self._waiting[path] = self._published.pop(path, None)
        self.delete_pending()

    def delete_pending(self) -> None:
        """Delete what waited and is free now, unless a save is in flight or has failed.

        A failed deletion takes up space, but does not end the run.
        """
        with self._lock:
            for path, doomed in [] if self._held_for else list(self._waiting.items()):
                try:
                    waits = path.identity() == doomed and not self._try(path, doomed)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", path, error)
                    waits = False
                if not waits:
                    del self._waiting[path]

    def _try(self, path: Folder, doomed: object) -> bool:
        """Delete a checkpoint; return False if it must wait."""
        if not path.is_link():
            if not path.exists():
                return True
            if path.follow_links() == self._resumed_from:
                log.info("%s is kept: this run was resumed from it", path)
                return True
            if _is_only_checkpoint(path, self._published):
                log.info("%s is kept: no other checkpoint is there yet", path)
                return False
            above = (each for each in self.folders if str(path.path.parent).startswith(f"{each}/"))
            if path.has_link(above):
                return False
        if refusal_reason := path.delete(doomed):
            log.warning(
                "%s is not deleted, because it %s. Delete it yourself, or move your files away.",
                path,
                refusal_reason,
            )
        return True


def _is_only_checkpoint(path: Folder, published: Iterable[Folder]) -> bool:
    """Whether a path is a checkpoint, and nothing next to it or published can replace it."""
    real = path.follow_links()
    others = (entry for entry in chain(path.siblings(), published) if entry.follow_links() != real)
    return path.is_checkpoint() and not any(other.can_replace(path) for other in others)
