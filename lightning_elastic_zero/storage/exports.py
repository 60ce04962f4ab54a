"""Files for other software that appear whole, in one step, where nothing was.

An export is no checkpoint of this library's: it is never replaced, and nothing is. While it is
written it lies in a hidden directory beside its target, and beside that a note says which process
writes it: what a killed one left is removed by the next one, or by a save in that folder.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import SUMS_SUFFIX, as_save_error, write_durably
from lightning_elastic_zero.storage.paths import sync_directory
from lightning_elastic_zero.storage.process_identity import (
    ProcessIdentity,
    filesystem_time_s,
    touch_regularly,
)
from lightning_elastic_zero.storage.staging import make_parents

EXPORT_PREFIX = ".zero-export-"
"""Prefix of the hidden directory in which an export is written."""

_NOTE_SUFFIX = ".json"
_NOTE_NAME = re.compile(f"{re.escape(EXPORT_PREFIX)}[0-9a-f]{{32}}{re.escape(_NOTE_SUFFIX)}")

_FILES = re.compile(
    r"weights|latest_universal|\.metadata(\.tmp)?|.+\.(pt|safetensors|json|sums|distcp)"
)
"""The names of files that conversions write."""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


def check_free(target: Path) -> None:
    """Refuse a target that exists: nothing is overwritten.

    Raises:
        SaveError: something is there.
    """
    if os.path.lexists(target):
        msg = (
            f"{target} is there already, and nothing is overwritten: write to another path, or "
            "move away what lies there"
        )
        raise SaveError(msg)


class StagedExport:
    """A directory in the making, or one file in such a directory.

    Attributes:
        path: the hidden directory.
        note: the file that says which process writes it.
        target: where it, or its one file, is to be found.
    """

    def __init__(self, target: Path) -> None:
        """Make the hidden directory, and those above it that are missing.

        Raises:
            SaveError: something is at the target, or the directory cannot be made.
        """
        check_free(target)
        self.target = target
        self.path = target.parent / f"{EXPORT_PREFIX}{uuid.uuid4().hex}"
        self.note = _note_of(self.path)
        with as_save_error(target):
            make_parents(target)
            # The note comes first: no directory of an export is ever without one.
            write_durably(self.note, ProcessIdentity.of_this_process(target.name).to_json())
            self.path.mkdir()

    def drop_sums(self) -> None:
        """Remove the checksums that were written beside files: other software does not use them."""
        for path in self.path.rglob(f"*{SUMS_SUFFIX}"):
            path.unlink()

    def publish(self, file: str = "") -> None:
        """Rename the directory, or one file in it, to the target.

        Raises:
            SaveError: something has come to the target meanwhile, or the system refused.
        """
        with as_save_error(self.target):
            for folder, _, _ in os.walk(self.path, topdown=False):
                sync_directory(Path(folder))
            if file:
                _name_file(self.path / file, self.target)
            else:
                if os.path.lexists(self.target):
                    raise FileExistsError(errno.EEXIST, "it is there by now", str(self.target))
                self.path.rename(self.target)
            sync_directory(self.target.parent)

    def remove(self) -> None:
        """Remove what is left under the hidden names; this process has written all of it."""
        _remove(self.path)


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + _NOTE_SUFFIX)


def _remove(path: Path) -> None:
    """Remove the directory of an export, and then its note; what cannot be removed stays."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with suppress(OSError):
                Path(folder, name).unlink()
        with suppress(OSError):
            Path(folder).rmdir()
    if not os.path.lexists(path):
        with suppress(OSError):
            _note_of(path).unlink()


def remove_dead_exports(parent: Path) -> list[Path]:
    """Remove what processes that have ended left of exports into a folder; return their paths.

    One stays that holds a file of a name that no export has: somebody else has put it there.
    """
    removed = []
    for note in sorted(parent.glob(f"{EXPORT_PREFIX}*{_NOTE_SUFFIX}")):
        owner = ProcessIdentity.read(note) if _NOTE_NAME.fullmatch(note.name) else None
        if owner is None:
            continue
        with suppress(OSError):
            now_s = filesystem_time_s(parent / f"{EXPORT_PREFIX}{uuid.uuid4().hex}")
            if owner.is_dead(now_s - note.lstat().st_mtime):
                path = note.with_name(note.name.removesuffix(_NOTE_SUFFIX))
                if _is_own(path):
                    _remove(path)
                    removed.append(path)
    return removed


def _is_own(path: Path) -> bool:
    """Whether all files in a directory have names of an export's; none is a link."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return all(_FILES.fullmatch(file.name) and not file.is_symlink() for file in files)


def _name_file(file: Path, target: Path) -> None:
    """Rename a file where the name is free: a link fails where it is not, unlike a rename."""
    try:
        target.hardlink_to(file)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or os.path.lexists(target):
            raise
        file.rename(target)


@contextmanager
def staged_export(target: Path) -> Iterator[StagedExport]:
    """Make an export; what was not published when this ends is removed.

    Raises:
        SaveError: something is at the target, or the directory cannot be made.
    """
    export = StagedExport(target)
    try:
        with touch_regularly(export.note):
            yield export
    finally:
        export.remove()
