"""Files for other software that appear whole, in one step, where nothing was.

An export is no checkpoint of this library's: it is never replaced, and nothing is. While it is
written it lies in a hidden directory beside its target, which only this process knows.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import SUMS_SUFFIX, as_save_error
from lightning_elastic_zero.storage.paths import sync_directory
from lightning_elastic_zero.storage.staging import make_parents

EXPORT_PREFIX = ".zero-export-"
"""Prefix of the hidden directory in which an export is written."""

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
        with as_save_error(target):
            make_parents(target)
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
        """Remove what is left under the hidden name; all in it was written by this process."""
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                with suppress(OSError):
                    Path(folder, name).unlink()
            with suppress(OSError):
                Path(folder).rmdir()


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
        yield export
    finally:
        export.remove()
