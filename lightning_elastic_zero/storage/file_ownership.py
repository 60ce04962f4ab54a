"""Ownership of the files in a directory: this library's, or others'.

This library removes and replaces only what it wrote itself, and recognises that by content. In a
published checkpoint these are the files that its manifest names, with the sizes that it records,
their sidecars, and the few files that every save writes beside them. A hidden directory of an
unfinished save or deletion may have no manifest: there the names of the files decide.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_elastic_zero.json_records import load_json
from lightning_elastic_zero.manifest import FORMAT, MANIFEST_NAME
from lightning_elastic_zero.storage.checksums import SUMS_SUFFIX
from lightning_elastic_zero.storage.regular_file import open_descriptor
from lightning_elastic_zero.storage.shared_directory import TABLE_PREFIX, TOKEN_PREFIX

TAG = "checkpoint"
"""The folder inside a checkpoint: the tag that Lightning passes to DeepSpeed."""
LATEST = "latest"
RECOVERY_SCRIPT = "zero_to_fp32.py"

_BESIDE = (MANIFEST_NAME, LATEST, RECOVERY_SCRIPT)

_WRITTEN = re.compile(
    rf"{MANIFEST_NAME}|{LATEST}|{RECOVERY_SCRIPT}|"
    rf"{re.escape(TOKEN_PREFIX)}[0-9A-Za-z-]+|{re.escape(TABLE_PREFIX)}[a-z]+|{TAG}/(?:"
    r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_00_optim_states\.pt|"
    r"(?:zero_pp_rank_\d+_)?mp_rank_00_model_states\.pt|"
    rf"client_objects\.pt)(?:{re.escape(SUMS_SUFFIX)})?"
)
"""The names of the files that a save writes, by which an unfinished one is recognised."""

_IGNORABLE = re.compile(r"(?:.*/)?(?:\.DS_Store|\.nfs[0-9a-f]+|__pycache__/[^/]+\.pyc)")
"""What systems and interpreters leave behind by themselves and make again by themselves.

macOS's folder settings, an NFS client's name for a deleted file that is still open, and Python's
bytecode (of ``zero_to_fp32.py``). Nothing else is taken for a trifle: a user may have made it.
"""

_ENOUGH = 20
"""After so many foreign entries no more are looked for: a directory may hold a whole data set."""


@dataclass(frozen=True, slots=True)
class FileOwnership:
    """The files of a directory, by their paths below it, with forward slashes."""

    ours: tuple[str, ...]
    """Written by this library; the manifest comes last."""
    ignorable: tuple[str, ...]
    """Of no substance: they may be removed with the directory."""
    foreign: tuple[str, ...]
    """Everything else: files, links, special files. Folders without files do not count."""
    problem: str = ""
    """Why it is no checkpoint of this library's; empty if it is one."""


def classify_files(path: Path, *, hidden: bool = False) -> FileOwnership:
    """Return whose the files of a directory are; no link is followed.

    Args:
        path: the directory.
        hidden: whether its name is one of this library's hidden names, so that it may be an
            unfinished or a partly deleted checkpoint without a manifest.

    Raises:
        OSError: the directory itself cannot be read.
    """
    recorded = _recorded(path)
    sizes, problem = recorded.sizes, recorded.problem
    ours, ignorable, foreign = [], [], []
    is_written = _WRITTEN.fullmatch if hidden and problem else None
    for name, status in _files(path):
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and (
            is_written(name)
            if is_written
            else name in sizes and sizes[name] in {None, status.st_size}
        ):
            ours.append(name)
        elif is_file and _IGNORABLE.fullmatch(name):
            ignorable.append(name)
        else:
            foreign.append(name)
            if len(foreign) == _ENOUGH:
                break
    ours.sort(key=lambda name: (name == MANIFEST_NAME, name))
    return FileOwnership(tuple(ours), tuple(ignorable), tuple(sorted(foreign)), problem)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory holds a manifest of this library's, whatever else is in it."""
    return not _recorded(path).problem


def can_replace(other: Path, path: Path) -> bool:
    """Whether a run that could go on from the checkpoint ``path`` can go on from ``other``.

    ``other`` is a checkpoint of this library's. Each file that it names is there in its size, and
    it has optimizer state if ``path`` has.
    """
    there, mine = _recorded(other), _recorded(path)
    if there.problem or (there.weights_only and not mine.weights_only):
        return False
    sizes = ((other / name, size) for name, size in there.sizes.items() if size is not None)
    try:
        return all(file.is_file() and file.stat().st_size == size for file, size in sizes)
    except OSError:  # another run deletes it
        return False


def remove_own_files(path: Path, on_progress: Callable[[], None], *, hidden: bool = False) -> None:
    """Remove what this library wrote in a directory, and the directory if nothing else is left.

    The manifest goes last, so that an interrupted removal can still be recognised. What the system
    refuses to remove stays.

    Args:
        path: the directory.
        on_progress: called before each file.
        hidden: see ``classify_files``.
    """
    try:
        contents = classify_files(path, hidden=hidden)
    except OSError:
        return
    for name in (*contents.ignorable, *contents.ours):
        on_progress()
        with suppress(OSError):
            (path / name).unlink()
    for folder, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            # Only an empty one can be removed.
            Path(folder).rmdir()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What a manifest says of the files beside it."""

    sizes: dict[str, int | None] = field(default_factory=dict)
    """The names of the files; None where a file may have any size."""
    weights_only: bool = False
    problem: str = ""
    """What is wrong with the manifest; empty if nothing is."""


def _recorded(path: Path) -> _Recorded:
    """Read a manifest. Its digest is not looked at: a changed name or size fits no file."""
    try:
        # A pipe in its place is not waited for, and is empty.
        with open(path / MANIFEST_NAME, "rb", opener=open_descriptor) as file:
            manifest = load_json(file.read())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return _Recorded(problem=f"its {MANIFEST_NAME} is of other software")
        files = {str(row["name"]): int(row["size_bytes"]) for row in manifest["files"]}
    except (FileNotFoundError, NotADirectoryError):
        return _Recorded(problem=f"it has no {MANIFEST_NAME}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return _Recorded(problem=f"its {MANIFEST_NAME} is damaged")
    sizes: dict[str, int | None] = dict.fromkeys(_BESIDE)
    sizes.update(dict.fromkeys(f"{name}{SUMS_SUFFIX}" for name in files))
    return _Recorded({**sizes, **files}, manifest.get("weights_only") is True)


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all that is no folder, and its status; a folder that cannot be listed itself.

    The system is asked once for each: a run of many ranks has thousands of files.
    """
    unread: list[Path] = []

    def note(error: OSError) -> None:
        if error.filename is None or Path(error.filename) == path:
            raise error
        unread.append(Path(error.filename))

    for folder, folders, files in os.walk(path, onerror=note):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        entries = (Path(folder, name) for name in (*links, *files))
        yield from _with_status(path, entries)
    yield from _with_status(path, unread)


def _with_status(path: Path, entries: Iterable[Path]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield those that are there still, by their names below a path."""
    for entry in entries:
        try:
            status = entry.lstat()
        except OSError:
            continue
        yield entry.relative_to(path).as_posix(), status
