"""Directories and links that are made under a hidden name and appear at their target in one step.

The hidden names are next to the target. None contains the target's name or ends like a
checkpoint's, because Lightning takes ``last*.ckpt`` and ``hpc_ckpt_*`` for checkpoints::

    .zero-staging-<id>      a checkpoint being written; after an exchange, the one that it replaced
    .zero-previous-<id>     the replaced checkpoint, where names cannot be exchanged in one step
    .zero-export-<id>       files for other software that are being written
    .zero-owner-<id>.json   the process that writes them

Where the system cannot exchange two names, the target is missing between two renames for some
microseconds. ``repair_all`` restores it after a crash in between, and ``remove_leftovers`` removes
the directories of processes that have ended.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.save_files import TAG
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.file_write import (
    DiskFile,
    as_save_error,
    write_durably,
)
from lightning_elastic_zero.storage.own_files import (
    classify_files,
    files_below,
    inspect_target,
    is_checkpoint,
    remove_files,
    remove_hidden,
    remove_interrupted_deletions,
)
from lightning_elastic_zero.storage.ownership import (
    ProcessIdentity,
    filesystem_time_s,
    new_id,
    touch_regularly,
)
from lightning_elastic_zero.storage.paths import NO_ENTRY, open_file, real_path, sync_directory

_log = logging.getLogger(__name__)

STAGING_PREFIX = ".zero-staging-"
EXPORT_PREFIX = ".zero-export-"
PREVIOUS_PREFIX = ".zero-previous-"
OWNER_PREFIX = ".zero-owner-"

LINK_PREFIX = ".zero-link-"
"""Prefix of a link that is being made. It stays only after a kill."""

HIDDEN_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")
"""The end of a hidden name: the id of a save on a disk, or of an export."""

LEFTOVER_AGE_S = 7 * 24 * 3600.0
"""Leftovers of a process whose state is unknown are removed after this time."""

SETTLE_S = 2.0
"""How long a target may be missing while another machine publishes it, with a large margin."""

NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
"""Errors of a feature that a file system lacks."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_EXPORTED = re.compile(
    r"weights|latest(_universal)?|\.metadata(\.tmp)?|.+\.(pt|safetensors|json|sums|distcp)"
)
"""The names of files that conversions write."""


def staging_path(target: Path, save_id: str) -> Path:
    """Return the directory in which the files of a save are written before it is published."""
    if not HIDDEN_ID.fullmatch(save_id):
        msg = f"save_id={save_id!r}, expected at most 64 letters, digits and hyphens"
        raise ValueError(msg)
    return target.parent / f"{STAGING_PREFIX}{save_id}"


def owner_path(parent: Path, save_id: str) -> Path:
    """Return the path of the file that identifies the process of a save or an export."""
    return parent / f"{OWNER_PREFIX}{save_id}.json"


class HiddenDirectory:
    """A hidden directory, and the file that identifies its process."""

    def __init__(self, path: Path, owner: Path, target: Path) -> None:
        self.path, self.target = path, target
        self._owner_path = owner

    def _make(self) -> None:
        with as_save_error(self.path):
            make_parents(self.target)
            # First, so that the directory never exists without an owner.
            owner = ProcessIdentity.of_this_process(self.target.name)
            write_durably(self._owner_path, owner.to_json())
            self.path.mkdir()
            sync_directory(self.target.parent)

    def touch_regularly(self) -> AbstractContextManager[None]:
        """Show other machines, within the context, that this process is alive."""
        return touch_regularly(self._owner_path)

    def _sync_names(self, progress: Progress = NO_PROGRESS) -> None:
        for folder, _, _ in os.walk(self.path, topdown=False):
            sync_directory(Path(folder))
            progress.check()


