"""Checkpoints in an object store.

::

    <parent>/<name>/manifest.json           the commit: a manifest, or a link to another name
    <parent>/<name>/<save id>/...           the files of a save
    <parent>/.zero-owner-<save id>.json     the process that writes or deletes it; while it writes,
                                            touched every minute

A save writes its files first. Then one conditional write of ``manifest.json`` publishes it: it
succeeds only if the object is still what it was when the save began. So readers see the old
checkpoint or the new one, of two saves to one name only one succeeds, and a killed save leaves
objects that no manifest names.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from lightning_elastic_zero.core.manifest import FORMAT, MANIFEST_NAME, load_json
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.save_files import SAVE_ID, TAG
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.disk_checkpoints import OWNER_PREFIX
from lightning_elastic_zero.storage.file_write import as_save_error
from lightning_elastic_zero.storage.object_store import RETRY_S
from lightning_elastic_zero.storage.own_files import (
    MOST_NAMED,
    WRITTEN,
    ExistingTarget,
    foreign_files_reason,
    leads_inside,
    recorded_files,
    target_in,
)
from lightning_elastic_zero.storage.ownership import (
    DEAD_AFTER_S,
    PeriodicThread,
    ProcessIdentity,
    new_id,
)
from lightning_elastic_zero.storage.paths import StorePath
from lightning_elastic_zero.storage.store import Store, StoredObject, Version

DELETED_FORMAT = "lightning_elastic_zero.deleted"
"""``format`` of a ``manifest.json`` that is about to be deleted."""

TOUCH_INTERVAL_S = 60.0
"""Interval at which a working process writes its owner object again."""

IN_FLIGHT_S = 60.0
"""Longest time after which a store carries out a request of a process that has ended."""

DELETION_S = 2 * RETRY_S + IN_FLIGHT_S
"""Longest time from the first to the last request of a deletion. A save under that name waits.

The result of the first request is known within ``RETRY_S``: no outage is waited for longer. The
second request is repeated for ``RETRY_S``, and the store carries out the last repetition within
``IN_FLIGHT_S``.
"""

_POLL_S = 0.2

PROBE_PREFIX = ".zero-probe-"
"""Beginning of the name of an object that is written to see which conditions a store supports."""

PROBE_AGE_S = DEAD_AFTER_S
"""Age at which such an object is deleted, because a process was killed that wrote it."""

_probed: set[str] = set()
"""Buckets of which this process knows that they have conditional writes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """The content of ``manifest.json``."""

    data: bytes
    version: Version
    modified: datetime
    save_id: str = ""
    """Of a checkpoint, also of one that is being deleted."""
    linked_to: str = ""
    """Of a link: a path relative to its folder."""
    is_deleted: bool = False
    """Whether the name is being deleted."""
    problem: str = ""
    """Why it is none of these; empty if it is one."""

    @property
    def identity(self) -> str:
        """Differs from that of any other save or link under the same name."""
        return self.save_id or self.linked_to or "other"


def read_commit(path: StorePath, progress: Progress = NO_PROGRESS) -> Commit | None:
    """Return the commit of a name; None if there is none, or if it is being deleted.

    Raises:
        OSError: it cannot be read.
    """
    commit = read_any_commit(path, progress)
    return None if commit is None or commit.is_deleted else commit


def read_any_commit(path: StorePath, progress: Progress = NO_PROGRESS) -> Commit | None:
    """Return the commit of a name, which may be about to be deleted; None if there is none."""
    try:
        stored = path.store.get((path / MANIFEST_NAME).key, progress)
    except FileNotFoundError:
        return None
    try:
        content: Any = load_json(stored[0])
    except ValueError:
        return Commit(*stored, problem=f"its {MANIFEST_NAME} is damaged")
    kind = content.get("format") if isinstance(content, dict) else None
    if target := target_in(stored[0]):
        if leads_inside(target):
            return Commit(*stored, linked_to=target)
        return Commit(*stored, problem=f"its {MANIFEST_NAME} is a link to {target}")
    if kind == DELETED_FORMAT:
        return Commit(*stored, str(content.get("save_id", "")), is_deleted=True)
    if kind == FORMAT and isinstance(content.get("save_id"), str):
        return Commit(*stored, save_id=content["save_id"])
    return Commit(*stored, problem=f"its {MANIFEST_NAME} was written by other software")


