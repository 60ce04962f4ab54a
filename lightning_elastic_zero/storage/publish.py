"""A directory that is built under a hidden name and appears in one step.

Three names lie beside the target while a save runs, all hidden, and none of them made of the
target's name, nor ending as a checkpoint's does: Lightning takes what looks like ``last*.ckpt`` or
``hpc_ckpt_*`` for a checkpoint.

::

    .zero-staging-<save id>      what is being written; after an exchange, what was there before
    .zero-previous-<save id>     what was there before, where names cannot be exchanged in one step
    .zero-owner-<save id>.json   the process that works on the two

Where the system cannot exchange two names, the target is missing between two renames, for some
microseconds. A crash in between is repaired by ``leftovers``, before the next look for it.

Giving a name to something else: in one step where the system can exchange two names.

Files for other software that appear whole, in one step, where nothing was.

An export is no checkpoint of this library's: it is never replaced, and nothing is. While it is
written it lies in a hidden directory beside its target, and beside that a note says which process
writes it: what a killed one left is removed by the next one, or by a save in that folder.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import SUMS_SUFFIX, as_save_error, write_durably
from lightning_elastic_zero.storage.owners import (
    ProcessIdentity,
    filesystem_time_s,
    touch_regularly,
)
from lightning_elastic_zero.storage.ownership import (
    inspect_target,
    is_checkpoint,
    remove_hidden,
)
from lightning_elastic_zero.storage.paths import real_path, sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange two names in one step; links are exchanged, not followed.

    Returns:
        Whether it was done: the C library, the kernel or the filesystem may not be able to.

    Raises:
        OSError: the system can, but did not.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
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
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """Rename to the target, in one step; what is there is then called ``new`` or ``aside``.

    Where the system cannot exchange two names, a directory gives way by two renames, and the name
    is free for some microseconds. If the second one fails, the first is taken back; an interrupt
    in between ends with the new one in its place, which is whole.

    Args:
        new: a directory or a link, on the disk.
        target: where it is to be found. A link there is replaced, if the new one is a link too.
        aside: a free name beside the target.

    Raises:
        OSError: it could not be done, and the target is what it was.
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


def rename_if_free(path: Path, target: Path) -> None:
    """Rename what is there to the target, if nothing has that name."""
    if os.path.lexists(path) and not os.path.lexists(target):
        path.rename(target)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


_log = logging.getLogger(__name__)

STAGING_PREFIX = ".zero-staging-"
PREVIOUS_PREFIX = ".zero-previous-"
OWNER_PREFIX = ".zero-owner-"

SAVE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")


def staging_path(target: Path, save_id: str) -> Path:
    """Return the directory in which the files of a save are written, before it is published.

    Raises:
        ValueError: the save id cannot be part of a name.
    """
    if not SAVE_ID.fullmatch(save_id):
        msg = f"{save_id!r} is no save id: at most 64 letters, digits and hyphens are."
        raise ValueError(msg)
    return target.parent / f"{STAGING_PREFIX}{save_id}"


