"""What saves, loads and retention do with a folder, wherever it is.

``Folder`` is the one protocol of all kinds of storage. The kinds are ``disk_folder.DiskFolder`` and
``store_folder.StoreFolder``; ``folders.folder_at`` chooses one by the path. Single files are opened
by path: ``file_read``, ``file_write`` and ``paths`` distinguish the two kinds too. Callers do so
only for what disks alone have, by ``Folder.local``.

A rank also leaves empty files for the other ranks, which prove that they see the same directory. A
network file system shows them to other hosts once they are closed. They are removed before the
checkpoint is published, so they are not synced to disk.
"""

from __future__ import annotations

import errno
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from typing_extensions import Self

from lightning_elastic_zero.core.manifest import MANIFEST_NAME, is_damaged
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.own_files import ExistingTarget, RecordedFiles, target_in
from lightning_elastic_zero.storage.paths import NO_ENTRY, AnyPath

_POLL_S = 0.1


class Staged(Protocol):
    """A checkpoint being written, on rank 0: ``put_in_place`` and ``clean``, or ``abandon``."""

    @property
    def path(self) -> AnyPath:
        """Where the files are written."""

    @property
    def prefix(self) -> str:
        """The prefix of the files' names in the manifest."""

    def touch_regularly(self) -> AbstractContextManager[None]:
        """Show other machines, within the context, that this process is alive."""

    def seal(self, manifest: bytes) -> None:
        """Take the manifest, after all other files."""

    def sync(self, progress: Progress = NO_PROGRESS) -> None:
        """Make all files durable, before ``put_in_place``."""

    def put_in_place(self) -> None:
        """Publish the checkpoint in one step; ``clean`` must follow.

        Raises:
            SaveError: it could not be published.
        """

    def clean(self, progress: Progress) -> None:
        """Remove what the published checkpoint replaced."""

    def abandon(self) -> None:
        """Remove the files, unless the checkpoint may have been published."""