def _has_files(path: StorePath, manifest: bytes) -> bool:
    """Whether all files that a manifest names are there, by their sizes."""
    sizes, recorded = file_sizes(path), recorded_files(manifest).sizes
    return all(sizes.get(name) == size for name, size in recorded.items() if size is not None)


def file_sizes(path: StorePath) -> dict[str, int]:
    """Return the sizes of all objects below a path, by their names relative to it."""
    return {_below(path, each): each.size_bytes for each in path.store.objects_below(path.key)}


def _below(path: StorePath, stored: StoredObject) -> str:
    return stored.key.removeprefix(f"{path.key}/" if path.key else "")


# -- replacement and deletion --------------------------------------------------------------------


def inspect_target(path: StorePath) -> ExistingTarget:
    """Return what exists under a name.

    Raises:
        OSError: the store cannot be read.
    """
    if not path.key:
        return ExistingTarget("other", "is a bucket, expected a path in it")
    commit = read_commit(path)
    if commit is not None and commit.problem:
        return ExistingTarget("other", f"is not a checkpoint of this library ({commit.problem})")
    if commit is not None and commit.linked_to:
        return ExistingTarget("link")
    recorded = recorded_files(commit.data).sizes if commit else {}
    # While training waits, no other node is asked whether a new name is free.
    sizes = file_sizes(path) if commit or any(path.store.entries(path.key)) else {}
    foreign = [n for n in sizes if not _is_ours(n) and recorded.get(n, -1) not in {None, sizes[n]}]
    if commit is not None:
        return ExistingTarget("checkpoint", foreign_files_reason(tuple(foreign)))
    with suppress(FileNotFoundError):
        path.store.size(path.key)
        return ExistingTarget("other", "is an object that this library did not write")
    if foreign:
        names = format_names(sorted({name.partition("/")[0] for name in foreign}), MOST_NAMED)
        what = f"is not a checkpoint of this library (it has no {MANIFEST_NAME}): it contains"
        return ExistingTarget("other", f"{what} {names}")
    return ExistingTarget("nothing")


def check_replaceable(target: StorePath) -> None:
    """Refuse a target that contains objects of others.

    Raises:
        SaveError: a checkpoint must not replace it.
    """
    try:
        why = inspect_target(target).refusal_reason
    except OSError as error:
        msg = f"{target} is not accessible: {error.strerror or error}. Nothing was written."
        raise SaveError(msg) from error
    if why:
        msg = f"{target} {why}. Nothing was written. Save under another name."
        raise SaveError(msg)


def _is_ours(name: str) -> bool:
    save_id, _, file = name.partition("/")
    if not file:
        return name == MANIFEST_NAME
    return bool(SAVE_ID.fullmatch(save_id) and WRITTEN.fullmatch(file))


def unique_commit(kind: str, **fields: str) -> bytes:
    """Return a unique content of ``manifest.json``."""
    content = {"format": kind, "format_version": 1, "id": new_id(), **fields}
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


@contextmanager
def owned_deletion(path: StorePath, commit: Commit, progress: Progress) -> Iterator[None]:
    """Name this process as the owner of a commit's files while it deletes them.

    If it is killed, or the store fails, a later save into the folder deletes the rest
    (``remove_leftovers``). Where one process writes, it repeats the deletion itself.
    """
    if path.store.has_one_writer or not SAVE_ID.fullmatch(commit.save_id):
        yield
        return
    owner = path.parent / f"{OWNER_PREFIX}{commit.save_id}.json"
    path.store.put(owner.key, ProcessIdentity.of_this_process(path.name).to_json(), progress)
    try:
        yield
    except FileExistsError:  # Another process has replaced the commit, and deletes its files.
        path.store.delete([owner.key], progress)
        raise
    path.store.delete([owner.key], progress)