class StagedDirectory(HiddenDirectory):
    """A checkpoint being written; see ``folder.Staged``. ``seal`` writes the manifest.

    ``create``, write to ``path``, then publish or ``abandon`` it. ``put_in_place`` and ``clean``
    publish it. Rank 0 does this; the other ranks find the directory with ``staging_path``. It
    replaces a checkpoint of this library, a link to one, or an empty
    directory, and nothing else.
    """

    prefix = ""

    def __init__(self, target: Path, save_id: str) -> None:
        super().__init__(staging_path(target, save_id), owner_path(target.parent, save_id), target)
        self._previous = target.parent / f"{PREVIOUS_PREFIX}{save_id}"
        self._may_be_undone = False

    @classmethod
    def create(cls, target: Path, save_id: str) -> StagedDirectory:
        """Make the hidden directory and missing parents.

        ``check_replaceable`` was called before. A file that was added to the target since then
        does not fail the save: ``put_in_place`` keeps it.
        """
        staged = cls(target, save_id)
        try:
            with as_save_error(target):
                _check_still_replaceable(target)
            staged._make()
            with as_save_error(target):
                (staged.path / TAG).mkdir()
        except BaseException:
            staged.abandon()
            raise
        return staged

    def seal(self, manifest: bytes) -> None:
        """Write the manifest, after all other files."""
        write_durably(self.path / MANIFEST_NAME, manifest)

    def sync(self, progress: Progress = NO_PROGRESS) -> None:
        """Flush the names of all files to disk, before ``put_in_place``."""
        with self._publishing(f"Its files are in {self.path}."):
            self._sync_names(progress)

    def put_in_place(self) -> None:
        """Rename the directory to the target in one step; ``clean`` must follow.

        A link at the target is replaced, and its destination stays. If other files were added to a
        checkpoint at the target since ``create``, it is kept under another name, with a warning.

        Raises:
            SaveError: the system failed, or the target must not be replaced any more. The target
                is unchanged or, if the message says so, the new checkpoint, which a power failure
                may still undo.
        """
        with self._publishing(f"Its files are in {self.path}."):
            _check_still_replaceable(self.target)
            exchange_into_place(self.path, self.target, self._previous)
        try:
            with self._publishing("It is in its place, but a power failure may undo this."):
                sync_directory(self.target.parent)
        except SaveError:
            self._may_be_undone = True
            raise

    @contextmanager
    def _publishing(self, state: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            msg = f"Could not publish {self.target}: {error.strerror}. {state}"
            raise SaveError(msg) from error

    def clean(self, progress: Progress) -> None:
        """Remove what the published checkpoint replaced."""
        # The checkpoint is published: a failure costs disk space only.
        try:
            for path in (self.path, self._previous):
                remove_hidden(path, self.target, progress, unfinished=False)
            self._remove_owner_file()
        except OSError as error:
            _log.warning("Could not remove what %s replaced: %s.", self.target, error)

    def abandon(self) -> None:
        """Remove the directory. ``remove_leftovers`` removes what cannot be removed now.

        If an interrupt came between the two renames of ``put_in_place``, the target is missing: the
        new checkpoint gets its name if it is complete, otherwise the old one gets it back. The
        owner file stays while anything is left, because it is needed to restore the target.

        A replaced checkpoint stays, under a hidden name, if a power failure may undo the exchange.
        """
        if self._may_be_undone:
            return
        with suppress(OSError):
            # Exists only between two renames, where names cannot be exchanged.
            if os.path.lexists(self._previous):
                if is_checkpoint(self.path):
                    rename_if_free(self.path, self.target)
                rename_if_free(self._previous, self.target)
                remove_hidden(self._previous, self.target, unfinished=False)
            known_as = self.target if is_checkpoint(self.path) else None
            remove_hidden(self.path, known_as)
            self._remove_owner_file()

    def _remove_owner_file(self) -> None:
        if not (os.path.lexists(self.path) or os.path.lexists(self._previous)):
            self._owner_path.unlink(missing_ok=True)


def _check_still_replaceable(target: Path) -> None:
    # A checkpoint with added files is accepted: it is kept under another name.
    existing = inspect_target(target)
    if existing.refusal_reason and existing.kind != "checkpoint":
        msg = (
            f"{target} {existing.refusal_reason}. It appeared after the save began, and is "
            "unchanged. Save under another name."
        )
        raise SaveError(msg)


def make_parents(target: Path) -> None:
    """Make the missing directories above a target, synced to disk."""
    directory = target.parent
    above = (directory, *directory.parents)
    if link := next((path for path in above if path.is_symlink() and not path.exists()), None):
        msg = (
            f"Could not write {target}: {link} is a link to {real_path(link)}, which does not "
            "exist. Mount that disk, or choose another path."
        )
        raise SaveError(msg)
    if file := next((path for path in above if path.exists() and not path.is_dir()), None):
        msg = f"Could not write {target}: {file} is a file, not a directory. Choose another path."
        raise SaveError(msg)
    missing = [path for path in above if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


# -- links ---------------------------------------------------------------------------------------


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
        _make_link(new, target, progress)
        exchange_into_place(new, link, old)
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


def _make_link(new: Path, target: Path, progress: Progress) -> None:
    try:
        new.symlink_to(os.path.relpath(target, new.parent))
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:  # A copy would fail too.
            raise
        copy_checkpoint(target, new, progress)


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
        with (
            os.fdopen(open_file(source / name)[0], "rb") as read,
            closing(DiskFile(target / name, progress)) as written,
        ):
            while block := read.read(1 << 20):
                written.write(memoryview(block))
                progress.check()
            written.finish()
    for folder, _, _ in os.walk(target, topdown=False):
        sync_directory(Path(folder))


# -- names that change in one step ---------------------------------------------------------------


def exchange_into_place(new: Path, target: Path, aside: Path) -> None:
    """Rename ``new`` to ``target`` in one step; a replaced entry moves to ``new`` or ``aside``.

    Where the system cannot exchange two names, a directory is replaced by two renames, and the name
    is missing for some microseconds. If the second rename fails, the first one is reverted. After
    an interrupt in between, the new entry, which is complete, takes the name. A link at the target
    is replaced only by a link. An OSError leaves the target unchanged.
    """
    if not os.path.lexists(target) or not (_is_directory(new) or _is_directory(target)):
        new.replace(target)
    elif not exchange_names(new, target):
        try:
            target.rename(aside)
            new.rename(target)
        except OSError:
            rename_if_free(aside, target)
            raise
        except BaseException:
            rename_if_free(new, target)
            raise


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step, without following links.

    Returns False if the C library, the kernel or the file system does not support it.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    result = renameat2(
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(one)),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(other)),
        ctypes.c_uint(_RENAME_EXCHANGE),
    )
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def rename_if_free(path: Path, target: Path) -> None:
    """Rename ``path``, if it exists, to ``target``, if that name is free."""
    if os.path.lexists(path) and not os.path.lexists(target):
        path.rename(target)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


