"""The runs that save into a folder: each leaves a marker while it lives, and looks for others.

Two runs in one folder number the names that are taken; where both take one at the same time, or go
on from one ``last.ckpt``, each replaces and deletes the other's. A run that was killed leaves its
marker behind, and the one that goes on in its place must not be warned of it. So a process of this
machine is asked of the system; one of another machine is alive when its marker has been touched
since it was first seen, whatever the clocks say.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.checksums import write_durably
from lightning_elastic_zero.storage.paths import check_local_path
from lightning_elastic_zero.storage.periodic_thread import END_S, PeriodicThread
from lightning_elastic_zero.storage.process_identity import (
    TOUCH_INTERVAL_S,
    ProcessIdentity,
    filesystem_time_s,
    new_id,
)

RUN_MARKER_PREFIX = ".zero-run-"
"""Prefix of the marker that a run leaves in each folder into which it saves."""

log = logging.getLogger(__name__)


class ConcurrentRunMonitor:
    """The folders into which a run saves, with its markers in them; on one rank."""

    def __init__(self, folders: Iterable[object]) -> None:
        """Watch folders, except those on a remote storage, where nothing can be saved.

        Args:
            folders: paths; None for a callback that has none.
        """
        self._markers: dict[Path, Path | None] = {}
        for folder in folders:
            with suppress(UnsupportedError):
                if folder:
                    self._markers.setdefault(check_local_path(os.fspath(str(folder))), None)
        self._seen: dict[Path, int] = {}
        self._warned: set[tuple[Path, ProcessIdentity]] = set()
        self._is_over, self._at_work = False, threading.Lock()
        self._thread = PeriodicThread(self.look, TOUCH_INTERVAL_S, "watches its folders")

    def __reduce__(self) -> tuple[type[ConcurrentRunMonitor], tuple[tuple[()]]]:
        """Copy as one that has no folders: a run's markers are its own."""
        return ConcurrentRunMonitor, ((),)

    def begin(self) -> None:
        """Leave a marker in each folder, and look at the folders now and then until the end."""
        if self._markers:
            self.look()
            self._thread.start()

    def end(self) -> None:
        """Remove the markers. May be called twice."""
        self._is_over = True
        if self._thread.is_alive():
            self._thread.end()
        if self._at_work.acquire(timeout=END_S):
            try:
                for folder, marker in self._markers.items():
                    if marker is not None:
                        _remove(marker)
                        self._markers[folder] = None
            finally:
                self._at_work.release()

    def look(self) -> None:
        """Show that this run lives, and warn of others that do."""
        with self._at_work:
            if self._is_over:
                return
            for folder in self._markers:
                # It may not be there yet, and what is wrong with a disk is a save's to tell.
                with suppress(OSError, SaveError):
                    self._look_at(folder)

    def look_soon(self) -> None:
        """Look in the background at once, as after a save, which may have made a folder."""
        self._thread.call_soon()

    def _look_at(self, folder: Path) -> None:
        if not folder.is_dir():
            return
        marker, mine = self._markers[folder], ProcessIdentity.of_this_process(folder.name)
        if marker is None or not marker.exists():
            self._markers[folder] = marker = folder / f"{RUN_MARKER_PREFIX}{new_id()}.json"
            write_durably(marker, mine.to_json())
        os.utime(marker)
        for path in sorted(folder.glob(f"{RUN_MARKER_PREFIX}*.json")):
            owner = ProcessIdentity.read(path)
            if owner is None or owner.is_same_process(mine):
                continue
            if self._is_left(path, owner, folder):
                _remove(path)
            elif self._lives(path, owner) and (folder, owner) not in self._warned:
                self._warned.add((folder, owner))
                _warn(folder, owner)

    def _is_left(self, path: Path, owner: ProcessIdentity, folder: Path) -> bool:
        """Whether a marker is of a run that has ended."""
        if owner.is_dead():
            return True
        if owner.is_on_this_machine() or path in self._seen:
            return False
        now_s = filesystem_time_s(folder / f"{RUN_MARKER_PREFIX}{new_id()}.clock")
        return owner.is_dead(now_s - path.lstat().st_mtime)

    def _lives(self, path: Path, owner: ProcessIdentity) -> bool:
        """Whether a run that has not ended is known to be alive."""
        touched_ns = path.lstat().st_mtime_ns
        return owner.is_on_this_machine() or self._seen.setdefault(path, touched_ns) != touched_ns


def _remove(marker: Path) -> None:
    """Remove a marker, if it is one at this instant."""
    with suppress(OSError):
        if ProcessIdentity.read(marker) is not None and not marker.is_symlink():
            marker.unlink()


def _warn(folder: Path, owner: ProcessIdentity) -> None:
    log.warning(
        "Another run saves into %s: process %d on %s is alive. A name that is taken is numbered "
        "(last-v1.ckpt); but where both take one at the same time, or both were resumed from the "
        "same last.ckpt, each replaces and deletes the other's checkpoints, save_last=True or "
        '"link" alike, and ckpt_path="last" takes whichever run\'s is newest. Give each run a '
        "dirpath of its own, or end one.",
        folder,
        owner.pid,
        owner.host,
    )
