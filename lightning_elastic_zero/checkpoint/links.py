"""Links such as ``last.ckpt`` name only what is published."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from lightning_elastic_zero.storage import ignore_progress, make_link

log = logging.getLogger(__name__)


class CheckpointLinks:
    """Makes links to checkpoints when these are published. Used on one rank, by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target: Path | None = None
        self._waiting: list[Path] = []

    def __reduce__(self) -> tuple[type[CheckpointLinks], tuple[()]]:
        """Copy as a new one: the links that wait here are made by this one only."""
        return CheckpointLinks, ()

    def on_save_started(self, target: Path) -> None:
        """Defer links to this checkpoint: it is about to be written in the background."""
        with self._lock:
            self._target, self._waiting = target, []

    def is_deferred(self, target: Path) -> bool:
        """Whether this checkpoint is being written."""
        with self._lock:
            return target == self._target

    def make(
        self, target: Path, link: Path, on_progress: Callable[[], None] = ignore_progress
    ) -> None:
        """Make a link to a checkpoint, now or when it is published.

        Where nothing is, because its save has failed, the link stays what it was.

        Raises:
            SaveError: it could not be made, and is what it was.
        """
        with self._lock:
            if target == self._target:
                self._waiting.append(link)
            elif target.exists():
                make_link(target, link, on_progress)
            else:
                log.warning("%s is not linked to %s, which is not there", link, target)

    def on_save_ended(
        self,
        target: Path,
        on_progress: Callable[[], None] = ignore_progress,
        *,
        published: bool,
    ) -> None:
        """Make the links that waited for this checkpoint; or forget them, if it failed.

        Args:
            target: what was saved.
            on_progress: called while a link takes long: where the disk has none, it is a copy.
            published: whether it is there.

        Raises:
            SaveError: one could not be made, and is what it was.
        """
        with self._lock:
            if target != self._target:
                return
            waiting = self._waiting
            self._target, self._waiting = None, []
            if published:
                for link in waiting:
                    make_link(target, link, on_progress)
