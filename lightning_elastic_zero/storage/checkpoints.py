"""Checkpoints at any location: the one place that selects between a disk and an object store.

A rank also writes files for the other ranks to read. An empty token proves that a rank sees the
same directory; tables are compared between ranks. Both are removed before the checkpoint is
published, so they are not synced to disk. A network file system shows them to other hosts once they
are closed.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage import disk_checkpoints, own_files, store_checkpoints
from lightning_elastic_zero.storage.disk_checkpoints import StagedDirectory, staging_path
from lightning_elastic_zero.storage.file_write import as_save_error
from lightning_elastic_zero.storage.object_store import AnyPath, StorePath
from lightning_elastic_zero.storage.own_files import ExistingTarget, RecordedFiles, recorded_files
from lightning_elastic_zero.storage.paths import read_file
from lightning_elastic_zero.storage.store_checkpoints import StagedObjects

Staged: TypeAlias = "StagedDirectory | StagedObjects"
"""A checkpoint being written, on rank 0."""


# -- paths ---------------------------------------------------------------------------------------


def resolved(path: AnyPath) -> AnyPath:
    """Return the path behind links; of a missing one, the path as far as it can be resolved."""
    if isinstance(path, StorePath):
        return store_checkpoints.follow_links(path)
    return own_files.follow_links(path)


def resolved_if_exists(path: AnyPath) -> AnyPath:
    """Return the path behind links. A missing one is unchanged, so that errors name it."""
    if isinstance(path, StorePath):
        with suppress(PermissionError):
            return store_checkpoints.follow_links(path)
        return path
    real = own_files.follow_links(path)
    return real if os.path.exists(real) else path  # noqa: PTH110 (never raises)


def exists(path: AnyPath) -> bool:
    """Whether something is at a path; links are followed."""
    if isinstance(path, StorePath):
        return store_checkpoints.read_commit(store_checkpoints.follow_links(path)) is not None
    return own_files.follow_links(path).exists()


def has_entry(path: AnyPath) -> bool:
    """Whether a path has an entry, which may be a link to something missing."""
    if isinstance(path, StorePath):
        return store_checkpoints.inspect_target(path).kind != "nothing"
    return os.path.lexists(path)


def is_link(path: AnyPath) -> bool:
    """Whether a path is a link."""
    if isinstance(path, StorePath):
        commit = store_checkpoints.read_commit(path)
        return commit is not None and bool(commit.linked_to)
    return path.is_symlink() or bool(own_files.copied_link(path))


def siblings(path: AnyPath) -> Iterator[AnyPath]:
    """Yield the other visible entries of a path's folder."""
    if isinstance(path, StorePath):
        yield from (each for each in store_checkpoints.siblings(path) if each.name[0] != ".")
    else:
        entries = path.parent.iterdir() if path.parent.is_dir() else ()
        # A hidden one is being written or deleted.
        yield from (each for each in entries if each != path and each.name[0] != ".")


def entries_below(folder: AnyPath, depth: int) -> Iterator[AnyPath]:
    """Yield the visible entries of the folders below a folder, to a depth.

    Links and checkpoints are not searched.
    """
    folders = [folder]
    for _ in range(depth):
        entries = [entry for each in folders for entry in siblings(each / MANIFEST_NAME)]
        folders = [entry for entry in entries if not is_link(entry) and not is_checkpoint(entry)]
        for each in folders:
            yield from siblings(each / MANIFEST_NAME)


def file_sizes(folder: AnyPath, names: Iterable[str]) -> Iterator[tuple[str, int | OSError]]:
    """Yield the name of each file in a folder with its size, or the error of looking at it."""
    if isinstance(folder, StorePath):
        found = store_checkpoints.file_sizes(folder)
        missing = FileNotFoundError(errno.ENOENT, "no such object")
        yield from ((name, found.get(name, missing)) for name in names)
    else:
        yield from ((name, _size(folder / name)) for name in names)


def _size(path: Path) -> int | OSError:
    try:
        return path.stat().st_size
    except OSError as error:
        return error


