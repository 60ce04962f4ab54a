"""Leftovers of killed saves and deletions, copies of checkpoints, and links to checkpoints."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import Writeback
from lightning_elastic_zero.storage.owners import ProcessIdentity, filesystem_time_s, new_id
from lightning_elastic_zero.storage.ownership import (
    classify_files,
    inspect_target,
    is_checkpoint,
    remove_hidden,
    remove_interrupted_deletions,
)
from lightning_elastic_zero.storage.paths import NO_ENTRY, sync_directory
from lightning_elastic_zero.storage.publish import (
    EXPORT_PREFIX,
    OWNER_PREFIX,
    PREVIOUS_PREFIX,
    SAVE_ID,
    STAGING_PREFIX,
    owner_path,
    put_in_place,
    remove_export,
    rename_if_free,
)

LINK_PREFIX = ".zero-link-"
"""Prefix of a link that is being made. It stays only after a kill."""

LEFTOVER_AGE_S = 7 * 24 * 3600.0
"""Leftovers of a process whose state is unknown are removed after this time."""

SETTLE_S = 2.0
"""How long a target may be missing while another machine publishes it, with a large margin."""


def remove_leftovers(parent: Path, progress: Progress = NO_PROGRESS) -> list[Path]:
    """Remove leftovers of killed saves, exports and deletions in a directory; return their paths.

    Targets that were lost between two renames are restored first. Removed are interrupted
    deletions, directories whose process has ended (``ProcessIdentity.is_dead``) and those that
    were not touched for ``LEFTOVER_AGE_S``. Links that were being made are removed after that time,
    or when the link is made again. Entries that cannot be removed stay, and directories with files
    that this library did not write.
    """
    repair(parent)
    removed = remove_interrupted_deletions(parent, progress)
    now_s = cache(lambda: filesystem_time_s(owner_path(parent, new_id())))
    for path in sorted(parent.glob(f"{LINK_PREFIX}*")):
        if _untouched_s(path, now_s) > LEFTOVER_AGE_S:
            removed += _discarded(path, None, progress)
    for save_id in sorted({save_id for _, save_id in _ours(parent)}):
        removed += _remove_by_id(parent, save_id, now_s, progress)
    return removed


def _remove_by_id(
    parent: Path, save_id: str, now_s: Callable[[], float], progress: Progress
) -> list[Path]:
    """Remove the leftovers of one save or export unless they are in use; return removed paths."""
    prefixes = (STAGING_PREFIX, PREVIOUS_PREFIX, EXPORT_PREFIX)
    paths = staging, previous, export = [parent / f"{prefix}{save_id}" for prefix in prefixes]
    owner_file = owner_path(parent, save_id)
    owner = ProcessIdentity.read(owner_file)
    target = parent / owner.target if owner else None
    if os.path.lexists(previous) and (target is None or not os.path.lexists(target)):
        return []  # It was not replaced.
    if owner is None or not owner.is_dead():
        existing = filter(os.path.lexists, (owner_file, *paths))
        untouched_s = _untouched_s(next(existing, staging), now_s)
        is_dead = owner is not None and owner.is_dead(untouched_s)
        if not (is_dead or untouched_s > LEFTOVER_AGE_S):
            return []
    gone = []
    for path in (staging, previous):
        gone += _discarded(path, target if is_checkpoint(path) else None, progress)
    if os.path.lexists(export):
        remove_export(export)
        gone += [] if os.path.lexists(export) else [export]
    if not any(map(os.path.lexists, paths)):
        with suppress(OSError):
            owner_file.unlink()
            gone.append(owner_file)
    return gone


def _untouched_s(path: Path, now_s: Callable[[], float]) -> float:
    try:
        return now_s() - path.lstat().st_mtime
    except OSError:
        return 0.0


def repair(parent: Path) -> list[Path]:
    """Restore all targets in a directory that are missing after a crash between two renames."""
    lost = {
        parent / owner.target
        for kind, save_id in _ours(parent)
        if kind == PREVIOUS_PREFIX
        for owner in (ProcessIdentity.read(owner_path(parent, save_id)),)
        if owner is not None
    }
    return [target for target in sorted(lost) if repair_target(target)]


def repair_target(target: Path, settle_s: float = SETTLE_S) -> bool:
    """Restore the target if it is missing after a crash between two renames; return whether it was.

    Called before a checkpoint is opened, on any rank, and on several at once. ``settle_s`` is the
    wait for a save that may still run on another machine.
    """
    if os.path.lexists(target):
        return False
    for kind, save_id in list(_ours(target.parent)):
        owner = ProcessIdentity.read(owner_path(target.parent, save_id))
        if kind != PREVIOUS_PREFIX or owner is None or owner.target != target.name:
            continue
        if not owner.is_dead():
            time.sleep(settle_s)
        if _put_back(target.parent / f"{PREVIOUS_PREFIX}{save_id}", target):
            return True
    set_aside = target.parent / f"{LINK_PREFIX}{target.name}.old"
    if is_checkpoint(set_aside):
        # It was being replaced by a link, by an unknown process.
        time.sleep(settle_s)
        return _put_back(set_aside, target)
    return False


def _put_back(hidden: Path, target: Path) -> bool:
    if os.path.lexists(target):
        return False
    # Another rank may have been faster.
    with suppress(FileNotFoundError):
        hidden.rename(target)
        sync_directory(target.parent)
        return True
    return False


def _discarded(path: Path, known_as: Path | None, progress: Progress) -> list[Path]:
    if not os.path.lexists(path):
        return []
    with suppress(OSError):
        remove_hidden(path, known_as, progress)
    return [] if os.path.lexists(path) else [path]


def _ours(parent: Path) -> Iterator[tuple[str, str]]:
    """Yield the prefix and the id of each hidden name of this library in a directory."""
    try:
        entries = os.scandir(parent)
    except OSError as error:
        if error.errno not in NO_ENTRY:
            raise
        return
    with entries:
        for entry in entries:
            for kind in (STAGING_PREFIX, PREVIOUS_PREFIX, EXPORT_PREFIX, OWNER_PREFIX):
                save_id = entry.name.removeprefix(kind).removesuffix(".json")
                if entry.name.startswith(kind) and SAVE_ID.fullmatch(save_id):
                    yield kind, save_id


def copy_checkpoint(source: Path, target: Path, progress: Progress) -> None:
    """Copy the files of a checkpoint that this library wrote, synced to disk.

    ``shutil.copytree`` would copy other files too, report no progress within a file of many GB (the
    other ranks would consider rank 0 stalled), and sync nothing.
    """
    contents = classify_files(source)
    if contents.problem:
        raise OSError(errno.EINVAL, contents.problem, str(source))
    target.mkdir()
    for name in contents.ours:
        (target / name).parent.mkdir(exist_ok=True)
        _copy_file(source / name, target / name, progress)
    for folder, _, _ in os.walk(target, topdown=False):
        sync_directory(Path(folder))


def _copy_file(source: Path, target: Path, progress: Progress) -> None:
    with source.open("rb") as read, target.open("xb", buffering=0) as written:
        writeback = Writeback(written.fileno(), progress)
        while block := read.read(1 << 20):
            rest = memoryview(block)
            while rest:
                rest = rest[written.write(rest) :]
            writeback.wrote(len(block))
            progress.check()
        writeback.finish()


_NO_LINKS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""Errors of a file system without links. After any other error a copy would fail too."""