def delete_replaced(path: StorePath, commit: Commit, progress: Progress) -> None:
    """Delete the files of a checkpoint whose manifest is gone; of a link there are none."""
    if not commit.save_id:
        return
    _delete_files(path, commit.save_id, progress)
    copied = recorded_files(commit.data).sizes
    if any(name.startswith(f"{commit.save_id}/{TAG}") for name in copied):
        return
    # Its folder was copied from a disk: the files are not below the save id.
    present = {_below(path, each): each for each in path.store.objects_below(path.key, progress)}
    copied.pop(MANIFEST_NAME, None)
    ours = [p.key for name, p in present.items() if copied.get(name, -1) in {None, p.size_bytes}]
    path.store.delete(ours, progress)


def _delete_files(path: StorePath, save_id: str, progress: Progress) -> None:
    """Delete the objects below a save id."""
    if not SAVE_ID.fullmatch(save_id):
        return
    objects = path.store.objects_below((path / save_id).key, progress)
    ours = [each.key for each in objects if _is_ours(_below(path, each))]
    path.store.delete(ours, progress)
    if others := sorted({each.key for each in objects}.difference(ours)):
        names = format_names(others, MOST_NAMED)
        _log.warning("%s was removed, but not objects of others below it: %s", path, names)


# -- leftovers -----------------------------------------------------------------------------------


def remove_leftovers(parent: StorePath, progress: Progress = NO_PROGRESS) -> list[StorePath]:
    """Remove the objects of killed saves in a folder; return the removed prefixes.

    A save is killed if its process has ended, or if its owner object was not written for a long
    time by the store's clock. The newest owner object tells the time: ``StagedObjects.create``
    has just written one.
    """
    _, objects = parent.store.entries(parent.key, progress)
    owners = _owners(parent, objects)
    if not owners:
        return []
    now = max(owner.modified for owner in owners.values())
    probes = [each for each in objects if _below(parent, each).startswith(PROBE_PREFIX)]
    old = timedelta(seconds=PROBE_AGE_S)
    parent.store.delete([each.key for each in probes if now - each.modified > old], progress)
    removed = []
    for save_id, owner in owners.items():
        removed += _remove_if_dead(parent, save_id, owner.key, now, progress)
    return removed


def _owners(parent: StorePath, objects: Iterable[StoredObject]) -> dict[str, StoredObject]:
    """Return the owner objects among the objects of a folder, by save id."""
    named = {
        _below(parent, each).removeprefix(OWNER_PREFIX).removesuffix(".json"): each
        for each in objects
        if _below(parent, each).startswith(OWNER_PREFIX)
    }
    return {save_id: each for save_id, each in named.items() if SAVE_ID.fullmatch(save_id)}


def _remove_if_dead(
    parent: StorePath, save_id: str, owner_key: str, now: datetime, progress: Progress
) -> list[StorePath]:
    """If the process of an owner object is dead, remove its saves that are not published.

    First the owner object is replaced by one that lists them. This fails if the process is alive
    and has written it meanwhile. A process that was only suspended reads the list.
    """
    try:
        data, version, modified = parent.store.get(owner_key, progress)
    except FileNotFoundError:
        return []
    owner, untouched_s = ProcessIdentity.from_bytes(data), (now - modified).total_seconds()
    if owner is None or untouched_s <= IN_FLIGHT_S or not owner.is_dead(untouched_s):
        return []
    target = parent / owner.target
    # In this order: a save has an owner before its first file, and until after its commit.
    saves, _ = target.store.entries(target.key, progress)
    owners = _owners(parent, parent.store.entries(parent.key, progress)[1])
    commit = read_commit(target, progress)
    kept = {*owners} - {save_id} | {commit.save_id if commit else ""}
    gone = [each for each in saves if SAVE_ID.fullmatch(each) and each not in kept]
    claim = {**load_json(owner.to_json()), "removed": gone, "id": new_id()}
    try:
        parent.store.swap(owner_key, json.dumps(claim).encode(), version, progress)
    except FileExistsError:
        return []
    for each in gone:
        _delete_files(target, each, progress)
    parent.store.delete([owner_key], progress)
    return [target / each for each in gone]


# -- saving --------------------------------------------------------------------------------------


