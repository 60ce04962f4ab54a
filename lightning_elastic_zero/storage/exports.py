"""Folders and files for other software, which appear at their target in one step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.disk_checkpoints import (
    EXPORT_PREFIX,
    HiddenDirectory,
    owner_path,
)
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX, as_save_error
from lightning_elastic_zero.storage.own_files import remove_files
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import sync_directory

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@contextmanager
def staged_export(target: Path) -> Iterator[StagedExport]:
    """Make an export; at the end of the context, remove it unless it was published."""
    export = StagedExport(target)
    try:
        with export.touch_regularly():
            yield export
    finally:
        export.remove()


class StagedExport(HiddenDirectory):
    """A directory for other software, or a single file in such a directory, being written.

    It replaces nothing, and nothing of this library replaces it.
    """

    def __init__(self, target: Path) -> None:
        check_free(target)
        export_id = new_id()
        super().__init__(
            target.parent / f"{EXPORT_PREFIX}{export_id}",
            owner_path(target.parent, export_id),
            target,
        )
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def drop_sums(self) -> None:
        """Remove the checksums of files, which other software does not use."""
        remove_files(self.path, lambda name: name.endswith(SUMS_SUFFIX))

    def publish(self, file: str = "") -> None:
        """Rename the directory, or one file in it, to the target, which must not exist."""
        with as_save_error(self.target):
            self._sync_names()
            if file:
                _name_file(self.path / file, self.target)
            else:
                check_free(self.target)
                self.path.rename(self.target)
            sync_directory(self.target.parent)

    def remove(self) -> None:
        """Remove the remaining files under hidden names; this process has written all of them."""
        remove_files(self.path, lambda _: True)
        if not os.path.lexists(self.path):
            with suppress(OSError):
                self._owner_path.unlink()


def check_free(target: Path) -> None:
    """Refuse a target that exists."""
    if os.path.lexists(target):
        msg = f"{target} exists, and is not overwritten: choose another path, or move it away"
        raise SaveError(msg)


def _name_file(file: Path, target: Path) -> None:
    # A hard link fails where the name is taken, unlike a rename.
    try:
        target.hardlink_to(file)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or os.path.lexists(target):
            raise
        file.rename(target)
