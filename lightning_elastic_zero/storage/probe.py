"""Capabilities of a directory that saves need, tried out and not taken from a list of systems."""

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

_NOT_OFFERED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""What a system says that does not have something. Any other error is a failure."""

Outcome = Literal["holds", "does without", "FAILS"]
"""``does without`` is what saves need less, and have another way for."""

Found = tuple[Outcome, str]


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that saves need of a directory, and what became of trying it."""

    what: str
    outcome: Outcome
    details: str = ""
    """Of ``FAILS``, what the system said and what that means for a run; of ``does without``, what
    is done instead."""


def probe_capabilities(folder: Path) -> list[Capability]:
    """Try out a new folder; what is written stays in it.

    Args:
        folder: empty, and of this process alone.
    """
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
    """Return what the system said, and what that means for a run."""
    cause = error if isinstance(error, OSError) else error.__cause__ or error
    said = cause.strerror if isinstance(cause, OSError) else ""
    means = {
        RENAME: "no checkpoint can be published there",
        EXCHANGE: "a checkpoint that is there cannot be replaced",
        LINKS: "last.ckpt cannot name the newest checkpoint",
        SYNC_FILE: "a power cut can take what was saved",
        SYNC_NAMES: "a power cut can take what was saved",
    }[what]
    return f"the system says {said or cause}: {means}; save on another file system"


def _rename(place: Path) -> Found:
    """Publish a folder, and replace a file."""
    hidden, published = place / ".hidden", place / "published"
    hidden.mkdir()
    _write_new(hidden / "file", b"1")
    hidden.rename(published)
    if (published / "file").read_bytes() != b"1" or os.path.lexists(hidden):
        return "FAILS", "a folder that was renamed is not where it should be"
    _write_new(place / "old", b"old")
    _write_new(place / "new", b"new")
    (place / "new").replace(place / "old")
    if (place / "old").read_bytes() != b"new":
        return "FAILS", "a file that took another one's name has the old one's bytes"
    return "holds", ""


def _exchange(place: Path) -> Found:
    """Exchange two folders' names, as when a checkpoint is replaced."""
    for name in ("one", "two"):
        (place / name).mkdir()
        _write_new(place / name / "file", name.encode())
    if not exchange_names(place / "one", place / "two"):
        return "does without", "a checkpoint is replaced by two renames, and missing in between"
    if (place / "one" / "file").read_bytes() != b"two":
        return "FAILS", "the system says that it has exchanged two names, and has not"
    return "holds", ""


def _links(place: Path) -> Found:
    """Make a link, and let it name something else, as ``last.ckpt`` does."""
    try:
        (place / "try").symlink_to("one")
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        return "does without", "last.ckpt is a copy of the newest checkpoint, not a link"
    link = place / "last.ckpt"
    for name in ("one", "two"):
        make_link(place / name, link)
        if str(link.readlink()) != name:
            return "FAILS", f"a link that was to name {name} names {link.readlink()}"
    return "holds", ""


def _sync_file(place: Path) -> Found:
    """Flush a file to the disk (fsync)."""
    write_durably(place / "file", b"x")
    return "holds", ""


def _sync_names(place: Path) -> Found:
    """Flush a name to the disk (fsync of its directory)."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        sync_directory(place)  # raises what is no refusal
        return "does without", f"the system says {error.strerror}: names are left to its own ways"
    finally:
        os.close(descriptor)
    return "holds", ""


def _write_new(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
