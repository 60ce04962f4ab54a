"""Check, before training, that all ranks share each checkpoint directory and can save there."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.processes import machine
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checkpoints import check_shareable
from lightning_elastic_zero.storage.checksums import as_save_error, write_durably
from lightning_elastic_zero.storage.owners import new_id
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.storage.probe import probe_capabilities
from lightning_elastic_zero.storage.shared import (
    await_shared,
    leave_shared,
    leave_token,
    remove_shared,
    scratch_folder,
    token_name,
)
from lightning_elastic_zero.storage.store_checkpoints import check_conditional_writes
from lightning_elastic_zero.storage.stores import StorePath

PREFIX = "zero-directory-check-"
"""Beginning of the trial folder's name; it is there for milliseconds."""

TRIAL_BYTES = 4 << 20
"""What each of several hosts writes, to learn how fast the directory is."""

_tried_devices: set[int] = set()
"""Devices of which this process knows what they can do: of rank 0 only."""


@dataclass(frozen=True, slots=True)
class CheckedDirectory:
    """A directory into which all ranks can save."""

    path: str
    hosts: int
    """Hosts (containers count as such) that see the same files in it."""

    write_s: float
    """Seconds in which the slowest host wrote ``TRIAL_BYTES`` and brought them to the disk; 0 where
    nothing was written: there is one host, or the same device was tried before."""

    made: tuple[str, ...]
    """Directories that this check created, the outermost first."""


def check_directories(folders: Iterable[object], ranks: Ranks) -> list[CheckedDirectory]:
    """Check that all ranks share each directory and that checkpoints can be published there.

    Collective. Directories that are not there are made, as by the first save. A trial folder is
    made in each, and removed again.

    Args:
        folders: paths; all ranks take rank 0's. None and empty ones are left out.
        ranks: those of the run.

    Raises:
        SaveError: a directory cannot be written, cannot rename or sync, or is not the same one on
            all hosts (node-local storage), as far as all of them see within ten seconds.
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
    leavers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    checked = []
    for path in map(parse_path, wanted):
        if isinstance(path, StorePath):
            _check_store(path, ranks)
            checked.append(CheckedDirectory(str(path), len(leavers), 0.0, ()))
        else:
            checked.append(_check(path, ranks, leavers))
    return checked


def _check_store(folder: StorePath, ranks: Ranks) -> None:
    """Check that rank 0 can write into a store, and that all ranks can read it. Collective."""
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


def _check(directory: Path, ranks: Ranks, leavers: Collection[int]) -> CheckedDirectory:
    """Check one directory. Collective."""
    step = f"check {directory}"
    with ExitStack() as opened:

        def make() -> tuple[str, bool, list[str]]:
            # It stays: others may begin to use it now.
            with as_save_error(directory):
                missing = [p for p in (directory, *directory.parents) if not p.exists()]
                directory.mkdir(parents=True, exist_ok=True)
                device = directory.stat().st_dev
            is_new = device not in _tried_devices
            folder = opened.enter_context(scratch_folder(directory, PREFIX, ranks.progress))
            if is_new:
                _try_out(directory, folder / "abilities")
                _tried_devices.add(device)
            return str(folder), is_new, [str(p) for p in reversed(missing)]

        # The other ranks get lists, as JSON has no tuples.
        name, is_new, made = ranks.broadcast(step, make)
        folder, seconds = Path(name), [0.0]
        if unseen := find_unseen(ranks, folder, leavers, step):
            raise SaveError(unseen)
        if is_new and len(leavers) > 1:
            seconds = ranks.all_gather(f"{step}: write", lambda: _write(folder, ranks, leavers))
    return CheckedDirectory(str(directory), len(leavers), max(seconds), tuple(made))


def find_unseen(ranks: Ranks, folder: Path, leavers: Collection[int], step: str) -> str:
    """Return which rank does not see what another one wrote; empty where all do. Collective.

    Args:
        ranks: all of which look for what rank 0 leaves in the folder.
        folder: empty, made by rank 0.
        leavers: ranks that leave something, for which rank 0 looks; rank 0 is one of them.
        step: what this is a part of, for messages.
    """
    told = ranks.all_gather(f"{step}: leave a file", lambda: _leave(folder, ranks, leavers))
    if any(told):
        return next(filter(None, told))
    return ranks.broadcast(f"{step}: see all files", lambda: _look(folder, ranks, leavers))


def _leave(folder: Path, ranks: Ranks, leavers: Collection[int]) -> str:
    """Look for what rank 0 leaves, and leave something too; return what went wrong."""
    try:
        if ranks.rank:
            await_shared(folder, token_name(0))
        if ranks.rank in leavers:
            leave_token(folder, ranks.rank)
    except OSError as error:
        return f"rank {ranks.rank} cannot write into {folder.parent}: {error.strerror or error}"
    except SaveError as error:
        return str(error)
    return ""


def _look(folder: Path, ranks: Ranks, leavers: Collection[int]) -> str:
    """Look for what the others have left; return what went wrong."""
    try:
        for rank in leavers:
            await_shared(folder, token_name(rank), writer=rank)
            ranks.progress.check()
    except SaveError as error:
        return str(error)
    return ""


def _host() -> str:
    """Return what tells this host, or this container, from the others."""
    # Two containers of one host may have other things mounted at one path.
    with suppress(OSError):
        return f"{machine()} {Path('/proc/self/ns/mnt').readlink()}"
    return machine()


def _try_out(directory: Path, folder: Path) -> None:
    """Try out what a save needs.

    Raises:
        SaveError: something fails.
    """
    with as_save_error(directory):
        folder.mkdir()
    failed = [found for found in probe_capabilities(folder) if found.outcome == "FAILS"]
    if failed:
        found = "; ".join(f"{ability.what}: {ability.details}" for ability in failed)
        msg = f"Checkpoints cannot be saved into {directory}: {found}."
        raise SaveError(msg)


def _write(folder: Path, ranks: Ranks, leavers: Collection[int]) -> float:
    """Return the seconds of a small write by the first rank of each host."""
    if ranks.rank not in leavers:
        return 0.0
    began = time.monotonic()
    with as_save_error(folder.parent):
        write_durably(folder / f"written-by-{ranks.rank}", bytes(TRIAL_BYTES))
    return time.monotonic() - began