# -- leftovers of killed processes ---------------------------------------------------------------


def remove_leftovers(parent: Path, progress: Progress = NO_PROGRESS) -> list[Path]:
    """Remove leftovers of killed saves, exports and deletions in a directory; return their paths.

    Targets that were lost between two renames are restored first. Removed are interrupted
    deletions, directories whose process has ended (``ProcessIdentity.is_dead``) and those that
    were not touched for ``LEFTOVER_AGE_S``. Links that were being made are removed after that time,
    or when the link is made again. Entries that cannot be removed stay, and directories with files
    that this library did not write.
    """
    repair_all(parent)
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


def remove_export(path: Path) -> None:
    """Remove the directory of a killed export, unless a file in it has a name that exports lack."""
    if _is_directory(path) and all(_is_exported(*entry) for entry in files_below(path)):
        remove_files(path, lambda name: _EXPORTED.fullmatch(PurePosixPath(name).name))


def _is_exported(name: str, status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and bool(_EXPORTED.fullmatch(PurePosixPath(name).name))


def _untouched_s(path: Path, now_s: Callable[[], float]) -> float:
    try:
        return now_s() - path.lstat().st_mtime
    except OSError:
        return 0.0


def repair_all(parent: Path) -> list[Path]:
    """Restore all targets in a directory that are missing after a crash between two renames."""
    lost = {
        parent / owner.target
        for kind, save_id in _ours(parent)
        if kind == PREVIOUS_PREFIX
        for owner in (ProcessIdentity.read(owner_path(parent, save_id)),)
        if owner is not None
    }
    set_aside = parent.glob(f"{LINK_PREFIX}*.old")
    lost |= {path.with_name(path.name[len(LINK_PREFIX) : -len(".old")]) for path in set_aside}
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
                if entry.name.startswith(kind) and HIDDEN_ID.fullmatch(save_id):
                    yield kind, save_id