@dataclass(frozen=True, slots=True)
class Folder(ABC):
    """A path: of a checkpoint, a link to one, a folder of checkpoints, or nothing.

    Two are equal if their paths are. Methods raise ``OSError`` if the storage does not answer.
    """

    path: AnyPath
    """Absolute; links are not resolved."""

    @property
    @abstractmethod
    def access_advice(self) -> str:
        """What a user should check if it cannot be read."""

    @property
    def local(self) -> Path | None:
        """The path on a disk, where other software finds its files; None elsewhere."""
        return None

    @property
    def requests(self) -> int:
        """Requests of this process to the storage so far, if it counts them."""
        return 0

    def __str__(self) -> str:
        """Return the path."""
        return str(self.path)

    # -- inspection --------------------------------------------------------------------------

    @abstractmethod
    def inspect(self) -> ExistingTarget:
        """Return what exists at the path, without following a link."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether something is there; links are followed."""

    @abstractmethod
    def is_link(self) -> bool:
        """Whether it is a link."""

    @abstractmethod
    def is_checkpoint(self) -> bool:
        """Whether it is, or links to, a checkpoint of this library; other files do not matter."""

    @abstractmethod
    def follow_links(self) -> Self:
        """Return the folder behind links; of a missing one, as far as it can be resolved."""

    @abstractmethod
    def follow_links_if_exists(self) -> Self:
        """Return the folder behind links. A missing one is unchanged, so that errors name it."""

    @abstractmethod
    def entries(self) -> Iterator[Self]:
        """Yield its visible entries. A hidden one is being written or deleted."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
        """Yield the name of each file in it with its size, or the error of looking at it."""

    @abstractmethod
    def identity(self) -> object:
        """Return what distinguishes a checkpoint from a later one at its path; None if missing."""

    @abstractmethod
    def published_ns(self) -> int:
        """Return when the checkpoint, or else the folder or link, was written; 0 if missing."""

    def siblings(self) -> Iterator[Self]:
        """Yield the other visible entries of the folder above."""
        above = replace(self, path=self.path.parent)
        yield from (entry for entry in above.entries() if entry != self)

    def entries_below(self, depth: int) -> Iterator[Self]:
        """Yield the visible entries of the folders below, to a depth.

        Links and checkpoints are not searched.
        """
        folders = [self]
        for _ in range(depth):
            entries = [entry for folder in folders for entry in folder.entries()]
            folders = [each for each in entries if not each.is_link() and not each.is_checkpoint()]
            for folder in folders:
                yield from folder.entries()

    def has_link(self, folders: Iterable[Folder] = ()) -> bool:
        """Whether a link next to the checkpoint or in one of the folders leads to it."""
        real = self.follow_links()
        # Of a hidden one, a killed process may have left it: only visible entries count.
        entries = chain(self.siblings(), *(folder.entries() for folder in folders))
        return any(entry.is_link() and entry.follow_links() == real for entry in entries)

    def can_replace(self, other: Folder) -> bool:
        """Whether a run that could resume from ``other`` can resume from this one.

        This one must be a checkpoint of this library with all files in their recorded sizes, and
        with optimizer state if ``other`` has it. Another run may delete it meanwhile.
        """
        recorded = self.recorded()
        if recorded.problem or (recorded.weights_only and not other.recorded().weights_only):
            return False
        return next(self.lacking(recorded), None) is None

    def lacking(self, recorded: RecordedFiles) -> Iterator[str]:
        """Yield the recorded files that are missing or have another size."""
        expected = {name: size for name, size in recorded.sizes.items() if size is not None}
        yield from (name for name, size in self.sizes(expected) if size != expected[name])

    def why_missing(self) -> str:
        """Return why files may be missing, as a clause for a message; usually empty."""
        return ""

    # -- reading -----------------------------------------------------------------------------

    @abstractmethod
    def read_manifest_as_is(self) -> bytes:
        """Read the file of the manifest, which may be a link."""

    @abstractmethod
    def recorded(self) -> RecordedFiles:
        """Return the files that its manifest names, without verifying it."""

    @abstractmethod
    def raise_if_denied(self, error: Exception) -> None:
        """Raise PermissionError if access was denied: this says nothing about the checkpoint."""

    def has_damaged_manifest(self) -> bool:
        """Whether it has a manifest that is not what was written; then it may be a checkpoint."""
        try:
            return is_damaged(self.read_manifest_as_is())
        except OSError as error:
            if error.errno not in NO_ENTRY:
                raise
            return False

    def read_manifest(self) -> bytes:
        """Read the manifest of a checkpoint.

        Raises:
            OSError: it is missing or cannot be read.
        """
        data = self.read_manifest_as_is()
        if target := target_in(data):
            why = f"it is a link to {target}, which is not a checkpoint in the folder of the link"
            raise OSError(errno.EINVAL, why, str(self.path / MANIFEST_NAME))
        return data

    # -- saving, links and deletion ----------------------------------------------------------

    def check_shareable(self, world_size: int) -> None:
        """Refuse storage that several ranks cannot share.

        Raises:
            UnsupportedError: it is that.
        """

    def check_writable(self) -> None:
        """Refuse storage into which no save can be published; raises SaveError."""

    def repair(self) -> None:
        """Restore a checkpoint that a crash during its publication left missing.

        Of a folder of checkpoints, also those in it: a search would not find them.
        """

    @abstractmethod
    def prepare(self, below: str) -> None:
        """Restore a target that a crash left missing, and refuse one that must not be replaced.

        Raises:
            SaveError: it must not be replaced. If it is a folder, the message suggests the name
                ``below`` in it.
        """

    @abstractmethod
    def stage(self, save_id: str, progress: Progress = NO_PROGRESS) -> Staged:
        """Remove leftovers of killed saves, and begin to write a checkpoint; on rank 0."""

    @abstractmethod
    def staging(self, save_id: str) -> Self:
        """Return the folder in which the files of a save are written."""

    @abstractmethod
    def delete(self, expected: object = None, progress: Progress = NO_PROGRESS) -> str:
        """Delete a checkpoint, or a link to one. Its name disappears first, then its files.

        Args:
            expected: ``identity`` of the checkpoint to delete; None: any.
            progress: checked between removals.

        Returns:
            Why it was not deleted, as the predicate of a sentence; empty if it does not exist now.

        Raises:
            OSError: it could not be renamed, and is intact.
        """

    def make_link(self, target: Folder, progress: Progress = NO_PROGRESS) -> None:
        """Become a link to a checkpoint in one step, replacing a link or a checkpoint.

        Raises:
            SaveError: it could not be made, and is unchanged.
        """
        if not isinstance(target, type(self)):
            msg = (
                f"Could not link {self} to the published {target}: one is on a disk, the other in "
                "an object store. Choose a link in the folder of the checkpoint."
            )
            raise SaveError(msg)
        if target != self:
            self._make_link(target, progress)

    @abstractmethod
    def _make_link(self, target: Self, progress: Progress) -> None: ...

    # -- files for other ranks ---------------------------------------------------------------

    @abstractmethod
    def leave(self, name: str) -> None:
        """Make an empty file that the other ranks wait for; raise SaveError if it fails."""

    @abstractmethod
    def sees(self, name: str) -> bool:
        """Whether a file that another rank has left is visible; or raise FileNotFoundError."""

    def await_left(self, name: str, wait_s: float = 10.0, writer: int = 0) -> None:
        """Wait for a file that another rank has left.

        Network file systems show the files of other hosts with a delay. ``writer`` is the rank that
        made it, for the message.
        """
        stop_s, why = time.monotonic() + wait_s, ""
        while True:
            try:
                if self.sees(name):
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                why = f" ({error.strerror})"
            if time.monotonic() >= stop_s:
                msg = (
                    f"{self}: {socket.gethostname()} does not see the file {name} that rank "
                    f"{writer} wrote there, after {wait_s:g} s{why}. Save on a file system that "
                    "all machines share, under the same path on each, or to an object store."
                )
                raise SaveError(msg)
            time.sleep(_POLL_S)

    def remove_left(self, *names: str) -> None:
        """Remove files of ``leave``, where they exist."""
        try:
            self._remove_left(names)
        except OSError as error:
            msg = f"{self}: could not remove a file of this save ({error.strerror})."
            raise SaveError(msg) from error

    @abstractmethod
    def _remove_left(self, names: Iterable[str]) -> None: ...
