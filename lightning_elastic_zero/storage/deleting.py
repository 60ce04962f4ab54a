"""Deleting checkpoints so that none is ever half there under its own name.

Nothing is deleted that this library did not write: see ``contents``.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.storage.contents import contents_of, remove_contents
from lightning_elastic_zero.storage.occupants import listed, occupant_of
from lightning_elastic_zero.storage.places import sync_directory

DOOMED = ".zero-removed-"
"""Prefix of a checkpoint that is being deleted: renamed first, so that none is half there."""

_DOOMED_NAME = re.compile(re.escape(DOOMED) + "[0-9a-f]+")

_log = logging.getLogger(__name__)


def no_work() -> None:
    """Take no notice of work that goes on."""


def delete(path: Path, on_work: Callable[[], None] = no_work) -> str:
    """Delete a checkpoint, which vanishes at once and is then emptied, or a link to one.

    Args:
        path: what is to be deleted, if it is there.
        on_work: called between files: large directories take long on some disks.

    Returns:
        Why it is still there, untouched, as the predicate of a sentence; empty if it is gone.

    Raises:
        OSError: it is still there, whole.
    """
    occupant = occupant_of(path)
    if occupant.kind == "link":
        path.unlink(missing_ok=True)
    if occupant.keeps or occupant.kind in {"nothing", "link"}:
        return occupant.keeps
    if occupant.kind == "empty":
        return "is an empty directory, and no checkpoint"
    remove_doomed(path.parent, on_work)
    doomed = doom(path)
    if keeps := _holding(contents_of(doomed).foreign):
        # It came between the look and the rename.
        doomed.rename(path)
        return keeps
    sync_directory(path.parent)
    remove_contents(doomed, on_work, hidden=True)
    return ""


def doom(path: Path) -> Path:
    """Rename what is to be removed, so that nobody takes it for a checkpoint; return its name."""
    doomed = path.parent / f"{DOOMED}{uuid.uuid4().hex}"
    path.rename(doomed)
    return doomed


def remove_doomed(parent: Path, on_work: Callable[[], None] = no_work) -> list[Path]:
    """Remove what deletions that were killed left in a directory; return what it was."""
    found = [
        path
        for path in parent.glob(f"{DOOMED}*")
        if _DOOMED_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    for path in found:
        with suppress(OSError):
            if keeps := _holding(contents_of(path, hidden=True).foreign):
                _bring_to_light(path, None, keeps)
            else:
                remove_contents(path, on_work, hidden=True)
    return [path for path in found if not os.path.lexists(path)]


def discard(
    path: Path,
    known_as: Path | None,
    on_work: Callable[[], None] = no_work,
    *,
    unfinished: bool = True,
) -> None:
    """Remove a checkpoint that lies under a hidden name, or a link that does.

    What somebody else put there in the meantime is not removed: the whole of it is then found
    beside the name by which it was known.

    Args:
        path: the hidden name; nothing need be there.
        known_as: the visible path that it had; None: it never had one, or that is not known.
        on_work: called between files.
        unfinished: whether it may be without a manifest. It is then renamed first, so that
            whoever still works on it cannot publish what is left of it.

    Raises:
        OSError: not all of it could be removed.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        keeps = occupant_of(path).keeps
    else:
        keeps = _holding(contents_of(path, hidden=unfinished).foreign)
    if keeps:
        _bring_to_light(path, known_as, keeps)
    elif path.is_symlink():
        path.unlink()
    else:
        last_name = doom(path) if unfinished else path
        remove_contents(last_name, on_work, hidden=unfinished)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", str(path))


def _bring_to_light(path: Path, known_as: Path | None, keeps: str) -> None:
    if known_as is None:
        _log.warning("%s is not removed: it %s. Move it away.", path, keeps)
        return
    kept = known_as.with_name(f"{known_as.name}.kept-{uuid.uuid4().hex[:8]}")
    path.rename(kept)
    _log.warning("What was %s is kept as %s: it %s.", known_as, kept, keeps)


def _holding(foreign: tuple[str, ...]) -> str:
    return f"holds what no save wrote: {listed(foreign)}" if foreign else ""