class StagedDirectory:
    """A directory in the making: ``create``, write below ``path``, then ``publish`` or ``abandon``.

    One process does this, on rank 0; the others find the directory by ``staging_path``. Only a
    checkpoint of this library's is replaced, an empty directory, and a link to a checkpoint:
    ``existing_target`` says what lies there.

    Attributes:
        path: where the files are written.
        target: where they are to be found once they are published.
    """

    def __init__(self, target: Path, save_id: str) -> None:
        """Name a staged directory; nothing is done on disk."""
        self.path = staging_path(target, save_id)
        self.target = target
        self._previous = target.parent / f"{PREVIOUS_PREFIX}{save_id}"
        self._owner_path = owner_path(target.parent, save_id)

    @classmethod
    def create(cls, target: Path, save_id: str) -> StagedDirectory:
        """Make the hidden directory, and those above it that are missing.

        What may lie at the target is decided before (``check_replaceable``): a file that came into
        a checkpoint there since then is no reason to fail, and is kept by ``publish``.

        Raises:
            SaveError: it cannot be made, or the target is something that must not be replaced.
        """
        staged = cls(target, save_id)
        try:
            _check_still_ours(target)
            make_parents(target)
            # The owner comes first: no directory of ours is ever without one.
            write_durably(
                staged._owner_path, ProcessIdentity.of_this_process(target.name).to_json()
            )
            staged.path.mkdir()
            sync_directory(target.parent)
        except BaseException as error:
            staged.abandon()
            if not isinstance(error, OSError):
                raise
            msg = f"Could not make {staged.path} for a checkpoint: {error.strerror}."
            raise SaveError(msg) from error
        return staged

    def touch_regularly(self) -> AbstractContextManager[None]:
        """Show other machines, in here, that this process still works on it."""
        return touch_regularly(self._owner_path)

    def sync(self, progress: Progress = NO_PROGRESS) -> None:
        """Flush the names of all files to the disk, before ``publish``.

        Raises:
            SaveError: the system refused.
        """
        with self._publishing(f"The files of the checkpoint are in {self.path}."):
            for folder, _, _ in os.walk(self.path, topdown=False):
                sync_directory(Path(folder))
                progress.check()

    def publish(self, progress: Progress = NO_PROGRESS) -> None:
        """Rename the directory to the target in one step, and remove what it replaced.

        Args:
            progress: checked between removed files; an error that it raises ends the removal.

        Raises:
            SaveError: see ``put_in_place``.
        """
        self.put_in_place()
        self.clean(progress)

    def put_in_place(self) -> None:
        """Rename the directory to the target in one step; ``clean`` has to follow.

        A link in the target's place is replaced; what it points to is left alone. What somebody
        put into the target since ``create`` is not removed: the old checkpoint is then kept under
        another name, with a warning.

        Raises:
            SaveError: the system refused, or the target is now something that must not be replaced.
                The target is what it was, or, if the message says so, the new checkpoint, which a
                power cut may still undo.
        """
        with self._publishing(f"The files of the checkpoint are in {self.path}."):
            _check_still_ours(self.target)
            put_in_place(self.path, self.target, self._previous)
        with self._publishing("It is in its place, but may be lost if the power fails."):
            sync_directory(self.target.parent)

    @contextmanager
    def _publishing(self, state: str) -> Iterator[None]:
        """Raise what the system refused, with the state in which that leaves the checkpoint."""
        try:
            yield
        except OSError as error:
            msg = f"Could not publish {self.target}: {error.strerror}. {state}"
            raise SaveError(msg) from error

    def clean(self, progress: Progress) -> None:
        """Remove what the published checkpoint replaced; see ``publish``."""
        # The checkpoint is published: a failure here is a matter of disk space, not of the save.
        try:
            for path in (self.path, self._previous):
                remove_hidden(path, self.target, progress, unfinished=False)
            self._remove_owner_file()
        except OSError as error:
            _log.warning("Could not remove what %s replaced: %s.", self.target, error)

    def abandon(self) -> None:
        """Remove the directory. What cannot be removed now is left for ``remove_leftovers``.

        Where an interrupt came between the two renames of ``publish``, the target is missing: the
        new checkpoint gets its name if it is whole, or else the old one gets it back. The owner
        stays while anything is left, since without one nobody can put it back.
        """
        with suppress(OSError):
            # Without something set aside, nothing was published: what is staged is given up.
            if os.path.lexists(self._previous):
                if is_checkpoint(self.path):
                    rename_if_free(self.path, self.target)
                rename_if_free(self._previous, self.target)
                remove_hidden(self._previous, self.target, unfinished=False)
            known_as = self.target if is_checkpoint(self.path) else None
            remove_hidden(self.path, known_as)
            self._remove_owner_file()

    def _remove_owner_file(self) -> None:
        """Remove the owner's file when nothing is left that it could be asked about."""
        if not (os.path.lexists(self.path) or os.path.lexists(self._previous)):
            self._owner_path.unlink(missing_ok=True)


def _check_still_ours(target: Path) -> None:
    """Refuse what took the target's name since the save began.

    A checkpoint into which something was put since then is no reason to lose the new one: it is
    kept under another name.
    """
    existing = inspect_target(target)
    if existing.refusal_reason and existing.kind != "checkpoint":
        msg = (
            f"{target} {existing.refusal_reason}, which it was not when the save began. "
            "Nothing there was touched. Save under another name."
        )
        raise SaveError(msg)


def owner_path(parent: Path, save_id: str) -> Path:
    """Return the path of the file that says who works on a save."""
    return parent / f"{OWNER_PREFIX}{save_id}.json"


