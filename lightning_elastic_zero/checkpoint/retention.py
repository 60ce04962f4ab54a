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
from pathlib import Path

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.engine.support import recovery_script
from lightning_elastic_zero.storage.checkpoints import (
    can_replace,
    delete_checkpoint,
    exists,
    has_link,
    identity,
    is_checkpoint,
    is_link,
    make_link,
    resolved,
    siblings,
)
from lightning_elastic_zero.storage.file_write import replace_durably, write_durably
from lightning_elastic_zero.storage.object_store import AnyPath
from lightning_elastic_zero.storage.own_files import LATEST, RECOVERY_SCRIPT, TAG
from lightning_elastic_zero.storage.paths import parse_path

log = logging.getLogger(__name__)


class CheckpointLinks:
    """Makes links to checkpoints after publication. Used on rank 0, by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target: AnyPath | None = None
        self._waiting: list[AnyPath] = []

    def __reduce__(self) -> tuple[type[CheckpointLinks], tuple[()]]:
        """Copy without the waiting links."""
        return CheckpointLinks, ()

    def on_save_started(self, target: AnyPath) -> None:
        """Defer links to this checkpoint until its save has ended."""
        with self._lock:
            self._target, self._waiting = target, []

    def is_deferred(self, target: AnyPath) -> bool:
        """Whether links to this checkpoint wait."""
        with self._lock:
            return target == self._target

    def make(self, target: AnyPath, link: AnyPath, progress: Progress = NO_PROGRESS) -> None:
        """Make a link to a checkpoint, now or when it is published.

        After a failed save, the link is unchanged. Raises SaveError if it could not be made.
        """
        with self._lock:
            if target == self._target:
                self._waiting.append(link)
            elif exists(target):
                _make(target, link, progress)
            else:
                log.warning("%s is not linked to %s, which does not exist", link, target)

    def on_save_ended(self, target: AnyPath, *, published: bool) -> None:
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


def _make(target: AnyPath, link: AnyPath, progress: Progress = NO_PROGRESS) -> None:
    """Make a link, or DeepSpeed's file ``latest`` with the name of the checkpoint."""
    if link.name != LATEST or not isinstance(link, Path):
        make_link(target, link, progress)
        return
    replace_durably(link, f"{target.name}/{TAG}".encode())
    source, script = recovery_script(), link.with_name(RECOVERY_SCRIPT)
    if source is not None and not script.exists():
        write_durably(script, source.read_bytes())


class Retention:
    """Deletes checkpoints that nothing needs. Used on rank 0, by any thread."""

    def __init__(self) -> None:
        self._resumed_from: AnyPath | None = None
        self._waiting: dict[AnyPath, object] = {}
        self._published: dict[AnyPath, object] = {}
        """Identity of what this run has published under a name: another run may replace it."""
        self._held_for: AnyPath | None = None
        """The checkpoint that is being saved. Nothing is deleted until it is published."""
        self.folders: tuple[AnyPath, ...] = ()
        """Folders of callbacks: a slash in a name puts a checkpoint below, its link stays there."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Retention], tuple[()]]:
        """Copy without the waiting deletions."""
        return Retention, ()

    def protect(self, path: str | os.PathLike[str]) -> None:
        """Keep the checkpoint that the run was resumed from; links are resolved."""
        self._resumed_from = resolved(parse_path(path))

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint as soon as no save and no link needs it."""
        doomed = parse_path(path)
        with self._lock:
            try:
                published = self._published.pop(doomed, None)
                self._waiting[doomed] = published or identity(doomed)
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error)
        self.delete_pending()

    def on_save_started(self, path: AnyPath) -> None:
        """Cancel the deletion of a path, and delay others until its new save is published."""
        with self._lock:
            self._waiting.pop(path, None)
            self._held_for = path

    def on_published(self, path: AnyPath) -> None:
        """Delete what waited for a new checkpoint.

        A deletion of the new checkpoint itself was requested during the save, so it applies to the
        new one.
        """
        with self._lock:
            if path == self._held_for:
                self._held_for = None
            with suppress(OSError):
                self._published[path] = identity(path)
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
                    waits = identity(path) == doomed and not self._try(path, doomed)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", path, error)
                    waits = False
                if not waits:
                    del self._waiting[path]

    def _try(self, path: AnyPath, doomed: object) -> bool:
        """Delete a checkpoint; return False if it must wait."""
        if not is_link(path):
            if not exists(path):
                return True
            if resolved(path) == self._resumed_from:
                log.info("%s is kept: this run was resumed from it", path)
                return True
            if _is_only_checkpoint(path, self._published):
                log.info("%s is kept: no other checkpoint is there yet", path)
                return False
            above = (each for each in self.folders if str(path.parent).startswith(f"{each}/"))
            if has_link(path, above):
                return False
        if refusal_reason := delete_checkpoint(path, doomed):
            log.warning(
                "%s is not deleted, because it %s. Delete it yourself, or move your files away.",
                path,
                refusal_reason,
            )
        return True


def _is_only_checkpoint(path: AnyPath, published: Iterable[AnyPath]) -> bool:
    """Whether a path is a checkpoint, and nothing next to it or published can replace it."""
    real = resolved(path)
    others = (entry for entry in chain(siblings(path), published) if resolved(entry) != real)
    return is_checkpoint(path) and not any(can_replace(other, path) for other in others)
