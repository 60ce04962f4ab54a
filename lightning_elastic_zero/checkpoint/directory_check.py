"""Check before training that all ranks share each checkpoint directory and can save there.

Also: temporary folders, and tests of the capabilities of a directory that saves need.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.processes import machine
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.storage.disk_checkpoints import NOT_SUPPORTED, exchange_names
from lightning_elastic_zero.storage.file_write import as_save_error, write_durably
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import sync_directory

log = logging.getLogger(__name__)

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
        named = (str(folder_at(str(folder))) for folder in folders if folder)
        return list(dict.fromkeys(named))

    wanted = ranks.broadcast("check directories: which", paths)
    if not wanted:
        return []
    hosts = ranks.all_gather("check directories: hosts", _host)
    writers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    checked = []
    for folder in map(folder_at, wanted):
        if folder.local is not None:
            checked.append(_check(folder.local, ranks, writers))
        else:
            _check_remote(folder, ranks)
            checked.append(CheckedDirectory(str(folder), len(writers), 0.0, ()))
    return checked


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
            seconds = ranks.all_gather(
                f"{step}: write", lambda: _time_write(folder, ranks, writers)
            )
    return CheckedDirectory(str(directory), len(writers), max(seconds), tuple(made))


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


def _time_write(folder: Path, ranks: Ranks, writers: Collection[int]) -> float:
    """Return the seconds that a small write took; 0 on ranks that are not ``writers``."""
    if ranks.rank not in writers:
        return 0.0
    began = time.monotonic()
    with as_save_error(folder.parent):
        write_durably(folder / f"written-by-{ranks.rank}", bytes(TRIAL_BYTES))
    return time.monotonic() - began


RENAME, EXCHANGE, LINKS = "directory: rename", "directory: exchange of names", "directory: links"
SYNC_FILE, SYNC_NAMES = "directory: sync of files", "directory: sync of names"

_CONSEQUENCES = {
    RENAME: "checkpoints cannot be published there",
    EXCHANGE: "existing checkpoints cannot be replaced",
    LINKS: "last.ckpt cannot link to the newest checkpoint",
    SYNC_FILE: "a power failure can destroy saved checkpoints",
    SYNC_NAMES: "a power failure can destroy saved checkpoints",
}
"""The consequence for a run, if a capability fails."""


@dataclass(frozen=True, slots=True)
class Capability:
    """A capability that saves need, and the result of testing it."""

    what: str
    outcome: Literal["holds", "does without", "FAILS"]
    """``does without``: the feature is missing, and saves use another method."""
    details: str = ""
    """For ``FAILS``, the error and its consequence; for ``does without``, the other method."""


def probe_capabilities(folder: Path) -> list[Capability]:
    """Test an empty folder, used by this process only. The written files stay in it."""
    probes: dict[str, Callable[[Path], str]] = {
        RENAME: _rename,
        EXCHANGE: _exchange,
        LINKS: _links,
        SYNC_FILE: _sync_file,
        SYNC_NAMES: _sync_names,
    }
    found = []
    for number, (what, probe) in enumerate(probes.items()):
        place = folder / str(number)
        try:
            place.mkdir()
            instead = probe(place)
            found.append(Capability(what, "does without" if instead else "holds", instead))
        except (OSError, SaveError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__ or error
            text = (isinstance(cause, OSError) and cause.strerror) or cause
            details = f"{text}: {_CONSEQUENCES[what]}; save on another file system"
            found.append(Capability(what, "FAILS", details))
    return found


# Each returns the method that saves use instead of a missing feature, or raises.


def _rename(place: Path) -> str:
    """Publish a folder, and replace a file."""
    hidden, published = place / ".hidden", place / "published"
    hidden.mkdir()
    _write_new(hidden / "file", b"1")
    hidden.rename(published)
    if (published / "file").read_bytes() != b"1" or os.path.lexists(hidden):
        raise OSError(errno.EIO, "a renamed folder is not at its new path")
    _write_new(place / "old", b"old")
    _write_new(place / "new", b"new")
    (place / "new").replace(place / "old")
    if (place / "old").read_bytes() != b"new":
        raise OSError(errno.EIO, "a replaced file has its old bytes")
    return ""


def _exchange(place: Path) -> str:
    """Exchange the names of two folders, as when a checkpoint is replaced."""
    for name in ("one", "two"):
        (place / name).mkdir()
        _write_new(place / name / "file", name.encode())
    if not exchange_names(place / "one", place / "two"):
        return "a checkpoint is replaced by two renames, and is missing in between"
    if (place / "one" / "file").read_bytes() != b"two":
        raise OSError(errno.EIO, "two names were not exchanged, without an error")
    return ""


def _links(place: Path) -> str:
    """Make a link, and change its destination, as for ``last.ckpt``."""
    try:
        (place / "try").symlink_to("one")
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return "last.ckpt is a copy of the newest checkpoint, not a link"
    link = place / "last.ckpt"
    for name in ("one", "two"):
        folder_at(link).make_link(folder_at(place / name))
        if (found := str(link.readlink())) != name:
            raise OSError(errno.EIO, f"a link has the destination {found}, expected {name}")
    return ""


def _sync_file(place: Path) -> str:
    write_durably(place / "file", b"x")
    return ""


def _sync_names(place: Path) -> str:
    return "" if sync_directory(place) else "names are not synced"


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)


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
