"""Ownership of files, replaceability of a save's target, and deletion of checkpoints.

This library removes and replaces only files that it wrote, which it recognises by content. In a
published checkpoint these are the files that the manifest names, with the recorded sizes, their
sidecars, and the few files that every save adds. A hidden directory of an unfinished save or
deletion may have no manifest: there the names of the files decide.

A checkpoint is renamed before it is deleted, so that it never exists partially under its own name.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lightning_elastic_zero.core.manifest import FORMAT, MANIFEST_NAME, load_json
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.save_files import LATEST, SAVE_FILES, SAVE_ID
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX
from lightning_elastic_zero.storage.paths import read_file, real_path

LINK_FORMAT = "lightning_elastic_zero.link"
"""``format`` of a ``manifest.json`` that is a link, in an object store or a copy of its folder."""

MOST_LINKS = 8
"""Links that are followed from one to the next."""

WRITTEN = re.compile(
    "|".join(
        f"{file.pattern}(?:{re.escape(SUMS_SUFFIX)})?" if file.has_checksums else file.pattern
        for file in SAVE_FILES
    )
)
"""The names of the files that a save writes."""

DELETING_PREFIX = ".zero-removed-"
"""Prefix of a checkpoint that is being deleted."""

MOST_NAMED = 5
"""Number of names that a message lists."""

_MOST_LINK_BYTES = 1 << 16
"""Size of the largest link."""

_DELETING_NAME = re.compile(re.escape(DELETING_PREFIX) + "[0-9a-f]+")

_IGNORABLE = re.compile(r"(?:.*/)?(?:\.DS_Store|\.nfs[0-9a-f]+|__pycache__/[^/]+\.pyc)")
"""Files that systems and interpreters create automatically, which may be removed.

macOS's folder settings, an NFS client's name for a deleted open file, and Python's bytecode (of
``zero_to_fp32.py``).
"""

_MOST_FOREIGN = 20
"""Foreign entries after which the search ends: a directory may contain a whole data set."""

_MOST_LEVELS = 16
"""Levels of folders that are searched: Python 3.11 fails at a thousand."""

_MOST_LISTED = 1000
"""Number of entries of a folder that are inspected for a message."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileOwnership:
    """The files of a directory, by their relative paths with forward slashes."""

    ours: tuple[str, ...]
    """Written by this library; the manifest is the last one."""
    ignorable: tuple[str, ...]
    """Created automatically; they may be removed with the directory."""
    foreign: tuple[str, ...]
    """All other files, links and special files. Folders without files do not count."""
    problem: str = ""
    """Why the directory is not a checkpoint of this library; empty if it is one."""


def classify_files(path: Path, *, hidden: bool = False) -> FileOwnership:
    """Classify the files of a directory, without following links.

    ``hidden``: it has a hidden name of this library, so it may be an unfinished or partly deleted
    checkpoint without a manifest. Raises OSError if the directory itself cannot be read.
    """
    recorded = recorded_at(path)
    sizes, problem = recorded.sizes, recorded.problem
    ours, ignorable, foreign = [], [], []
    is_written = _is_written if hidden and problem else None
    for name, status in files_below(path):
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
            if len(foreign) == _MOST_FOREIGN:
                break
    ours.sort(key=lambda name: (name == MANIFEST_NAME, name))
    return FileOwnership(tuple(ours), tuple(ignorable), tuple(sorted(foreign)), problem)


def _is_written(name: str) -> bool:
    save_id, _, file = name.partition("/")
    return bool(WRITTEN.fullmatch(file if SAVE_ID.fullmatch(save_id) else name))