def read_manifest(path: AnyPath) -> bytes:
    """Read the manifest of a checkpoint.

    Raises:
        OSError: it is missing or cannot be read.
    """
    if isinstance(path, StorePath):
        commit = store_checkpoints.read_commit(path)
        if commit is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
        data = commit.data
    else:
        data = read_file(path / MANIFEST_NAME)
    if target := own_files.target_in(data):
        msg = f"it is a link to {target}, which is not a checkpoint in the folder of the link"
        raise OSError(errno.EINVAL, msg, str(path / MANIFEST_NAME))
    return data


def check_shareable(path: AnyPath, world_size: int) -> None:
    """Refuse the memory of one process as a store for several.

    Raises:
        UnsupportedError: it is that.
    """
    if world_size > 1 and str(path).startswith("memory://"):
        msg = (
            f"{path} is in the memory of one process, but {world_size} ranks save or load. Choose "
            "a folder or a store that all ranks share"
        )
        raise UnsupportedError(msg)


def request_count(path: AnyPath) -> int:
    """Return the requests of this process to the store of a path so far; 0 for a disk."""
    return path.store.requests if isinstance(path, StorePath) else 0


# -- checkpoints ---------------------------------------------------------------------------------


def is_checkpoint(path: AnyPath) -> bool:
    """Whether a checkpoint of this library is at a path; other files do not matter."""
    if isinstance(path, StorePath):
        return store_checkpoints.is_checkpoint(path)
    return own_files.is_checkpoint(path)


def can_replace(other: AnyPath, path: AnyPath) -> bool:
    """Whether a run that could resume from ``path`` can resume from ``other``.

    ``other`` must be a checkpoint of this library with all files in their recorded sizes, and with
    optimizer state if ``path`` has it. Another run may delete it meanwhile.
    """
    there = _recorded(other)
    if there.problem or (there.weights_only and not _recorded(path).weights_only):
        return False
    sizes = {name: size for name, size in there.sizes.items() if size is not None}
    return all(found == sizes[name] for name, found in file_sizes(other, sizes))


def _recorded(path: AnyPath) -> RecordedFiles:
    if isinstance(path, Path):
        return own_files.recorded_at(path)
    commit = store_checkpoints.read_commit(path)
    return recorded_files(commit.data if commit else b"")


def has_link(path: AnyPath, folders: Iterable[AnyPath] = ()) -> bool:
    """Whether a link next to a checkpoint or in one of the folders leads to it."""
    real = resolved(path)
    # Of a hidden one, a killed process may have left it: siblings leaves those out.
    found = chain(siblings(path), *(siblings(folder / MANIFEST_NAME) for folder in folders))
    return any(is_link(entry) and resolved(entry) == real for entry in found)


def identity(path: AnyPath) -> object:
    """Return what distinguishes a checkpoint from a later one at its path; None if missing."""
    if isinstance(path, StorePath):
        commit = store_checkpoints.read_commit(path)
        return commit and commit.identity
    return own_files.identity(path)


def published_ns(*paths: AnyPath) -> int:
    """Return when the manifest of a checkpoint, or else a folder or link, was written."""
    first = paths[0]
    if isinstance(first, StorePath):
        commit = store_checkpoints.read_commit(first)
        return int(commit.modified.timestamp() * 1e9) if commit else 0
    for there in (first / MANIFEST_NAME, *paths):
        try:
            return there.lstat().st_mtime_ns  # type: ignore[union-attr] # all of one kind
        except OSError:
            continue
    return 0


def inspect_target(path: AnyPath) -> ExistingTarget:
    """Return what exists at a path."""
    if isinstance(path, StorePath):
        return store_checkpoints.inspect_target(path)
    return own_files.inspect_target(path)


def delete_checkpoint(path: AnyPath, expected: object) -> str:
    """Delete a checkpoint of a given ``identity``; see ``own_files.delete_checkpoint``."""
    if isinstance(path, StorePath):
        return store_checkpoints.delete_checkpoint(path, expected)
    return own_files.delete_checkpoint(path, expected)


