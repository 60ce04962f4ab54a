"""Temporary folders, and tests of the capabilities of a directory that saves need."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.storage.checksums import write_durably
from lightning_elastic_zero.storage.paths import sync_directory
from lightning_elastic_zero.storage.publish import NOT_SUPPORTED, exchange_names, make_link

log = logging.getLogger(__name__)

RENAME, EXCHANGE, LINKS = "directory: rename", "directory: exchange of names", "directory: links"
SYNC_FILE, SYNC_NAMES = "directory: sync of files", "directory: sync of names"

Outcome = Literal["holds", "does without", "FAILS"]
"""``does without``: the feature is missing, and saves use another method."""

Found = tuple[Outcome, str]


@dataclass(frozen=True, slots=True)
class Capability:
    """A capability that saves need, and the result of testing it."""

    what: str
    outcome: Outcome
    details: str = ""
    """For ``FAILS``, the error and its consequence; for ``does without``, the other method."""


def probe_capabilities(folder: Path) -> list[Capability]:
    """Test an empty folder, used by this process only. The written files stay in it."""
    probes: dict[str, Callable[[Path], Found]] = {
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
            outcome, details = probe(place)
        except (OSError, SaveError) as error:
            outcome, details = "FAILS", _why(what, error)
        found.append(Capability(what, outcome, details))
    return found


def _why(what: str, error: Exception) -> str:
    """Return an error and its consequence for a run."""
    cause = error if isinstance(error, OSError) else error.__cause__ or error
    error_text = cause.strerror if isinstance(cause, OSError) else ""
    consequence = {
        RENAME: "checkpoints cannot be published there",
        EXCHANGE: "existing checkpoints cannot be replaced",
        LINKS: "last.ckpt cannot link to the newest checkpoint",
        SYNC_FILE: "a power failure can destroy saved checkpoints",
        SYNC_NAMES: "a power failure can destroy saved checkpoints",
    }[what]
    return f"{error_text or cause}: {consequence}; save on another file system"


def _rename(place: Path) -> Found:
    """Publish a folder, and replace a file."""
    hidden, published = place / ".hidden", place / "published"
    hidden.mkdir()
    _write_new(hidden / "file", b"1")
    hidden.rename(published)
    if (published / "file").read_bytes() != b"1" or os.path.lexists(hidden):
        return "FAILS", "a renamed folder is not at its new path"
    _write_new(place / "old", b"old")
    _write_new(place / "new", b"new")
    (place / "new").replace(place / "old")
    if (place / "old").read_bytes() != b"new":
        return "FAILS", "a replaced file has its old bytes"
    return "holds", ""


def _exchange(place: Path) -> Found:
    """Exchange the names of two folders, as when a checkpoint is replaced."""
    for name in ("one", "two"):
        (place / name).mkdir()
        _write_new(place / name / "file", name.encode())
    if not exchange_names(place / "one", place / "two"):
        return "does without", "a checkpoint is replaced by two renames, and is missing in between"
    if (place / "one" / "file").read_bytes() != b"two":
        return "FAILS", "two names were not exchanged, without an error"
    return "holds", ""


def _links(place: Path) -> Found:
    """Make a link, and change its destination, as for ``last.ckpt``."""
    try:
        (place / "try").symlink_to("one")
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return "does without", "last.ckpt is a copy of the newest checkpoint, not a link"
    link = place / "last.ckpt"
    for name in ("one", "two"):
        make_link(place / name, link)
        if str(link.readlink()) != name:
            return "FAILS", f"a link has the destination {link.readlink()}, expected {name}"
    return "holds", ""


def _sync_file(place: Path) -> Found:
    """Flush a file to disk (fsync)."""
    write_durably(place / "file", b"x")
    return "holds", ""


def _sync_names(place: Path) -> Found:
    """Flush a name to disk (fsync of its directory)."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        sync_directory(place)  # Raises if the error is a failure.
        return "does without", f"{error.strerror}: names are not synced"
    finally:
        os.close(descriptor)
    return "holds", ""


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
