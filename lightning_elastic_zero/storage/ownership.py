"""Ownership of the files in a directory: this library's, or others'.

This library removes and replaces only what it wrote itself, and recognises that by content. In a
published checkpoint these are the files that its manifest names, with the sizes that it records,
their sidecars, and the few files that every save writes beside them. A hidden directory of an
unfinished save or deletion may have no manifest: there the names of the files decide.

Inspection of the target of a save: its present content, and whether it may be replaced.

Deleting checkpoints so that none is ever half there under its own name.

Nothing is deleted that this library did not write: see ``file_ownership``.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightning_elastic_zero.core.manifest import FORMAT, MANIFEST_NAME, load_json
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import SUMS_SUFFIX
from lightning_elastic_zero.storage.paths import open_descriptor, real_path, sync_directory
from lightning_elastic_zero.storage.shared import TABLE_PREFIX, TOKEN_PREFIX

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


def remove_own_files(path: Path, progress: Progress, *, hidden: bool = False) -> None:
    """Remove what this library wrote in a directory, and the directory if nothing else is left.

    The manifest goes last, so that an interrupted removal can still be recognised. What the system
    refuses to remove stays.

    Args:
        path: the directory.
        progress: checked before each file.
        hidden: see ``classify_files``.
    """
    try:
        contents = classify_files(path, hidden=hidden)
    except OSError:
        return
    for name in (*contents.ignorable, *contents.ours):
        progress.check()
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


DELETING_PREFIX = ".zero-removed-"
"""Prefix of a checkpoint that is being deleted: renamed first, so that none is half there."""

_DELETING_NAME = re.compile(re.escape(DELETING_PREFIX) + "[0-9a-f]+")

_log = logging.getLogger(__name__)


def delete_checkpoint(path: Path, progress: Progress = NO_PROGRESS) -> str:
    """Delete a checkpoint, which vanishes at once and is then emptied, or a link to one.

    Args:
        path: what is to be deleted, if it is there.
        progress: checked between files: large directories take long on some disks.

    Returns:
        Why it is still there, untouched, as the predicate of a sentence; empty if it is gone.

    Raises:
        OSError: it is still there, whole.
    """
    existing = inspect_target(path)
    if existing.kind == "link":
        path.unlink(missing_ok=True)
    if existing.refusal_reason or existing.kind in {"nothing", "link"}:
        return existing.refusal_reason
    if existing.kind == "empty":
        return "is an empty directory, and no checkpoint"
    remove_interrupted_deletions(path.parent, progress)
    renamed = rename_for_deletion(path)
    if refusal_reason := _foreign_files_reason(classify_files(renamed).foreign):
        # It came between the look and the rename.
        renamed.rename(path)
        return refusal_reason
    sync_directory(path.parent)
    remove_own_files(renamed, progress, hidden=True)
    return ""


def rename_for_deletion(path: Path) -> Path:
    """Rename what is to be removed, so that nobody takes it for a checkpoint; return its name."""
    renamed = path.parent / f"{DELETING_PREFIX}{uuid.uuid4().hex}"
    path.rename(renamed)
    return renamed


def remove_interrupted_deletions(parent: Path, progress: Progress = NO_PROGRESS) -> list[Path]:
    """Remove what deletions that were killed left in a directory; return what it was."""
    found = [
        path
        for path in parent.glob(f"{DELETING_PREFIX}*")
        if _DELETING_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    for path in found:
        with suppress(OSError):
            if refusal_reason := _foreign_files_reason(classify_files(path, hidden=True).foreign):
                _keep_under_visible_name(path, None, refusal_reason)
            else:
                remove_own_files(path, progress, hidden=True)
    return [path for path in found if not os.path.lexists(path)]


def remove_hidden(
    path: Path,
    known_as: Path | None,
    progress: Progress = NO_PROGRESS,
    *,
    unfinished: bool = True,
) -> None:
    """Remove a checkpoint that lies under a hidden name, or a link that does.

    What somebody else put there in the meantime is not removed: the whole of it is then found
    beside the name by which it was known.

    Args:
        path: the hidden name; nothing need be there.
        known_as: the visible path that it had; None: it never had one, or that is not known.
        progress: checked between files.
        unfinished: whether it may be without a manifest. It is then renamed first, so that
            whoever still works on it cannot publish what is left of it.

    Raises:
        OSError: not all of it could be removed.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        refusal_reason = inspect_target(path).refusal_reason
    else:
        refusal_reason = _foreign_files_reason(classify_files(path, hidden=unfinished).foreign)
    if refusal_reason:
        _keep_under_visible_name(path, known_as, refusal_reason)
    elif path.is_symlink():
        path.unlink()
    else:
        last_name = rename_for_deletion(path) if unfinished else path
        remove_own_files(last_name, progress, hidden=unfinished)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", str(path))


def _keep_under_visible_name(path: Path, known_as: Path | None, refusal_reason: str) -> None:
    if known_as is None:
        _log.warning("%s is not removed: it %s. Move it away.", path, refusal_reason)
        return
    kept = known_as.with_name(f"{known_as.name}.kept-{uuid.uuid4().hex[:8]}")
    path.rename(kept)
    _log.warning("What was %s is kept as %s: it %s.", known_as, kept, refusal_reason)


def _foreign_files_reason(foreign: tuple[str, ...]) -> str:
    return f"holds what no save wrote: {format_names(foreign, MOST_NAMED)}" if foreign else ""
