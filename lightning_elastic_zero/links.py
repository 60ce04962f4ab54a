"""Links such as ``last.ckpt``, which name a checkpoint that is still being written.

``ModelCheckpoint(save_last="link")`` links to a checkpoint as soon as its save has returned. Where
it is written in the background, the link is set back to what it named before, until the checkpoint
is published: a run that is killed meanwhile finds the last whole one through it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_elastic_zero.storage import sync_directory


class WaitingLinks:
    """The links to the one checkpoint that is being written. Used on one rank, by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target: Path | None = None
        self._folders: frozenset[Path] = frozenset()
        self._before: dict[Path, str] = {}
        self._waiting: dict[Path, str] = {}

    def expect(self, target: Path, folders: Iterable[Path]) -> None:
        """Note what the links in some folders name, before a save of ``target`` has begun."""
        with self._lock:
            self._target = target
            self._folders = frozenset(folders)
            self._before = {link: os.readlink(link) for link in self._links()}  # noqa: PTH115
            self._waiting = {}

    def set_back(self) -> None:
        """Let no link name the target before it is there."""
        with self._lock:
            if self._target is None or os.path.lexists(self._target):
                return
            for link in self._links():
                text = os.readlink(link)  # noqa: PTH115 - as it is, relative or not
                if os.path.abspath(link.parent / text) == str(self._target):  # noqa: PTH100
                    self._waiting[link] = text
                    _set(link, self._before.get(link))

    def release(self, *, published: bool) -> None:
        """Let the links name the target, now that it is published; or leave them, if it failed."""
        with self._lock:
            if published:
                for link, text in self._waiting.items():
                    _set(link, text)
            self._target, self._waiting = None, {}

    def _links(self) -> Iterator[Path]:
        for folder in self._folders:
            if folder.is_dir():
                yield from (entry for entry in folder.iterdir() if entry.is_symlink())


def _set(link: Path, text: str | None) -> None:
    """Let a link name something else, in one step; None: remove it."""
    if text is None:
        link.unlink(missing_ok=True)
    else:
        new = link.parent / f".zero-link-{link.name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(text)
        new.replace(link)
    sync_directory(link.parent)