class StagedObjects:
    """A checkpoint being written; see ``folder.Staged``. ``put_in_place`` writes the manifest.

    Attributes:
        path: the prefix below which the files are written.
        target: the name under which they are published.
        prefix: the prefix of file names in the manifest.
    """

    def __init__(self, target: StorePath, save_id: str) -> None:
        """Choose the names; no request is made."""
        self.path, self.target, self.prefix = target / save_id, target, f"{save_id}/"
        self._owner = target.parent / f"{OWNER_PREFIX}{save_id}.json"
        self._owner_data = ProcessIdentity.of_this_process(target.name).to_json()
        self._owner_version: Version | None = None
        self._lock = threading.Lock()
        self._save_id = save_id
        self._replaced: Commit | None = None
        self._manifest = b""
        self._is_committing = False

    @classmethod
    def create(
        cls, target: StorePath, save_id: str, progress: Progress = NO_PROGRESS
    ) -> StagedObjects:
        """Show that this process writes the target.

        Raises:
            SaveError: the store cannot be written or has no conditional writes, or the target must
                not be replaced.
        """
        staged = cls(target, save_id)
        with as_save_error(target):
            check_conditional_writes(target.store, target.parent)
            check_replaceable(target)
            try:
                staged._touch()
                staged._replaced = staged._await_deletion(progress)
                remove_leftovers(target.parent, progress)
            except BaseException:
                staged.abandon()
                raise
        return staged

    def _await_deletion(self, progress: Progress) -> Commit | None:
        """Return the commit that is replaced, after a deletion of the name has ended."""
        began = time.monotonic()
        now = self.target.store.get(self._owner.key, progress)[2]
        while (commit := read_any_commit(self.target, progress)) and commit.is_deleted:
            if self.target.store.has_one_writer:
                break
            deleted_s = (now - commit.modified).total_seconds() + time.monotonic() - began
            if deleted_s > DELETION_S:
                break
            progress.check()
            time.sleep(_POLL_S)
        return commit

    def touch_regularly(self) -> PeriodicThread:
        """Show other machines, within the context, that this process is alive."""
        failed = threading.Event()

        def touch() -> None:
            try:
                self._touch()
            except OSError as error:
                if not failed.is_set():
                    failed.set()
                    _log.warning(
                        "%s cannot be written (%s). After %d min without it, other runs consider "
                        "this process dead, and its save fails.",
                        self._owner,
                        error.strerror,
                        DEAD_AFTER_S // 60,
                    )

        return PeriodicThread(touch, TOUCH_INTERVAL_S, "owns a save")

    def _touch(self) -> None:
        """Write the owner object again, unless it was removed.

        Raises:
            FileExistsError: it was, because this process seemed to be dead.
        """
        with self._lock:
            store, key = self.target.store, self._owner.key
            self._owner_data += b"\n"  # Different each time, as a swap requires.
            try:
                self._owner_version = store.swap(key, self._owner_data, self._owner_version)
            except FileExistsError:
                version = self._version_of_lost_touch()
                if version is None:
                    raise
                self._owner_version = store.swap(key, self._owner_data, version)

    def _version_of_lost_touch(self) -> Version | None:
        """Return the version of the owner object if this process has written it; else None.

        The store may have carried out a touch whose result it could not report.
        """
        with suppress(FileNotFoundError):
            data, version, _ = self.target.store.get(self._owner.key)
            return version if data.rstrip() == self._owner_data.rstrip() else None
        return None

    def seal(self, manifest: bytes) -> None:
        """Set the manifest, which ``put_in_place`` writes."""
        self._manifest = manifest

    def sync(self, progress: Progress = NO_PROGRESS) -> None:
        """Do nothing: objects are durable when they appear."""

    def put_in_place(self) -> None:
        """Publish the checkpoint in one step; ``clean`` must follow.

        Raises:
            SaveError: another process has published under this name, or removed the files because
                this process seemed to be dead, or the store failed.
        """
        store, key = self.target.store, (self.target / MANIFEST_NAME).key
        expected = self._replaced.version if self._replaced else None
        try:
            self._touch()
        except FileExistsError as error:
            raise self._considered_dead() from error
        except OSError as error:
            msg = f"Could not publish {self.target}: {error.strerror}."
            raise SaveError(msg) from error
        self._is_committing = True
        try:
            # Without progress checks: an interrupted request may still be carried out.
            version = store.swap(key, self._manifest, expected)
            self._check_kept(version)
        except FileExistsError as error:
            self._is_committing = False
            msg = (
                f"Could not publish {self.target}: another process saved, linked or deleted it "
                "after this save began. Give each run its own folder."
            )
            raise SaveError(msg) from error
        except OSError as error:
            msg = f"Could not publish {self.target}: {error.strerror}. Its files: {self.path}."
            raise SaveError(msg) from error
        self._is_committing = False

    def _check_kept(self, version: Version) -> None:
        """Undo the commit if a cleanup has read the manifest before it, and removes the files.

        A cleanup reads the manifest, then replaces the owner object. This process has written the
        manifest, and now the owner object: one of the two sees the other.

        Raises:
            SaveError: the files are removed. What was replaced is published again.
        """
        store, key = self.target.store, (self.target / MANIFEST_NAME).key
        try:
            self._touch()
        except FileExistsError as error:
            if self._is_kept():
                return
            previous = self._replaced.data if self._replaced else unique_commit(DELETED_FORMAT)
            store.swap(key, previous, version)
            self._is_committing = False
            raise self._considered_dead() from error
        except OSError as error:
            _log.warning("%s cannot be written (%s).", self._owner, error.strerror)

    def _is_kept(self) -> bool:
        """Whether the cleanup that has replaced the owner object leaves this save."""
        try:
            claim: Any = load_json(self.target.store.get(self._owner.key)[0])
        except FileNotFoundError:  # It has ended.
            return _has_files(self.target, self._manifest)
        return self._save_id not in claim.get("removed", ())

    def _considered_dead(self) -> SaveError:
        msg = (
            f"Could not publish {self.target}: this process was considered dead, and another save "
            "removed its files. Save again."
        )
        return SaveError(msg)

    def clean(self, progress: Progress) -> None:
        """Remove the replaced checkpoint."""
        # The checkpoint is published: a failure costs space only.
        try:
            if self._replaced is not None:
                delete_replaced(self.target, self._replaced, progress)
            self.target.store.delete([self._owner.key], progress)
        except OSError as error:
            _log.warning("Could not remove what %s replaced: %s.", self.target, error)

    def abandon(self) -> None:
        """Remove the files, unless the checkpoint may have been published.

        ``remove_leftovers`` removes what cannot be removed now.
        """
        with suppress(OSError):
            commit = read_commit(self.target)
            if commit is not None and commit.save_id == self._save_id:
                # A node without the new manifest still names the replaced files. The next join
                # removes what no node names.
                if not (self._is_committing and self.target.store.has_one_writer):
                    self.clean(NO_PROGRESS)
            elif not self._is_committing:
                _delete_files(self.target, self._save_id, NO_PROGRESS)
                self.target.store.delete([self._owner.key])


def check_conditional_writes(store: Store, folder: StorePath) -> None:
    """Check once per bucket that the store refuses to create an object twice.

    Raises:
        SaveError: it does not, or cannot replace an object of a given version.
        OSError: the store cannot be written.
    """
    if store.root in _probed:
        return
    key = (folder / f"{PROBE_PREFIX}{new_id()}").key
    try:
        version = store.swap(key, b"1", None)
        attempts = ((b"2", None), (b"3", version), (b"4", version))
        refused = [_refuses(store, key, data, expected) for data, expected in attempts]
        if refused != [True, False, True]:
            msg = (
                f"{store.root} does not support conditional writes, without which a checkpoint "
                "could be torn or replaced silently. Save to another store, or to a disk."
            )
            raise SaveError(msg)
    finally:
        with suppress(OSError):
            store.delete([key])
    _probed.add(store.root)


def _refuses(store: Store, key: str, data: bytes, expected: Version | None) -> bool:
    try:
        store.swap(key, data, expected)
    except FileExistsError:
        return True
    return False