def make_link(target: Path, link: Path, progress: Progress = NO_PROGRESS) -> None:
    """Make a link to a checkpoint in one step, replacing a link or a checkpoint of this library.

    The link is made under a hidden name and renamed, so that a kill or an error at any moment
    leaves the old link or the new one. The next call for the same link removes leftovers of a
    killed one. Without links in the file system the checkpoint is copied, as Lightning does for
    files.
    """
    if target == link:
        return
    new, old = (link.parent / f"{LINK_PREFIX}{link.name}.{end}" for end in ("new", "old"))
    try:
        if refusal_reason := inspect_target(link).refusal_reason:
            msg = f"Could not link {link} to the published {target}: {link} {refusal_reason}."
            raise SaveError(msg)
        for hidden in (new, old):
            remove_hidden(hidden, link, progress)
        _make(new, target, progress)
        put_in_place(new, link, old)
        sync_directory(link.parent)
    except OSError as error:
        msg = f"Could not link {link} to the published {target}: {error.strerror or error}."
        raise SaveError(msg) from error
    finally:
        with suppress(OSError):
            rename_if_free(old, link)  # Restoring it may have been interrupted.
        # The link is final: a failure from here on costs disk space only.
        for hidden in (new, old):
            with suppress(OSError):
                remove_hidden(hidden, link, progress)


def _make(new: Path, target: Path, progress: Progress) -> None:
    try:
        new.symlink_to(os.path.relpath(target, new.parent))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_checkpoint(target, new, progress)
