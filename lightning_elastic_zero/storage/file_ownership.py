"""Whose the files of a directory are: this library's, or somebody else's.

This library removes and replaces only what it wrote itself, and recognises that by content. In a
published checkpoint these are the files that its manifest names, with the sizes that it records,
their sidecars, and the few files that every save writes beside them. A hidden directory of an
unfinished save or deletion may have no manifest: there the names of the files decide.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_elastic_zero.manifest import FORMAT, MANIFEST_NAME
from lightning_elastic_zero.storage.checksums import SUMS_SUFFIX

TAG = "checkpoint"
"""The folder inside a checkpoint: the tag that Lightning passes to DeepSpeed."""
LATEST = "latest"
RECOVERY_SCRIPT = "zero_to_fp32.py"

_BESIDE = (MANIFEST_NAME, LATEST, RECOVERY_SCRIPT)

_WRITTEN = re.compile(
    rf"{MANIFEST_NAME}|{LATEST}|{RECOVERY_SCRIPT}|\.seen-[0-9A-Za-z-]+|\.compared-[a-z]+|{TAG}/(?:"
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
    sizes, problem = _recorded(path)
    ours, ignorable, foreign = [], [], []
    is_written = _WRITTEN.fullmatch if hidden and problem else None
    for name, entry in _files(path):
        status = entry.lstat()
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
    return not _recorded(path)[1]


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


def _recorded(path: Path) -> tuple[dict[str, int | None], str]:
    """Return the sizes of the files that a manifest vouches for, and what is wrong with it.

    Its digest is not looked at: a name or a size that was changed fits no file.
    """
    try:
        manifest = json.loads((path / MANIFEST_NAME).read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return {}, f"its {MANIFEST_NAME} is of other software"
        files = {str(row["name"]): int(row["size_bytes"]) for row in manifest["files"]}
    except (FileNotFoundError, NotADirectoryError):
        return {}, f"it has no {MANIFEST_NAME}"
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"its {MANIFEST_NAME} is damaged"
    sizes: dict[str, int | None] = dict.fromkeys(_BESIDE)
    sizes.update(dict.fromkeys(f"{name}{SUMS_SUFFIX}" for name in files))
    return {**sizes, **files}, ""


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield all that is no folder; a folder that cannot be listed is yielded itself."""
    unread: list[Path] = []

    def note(error: OSError) -> None:
        if error.filename is None or Path(error.filename) == path:
            raise error
        unread.append(Path(error.filename))

    for folder, folders, files in os.walk(path, onerror=note):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*links, *files):
            entry = Path(folder, name)
            if os.path.lexists(entry):
                yield entry.relative_to(path).as_posix(), entry
    for entry in unread:
        if os.path.lexists(entry):
            yield entry.relative_to(path).as_posix(), entry
