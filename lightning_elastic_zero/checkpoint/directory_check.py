"""Check before training that all ranks share each checkpoint directory; and temporary folders."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.checkpoint.nodes import join_folder
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.process_state import machine, mount_namespace
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.storage.file_write import as_save_error
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import is_on_nodes

log = logging.getLogger(__name__)

PREFIX = "zero-directory-check-"
"""Prefix of the temporary folder's name."""


def check_directories(
    folders: Iterable[object], ranks: Ranks, node_copies: int | None = None
) -> list[str]:
    """Check that all ranks share each directory; join those on nodes.

    Collective. Creates missing directories, as the first save would, and a temporary folder in each
    directory. All ranks use rank 0's ``folders``; None and empty paths are skipped.

    Returns:
        Directories that this check created, outer ones first.

    Raises:
        SaveError: a directory cannot be written, or a rank does not see the files of another host
            within ten seconds (node-local storage).
        UnsupportedError: a URL has an unsupported scheme, obstore is not installed, or several
            ranks would save into the memory of one process.
    """

    def paths() -> list[str]:
        named = (str(folder_at(str(folder))) for folder in folders if folder)
        return list(dict.fromkeys(named))

    wanted = ranks.broadcast("check directories: which", paths)
    if not wanted:
        return []
    hosts = ranks.all_gather("check directories: hosts", _host)
    writers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    made: list[str] = []
    for folder in map(folder_at, wanted):
        if folder.local is not None:
            made += _check(folder.local, ranks, writers)
        elif is_on_nodes(folder.path):
            join_folder(folder.path, ranks, node_copies)
        else:
            _check_remote(folder, ranks)
    return made


def _host() -> str:
    """Return an identifier of this host or container."""
    # Containers of one host may have different mounts at the same path.
    with suppress(OSError):
        return f"{machine()} {mount_namespace()}"
    return machine()


def _check_remote(folder: Folder, ranks: Ranks) -> None:
    """Check that rank 0 can write into a folder and that all ranks can read it. Collective."""
    step = f"check {folder}"

    def leave() -> str:
        folder.check_shareable(ranks.world_size)
        folder.check_writable()
        name = f"{PREFIX}{new_id()}"
        folder.leave(name)
        return name

    name = ranks.broadcast(step, leave)
    try:
        ranks.run_all(f"{step}: read", lambda: folder.await_left(name))
    finally:
        if not ranks.rank:
            folder.remove_left(name)


def _check(directory: Path, ranks: Ranks, writers: Collection[int]) -> list[str]:
    """Check one directory and return those that were created for it. Collective.

    ``writers``: the first rank of each host.
    """
    step = f"check {directory}"
    with ExitStack() as opened:

        def make() -> tuple[str, list[str]]:
            # The directory is kept, since another run may already use it.
            with as_save_error(directory):
                missing = [p for p in (directory, *directory.parents) if not p.exists()]
                directory.mkdir(parents=True, exist_ok=True)
            folder = opened.enter_context(scratch_folder(directory, PREFIX, ranks.progress))
            return str(folder), [str(p) for p in reversed(missing)]

        # The other ranks receive lists, because JSON has no tuples.
        name, made = ranks.broadcast(step, make)
        if unseen := find_unseen(ranks, Path(name), writers, step):
            raise SaveError(unseen)
    return list(made)


def find_unseen(ranks: Ranks, folder: Path, writers: Collection[int], step: str) -> str:
    """Return which rank does not see another rank's file; empty if all do. Collective.

    All ranks look for the file of rank 0, and rank 0 for those of all ``writers``, which include
    rank 0. ``step`` is the name of this check in messages.
    """

    def write() -> None:
        if ranks.rank:
            folder_at(folder).await_left(_token(0))
        if ranks.rank in writers:
            folder_at(folder).leave(_token(ranks.rank))

    def look() -> None:
        for rank in writers:
            folder_at(folder).await_left(_token(rank), writer=rank)
            ranks.progress.check()

    def failure_of(work: Callable[[], None]) -> str:
        try:
            work()
        except SaveError as error:
            return f"rank {ranks.rank}: {error}"
        return ""

    failures = ranks.all_gather(f"{step}: write files", lambda: failure_of(write))
    if any(failures):
        return next(filter(None, failures))
    return ranks.broadcast(f"{step}: see all files", lambda: failure_of(look))


def _token(rank: int) -> str:
    return f"seen-by-{rank}"


@contextmanager
def scratch_folder(
    directory: Path, prefix: str, progress: Progress = NO_PROGRESS
) -> Iterator[Path]:
    """Make a new folder in a directory; at the end of the context, remove it with its content.

    The name has a random part after ``prefix``. ``progress`` is checked during the removal; errors
    of this library from it are ignored.
    """
    folder = directory / f"{prefix}{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        msg = (
            f"{directory} cannot be written ({error.strerror or error}), expected a directory for "
            "checkpoints: check its permissions, and whether it is mounted read-only"
        )
        raise SaveError(msg) from error
    try:
        yield folder
    finally:
        _remove(folder, progress)


def _remove(folder: Path, progress: Progress) -> None:
    # A file that another host has open reappears under another name for a while.
    for left in reversed(range(5)):
        for inner in _folders_in(folder):
            shutil.rmtree(inner, ignore_errors=True)
            with suppress(ElasticZeroError):  # The step has failed: remove the folder all the same.
                progress.check()
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        if left:
            time.sleep(1.0)
    log.warning("%s could not be removed. It can be deleted.", folder)


def _folders_in(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return []
