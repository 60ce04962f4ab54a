"""Folders in an object store. A checkpoint is published and deleted by writing its manifest."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.file_write import as_save_error
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.own_files import (
    LINK_FORMAT,
    MOST_LINKS,
    ExistingTarget,
    RecordedFiles,
    leads_inside,
    recorded_files,
)
from lightning_elastic_zero.storage.paths import StorePath
from lightning_elastic_zero.storage.store_checkpoints import (
    DELETED_FORMAT,
    StagedObjects,
    check_conditional_writes,
    check_replaceable,
    delete_replaced,
    file_sizes,
    inspect_target,
    owned_deletion,
    read_any_commit,
    read_commit,
    unique_commit,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreFolder(Folder):
    """The objects below a path in a bucket."""

    path: StorePath

    @property
    def access_advice(self) -> str:
        return self.path.store.access_advice

    @property
    def requests(self) -> int:
        return self.path.store.requests

    # -- inspection --------------------------------------------------------------------------

    def inspect(self) -> ExistingTarget:
        return inspect_target(self.path)

    def exists(self) -> bool:
        return read_commit(self.follow_links().path) is not None

    def is_link(self) -> bool:
        commit = read_commit(self.path)
        return commit is not None and bool(commit.linked_to)

    def is_checkpoint(self) -> bool:
        with suppress(PermissionError):
            commit = read_commit(self.follow_links().path)
            return commit is not None and bool(commit.save_id)
        return False

    def follow_links(self) -> StoreFolder:
        path = self.path
        for _ in range(MOST_LINKS):
            commit = read_commit(path)
            if commit is None or not commit.linked_to:
                break
            path = path.with_name(commit.linked_to)
        return StoreFolder(path)

    def follow_links_if_exists(self) -> StoreFolder:
        with suppress(PermissionError):
            return self.follow_links()
        return self

    def entries(self) -> Iterator[StoreFolder]:
        names, _ = self.path.store.entries(self.path.key)
        yield from (StoreFolder(self.path / name) for name in names if name[0] != ".")

    def sizes(self, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        sizes = file_sizes(self.path)
        missing = FileNotFoundError(errno.ENOENT, "no such object")
        yield from ((name, sizes.get(name, missing)) for name in names)

    def identity(self) -> object:
        commit = read_commit(self.path)
        return commit and commit.identity

    def published_ns(self) -> int:
        commit = read_commit(self.path)
        return int(commit.modified.timestamp() * 1e9) if commit else 0

    def why_missing(self) -> str:
        return self.path.store.why_missing()

    # -- reading -----------------------------------------------------------------------------

    def read_manifest_as_is(self) -> bytes:
        commit = read_commit(self.path)
        if commit is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self.path))
        return commit.data

    def recorded(self) -> RecordedFiles:
        commit = read_commit(self.path)
        return recorded_files(commit.data if commit else b"")

    def raise_if_denied(self, error: Exception) -> None:
        if isinstance(error, PermissionError):
            raise error

    # -- saving, links and deletion ----------------------------------------------------------

    def check_shareable(self, world_size: int) -> None:
        if world_size > 1 and self.path.root.startswith("memory://"):
            msg = (
                f"{self} is in the memory of one process, but {world_size} ranks save or load. "
                "Choose a folder or a store that all ranks share"
            )
            raise UnsupportedError(msg)

    def check_writable(self) -> None:
        with as_save_error(self.path):
            check_conditional_writes(self.path.store, self.path)

    def prepare(self, below: str) -> None:  # noqa: ARG002 (a disk suggests it)
        check_replaceable(self.path)

    def stage(self, save_id: str, progress: Progress = NO_PROGRESS) -> StagedObjects:
        return StagedObjects.create(self.path, save_id, progress)

    def staging(self, save_id: str) -> StoreFolder:
        return StoreFolder(self.path / save_id)

    def delete(self, expected: object = None, progress: Progress = NO_PROGRESS) -> str:
        # Stores delete without conditions. So the manifest is replaced on the condition that it is
        # unchanged, then deleted. A save that begins in between waits (``DELETION_S``).
        store, key = self.path.store, (self.path / MANIFEST_NAME).key
        commit, existing = read_any_commit(self.path, progress), self.inspect()
        is_left = commit is not None and commit.is_deleted and not store.has_one_writer
        if existing.refusal_reason or commit is None or is_left:  # to another process
            return existing.refusal_reason
        if commit.is_deleted or expected in {None, commit.identity}:
            with suppress(FileExistsError), owned_deletion(self.path, commit, progress):
                deleted = unique_commit(DELETED_FORMAT, save_id=commit.save_id)
                store.swap(key, deleted, commit.version, progress)
                self._delete_name(progress)
                delete_replaced(self.path, commit, progress)
                return ""
        _log.warning("%s is not deleted: another process has replaced it.", self)
        return ""

    def _delete_name(self, progress: Progress) -> None:
        """Delete the manifest, whose content says that the checkpoint is deleted."""
        store = self.path.store
        try:
            store.delete_name((self.path / MANIFEST_NAME).key, progress)
        except OSError as error:
            if store.has_one_writer:  # The caller deletes again.
                raise
            _log.warning("%s is deleted, but its manifest may stay: %s", self, error.strerror)

    def _make_link(self, target: StoreFolder, progress: Progress) -> None:
        text = self._relative(target)
        data = unique_commit(LINK_FORMAT, target=text)
        try:
            if refusal_reason := self.inspect().refusal_reason:
                msg = f"Could not link {self} to the published {target}: {self} {refusal_reason}."
                raise SaveError(msg)
            replaced = read_any_commit(self.path, progress)
            expected = replaced.version if replaced else None
            self.path.store.swap((self.path / MANIFEST_NAME).key, data, expected, progress)
        except OSError as error:
            msg = f"Could not link {self} to the published {target}: {error.strerror or error}."
            raise SaveError(msg) from error
        if replaced is not None:
            with suppress(OSError):
                delete_replaced(self.path, replaced, progress)

    def _relative(self, target: StoreFolder) -> str:
        """Return the text of a link; raise SaveError if no link can lead there."""
        text = ""
        with suppress(ValueError):
            text = str(target.path.relative_to(self.path.parent))
        if target.path.root != self.path.root or not leads_inside(text):
            msg = (
                f"Could not link {self} to the published {target}: a link in an object store leads "
                "to a checkpoint in its own folder or below it. Place the link in a folder above "
                "the checkpoint."
            )
            raise SaveError(msg)
        return text

    # -- files for other ranks ---------------------------------------------------------------

    def leave(self, name: str) -> None:
        path = self.path / name
        with as_save_error(path):
            path.store.put(path.key, b"")

    def sees(self, name: str) -> bool:
        path = self.path / name
        path.store.get(path.key)
        return True

    def _remove_left(self, names: Iterable[str]) -> None:
        self.path.store.delete([(self.path / name).key for name in names])
