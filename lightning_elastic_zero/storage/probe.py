"""Tests of the capabilities of a directory that saves need, instead of a list of file systems."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import write_durably
from lightning_elastic_zero.storage.leftovers import make_link
from lightning_elastic_zero.storage.paths import sync_directory
from lightning_elastic_zero.storage.publish import exchange_names

RENAME, EXCHANGE, LINKS = "directory: rename", "directory: exchange of names", "directory: links"
SYNC_FILE, SYNC_NAMES = "directory: sync of files", "directory: sync of names"

_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""Errors of a missing feature. Any other error is a failure."""

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
        if error.errno not in _NOT_SUPPORTED:
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
