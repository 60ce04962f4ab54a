"""The requests that checkpoints need of an object store, whichever it is.

``object_store.ObjectStore`` is a bucket, ``node_store.NodeStore`` the memory or the disks of the
job's nodes; ``paths.StorePath.store`` chooses one. Errors are ``OSError``, as of a disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress

Version: TypeAlias = "Mapping[str, str]"
"""Identifies one content of an object: its ``e_tag``, and ``version`` where the store has one."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a list."""

    key: str
    size_bytes: int
    modified: datetime
    """By the store's clock."""


class Read(Protocol):
    """A ranged read under way."""

    @property
    def start(self) -> int:
        """The first byte."""

    @property
    def stop(self) -> int:
        """The end of the requested range."""

    @property
    def holder(self) -> object:
        """Which of several copies was read, after ``result``; None if there is one."""

    def result(self, progress: Progress) -> memoryview:
        """Wait for the bytes; fewer if the object is shorter.

        Raises:
            OSError: it cannot be read.
        """

    def cancel(self) -> None:
        """Cancel the read."""


class Writer(Protocol):
    """A new object, written as a stream: ``write``, then ``finish``. Otherwise it never appears."""

    def write(self, part: memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: a part could not be written.
        """

    def finish(self) -> None:
        """Make the object appear.

        Raises:
            OSError: it could not be written.
        """

    def close(self) -> None:
        """Forget the writer."""


class Store(ABC):
    """One bucket. Methods raise ``OSError`` and may be called in any thread.

    Attributes:
        root: its URL.
        requests: requests so far, without repetitions.
        bytes_read: bytes of objects received so far.
    """

    access_advice: ClassVar[str]
    """What a user should check if it cannot be used."""

    has_one_writer: ClassVar[bool] = False
    """Whether only this process changes names now, so that it can complete what it began."""

    root: str
    requests: int
    bytes_read: int

    # -- reads -------------------------------------------------------------------------------

    @abstractmethod
    def get(self, key: str, progress: Progress = NO_PROGRESS) -> tuple[bytes, Version, datetime]:
        """Return a small object, its version, and when it was written."""

    @abstractmethod
    def size(self, key: str, progress: Progress = NO_PROGRESS) -> int:
        """Return the size of an object."""

    @abstractmethod
    def begin_read(self, key: str, start: int, stop: int) -> Read:
        """Request the bytes ``[start, stop)`` of an object; several requests may be under way."""

    @abstractmethod
    def objects_below(self, prefix: str, progress: Progress = NO_PROGRESS) -> list[StoredObject]:
        """Return all objects below a path, sorted."""

    @abstractmethod
    def entries(
        self, prefix: str, progress: Progress = NO_PROGRESS
    ) -> tuple[list[str], list[StoredObject]]:
        """Return the names of folders and the objects directly below a path, sorted."""

    def local_file(self, key: str) -> Path | None:
        """Return the file of an object on this machine; None if it is elsewhere."""

    def distrust(self, key: str, holder: object) -> bool:  # noqa: ARG002 (a bucket has one copy)
        """Read no more from where a damaged object was read; return whether others have it.

        ``holder`` is that of the read; None: the file of this machine, or what ``get`` has read.
        """
        return False

    def why_missing(self) -> str:
        """Return why objects may be missing, as a clause for a message; usually empty."""
        return ""

    # -- writes ------------------------------------------------------------------------------

    @abstractmethod
    def put(self, key: str, data: bytes, progress: Progress = NO_PROGRESS) -> None:
        """Write a small object unconditionally."""

    @abstractmethod
    def swap(
        self, key: str, data: bytes, expected: Version | None, progress: Progress = NO_PROGRESS
    ) -> Version:
        """Write a small object if it has the expected version; None: if it does not exist.

        ``data`` must be unique to this call.

        Raises:
            FileExistsError: the object has another version.
        """

    @abstractmethod
    def writer(self, key: str, size_bytes: int, progress: Progress = NO_PROGRESS) -> Writer:
        """Begin an object of about ``size_bytes``, which appears when it is complete."""

    @abstractmethod
    def delete(self, keys: Collection[str], progress: Progress = NO_PROGRESS) -> None:
        """Delete objects; those that do not exist count as deleted."""

    def delete_name(self, key: str, progress: Progress = NO_PROGRESS) -> None:
        """Delete an object whose name another process may use again, by one request.

        A repetition of a request that was carried out could delete the other process's object.
        """
        self.delete([key], progress)
