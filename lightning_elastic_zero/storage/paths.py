"""Paths: on disks, in object stores and on the nodes of a job; and opening of regular files."""

from __future__ import annotations

import errno
import importlib
import os
import re
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeGuard

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.object_store import SCHEMES, ObjectStore
from lightning_elastic_zero.storage.store import Store

NODES = "node://"
"""Root of the paths on the nodes' own memory or disks, such as ``node:///dev/shm/run``."""

_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+)://")

_WAS_URL = re.compile(rf"(^|/)(file|node|{'|'.join(SCHEMES)}):/")
"""In paths that were made of a URL: ``Path("s3://bucket/run")`` is ``s3:/bucket/run``."""

NO_ENTRY = {
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
}
"""Errors of a path that does not exist or is not accessible to this user."""

_DAMAGE = {*NO_ENTRY, errno.EINVAL, errno.ESTALE, None}
"""Errors of a file that is missing, was removed meanwhile (NFS), or is not a regular file."""

_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


@dataclass(frozen=True, slots=True, order=True)
class StorePath:
    """The path of an object, or of the objects below it.

    It has the methods of ``pathlib.PurePath`` that checkpoints need and, on purpose, no
    ``__fspath__``: functions for local files refuse it.
    """

    root: str
    """URL of the bucket, such as ``"s3://bucket"``."""
    key: str
    """Path in the bucket, with forward slashes; empty for the bucket itself."""

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> StorePath:
        """Return the path of an object below this one."""
        return StorePath(self.root, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.key).stem

    @property
    def suffix(self) -> str:
        """The last suffix of the name."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> StorePath:
        """The path above."""
        return StorePath(self.root, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        """Return the path of another name next to this one."""
        return self.parent / name

    def relative_to(self, other: StorePath | Path) -> PurePosixPath:
        """Return the path below ``other``."""
        above = other.key if isinstance(other, StorePath) else ""
        return PurePosixPath(self.key).relative_to(above)

    @property
    def store(self) -> Store:
        """The store, chosen by the URL, with one connection pool per process."""
        return _store(self.root, os.getpid())


AnyPath: TypeAlias = "Path | StorePath"
"""A path on a disk or in an object store."""


@cache
def _store(root: str, _pid: int) -> Store:
    # By process: neither threads nor connections survive a fork.
    if root == NODES:
        # Imported here, because it opens files by this module.
        module = importlib.import_module("lightning_elastic_zero.storage.node_store")
        store: Store = module.NodeStore(root)
        return store
    return ObjectStore(root)


def raise_unless_damage(error: OSError, path: AnyPath) -> None:
    """Raise an error of the disk or store with the path: it may be temporary, and is not damage."""
    is_of_store = isinstance(path, StorePath) and isinstance(error, PermissionError)
    if error.errno not in _DAMAGE or is_of_store:
        why = f"{error.strerror}. If another attempt fails too, load another checkpoint"
        raise OSError(error.errno, why, str(path)) from error


def parse_path(path: str | os.PathLike[str] | StorePath) -> AnyPath:
    """Return the path that a URL or an absolute or relative path names; links are not resolved.

    The URL of a manifest stands for its checkpoint.
    """
    if isinstance(path, StorePath):
        return path
    text = os.fspath(path)
    if "\0" in text:
        msg = f"{text!r} contains a NUL character, which a path cannot contain"
        raise UnsupportedError(msg)
    url = _URL.match(text)
    if url is None or url[1].lower() == "file":
        local = text[url.end() :] if url is not None else text
        if _WAS_URL.search(local) or (url is not None and not local.startswith("/")):
            msg = (
                f"{text} was a URL before pathlib, os.path or ModelCheckpoint changed it, or has a "
                "host. Pass a path instead of a file:// URL, and the URL of a store as a string"
            )
            raise UnsupportedError(msg)
        return Path(os.path.abspath(local))  # noqa: PTH100 - Path.absolute() would keep ".."
    scheme = url[1].lower()
    parts = [part for part in text[url.end() :].split("/") if part not in {"", "."}]
    if parts[-1:] == [MANIFEST_NAME]:
        parts.pop()
    if scheme == "node":
        if not text[url.end() :].startswith("/") or not parts or ".." in parts:
            msg = (
                f"{text} is not supported. Choose a folder that each node has for itself, as an "
                "absolute path without '..' after node://, such as node:///dev/shm/run"
            )
            raise UnsupportedError(msg)
        return StorePath(NODES, "/".join(parts))
    if scheme not in SCHEMES or not parts or ".." in parts:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        msg = (
            f"{text} is not supported. Choose a path on a file system that all ranks share, or a "
            f"URL that begins with {known} and a bucket, without '..'"
        )
        raise UnsupportedError(msg)
    return StorePath(f"{scheme}://{parts[0]}", "/".join(parts[1:]))


def is_on_nodes(path: AnyPath) -> TypeGuard[StorePath]:
    """Whether a path is on the nodes of the job, each of which sees its own files."""
    return isinstance(path, StorePath) and path.root == NODES


def check_local_path(path: str | os.PathLike[str] | StorePath) -> Path:
    """Return the absolute path, without resolving links; refuse a URL."""
    location = parse_path(path)
    if isinstance(location, StorePath):
        where = "on the nodes of a job" if is_on_nodes(location) else "in an object store"
        msg = f"{location} is {where}. Choose a path on a file system"
        raise UnsupportedError(msg)
    return location


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with existing links resolved; the path itself may be missing.

    A link to itself is not resolved. ``Path.resolve`` raises ``RuntimeError`` there before 3.13.
    """
    return Path(os.path.realpath(path))


def sync_directory(path: Path) -> bool:
    """Flush the names in a directory to disk (fsync); return whether the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def open_file(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; return its descriptor and its status.

    Pipes are opened without waiting for a writer, and refused.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:
        # A Samba or NFS server on this host has a lease on it. A blocking open makes the system
        # revoke it: fcntl(2), "Leases".
        if not stat.S_ISREG(path.stat().st_mode):
            raise
        descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor, status


MOST_READ_BYTES = 1 << 30
"""Largest file that is read as a whole, such as the manifest of millions of parameters."""


def read_file(path: AnyPath, most_bytes: int = MOST_READ_BYTES) -> bytes:
    """Read a small regular file, without waiting, or an object."""
    if isinstance(path, StorePath):
        return path.store.get(path.key)[0]
    descriptor, status = open_file(path)
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > most_bytes:
            msg = f"it has {status.st_size} bytes, expected at most {most_bytes}"
            raise OSError(errno.EINVAL, msg, str(path))
        return file.read(status.st_size)  # A limit above the size would be allocated.