def make_link(target: AnyPath, link: AnyPath, progress: Progress = NO_PROGRESS) -> None:
    """Make a link to a checkpoint in one step; a SaveError leaves the link unchanged."""
    if isinstance(target, StorePath) and isinstance(link, StorePath):
        store_checkpoints.make_link(target, link, progress)
    elif isinstance(target, Path) and isinstance(link, Path):
        disk_checkpoints.make_link(target, link, progress)
    else:
        msg = (
            f"Could not link {link} to the published {target}: one is on a disk, the other in an "
            "object store. Choose a link in the folder of the checkpoint."
        )
        raise SaveError(msg)


# -- saving --------------------------------------------------------------------------------------


def prepare_target(target: AnyPath, below: str) -> None:
    """Restore a target that a crash left missing, and refuse one that must not be replaced."""
    if isinstance(target, StorePath):
        store_checkpoints.check_replaceable(target)
        return
    disk_checkpoints.repair_target(target)
    own_files.check_replaceable(target, below)


def repair_target(target: AnyPath) -> None:
    """Restore a target that a crash between two renames left missing."""
    if isinstance(target, Path):
        disk_checkpoints.repair_target(target)


def stage(target: AnyPath, save_id: str, progress: Progress = NO_PROGRESS) -> Staged:
    """Remove leftovers of killed saves, and begin to write a checkpoint; on rank 0."""
    if isinstance(target, StorePath):
        return StagedObjects.create(target, save_id, progress)
    if target.parent.is_dir():
        disk_checkpoints.remove_leftovers(target.parent, progress)
    return StagedDirectory.create(target, save_id)


def staged_folder(target: AnyPath, save_id: str) -> AnyPath:
    """Return the folder or prefix in which the files of a save are written."""
    if isinstance(target, StorePath):
        return target / save_id
    return staging_path(target, save_id)


# -- files for other ranks ----------------------------------------------------------------------


_POLL_S = 0.1


def await_shared(
    directory: AnyPath,
    name: str,
    is_whole: Callable[[bytes], bool] = lambda _: True,
    wait_s: float = 10.0,
    writer: int = 0,
) -> bytes:
    """Wait for a file of another rank, and read it.

    Network file systems show the files of other hosts with a delay. ``is_whole`` checks that the
    data are complete; ``writer`` is the rank that wrote them, for the message.
    """
    stop_s, why = time.monotonic() + wait_s, ""
    while True:
        try:
            if (data := _read_shared(directory / name)) is not None and is_whole(data):
                return data
        except FileNotFoundError:
            pass
        except OSError as error:
            why = f" ({error.strerror})"
        if time.monotonic() >= stop_s:
            msg = (
                f"{directory}: {socket.gethostname()} does not see the file {name} that rank "
                f"{writer} wrote there, after {wait_s:g} s{why}. Save on a file system that all "
                "machines share, under the same path on each, or to an object store."
            )
            raise SaveError(msg)
        time.sleep(_POLL_S)


def leave_shared(directory: AnyPath, name: str, data: bytes = b"") -> None:
    """Write a new file for the other ranks, until ``remove_shared``."""
    path = directory / name
    with as_save_error(path):
        if isinstance(path, StorePath):
            path.store.put(path.key, data)
            return
        with path.open("xb") as file:
            file.write(data)


def remove_shared(directory: AnyPath, *names: str) -> None:
    """Remove files of ``leave_shared``, where they exist."""
    try:
        if isinstance(directory, StorePath):
            directory.store.delete([(directory / name).key for name in names])
            return
        for name in names:
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        msg = f"{directory}: could not remove a file of this save ({error.strerror})."
        raise SaveError(msg) from error


def _read_shared(path: AnyPath) -> bytes | None:
    if isinstance(path, StorePath):
        return path.store.get(path.key)[0]
    # Opening a directory makes a network file system ask its server. A lookup of the name may be
    # answered from a cache for up to a minute.
    with os.scandir(path.parent.parent), os.scandir(path.parent) as entries:
        is_there = any(entry.name == path.name for entry in entries)
    return read_file(path) if is_there else None