def make_parents(target: Path) -> None:
    """Make the directories above a target that are missing, so that they outlive a power cut.

    Raises:
        SaveError: a file, or a link that leads to nothing, lies above it.
        OSError: one could not be made.
    """
    directory = target.parent
    above = (directory, *directory.parents)
    if link := next((path for path in above if path.is_symlink() and not path.exists()), None):
        msg = (
            f"Could not write {target}: {link} is a link to {real_path(link)}, where nothing is. "
            "Mount that disk, or choose another path."
        )
        raise SaveError(msg)
    if file := next((path for path in above if path.exists() and not path.is_dir()), None):
        msg = f"Could not write {target}: {file} is a file, not a directory. Choose another path."
        raise SaveError(msg)
    missing = [path for path in above if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


EXPORT_PREFIX = ".zero-export-"
"""Prefix of the hidden directory in which an export is written."""

_NOTE_SUFFIX = ".json"
_NOTE_NAME = re.compile(f"{re.escape(EXPORT_PREFIX)}[0-9a-f]{{32}}{re.escape(_NOTE_SUFFIX)}")

_FILES = re.compile(
    r"weights|latest_universal|\.metadata(\.tmp)?|.+\.(pt|safetensors|json|sums|distcp)"
)
"""The names of files that conversions write."""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


def check_free(target: Path) -> None:
    """Refuse a target that exists: nothing is overwritten.

    Raises:
        SaveError: something is there.
    """
    if os.path.lexists(target):
        msg = (
            f"{target} is there already, and nothing is overwritten: write to another path, or "
            "move away what lies there"
        )
        raise SaveError(msg)


class StagedExport:
    """A directory in the making, or one file in such a directory.

    Attributes:
        path: the hidden directory.
        note: the file that says which process writes it.
        target: where it, or its one file, is to be found.
    """

    def __init__(self, target: Path) -> None:
        """Make the hidden directory, and those above it that are missing.

        Raises:
            SaveError: something is at the target, or the directory cannot be made.
        """
        check_free(target)
        self.target = target
        self.path = target.parent / f"{EXPORT_PREFIX}{uuid.uuid4().hex}"
        self.note = _note_of(self.path)
        with as_save_error(target):
            make_parents(target)
            # The note comes first: no directory of an export is ever without one.
            write_durably(self.note, ProcessIdentity.of_this_process(target.name).to_json())
            self.path.mkdir()

    def drop_sums(self) -> None:
        """Remove the checksums that were written beside files: other software does not use them."""
        for path in self.path.rglob(f"*{SUMS_SUFFIX}"):
            path.unlink()

    def publish(self, file: str = "") -> None:
        """Rename the directory, or one file in it, to the target.

        Raises:
            SaveError: something has come to the target meanwhile, or the system refused.
        """
        with as_save_error(self.target):
            for folder, _, _ in os.walk(self.path, topdown=False):
                sync_directory(Path(folder))
            if file:
                _name_file(self.path / file, self.target)
            else:
                if os.path.lexists(self.target):
                    raise FileExistsError(errno.EEXIST, "it is there by now", str(self.target))
                self.path.rename(self.target)
            sync_directory(self.target.parent)

    def remove(self) -> None:
        """Remove what is left under the hidden names; this process has written all of it."""
        _remove(self.path)


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + _NOTE_SUFFIX)


def _remove(path: Path) -> None:
    """Remove the directory of an export, and then its note; what cannot be removed stays."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with suppress(OSError):
                Path(folder, name).unlink()
        with suppress(OSError):
            Path(folder).rmdir()
    if not os.path.lexists(path):
        with suppress(OSError):
            _note_of(path).unlink()


def remove_dead_exports(parent: Path) -> list[Path]:
    """Remove what processes that have ended left of exports into a folder; return their paths.

    One stays that holds a file of a name that no export has: somebody else has put it there.
    """
    removed = []
    for note in sorted(parent.glob(f"{EXPORT_PREFIX}*{_NOTE_SUFFIX}")):
        owner = ProcessIdentity.read(note) if _NOTE_NAME.fullmatch(note.name) else None
        if owner is None:
            continue
        with suppress(OSError):
            now_s = filesystem_time_s(parent / f"{EXPORT_PREFIX}{uuid.uuid4().hex}")
            if owner.is_dead(now_s - note.lstat().st_mtime):
                path = note.with_name(note.name.removesuffix(_NOTE_SUFFIX))
                if _is_own(path):
                    _remove(path)
                    removed.append(path)
    return removed


def _is_own(path: Path) -> bool:
    """Whether all files in a directory have names of an export's; none is a link."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return all(_FILES.fullmatch(file.name) and not file.is_symlink() for file in files)


def _name_file(file: Path, target: Path) -> None:
    """Rename a file where the name is free: a link fails where it is not, unlike a rename."""
    try:
        target.hardlink_to(file)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS or os.path.lexists(target):
            raise
        file.rename(target)


@contextmanager
def staged_export(target: Path) -> Iterator[StagedExport]:
    """Make an export; what was not published when this ends is removed.

    Raises:
        SaveError: something is at the target, or the directory cannot be made.
    """
    export = StagedExport(target)
    try:
        with touch_regularly(export.note):
            yield export
    finally:
        export.remove()
