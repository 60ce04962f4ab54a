"""Deleting checkpoints so that none is ever half there under its own name.

Nothing is deleted that this library did not write: see ``file_ownership``.
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

from lightning_elastic_zero.storage.existing_target import MOST_NAMED, inspect_target
from lightning_elastic_zero.storage.file_ownership import classify_files, remove_own_files
from lightning_elastic_zero.storage.paths import sync_directory
from lightning_elastic_zero.text import format_names

DELETING_PREFIX = ".zero-removed-"
"""Prefix of a checkpoint that is being deleted: renamed first, so that none is half there."""

_DELETING_NAME = re.compile(re.escape(DELETING_PREFIX) + "[0-9a-f]+")

_log = logging.getLogger(__name__)


def ignore_progress() -> None:
    """Do nothing: the default of every ``on_progress``."""


def delete_checkpoint(path: Path, on_progress: Callable[[], None] = ignore_progress) -> str:
    """Delete a checkpoint, which vanishes at once and is then emptied, or a link to one.

    Args:
        path: what is to be deleted, if it is there.
        on_progress: called between files: large directories take long on some disks.

    Returns:
        Why it is still there, untouched, as the predicate of a sentence; empty if it is gone.

    Raises:
        OSError: it is still there, whole.
    """
    existing = inspect_target(path)
    if existing.kind == "link":
        path.unlink(missing_ok=True)
    if existing.refusal_reason or existing.kind in {"nothing", "link"}:
        return existing.refusal_reason
    if existing.kind == "empty":
        return "is an empty directory, and no checkpoint"
    remove_interrupted_deletions(path.parent, on_progress)
    renamed = rename_for_deletion(path)
    if refusal_reason := _foreign_files_reason(classify_files(renamed).foreign):
        # It came between the look and the rename.
        renamed.rename(path)
        return refusal_reason
    sync_directory(path.parent)
    remove_own_files(renamed, on_progress, hidden=True)
    return ""


def rename_for_deletion(path: Path) -> Path:
    """Rename what is to be removed, so that nobody takes it for a checkpoint; return its name."""
    renamed = path.parent / f"{DELETING_PREFIX}{uuid.uuid4().hex}"
    path.rename(renamed)
    return renamed


def remove_interrupted_deletions(
    parent: Path, on_progress: Callable[[], None] = ignore_progress
) -> list[Path]:
    """Remove what deletions that were killed left in a directory; return what it was."""
    found = [
        path
        for path in parent.glob(f"{DELETING_PREFIX}*")
        if _DELETING_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    for path in found:
        with suppress(OSError):
            if refusal_reason := _foreign_files_reason(classify_files(path, hidden=True).foreign):
                _keep_under_visible_name(path, None, refusal_reason)
            else:
                remove_own_files(path, on_progress, hidden=True)
    return [path for path in found if not os.path.lexists(path)]


def remove_hidden(
    path: Path,
    known_as: Path | None,
    on_progress: Callable[[], None] = ignore_progress,
    *,
    unfinished: bool = True,
) -> None:
    """Remove a checkpoint that lies under a hidden name, or a link that does.

    What somebody else put there in the meantime is not removed: the whole of it is then found
    beside the name by which it was known.

    Args:
        path: the hidden name; nothing need be there.
        known_as: the visible path that it had; None: it never had one, or that is not known.
        on_progress: called between files.
        unfinished: whether it may be without a manifest. It is then renamed first, so that
            whoever still works on it cannot publish what is left of it.

    Raises:
        OSError: not all of it could be removed.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        refusal_reason = inspect_target(path).refusal_reason
    else:
        refusal_reason = _foreign_files_reason(classify_files(path, hidden=unfinished).foreign)
    if refusal_reason:
        _keep_under_visible_name(path, known_as, refusal_reason)
    elif path.is_symlink():
        path.unlink()
    else:
        last_name = rename_for_deletion(path) if unfinished else path
        remove_own_files(last_name, on_progress, hidden=unfinished)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", str(path))


def _keep_under_visible_name(path: Path, known_as: Path | None, refusal_reason: str) -> None:
    if known_as is None:
        _log.warning("%s is not removed: it %s. Move it away.", path, refusal_reason)
        return
    kept = known_as.with_name(f"{known_as.name}.kept-{uuid.uuid4().hex[:8]}")
    path.rename(kept)
    _log.warning("What was %s is kept as %s: it %s.", known_as, kept, refusal_reason)


def _foreign_files_reason(foreign: tuple[str, ...]) -> str:
    return f"holds what no save wrote: {format_names(foreign, MOST_NAMED)}" if foreign else ""
