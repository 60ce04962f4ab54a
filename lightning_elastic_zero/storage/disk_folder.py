"""Folders on a disk. A checkpoint is published, replaced and deleted by renaming its folder."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.storage.disk_checkpoints import (
    StagedDirectory,
    make_link,
    remove_leftovers,
    repair_all,
    repair_target,
    staging_path,
)
from lightning_elastic_zero.storage.file_write import as_save_error
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.own_files import (
    ExistingTarget,
    RecordedFiles,
    check_replaceable,
    classify_files,
    copied_link,
    follow_links,
    foreign_files_reason,
    inspect_target,
    is_checkpoint,
    recorded_at,
    remove_interrupted_deletions,
    remove_own_files,
    rename_for_deletion,
)
from lightning_elastic_zero.storage.paths import NO_ENTRY, read_file, sync_directory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskFolder(Folder):
    """A folder of a file system."""

    path: Path

    @property
    def access_advice(self) -> str:
        return "its permissions, those of the folders above it, and that its file system is mounted"

    @property
    def local(self) -> Path:
        return self.path

    # -- inspection --------------------------------------------------------------------------

    def inspect(self) -> ExistingTarget:
        return inspect_target(self.path)

    def exists(self) -> bool:
        return follow_links(self.path).exists()

    def is_link(self) -> bool:
        return self.path.is_symlink() or bool(copied_link(self.path))

    def is_checkpoint(self) -> bool:
        return is_checkpoint(self.path)

    def follow_links(self) -> DiskFolder:
        return DiskFolder(follow_links(self.path))

    def follow_links_if_exists(self) -> DiskFolder:
        real = follow_links(self.path)
        return DiskFolder(real) if os.path.exists(real) else self  # noqa: PTH110 (never raises)

    def entries(self) -> Iterator[DiskFolder]:
        entries = self.path.iterdir() if self.path.is_dir() else ()
        yield from (DiskFolder(entry) for entry in entries if entry.name[0] != ".")

    def sizes(self, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        yield from ((name, _size(self.path / name)) for name in names)

    def identity(self) -> object:
        # The text of the manifest, which has the id of the save: on some file systems in user space
        # a rename changes the inode of a folder.
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(status.st_mode):
            with suppress(OSError):
                return hashlib.sha256(read_file(self.path / MANIFEST_NAME)).digest()
        return status.st_dev, status.st_ino

    def published_ns(self) -> int:
        for path in (self.path / MANIFEST_NAME, self.path):
            with suppress(OSError):
                return path.lstat().st_mtime_ns
        return 0

    # -- reading -----------------------------------------------------------------------------

    def read_manifest_as_is(self) -> bytes:
        return read_file(self.path / MANIFEST_NAME)

    def recorded(self) -> RecordedFiles:
        return recorded_at(self.path)

    def raise_if_denied(self, error: Exception) -> None:
        try:
            (self.path / MANIFEST_NAME).exists()
        except PermissionError:
            why = os.strerror(errno.EACCES)
            raise PermissionError(errno.EACCES, why, str(self.path)) from error
        except OSError:
            return  # The error of reading it says more.

    # -- saving, links and deletion ----------------------------------------------------------

    def repair(self) -> None:
        repair_target(self.path)
        try:
            repair_all(self.path)
        except OSError as error:
            # Other checkpoints in it may be readable; reading this one raises a better error.
            if error.errno not in NO_ENTRY | {errno.EROFS}:
                raise

    def prepare(self, below: str) -> None:
        repair_target(self.path)
        check_replaceable(self.path, below)

    def stage(self, save_id: str, progress: Progress = NO_PROGRESS) -> StagedDirectory:
        if self.path.parent.is_dir():
            remove_leftovers(self.path.parent, progress)
        return StagedDirectory.create(self.path, save_id)

    def staging(self, save_id: str) -> DiskFolder:
        return DiskFolder(staging_path(self.path, save_id))

    def delete(self, expected: object = None, progress: Progress = NO_PROGRESS) -> str:
        path, existing = self.path, self.inspect()
        is_symlink = existing.kind == "link" and path.is_symlink()
        if is_symlink and expected in {None, self.identity()}:
            path.unlink(missing_ok=True)
        if existing.refusal_reason or existing.kind == "nothing" or is_symlink:
            return existing.refusal_reason
        if existing.kind == "empty":
            return "is an empty directory, not a checkpoint"
        remove_interrupted_deletions(path.parent, progress)
        renamed = rename_for_deletion(path)
        refusal_reason = foreign_files_reason(classify_files(renamed).foreign)
        is_another = expected not in {None, DiskFolder(renamed).identity()}
        if refusal_reason or is_another:
            # A file was added between the inspection and the rename, or another run has saved.
            renamed.rename(path)
            if is_another:
                _log.warning("%s is not deleted: another process has replaced it.", path)
            return refusal_reason
        sync_directory(path.parent)
        remove_own_files(renamed, progress, hidden=True)
        return ""

    def _make_link(self, target: DiskFolder, progress: Progress) -> None:
        make_link(target.path, self.path, progress)

    # -- files for other ranks ---------------------------------------------------------------

    def leave(self, name: str) -> None:
        path = self.path / name
        with as_save_error(path):
            path.touch(exist_ok=False)

    def sees(self, name: str) -> bool:
        # Opening a directory makes a network file system ask its server. A lookup of the name may
        # be answered from a cache for up to a minute.
        with os.scandir(self.path.parent), os.scandir(self.path) as entries:
            return any(entry.name == name for entry in entries)

    def _remove_left(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)


def _size(path: Path) -> int | OSError:
    try:
        return path.stat().st_size
    except OSError as error:
        return error
