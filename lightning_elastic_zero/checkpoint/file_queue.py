"""Rank 0's links and deletions, in order with the publication of saves.

``ModelCheckpoint`` requests them right after a save. During a background save, they wait until the
checkpoint is published, so that links such as ``last.ckpt`` name only published checkpoints, and
nothing is deleted before its successor is there. If the save fails, links to it are dropped, and
deletions wait for the next one.

``ModelCheckpoint`` compares paths without resolving links, deletes before it moves ``last.ckpt``,
and does not know the checkpoint that a run was resumed from through a link. So a deletion also
waits while something still needs the checkpoint. Files that this library did not write are never
deleted, and neither are checkpoints that contain such files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.save_files import LATEST, RECOVERY_SCRIPT, TAG, recovery_script
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.file_write import replace_durably, write_durably
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import is_on_nodes, parse_path

log = logging.getLogger(__name__)

_GLANCE_S = 1.0
"""Interval at which a thread that waits for the other one looks whether it makes progress."""


@dataclass(eq=False, slots=True)
class PendingSave:
    """A save that is under way, and the links that wait for it."""

    target: Folder
    links: list[Folder] = field(default_factory=list)
    is_over: bool = False


class FileQueue:
    """The links and deletions of a run. Used on rank 0, by two threads."""

    def __init__(self) -> None:
        self.folders: tuple[Folder, ...] = ()
        """Folders of callbacks: a slash in a name puts a checkpoint below, its link stays there."""
        self._lock = threading.RLock()
        self._progress = Progress(self._count_work)
        self._work_count = 0
        """Number of reports of progress by the thread that deletes and links."""
        self._pending: PendingSave | None = None
        """The last save that has begun, until it is published: nothing is deleted before."""
        self._has_omitted = False
        """Whether the last save was omitted: until the next one, nothing is deleted."""
        self._deletions: dict[Folder, object] = {}
        """Identity of each checkpoint to delete."""
        self._published: dict[Folder, object] = {}
        """Identity of what this run has published under a name: another run may replace it."""
        self._resumed_from: Folder | None = None

    def __reduce__(self) -> tuple[type[FileQueue], tuple[()]]:
        """Copy without the waiting work."""
        return FileQueue, ()

    def protect(self, path: str | os.PathLike[str]) -> None:
        """Keep the checkpoint that the run was resumed from; links are resolved.

        On nodes it is deleted once it is replaced, because their memory is small.
        """
        if not is_on_nodes(parse_path(path)):
            self._resumed_from = folder_at(path).follow_links()

    def release(self) -> None:
        """Stop keeping the protected checkpoint, if this process has published a newer one.

        After a run, ``OnExceptionCheckpoint`` deletes the state of an earlier failure. If it
        stayed, the next run could take it for the last one. Memory of nodes ends with the job.
        """
        if (resumed := self._resumed_from) is None:
            return
        with self._lock, suppress(OSError):  # It cannot be compared, and is kept.
            saved_ns = resumed.published_ns()
            lasting = (each for each in self._published if not is_on_nodes(each.path))
            newer = (each for each in lasting if each.published_ns() > saved_ns)
            if any(each.can_replace(resumed) for each in newer):
                self._resumed_from = None

    # -- saves -------------------------------------------------------------------------------

    def begin_save(self, target: Folder) -> PendingSave:
        """Let links to a checkpoint, and all deletions, wait for ``end_save``.

        A deletion of the checkpoint that is replaced is cancelled.
        """
        with self._lock:
            self._has_omitted = False
            self._deletions.pop(target, None)
            self._pending = PendingSave(target)
            return self._pending

    def omit_save(self) -> None:
        """Refuse deletions until the next save: ``ModelCheckpoint`` requests them all the same."""
        self._has_omitted = True

    def end_save(self, save: PendingSave, *, published: bool) -> None:
        """Carry out what waited for a save; a second call does nothing.

        A deletion of the new checkpoint itself was requested during the save, so it applies to the
        new one.

        Raises:
            SaveError: a link could not be made.
        """
        if save.is_over:  # The other thread may need a long time for it.
            return
        with self._lock:
            is_due, save.is_over = published and not save.is_over, True
            if not is_due:
                return
            if save is self._pending:
                self._pending = None
            with suppress(OSError):
                self._published[save.target] = save.target.identity()
            if save.target in self._deletions:
                self._deletions[save.target] = self._published.pop(save.target, None)
            try:
                for link in save.links:
                    _make_link(save.target, link, self._progress)
            finally:
                self.delete_waiting()

    def is_being_saved(self, target: Folder) -> bool:
        """Whether links to a checkpoint wait for its save."""
        return self._save_of(target) is not None

    def _save_of(self, target: Folder) -> PendingSave | None:
        save = self._pending
        return save if save and save.target == target and not save.is_over else None

    # -- links -------------------------------------------------------------------------------

    def link(self, target: Folder, link: Folder, progress: Progress = NO_PROGRESS) -> None:
        """Make a link to a checkpoint, now or when it is published.

        After a failed save, the link is unchanged. Raises SaveError if it could not be made.
        """
        with self._locked(progress):
            if save := self._save_of(target):
                save.links.append(link)
            elif target.exists():
                _make_link(target, link, progress)
            else:
                log.warning("%s is not linked to %s, which does not exist", link, target)

    @contextmanager
    def _locked(self, progress: Progress) -> Iterator[None]:
        """Take the lock; report the progress of the other thread while it deletes and links."""
        reported = self._work_count
        while not self._lock.acquire(timeout=_GLANCE_S):
            if (count := self._work_count) != reported:
                reported = count
                progress.check()
        try:
            yield
        finally:
            self._lock.release()

    def _count_work(self) -> None:
        self._work_count += 1

    # -- deletions ---------------------------------------------------------------------------

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint as soon as no save and no link needs it."""
        if self._has_omitted:
            log.info("%s is kept: the save that would have replaced it was omitted", path)
            return
        doomed = folder_at(path)
        with self._lock:
            try:
                published = self._published.pop(doomed, None)
                self._deletions[doomed] = published or doomed.identity()
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error)
        self.delete_waiting()

    def delete_waiting(self) -> None:
        """Delete what waited and is free now, unless the last save is not published.

        A failed deletion takes up space, but does not end the run.
        """
        with self._lock:
            for path, doomed in [] if self._pending else list(self._deletions.items()):
                try:
                    waits = path.identity() == doomed and not self._try(path, doomed)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", path, error)
                    waits = False
                if not waits:
                    del self._deletions[path]

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
        if refusal_reason := path.delete(doomed, self._progress):
            log.warning(
                "%s is not deleted, because it %s. Delete it yourself, or move your files away.",
                path,
                refusal_reason,
            )
        return True


