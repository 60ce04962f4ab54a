"""Leftovers of killed saves and deletions: restored, or removed.

Copying a checkpoint so that the copy outlives a power cut.

Not by ``shutil.copytree``: that copies what others put into the folder too, shows no progress
within a file of many GB, so that the other ranks would take rank 0 for stalled, and syncs nothing.

Links to checkpoints, such as ``last.ckpt``, each changed in one step.

A link is made under a hidden name beside its own, which it then takes by one rename, so that a kill
at any instant leaves the old link or the new one. What a process that was killed in between has
left under such a name is removed when that link is made again.
"""

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
    OWNER_PREFIX,
    PREVIOUS_PREFIX,
    SAVE_ID,
    STAGING_PREFIX,
    owner_path,
    put_in_place,
    remove_dead_exports,
    rename_if_free,
)

LINK_PREFIX = ".zero-link-"
"""Prefix of a link that is being made; it is gone in an instant, unless a kill came in between."""

LEFTOVER_AGE_S = 7 * 24 * 3600.0
"""What a process of unknown fate left is removed after this time."""

SETTLE_S = 2.0
"""How long a target may be missing while another machine publishes it: far longer than it takes."""


def remove_leftovers(parent: Path, progress: Progress = NO_PROGRESS) -> list[Path]:
    """Remove what killed saves and conversions left in a directory; return the paths that are gone.

    That is what belongs to a process that has ended (``ProcessIdentity.is_dead``), or is older than
    ``LEFTOVER_AGE_S``, and what was being deleted, by whomever: it is no checkpoint any more.
    Targets that were lost between two renames are restored first. What cannot be removed is left,
    and so is what holds anything that no save wrote. A link in the making goes by its age: whoever
    makes that link again removes it before.
    """
    repair(parent)
    removed = [*remove_interrupted_deletions(parent, progress), *remove_dead_exports(parent)]
    now_s = cache(lambda: filesystem_time_s(owner_path(parent, new_id())))
    for path in sorted(parent.glob(f"{LINK_PREFIX}*")):
        if _untouched_s(path, now_s) > LEFTOVER_AGE_S:
            removed += _discarded(path, None, progress)
    for save_id in sorted({save_id for _, save_id in _ours(parent)}):
        removed += _remove_save(parent, save_id, now_s, progress)
    return removed


def _remove_save(
    parent: Path, save_id: str, now_s: Callable[[], float], progress: Progress
) -> list[Path]:
    """Remove what one save left, if nobody works on it or needs it; return what is gone."""
    staging, previous = (
        parent / f"{STAGING_PREFIX}{save_id}",
        parent / f"{PREVIOUS_PREFIX}{save_id}",
    )
    note = owner_path(parent, save_id)
    owner = ProcessIdentity.read(note)
    target = parent / owner.target if owner else None
    if os.path.lexists(previous) and (target is None or not os.path.lexists(target)):
        return []  # what was set aside is the only one: nothing took its place
    if owner is None or not owner.is_dead():
        untouched_s = _untouched_s(note if os.path.lexists(note) else staging, now_s)
        is_dead = owner is not None and owner.is_dead(untouched_s)
        if not (is_dead or untouched_s > LEFTOVER_AGE_S):
            return []
    gone = []
    for path in (staging, previous):
        gone += _discarded(path, target if is_checkpoint(path) else None, progress)
    if not any(map(os.path.lexists, (staging, previous))):
        with suppress(OSError):
            note.unlink()
            gone.append(note)
    return gone


def _untouched_s(path: Path, now_s: Callable[[], float]) -> float:
    """Return for how long a file has not been touched; 0 where there is none.

    Args:
        path: the file.
        now_s: the clock of the file system that gave it its time.
    """
    try:
        return now_s() - path.lstat().st_mtime
    except OSError:
        return 0.0


def repair(parent: Path) -> list[Path]:
    """Restore every target in a directory that a crash took between two renames."""
    lost = {
        parent / owner.target
        for kind, save_id in _ours(parent)
        if kind == PREVIOUS_PREFIX
        for owner in (ProcessIdentity.read(owner_path(parent, save_id)),)
        if owner is not None
    }
    return [target for target in sorted(lost) if repair_target(target)]


def repair_target(target: Path, settle_s: float = SETTLE_S) -> bool:
    """Restore the directory that a crash took from the target's place between two renames.

    It is called before a checkpoint is looked for, on any rank, and on several at once.

    Args:
        target: the path at which a checkpoint is expected.
        settle_s: how long to wait for a save that may still be running on another machine.

    Returns:
        Whether this call put it back.
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
        # It gave way to a link, and nothing says by which process.
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
    """Discard what lies at a path, if anything does; return what is gone."""
    if not os.path.lexists(path):
        return []
    with suppress(OSError):
        remove_hidden(path, known_as, progress)
    return [] if os.path.lexists(path) else [path]


def _ours(parent: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the save id of each of our hidden names in a directory."""
    try:
        entries = os.scandir(parent)
    except OSError as error:
        if error.errno not in NO_ENTRY:
            raise
        return
    with entries:
        for entry in entries:
            for kind in (STAGING_PREFIX, PREVIOUS_PREFIX, OWNER_PREFIX):
                save_id = entry.name.removeprefix(kind).removesuffix(".json")
                if entry.name.startswith(kind) and SAVE_ID.fullmatch(save_id):
                    yield kind, save_id


_BLOCK_BYTES = 1 << 20


def copy_checkpoint(source: Path, target: Path, progress: Progress) -> None:
    """Copy a checkpoint of this library's, and nothing that somebody else put into it.

    Args:
        source: what is copied.
        target: where nothing is yet.
        progress: checked at least every MiB.

    Raises:
        OSError: the copy is not whole.
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
        while block := read.read(_BLOCK_BYTES):
            rest = memoryview(block)
            while rest:
                rest = rest[written.write(rest) :]
            writeback.wrote(len(block))
            progress.check()
        writeback.finish()


_NO_LINKS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""What a filesystem says that has no links. Any other error would fail a copy too, or worse."""


def make_link(target: Path, link: Path, progress: Progress = NO_PROGRESS) -> None:
    """Make a link to a checkpoint, in one step, in the place of a link or a checkpoint.

    What this library did not write is left as it is.

    Args:
        target: the checkpoint, which is there.
        link: beside it or elsewhere; the link's text is relative.
        progress: checked while a directory is deleted, or copied if links are not supported.

    Raises:
        SaveError: it could not be made, and is what it was.
    """
    if target == link:
        return
    new, old = (link.parent / f"{LINK_PREFIX}{link.name}.{end}" for end in ("new", "old"))
    try:
        if refusal_reason := inspect_target(link).refusal_reason:
            msg = f"Could not link {link} to {target}, which is published: {link} {refusal_reason}."
            raise SaveError(msg)
        for hidden in (new, old):
            remove_hidden(hidden, link, progress)
        _make(new, target, progress)
        put_in_place(new, link, old)
        sync_directory(link.parent)
    except OSError as error:
        msg = f"Could not link {link} to {target}, which is published: {error.strerror or error}."
        raise SaveError(msg) from error
    finally:
        with suppress(OSError):
            rename_if_free(old, link)  # where even putting it back was interrupted
        # The link is changed, or is not: a failure here is a matter of disk space.
        for hidden in (new, old):
            with suppress(OSError):
                remove_hidden(hidden, link, progress)


def _make(new: Path, target: Path, progress: Progress) -> None:
    try:
        new.symlink_to(os.path.relpath(target, new.parent))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # What Lightning does there too, but for files only.
        copy_checkpoint(target, new, progress)
