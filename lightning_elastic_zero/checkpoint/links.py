"""Links such as ``last.ckpt``: each is changed in one step, and names only what is published.

A link is made under a hidden name beside its own, which it then takes by one rename, so that a kill
at any instant leaves the old link or the new one. What a process that was killed in between has
left under such a name is removed when that link is made again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage import (
    LINK_PREFIX,
    copy_checkpoint,
    exchange_names,
    ignore_progress,
    inspect_target,
    remove_hidden,
    sync_directory,
)

_NO_LINKS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""What a filesystem says that has no links. Any other error would fail a copy too, or worse."""

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

    def defer_until_published(self, target: Path | None) -> None:
        """Defer links to this checkpoint: it is about to be written in the background.

        None: no checkpoint is.
        """
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
                log.warning("%s is not made to name %s, which is not there", link, target)

    def on_save_ended(self, target: Path, *, published: bool) -> None:
        """Make the links that waited for this checkpoint; or forget them, if it failed.

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
                    make_link(target, link)


def make_link(target: Path, link: Path, on_progress: Callable[[], None] = ignore_progress) -> None:
    """Make a link to a checkpoint, in one step, in the place of a link or a checkpoint.

    A directory there gives way in one step where the system can exchange two names, otherwise the
    name is free for some microseconds. What this library did not write is left as it is.

    Args:
        target: the checkpoint, which is there.
        link: beside it or elsewhere; the link's text is relative.
        on_progress: called while a directory is deleted, or copied, where there are no links.

    Raises:
        SaveError: it could not be made, and is what it was.
    """
    if target == link:
        return
    new, old = (link.parent / f"{LINK_PREFIX}{link.name}.{end}" for end in ("new", "old"))
    try:
        if refusal_reason := inspect_target(link).refusal_reason:
            msg = (
                f"Could not let {link} name {target}, which is published: {link} {refusal_reason}."
            )
            raise SaveError(msg)
        for hidden in (new, old):
            remove_hidden(hidden, link, on_progress)
        _make(new, target, on_progress)
        _put(new, link, old)
        sync_directory(link.parent)
    except OSError as error:
        msg = f"Could not let {link} name {target}, which is published: {error.strerror or error}."
        raise SaveError(msg) from error
    finally:
        # The link is changed, or is not: a failure here is a matter of disk space.
        with suppress(OSError):
            if not os.path.lexists(link) and os.path.lexists(old):
                # An interrupt came between two renames.
                old.rename(link)
        for hidden in (new, old):
            with suppress(OSError):
                remove_hidden(hidden, link, on_progress)


def _make(new: Path, target: Path, on_progress: Callable[[], None]) -> None:
    try:
        new.symlink_to(os.path.relpath(target, new.parent))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # What Lightning does there too, but for files only.
        copy_checkpoint(target, new, on_progress)


def _put(new: Path, link: Path, old: Path) -> None:
    """Rename the new one to the link; a directory that was there is then called new or old."""
    with_directory = _is_directory(new) or _is_directory(link)
    if not (with_directory and os.path.lexists(link)):
        new.replace(link)
    elif not exchange_names(new, link):
        link.rename(old)
        try:
            new.rename(link)
        except OSError:
            old.rename(link)
            raise


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