def delete_at(path: str | os.PathLike[str], progress: Progress) -> None:
    """On rank 0: delete a checkpoint or a link.

    Raises:
        SaveError: it is neither, or could not be deleted.
    """
    try:
        why = folder_at(path).delete(progress=progress)
    except OSError as error:
        why = f"could not be renamed ({error.strerror or error})"
    if why:
        msg = f"{os.fspath(path)} was not deleted: it {why}."
        raise SaveError(msg)


def _make_link(target: Folder, link: Folder, progress: Progress) -> None:
    """Make a link, or DeepSpeed's file ``latest`` with the name of the checkpoint."""
    file = link.local
    if file is None or file.name != LATEST:
        link.make_link(target, progress)
        return
    replace_durably(file, f"{target.path.relative_to(file.parent)}/{TAG}".encode())
    source, script = recovery_script(), file.with_name(RECOVERY_SCRIPT)
    if source is not None and not script.exists():
        write_durably(script, source.read_bytes())


def _is_only_checkpoint(path: Folder, published: Iterable[Folder]) -> bool:
    """Whether a path is a checkpoint, and nothing next to it or published can replace it."""
    real = path.follow_links()
    others = (entry for entry in chain(path.siblings(), published) if entry.follow_links() != real)
    return path.is_checkpoint() and not any(other.can_replace(path) for other in others)