def files_below(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all entries but folders, with their status, and folders that are not listed.

    These cannot be read, or are nested more deeply than this library writes any.
    One system call per entry: a checkpoint of many ranks has thousands of files.
    """
    unread: list[Path] = []

    def note(error: OSError) -> None:
        if error.filename is None or Path(error.filename) == path:
            raise error
        unread.append(Path(error.filename))

    for folder, folders, files in os.walk(path, onerror=note):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        if len(Path(folder).parts) - len(path.parts) == _MOST_LEVELS:
            links, folders[:] = folders[:], []
        entries = (Path(folder, name) for name in (*links, *files))
        yield from _with_status(path, entries)
    yield from _with_status(path, unread)


def _with_status(path: Path, entries: Iterable[Path]) -> Iterator[tuple[str, os.stat_result]]:
    for entry in entries:
        try:
            status = entry.lstat()
        except OSError:
            continue
        yield entry.relative_to(path).as_posix(), status


@dataclass(frozen=True, slots=True)
class RecordedFiles:
    """The files that a manifest names."""

    sizes: dict[str, int | None] = field(default_factory=dict)
    """Sizes by name; None: the file may have any size."""
    weights_only: bool = False
    problem: str = ""
    """The error in the manifest; empty if it is valid."""


def recorded_at(path: Path) -> RecordedFiles:
    """Read a manifest, without verifying it: a changed name or size matches no file."""
    try:
        return recorded_files(read_file(path / MANIFEST_NAME))
    except (FileNotFoundError, NotADirectoryError):
        return RecordedFiles(problem=f"it has no {MANIFEST_NAME}")
    except OSError:
        return RecordedFiles(problem=f"its {MANIFEST_NAME} is damaged")


def recorded_files(data: bytes) -> RecordedFiles:
    """Return the files that the text of a manifest names, without verifying it."""
    try:
        manifest = load_json(data)
        if target := target_in(data):
            problem = f"its {MANIFEST_NAME} is a link to {target}"
            names = (MANIFEST_NAME,) if leads_inside(target) else ()
            return RecordedFiles(dict.fromkeys(names), problem=problem)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return RecordedFiles(problem=f"its {MANIFEST_NAME} was written by other software")
        files = {str(row["name"]): int(row["size_bytes"]) for row in manifest["files"]}
        save_id = manifest.get("save_id")
    except (ValueError, KeyError, TypeError, OverflowError):
        return RecordedFiles(problem=f"its {MANIFEST_NAME} is damaged")
    folders = ("", f"{save_id}/") if SAVE_ID.fullmatch(str(save_id)) else ("",)
    sizes: dict[str, int | None] = {MANIFEST_NAME: None}
    unlisted = [file.path for file in SAVE_FILES if file.is_unlisted]
    sizes.update(dict.fromkeys(f + name for f in folders for name in unlisted))
    sizes.update(dict.fromkeys(f"{name}{SUMS_SUFFIX}" for name in files))
    return RecordedFiles({**sizes, **files}, manifest.get("weights_only") is True)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory has a manifest of this library; other files do not matter."""
    if not recorded_at(path).problem:
        return True
    return bool(copied_link(path)) and not recorded_at(follow_links(path)).problem


# -- links ---------------------------------------------------------------------------------------


def follow_links(path: Path) -> Path:
    """Return the real path behind links of the system, and behind copies of links in a store."""
    path = real_path(path)
    for _ in range(MOST_LINKS):
        if not (target := copied_link(path)):
            break
        path = real_path(path.parent / target)
    return path


def copied_link(path: Path) -> str:
    """Return the target of a directory that is a link, copied from a store; empty if it is none.

    Raises nothing.
    """
    with suppress(OSError):
        target = target_in(read_file(path / MANIFEST_NAME, _MOST_LINK_BYTES))
        return target if leads_inside(target) else ""
    return ""


def target_in(manifest: bytes) -> str:
    """Return the target in the text of a manifest that is a link; empty if it is none."""
    if len(manifest) > _MOST_LINK_BYTES:
        return ""
    try:
        content = load_json(manifest)
    except ValueError:
        return ""
    is_link = isinstance(content, dict) and content.get("format") == LINK_FORMAT
    target = content.get("target") if is_link else ""
    return target if isinstance(target, str) else ""


def leads_inside(target: str) -> bool:
    """Whether the target of a link is a path in the link's folder, or below it.

    Anybody who writes into the folder could name any other one.
    """
    return target.isprintable() and not {"", ".", ".."} & {*target.split("/")}


def latest_in(folder: Path) -> str:
    """Return the path in a folder that its file ``latest`` names.

    It is empty if the file is missing or does not name an existing path below the folder. Readers
    of this library's checkpoints do not need it.
    """
    with suppress(OSError):
        name = read_file(folder / LATEST, _MOST_LINK_BYTES).decode(errors="replace").strip()
        # Raises an error for a name that the file system does not accept.
        if leads_inside(name) and os.path.lexists(folder / name):
            return name
    return ""


# -- replacement ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExistingTarget:
    """What exists at a path."""

    kind: Literal["nothing", "link", "empty", "checkpoint", "other"]
    """A link leads to a checkpoint of this library, or to a missing name in its own folder."""
    refusal_reason: str = ""
    """Why it must not be replaced, as the predicate of a sentence; empty if it may be."""


def inspect_target(path: Path) -> ExistingTarget:
    """Return what exists at a path; raise OSError if it is not accessible."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ExistingTarget("nothing")
    if stat.S_ISLNK(mode):
        if is_checkpoint(path) or _names_missing_sibling(path):
            return ExistingTarget("link")
        what = (
            "which is not a checkpoint of this library"
            if path.exists()
            else "which does not exist: its disk may not be mounted"
        )
        return ExistingTarget("other", f"is a link to {real_path(path)}, {what}")
    if not stat.S_ISDIR(mode):
        return ExistingTarget("other", "is a file, expected a directory")
    return _directory(path)


def _names_missing_sibling(link: Path) -> bool:
    """Whether a link leads to a missing name in its own folder.

    For instance ``last.ckpt``, after its checkpoint was deleted. Any other dangling link may lead
    to a disk that is not mounted.
    """
    text = link.readlink()
    return len(text.parts) == 1 and not os.path.lexists(link.parent / text)


def _directory(path: Path) -> ExistingTarget:
    contents = classify_files(path)
    if copied_link(path):
        return ExistingTarget("link", foreign_files_reason(contents.foreign))
    if not contents.problem:
        return ExistingTarget("checkpoint", foreign_files_reason(contents.foreign))
    if not contents.foreign:
        return ExistingTarget("empty")
    what = f"is not a checkpoint of this library ({contents.problem}): {_described(path)}"
    return ExistingTarget("other", what)


def foreign_files_reason(foreign: tuple[str, ...]) -> str:
    """Return why files of others prevent a replacement or deletion; empty without files."""
    if not foreign:
        return ""
    names = format_names(foreign, MOST_NAMED)
    return f"contains files that this library did not write: {names}"


def check_replaceable(target: Path, below: str) -> None:
    """Refuse a target that contains files of others, or that cannot be replaced.

    If the target is a folder, the message suggests the name ``below`` in it.
    """
    try:
        existing = inspect_target(target)
        why = existing.refusal_reason or _needed(target)
    except OSError as error:
        msg = f"{target} is not accessible: {error.strerror or error}. Nothing was written."
        raise SaveError(msg) from error
    if why:
        instead = _instead(target, existing, below)
        msg = (
            f"{target} {why}. A checkpoint would replace all of it, so nothing was written. Save "
            f"to {instead}, or move it away."
        )
        raise SaveError(msg)


def _needed(target: Path) -> str:
    if target.is_symlink() or not target.is_dir():
        return ""
    if os.path.ismount(target):
        return "is a mount point, which cannot be replaced"
    with suppress(FileNotFoundError):
        working = Path.cwd()
        if target.samefile(working) or real_path(target) in working.parents:
            return "is the working directory of this process, or contains it"
    return ""


def _instead(target: Path, existing: ExistingTarget, below: str) -> Path:
    """Return a path to suggest: in a directory of other files, or next to a checkpoint."""
    paths = (target.with_name(f"{target.stem}-v{n}{target.suffix}") for n in itertools.count(1))
    if target.is_dir() and not target.suffix and existing.kind != "checkpoint":
        numbered = (target / f"{below}-{n}" for n in itertools.count(2))
        paths = (path for path in itertools.chain([target / below], numbered))
    return next(path for path in paths if not os.path.lexists(path))


def _described(path: Path) -> str:
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in itertools.islice(entries, _MOST_LISTED))
    mine = [name for name in names if is_checkpoint(path / name)]
    tags = [name for name in names if _is_tag(path / name)]
    if mine:
        return f"it contains the checkpoints ({format_names(mine, MOST_NAMED)})"
    if tags:
        saved = [*tags, LATEST] if LATEST in names else tags
        return f"DeepSpeed saved there ({format_names(saved, MOST_NAMED)})"
    return f"it contains {format_names(names, MOST_NAMED)}"


def _is_tag(path: Path) -> bool:
    with suppress(OSError), os.scandir(path) as entries:
        names = (entry.name for entry in itertools.islice(entries, _MOST_LISTED))
        return any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names)
    return False


# -- deletion ------------------------------------------------------------------------------------


def remove_own_files(path: Path, progress: Progress, *, hidden: bool = False) -> None:
    """Remove the files of this library in a directory, and the directory if it is empty then.

    Files that cannot be removed stay. ``hidden`` as in ``classify_files``.
    """
    try:
        contents = classify_files(path, hidden=hidden)
    except OSError:
        return
    remove_files(path, {*contents.ignorable, *contents.ours}.__contains__, progress)


def remove_files(
    folder: Path, is_ours: Callable[[str], object], progress: Progress = NO_PROGRESS
) -> None:
    """Remove the files below a directory that ``is_ours`` accepts, and folders that are empty then.

    Names are relative to the directory, with forward slashes. The manifest is removed last, so that
    an interrupted removal is still recognised. Files that cannot be removed stay.

    No link is followed, whenever it appears: each folder is opened without following links,
    relative to the one above, and its files are removed relative to it.
    """
    with suppress(OSError), _opened_folder(folder) as descriptor:
        _remove_below(descriptor, "", is_ours, progress)
    with suppress(OSError):
        folder.rmdir()  # Fails unless it is an empty directory.


def _remove_below(
    folder: int, above: str, is_ours: Callable[[str], object], progress: Progress
) -> None:
    with os.scandir(folder) as entries:
        kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name in sorted(kinds, key=lambda name: (not kinds[name], name == MANIFEST_NAME, name)):
        progress.check()
        with suppress(OSError):
            if kinds[name]:
                with _opened_folder(name, folder) as inner:
                    _remove_below(inner, f"{above}{name}/", is_ours, progress)
                os.rmdir(name, dir_fd=folder)
            elif is_ours(f"{above}{name}"):
                os.unlink(name, dir_fd=folder)


@contextmanager
def _opened_folder(path: Path | str, above: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def rename_for_deletion(path: Path) -> Path:
    """Rename a directory so that it is not taken for a checkpoint; return its new path."""
    renamed = path.parent / f"{DELETING_PREFIX}{uuid.uuid4().hex}"
    path.rename(renamed)
    return renamed


def remove_interrupted_deletions(parent: Path, progress: Progress = NO_PROGRESS) -> list[Path]:
    """Remove the leftovers of killed deletions in a directory; return the removed paths."""
    leftovers = [
        path
        for path in parent.glob(f"{DELETING_PREFIX}*")
        if _DELETING_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    for path in leftovers:
        with suppress(OSError):
            if refusal_reason := foreign_files_reason(classify_files(path, hidden=True).foreign):
                _keep_under_visible_name(path, None, refusal_reason)
            else:
                remove_own_files(path, progress, hidden=True)
    return [path for path in leftovers if not os.path.lexists(path)]


def remove_hidden(
    path: Path, known_as: Path | None, progress: Progress = NO_PROGRESS, *, unfinished: bool = True
) -> None:
    """Remove a checkpoint or a link under a hidden name, if it exists.

    If it contains files of others, it is renamed to ``<known_as>.kept-<hex>`` instead, where
    ``known_as`` is the visible path that it had, if any.

    An ``unfinished`` one may have no manifest. It is renamed first, so that a process that still
    writes it cannot publish the rest. Raises OSError if not everything could be removed.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        refusal_reason = inspect_target(path).refusal_reason
    else:
        refusal_reason = foreign_files_reason(classify_files(path, hidden=unfinished).foreign)
    if refusal_reason:
        _keep_under_visible_name(path, known_as, refusal_reason)
    elif path.is_symlink():
        path.unlink()
    else:
        last_name = rename_for_deletion(path) if unfinished else path
        remove_own_files(last_name, progress, hidden=unfinished)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "some files cannot be removed", str(path))


def _keep_under_visible_name(path: Path, known_as: Path | None, refusal_reason: str) -> None:
    if known_as is None:
        _log.warning("%s was not removed: it %s. Move it away.", path, refusal_reason)
        return
    kept = known_as.with_name(f"{known_as.name}.kept-{uuid.uuid4().hex[:8]}")
    path.rename(kept)
    _log.warning("The replaced %s was kept as %s: it %s.", known_as, kept, refusal_reason)
