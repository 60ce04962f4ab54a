"""Inspection of the target of a save: its present content, and whether it may be replaced."""

from __future__ import annotations

import itertools
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.file_ownership import LATEST, classify_files, is_checkpoint
from lightning_elastic_zero.storage.paths import real_path
from lightning_elastic_zero.text import format_names

MOST_NAMED = 5
"""How many names a message lists."""

_LISTED = 1000
"""How many entries of a folder are looked at for a message."""


@dataclass(frozen=True, slots=True)
class ExistingTarget:
    """What lies at a path."""

    kind: Literal["nothing", "link", "empty", "checkpoint", "other"]
    """A link: to a checkpoint of this library, or to a name in its own folder that is gone."""
    refusal_reason: str = ""
    """Why it must not be replaced, as the predicate of a sentence; empty if it may."""


def inspect_target(path: Path) -> ExistingTarget:
    """Return what lies at a path.

    Raises:
        OSError: the system does not let it be looked at.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ExistingTarget("nothing")
    if stat.S_ISLNK(mode):
        if is_checkpoint(path) or _names_missing_sibling(path):
            return ExistingTarget("link")
        what = (
            "which is no checkpoint of this library"
            if path.exists()
            else "where nothing is: perhaps that disk is not mounted"
        )
        return ExistingTarget("other", f"is a link to {real_path(path)}, {what}")
    if not stat.S_ISDIR(mode):
        return ExistingTarget("other", "is a file, and a checkpoint is a directory")
    return _directory(path)


def _names_missing_sibling(link: Path) -> bool:
    """Return whether a link names a file of its own folder that is gone.

    So does a ``last.ckpt`` whose checkpoint was deleted. Only such a link cannot lead to a disk
    that is not mounted.
    """
    text = link.readlink()
    return len(text.parts) == 1 and not os.path.lexists(link.parent / text)


def _directory(path: Path) -> ExistingTarget:
    contents = classify_files(path)
    if not contents.problem:
        if not contents.foreign:
            return ExistingTarget("checkpoint")
        more = format_names(contents.foreign, MOST_NAMED)
        return ExistingTarget("checkpoint", f"holds what no save wrote: {more}")
    if not contents.foreign:
        return ExistingTarget("empty")
    what = f"is no checkpoint of this library ({contents.problem}): {_described(path)}"
    return ExistingTarget("other", what)


def check_replaceable(target: Path, below: str) -> None:
    """Refuse to save where something lies that this library did not write.

    Args:
        target: the checkpoint's path.
        below: the name of a folder in the target that the message suggests, where that is one.

    Raises:
        SaveError: a checkpoint must not take this place.
    """
    try:
        existing = inspect_target(target)
        why = existing.refusal_reason or _needed(target)
    except OSError as error:
        msg = f"Could not look at {target}: {error.strerror or error}. Nothing was written."
        raise SaveError(msg) from error
    if why:
        instead = _instead(target, existing, below)
        msg = (
            f"{target} {why}. A checkpoint takes the whole place of its directory, so nothing is "
            f"touched there, and nothing was written. Save to {instead}, or move away what lies "
            "there."
        )
        raise SaveError(msg)


def _needed(target: Path) -> str:
    """Return why a directory has to stay though nothing of substance is in it; or nothing."""
    if target.is_symlink() or not target.is_dir():
        return ""
    if os.path.ismount(target):
        return "is a mount point, which cannot be replaced"
    with suppress(FileNotFoundError):
        here = Path.cwd()
        if target.samefile(here) or real_path(target) in here.parents:
            return "is the working directory of this process, or contains it"
    return ""


def _instead(target: Path, existing: ExistingTarget, below: str) -> Path:
    """Return a path that would do: below a directory of many things, beside a checkpoint."""
    paths = (target.with_name(f"{target.stem}-v{n}{target.suffix}") for n in itertools.count(1))
    if target.is_dir() and not target.suffix and existing.kind != "checkpoint":
        numbered = (target / f"{below}-{n}" for n in itertools.count(2))
        paths = (path for path in itertools.chain([target / below], numbered))
    return next(path for path in paths if not os.path.lexists(path))


def _described(path: Path) -> str:
    """Return what lies in a directory, by kind where that is known."""
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in itertools.islice(entries, _LISTED))
    mine = [name for name in names if is_checkpoint(path / name)]
    tags = [name for name in names if _is_tag(path / name)]
    if mine:
        return f"it holds checkpoints ({format_names(mine, MOST_NAMED)})"
    if tags:
        has_latest = LATEST in names
        saved = [*tags, LATEST] if has_latest else tags
        return f"DeepSpeed saved there ({format_names(saved, MOST_NAMED)})"
    return f"it holds {format_names(names, MOST_NAMED)}"


def _is_tag(path: Path) -> bool:
    """Whether a folder holds what DeepSpeed saves under one tag."""
    with suppress(OSError), os.scandir(path) as entries:
        names = (entry.name for entry in itertools.islice(entries, _LISTED))
        return any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names)
    return False
