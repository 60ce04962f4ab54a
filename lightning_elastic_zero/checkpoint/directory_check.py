"""Check before training that all ranks share each checkpoint directory and can save there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.processes import machine
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checkpoints import (
    await_shared,
    check_shareable,
    leave_shared,
    remove_shared,
)
from lightning_elastic_zero.storage.checksums import as_save_error, write_durably
from lightning_elastic_zero.storage.owners import new_id
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.storage.probe import probe_capabilities, scratch_folder
from lightning_elastic_zero.storage.store_checkpoints import check_conditional_writes
from lightning_elastic_zero.storage.stores import StorePath

PREFIX = "zero-directory-check-"
"""Prefix of the temporary folder's name."""

TRIAL_BYTES = 4 << 20
"""Size of the file that each host writes to measure the directory's speed."""

_tried_devices: set[int] = set()
"""Devices whose capabilities this process has checked; used on rank 0 only."""


@dataclass(frozen=True, slots=True)
class CheckedDirectory:
    """A directory into which all ranks can save."""

    path: str
    hosts: int
    """Number of hosts that see the same files in it; a container counts as a host."""
    write_s: float
    """Seconds in which the slowest host wrote and synced ``TRIAL_BYTES``; 0 if not measured, with
    one host or on a device that was checked before."""
    made: tuple[str, ...]
    """Directories that this check created, the outermost first."""


def check_directories(folders: Iterable[object], ranks: Ranks) -> list[CheckedDirectory]:
    """Check that all ranks share each directory and that checkpoints can be published there.

    Collective. Creates missing directories, as the first save would, and a temporary folder in each
    directory. All ranks use rank 0's ``folders``; None and empty paths are skipped.

    Raises:
        SaveError: a directory does not support writing, renaming or syncing, or a rank does not see
            the files of another host within ten seconds (node-local storage).
        UnsupportedError: a URL has an unsupported scheme, obstore is not installed, or several
            ranks would save into the memory of one process.
    """

    def paths() -> list[str]:
        named = (str(parse_path(str(folder))) for folder in folders if folder)
        return list(dict.fromkeys(named))

    wanted = ranks.broadcast("check directories: which", paths)
    if not wanted:
        return []
    hosts = ranks.all_gather("check directories: hosts", _host)
    writers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    checked = []
    for path in map(parse_path, wanted):
        if isinstance(path, StorePath):
            _check_store(path, ranks)
            checked.append(CheckedDirectory(str(path), len(writers), 0.0, ()))
        else:
            checked.append(_check(path, ranks, writers))
    return checked


def _check_store(folder: StorePath, ranks: Ranks) -> None:
    """Check that rank 0 can write into a store and that all ranks can read it. Collective."""
    step = f"check {folder}"

    def leave() -> str:
        check_shareable(folder, ranks.world_size)
        name = f"{PREFIX}{new_id()}"
        with as_save_error(folder):
            check_conditional_writes(folder.store, folder)
        leave_shared(folder, name)
        return name

    name = ranks.broadcast(step, leave)
    try:
        ranks.run_all(f"{step}: read", lambda: await_shared(folder, name))
    finally:
        if not ranks.rank:
            remove_shared(folder, name)


def _check(directory: Path, ranks: Ranks, writers: Collection[int]) -> CheckedDirectory:
    """Check one directory. Collective; ``writers`` has the first rank of each host."""
    step = f"check {directory}"
    with ExitStack() as opened:

        def make() -> tuple[str, bool, list[str]]:
            # The directory is kept, since another run may already use it.
            with as_save_error(directory):
                missing = [p for p in (directory, *directory.parents) if not p.exists()]
                directory.mkdir(parents=True, exist_ok=True)
                device = directory.stat().st_dev
            is_new = device not in _tried_devices
            folder = opened.enter_context(scratch_folder(directory, PREFIX, ranks.progress))
            if is_new:
                _check_capabilities(directory, folder / "abilities")
                _tried_devices.add(device)
            return str(folder), is_new, [str(p) for p in reversed(missing)]

        # The other ranks receive lists, because JSON has no tuples.
        name, is_new, made = ranks.broadcast(step, make)
        folder, seconds = Path(name), [0.0]
        if unseen := find_unseen(ranks, folder, writers, step):
            raise SaveError(unseen)
        if is_new and len(writers) > 1:
            seconds = ranks.all_gather(f"{step}: write", lambda: _write(folder, ranks, writers))
    return CheckedDirectory(str(directory), len(writers), max(seconds), tuple(made))


def find_unseen(ranks: Ranks, folder: Path, writers: Collection[int], step: str) -> str:
    """Return which rank does not see another rank's file; empty if all do. Collective.

    All ranks look for the file of rank 0, and rank 0 for those of all ``writers``, which include
    rank 0. ``step`` is the name of this check in messages.
    """

    def write() -> None:
        if ranks.rank:
            await_shared(folder, _token(0))
        if ranks.rank in writers:
            leave_shared(folder, _token(ranks.rank))

    def look() -> None:
        for rank in writers:
            await_shared(folder, _token(rank), writer=rank)
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


def _host() -> str:
    """Return an identifier of this host or container."""
    # Containers of one host may have different mounts at the same path.
    with suppress(OSError):
        return f"{machine()} {Path('/proc/self/ns/mnt').readlink()}"
    return machine()


def _check_capabilities(directory: Path, folder: Path) -> None:
    with as_save_error(directory):
        folder.mkdir()
    failed = [found for found in probe_capabilities(folder) if found.outcome == "FAILS"]
    if failed:
        found = "; ".join(f"{ability.what}: {ability.details}" for ability in failed)
        msg = f"Checkpoints cannot be saved into {directory}: {found}."
        raise SaveError(msg)


def _write(folder: Path, ranks: Ranks, writers: Collection[int]) -> float:
    """Return the seconds that a small write took; 0 on ranks that are not ``writers``."""
    if ranks.rank not in writers:
        return 0.0
    began = time.monotonic()
    with as_save_error(folder.parent):
        write_durably(folder / f"written-by-{ranks.rank}", bytes(TRIAL_BYTES))
    return time.monotonic() - began
