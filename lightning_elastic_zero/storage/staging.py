"""A directory that is built under a hidden name and appears in one step.

Three names lie beside the target while a save runs, all hidden, and none of them made of the
target's name, nor ending as a checkpoint's does: Lightning takes what looks like ``last*.ckpt`` or
``hpc_ckpt_*`` for a checkpoint.

::

    .zero-staging-<save id>      what is being written; after an exchange, what was there before
    .zero-previous-<save id>     what was there before, where names cannot be exchanged in one step
    .zero-owner-<save id>.json   the process that works on the two

Where the system cannot exchange two names, the target is missing between two renames, for some
microseconds. A crash in between is repaired by ``repair_target``, before the next look for it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.checksums import write_durably
from lightning_elastic_zero.storage.deleting import DOOMED, delete, no_work, remove_tree
from lightning_elastic_zero.storage.exchange import exchange_names
from lightning_elastic_zero.storage.owner import Owner
from lightning_elastic_zero.storage.places import sync_directory

_log = logging.getLogger(__name__)

_STAGING = ".zero-staging-"
_PREVIOUS = ".zero-previous-"
_OWNER = ".zero-owner-"
LINKING = ".zero-link-"
"""Prefix of a link that is being made; it is gone in an instant, unless a kill came in between."""

_SAVE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")

LEFTOVER_AGE_S = 7 * 24 * 3600.0
"""What a process of unknown fate left is removed after this time."""

SETTLE_S = 2.0
"""How long a target may be missing while another machine publishes it: far longer than it takes."""


def _no_step(name: str) -> None:
    """Take notice of nothing."""


def staging_path(target: Path, save_id: str) -> Path:
    """Give the directory in which the files of a save are written, before it is published.

    Raises:
        ValueError: The save id cannot be part of a name.

    """
    if not _SAVE_ID.fullmatch(save_id):
        msg = f"{save_id!r} is no save id: at most 64 letters, digits and hyphens are."
        raise ValueError(msg)
    return target.parent / f"{_STAGING}{save_id}"


class StagedDirectory:
    """A directory in the making: ``create``, write below ``path``, then ``publish`` or ``abandon``.

    One process does this, on rank 0; the others find the directory by ``staging_path``.

    Attributes:
        path: Where the files are written.

        target: Where they are to be found once they are published.

    """

    def __init__(self, target: Path, save_id: str) -> None:
        """Name a staged directory; nothing is done on disk."""
        self.path = staging_path(target, save_id)
        self.target = target
        self._previous = target.parent / f"{_PREVIOUS}{save_id}"
        self._owner_path = _owner_path(target.parent, save_id)

    @classmethod
    def create(cls, target: Path, save_id: str) -> StagedDirectory:
        """Make the hidden directory, and those above it that are missing.

        Raises:
            SaveError: It cannot be made, or the target is something that must not be replaced.

        """
        staged = cls(target, save_id)
        _refuse_file(target)
        try:
            make_parents(target)
            # The owner comes first: no directory of ours is ever without one.
            write_durably(staged._owner_path, Owner.this_process(target.name).to_json())
            staged.path.mkdir()
            sync_directory(target.parent)
        except OSError as error:
            staged.abandon()
            msg = f"Could not make {staged.path} for a checkpoint: {error.strerror}."
            raise SaveError(msg) from error
        return staged

    def publish(
        self,
        *,
        exchange: bool = True,
        on_step: Callable[[str], None] = _no_step,
        on_work: Callable[[], None] = no_work,
    ) -> None:
        """Put the directory in the target's place, in one step, and remove what was there.

        A link in the target's place is replaced; what it points to is left alone.

        Args:
            exchange: Whether to exchange the two names in one step, where the system can.

            on_step: Told the name of each step when it is done: "synced", then "placed", or "set
                aside" and "placed" where names cannot be exchanged, then "kept" (it outlives a
                power cut) and "cleaned".

            on_work: Called between the folders that are synced and the files that are removed.

        Raises:
            SaveError: The system refused. The target is what it was, or, if the message says so,
                the new checkpoint, which a power cut may still undo.

        """
        _refuse_file(self.target)
        state = f"The files of the checkpoint are in {self.path}."
        try:
            for folder, _, _ in os.walk(self.path, topdown=False):
                sync_directory(Path(folder))
                on_work()
            on_step("synced")
            self._place(on_step, exchange=exchange)
            state = "It is in its place, but may be lost if the power fails."
            on_step("placed")
            sync_directory(self.target.parent)
            on_step("kept")
        except OSError as error:
            msg = f"Could not publish {self.target}: {error.strerror}. {state}"
            raise SaveError(msg) from error
        self._clean(on_work)
        on_step("cleaned")

    def _place(self, on_step: Callable[[str], None], *, exchange: bool) -> None:
        if not os.path.lexists(self.target):
            self.path.rename(self.target)
        elif not (exchange and exchange_names(self.path, self.target)):
            self.target.rename(self._previous)
            on_step("set aside")
            try:
                self.path.rename(self.target)
            except OSError:
                self._previous.rename(self.target)
                raise

    def _clean(self, on_work: Callable[[], None]) -> None:
        # The checkpoint is published: a failure here is a matter of disk space, not of the save.
        try:
            _remove(self.path, on_work)
            _remove(self._previous, on_work)
            _remove(self._owner_path)
        except OSError as error:
            _log.warning("Could not remove what %s replaced: %s.", self.target, error)

    def abandon(self) -> None:
        """Remove the directory. What cannot be removed now is left for ``remove_leftovers``."""
        with suppress(OSError):
            _remove(self.path)
            _remove(self._owner_path)


def remove_leftovers(parent: Path, on_work: Callable[[], None] = no_work) -> list[Path]:
    """Remove what killed saves left in a directory, and give the paths that were removed.

    That is what belongs to a process that is certainly dead, or is older than ``LEFTOVER_AGE_S``,
    and what was being deleted, by whomever: it is no checkpoint any more. Targets that were lost
    between two renames are restored first. What cannot be removed is left. A link in the making
    goes by its age: whoever makes that link again removes it before.
    """
    repair(parent)
    removed = list(parent.glob(f"{DOOMED}*"))
    for path in removed:
        remove_tree(path, on_work)
    for path in [path for path in parent.glob(f"{LINKING}*") if _age_s(path) > LEFTOVER_AGE_S]:
        with suppress(OSError):
            delete(path, on_work)
            removed.append(path)
    for save_id in sorted({save_id for _, save_id in _ours(parent)}):
        owner_path = _owner_path(parent, save_id)
        owner = Owner.read(owner_path)
        staging, previous = parent / f"{_STAGING}{save_id}", parent / f"{_PREVIOUS}{save_id}"
        if os.path.lexists(previous) and not _is_replaced(previous, owner):
            continue
        oldest = owner_path if os.path.lexists(owner_path) else staging
        if (owner is not None and owner.is_dead()) or _age_s(oldest) > LEFTOVER_AGE_S:
            with suppress(OSError):
                for path in (staging, previous, owner_path):
                    if os.path.lexists(path):
                        _remove(path, on_work)
                        removed.append(path)
    return removed


def repair(parent: Path) -> list[Path]:
    """Restore every target in a directory that a crash took between two renames."""
    lost = {
        parent / owner.target
        for kind, save_id in _ours(parent)
        if kind == _PREVIOUS
        for owner in (Owner.read(_owner_path(parent, save_id)),)
        if owner is not None
    }
    return [target for target in sorted(lost) if repair_target(target)]


def repair_target(target: Path, settle_s: float = SETTLE_S) -> bool:
    """Restore the directory that a crash took from the target's place between two renames.

    It is called before a checkpoint is looked for, on any rank, and on several at once.

    Args:
        target: The path at which a checkpoint is expected.

        settle_s: How long to wait for a save that may still be running on another machine.

    Returns:
        Whether this call put it back.

    """
    if os.path.lexists(target):
        return False
    for kind, save_id in list(_ours(target.parent)):
        owner = Owner.read(_owner_path(target.parent, save_id))
        if kind != _PREVIOUS or owner is None or owner.target != target.name:
            continue
        if not owner.is_dead():
            time.sleep(settle_s)
        if not os.path.lexists(target):
            # Another rank may have been faster.
            with suppress(FileNotFoundError):
                (target.parent / f"{_PREVIOUS}{save_id}").rename(target)
                sync_directory(target.parent)
                return True
    return False


def _ours(parent: Path) -> Iterator[tuple[str, str]]:
    """Give the kind and the save id of each of our hidden names in a directory."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(parent) as entries:
        for entry in entries:
            for kind in (_STAGING, _PREVIOUS, _OWNER):
                save_id = entry.name.removeprefix(kind).removesuffix(".json")
                if entry.name.startswith(kind) and _SAVE_ID.fullmatch(save_id):
                    yield kind, save_id


def _owner_path(parent: Path, save_id: str) -> Path:
    return parent / f"{_OWNER}{save_id}.json"


def _is_replaced(previous: Path, owner: Owner | None) -> bool:
    """Tell whether the target has been put in the place of what was set aside."""
    return owner is not None and os.path.lexists(previous.parent / owner.target)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _refuse_file(target: Path) -> None:
    """Refuse to replace a file: it is not a checkpoint of ours, and may be somebody's only one."""
    try:
        mode = target.lstat().st_mode
    except OSError:
        return
    if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        msg = (
            f"{target} is a file, and a checkpoint is a directory. "
            "Move the file away, or save under another name."
        )
        raise SaveError(msg)


def make_parents(target: Path) -> None:
    """Make the directories above a target that are missing, so that they outlive a power cut."""
    directory = target.parent
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


def _remove(path: Path, on_work: Callable[[], None] = no_work) -> None:
    """Remove a file, a link, or a tree, if it is there; no link is followed."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path, on_work)
        if path.exists():
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", str(path))
    else:
        path.unlink(missing_ok=True)
