"""Publishing, replacing, linking and deleting in an object store, and untouched objects."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    SaveError,
)
from lightning_elastic_zero.formats.newest import checkpoints_in
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.storage import store_checkpoints
from lightning_elastic_zero.storage.disk_checkpoints import StagedDirectory
from lightning_elastic_zero.storage.file_read import VerifiedFile
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES, ChecksummedWriter
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.object_store import ObjectStore
from lightning_elastic_zero.storage.ownership import ProcessIdentity, new_id
from lightning_elastic_zero.storage.paths import StorePath
from lightning_elastic_zero.storage.store import Version
from lightning_elastic_zero.storage.store_checkpoints import (
    StagedObjects,
    check_conditional_writes,
    remove_leftovers,
)
from lightning_elastic_zero.tools.verification import verify_checkpoint
from tests.support.plain_checkpoints import make_state, write_elastic
from tests.support.small_checkpoints import complete, contents, fill, names_in

pytest.importorskip("obstore")

FILE = "checkpoint/mp_rank_00_model_states.pt"


@pytest.fixture
def folder() -> StorePath:
    """Return an empty folder in memory."""
    return StorePath("memory://tests", str(uuid4()))


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a failing request fail soon."""
    monkeypatch.setattr("lightning_elastic_zero.storage.object_store.RETRY_S", 0.5)


def begin(target: StorePath, content: bytes = b"content") -> StagedObjects:
    """Write a save up to its last step."""
    save_id = new_id()
    staged = StagedObjects.create(target, save_id)
    with ChecksummedWriter(staged.path, FILE) as file:
        file.write(content)
        entry = file.finish(save_id)
    files = [{"name": f"{staged.prefix}{entry.name}", "size_bytes": entry.size_bytes}]
    manifest = {"format": "lightning_elastic_zero", "save_id": save_id, "files": files}
    staged.seal(json.dumps(manifest).encode())
    return staged


def identity_of(staged: StagedObjects) -> str:
    """Return the identity of a published save."""
    return staged.path.name


def publish(target: StorePath, content: bytes = b"content") -> StagedObjects:
    """Publish a save."""
    staged = begin(target, content)
    staged.put_in_place()
    staged.clean(NO_PROGRESS)
    return staged


def keys(folder: StorePath) -> set[str]:
    """Return all objects of a folder, without the ids of saves."""
    names = (
        path.key.removeprefix(f"{folder.key}/") for path in folder.store.objects_below(folder.key)
    )
    return {"/".join("ID" if len(part) == 32 else part for part in n.split("/")) for n in names}


PUBLISHED = {"a.ckpt/manifest.json", f"a.ckpt/ID/{FILE}", f"a.ckpt/ID/{FILE}.sums"}


def test_an_abandoned_save_leaves_nothing(folder: StorePath) -> None:
    """It leaves no object of its own, and keeps all others."""
    publish(folder / "a.ckpt")
    begin(folder / "a.ckpt").abandon()
    assert keys(folder) == PUBLISHED


def test_one_of_two_saves_to_one_name_is_published(folder: StorePath) -> None:
    """The other one fails with the reason, and its files are removed."""
    target = folder / "a.ckpt"
    first, second = begin(target, b"first"), begin(target, b"second")
    second.put_in_place()
    with pytest.raises(SaveError, match=r"another process saved, linked or deleted it"):
        first.put_in_place()
    first.abandon()
    second.clean(NO_PROGRESS)
    assert keys(folder) == PUBLISHED
    assert second.path.store.get((second.path / FILE).key)[0] == b"second"


def test_a_lost_answer_is_not_a_failure(folder: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that was executed although its answer was lost is found by reading back."""
    staged = begin(folder / "a.ckpt")
    store = folder.store
    assert isinstance(store, ObjectStore)
    put, errors = store._obstore.put_async, store._errors
    lost: list[object] = []

    class Losing:
        def __getattr__(self, name: str) -> object:
            return getattr(obstore, name)

        async def put_async(self, *args: object, **options: object) -> object:
            answer = await put(*args, **options)
            if not lost and "mode" in options:
                lost.append(answer)
                msg = "the connection was lost"
                raise errors.GenericError(msg)
            return answer

    obstore = store._obstore
    monkeypatch.setattr(store, "_obstore", Losing())
    staged.put_in_place()
    assert lost
    assert folder_at(folder / "a.ckpt").is_checkpoint()


@pytest.mark.parametrize("other", ["a.ckpt/notes.txt", "a.ckpt", "a.ckpt/global_step1/latest"])
def test_objects_of_others_are_kept(folder: StorePath, other: str) -> None:
    """A name with such objects is neither replaced nor deleted."""
    store, target = folder.store, folder / "a.ckpt"
    store.put((folder / other).key, b"mine")
    with pytest.raises(SaveError, match="Nothing was written"):
        begin(target)
    assert folder_at(target).delete()
    assert store.get((folder / other).key)[0] == b"mine"
    assert keys(folder) == {other}


def test_a_checkpoint_with_an_added_object_is_kept(folder: StorePath) -> None:
    """Retention keeps it, and reports why."""
    target = folder / "a.ckpt"
    publish(target)
    folder.store.put((target / "notes.txt").key, b"mine")
    assert "contains files that this library did not write: notes.txt" in folder_at(target).delete()
    assert keys(folder) == PUBLISHED | {"a.ckpt/notes.txt"}


OUTSIDE = (
    *("file:///etc", "http://127.0.0.1:9/a.ckpt", "ftp://host/a.ckpt", "s3://other/a.ckpt"),
    *("memory://tests/a.ckpt", "../run/a.ckpt", "/etc", ".", "b//a.ckpt", "a\0b", "\ud800"),
)


@pytest.mark.parametrize("target", OUTSIDE, ids=ascii)
def test_a_link_that_leads_out_of_its_folder_is_not_followed(
    target: object, folder: StorePath, tmp_path: Path
) -> None:
    """Anybody who writes into the folder can plant one; on a disk, it is a copy."""
    content = {"format": "lightning_elastic_zero.link", "format_version": 1, "target": target}
    folder.store.put((folder / "last.ckpt/manifest.json").key, json.dumps(content).encode())
    publish(folder / "run/a.ckpt")
    download(folder, tmp_path)
    for path in (folder / "last.ckpt", tmp_path / "last.ckpt"):
        assert folder_at(path).follow_links().path == path
        assert not folder_at(path).is_link()
        assert not folder_at(path).is_checkpoint()
        assert "manifest.json is a link to" in folder_at(path).inspect().refusal_reason
        with pytest.raises(CheckpointFormatError, match=r"cannot be read .* it is a link to"):
            open_checkpoint(path)


def test_a_link_out_of_its_folder_is_not_made(folder: StorePath) -> None:
    """It could not be followed. A checkpoint below the folder can be linked."""
    publish(folder / "a.ckpt")
    for other in (StorePath("memory://other", folder.key) / "a.ckpt", folder / "a.ckpt"):
        with pytest.raises(SaveError, match="a checkpoint in its own folder or below it"):
            folder_at(folder / "run/last.ckpt").make_link(folder_at(other))
    for link in (folder / "last.ckpt", StorePath(folder.root, "last.ckpt")):
        folder_at(link).make_link(folder_at(folder / "a.ckpt"))
        assert folder_at(link).follow_links().path == folder / "a.ckpt"


def upload(here: Path, folder: StorePath) -> None:
    """Copy a folder as ``aws s3 sync`` does, which follows links."""
    for path in here.rglob("*"):
        if path.is_file():
            folder.store.put((folder / path.relative_to(here).as_posix()).key, path.read_bytes())


def download(folder: StorePath, here: Path) -> None:
    for found in folder.store.objects_below(folder.key):
        path = here / found.key.removeprefix(f"{folder.key}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(folder.store.get(found.key)[0])


def test_a_folder_copied_from_a_disk_is_read_replaced_and_removed(
    folder: StorePath, tmp_path: Path
) -> None:
    """Its files are not below a save id, and ``last.ckpt`` is a whole checkpoint."""
    write_elastic(tmp_path / "a.ckpt", make_state())
    for name in ("b.ckpt", "last.ckpt", "mine.ckpt"):
        shutil.copytree(tmp_path / "a.ckpt", tmp_path / name)
    (tmp_path / "mine.ckpt/notes.txt").write_text("mine")
    upload(tmp_path, folder)
    for name in ("a.ckpt", "last.ckpt"):
        assert verify_checkpoint(str(folder / name)).is_sound
        assert not folder_at(folder / name).inspect().refusal_reason
    assert folder_at(folder / "a.ckpt").can_replace(folder_at(folder / "last.ckpt"))
    of_mine = {key for key in keys(folder) if key.startswith("mine.ckpt/")}
    publish(folder / "a.ckpt")
    folder_at(folder / "last.ckpt").make_link(folder_at(folder / "a.ckpt"))
    FileQueue().delete(str(folder / "b.ckpt"))
    assert "notes.txt" in folder_at(folder / "mine.ckpt").delete()
    assert keys(folder) == PUBLISHED | of_mine | {"last.ckpt/manifest.json"}


def test_a_folder_copied_to_a_disk_is_read_replaced_and_removed(
    folder: StorePath, tmp_path: Path
) -> None:
    """Its files are below a save id, and a link is a folder with a manifest."""
    names = ("a.ckpt", "b.ckpt", "sub/c.ckpt")
    for name in names:
        staged = publish(folder / name)
        for file in ("latest", "zero_to_fp32.py"):
            folder.store.put((staged.path / file).key, b"x")
    links = dict(zip(("last.ckpt", "last-v1.ckpt", "best.ckpt"), names, strict=True))
    for link, name in links.items():
        folder_at(folder / link).make_link(folder_at(folder / name))
    download(folder, tmp_path)
    for link, name in links.items():
        copy = folder_at(tmp_path / link)
        assert copy.is_link()
        assert copy.follow_links() == folder_at(tmp_path / name).follow_links_if_exists()
        assert copy.is_checkpoint()
        assert folder_at(tmp_path / name).has_link() == ("/" not in name)
    for name in (*names, *links):
        assert not folder_at(tmp_path / name).inspect().refusal_reason
    queue = FileQueue()
    queue.delete(tmp_path / "a.ckpt")  # Its link needs it.
    assert folder_at(tmp_path / "last.ckpt").is_checkpoint()
    for name in ("last.ckpt", "b.ckpt"):
        save = StagedDirectory.create(tmp_path / name, new_id())
        fill(save.path, "new")
        save.put_in_place()
        save.clean(NO_PROGRESS)
        assert contents(tmp_path / name) == complete("new")
    folder_at(tmp_path / "last-v1.ckpt").make_link(folder_at(tmp_path / "b.ckpt"))
    assert (tmp_path / "last-v1.ckpt").is_symlink()
    queue.delete_waiting()
    queue.delete(tmp_path / "best.ckpt")
    assert not folder_at(tmp_path / "sub/c.ckpt").delete()
    assert names_in(tmp_path) == ["b.ckpt", "last-v1.ckpt", "last.ckpt", "sub"]
    assert names_in(tmp_path / "sub") == []


def test_links_between_a_disk_and_a_store_are_refused(folder: StorePath, tmp_path: Path) -> None:
    """Neither can name a checkpoint of the other."""
    publish(folder / "a.ckpt")
    for target, link in ((folder / "a.ckpt", tmp_path / "last"), (tmp_path, folder / "last")):
        with pytest.raises(SaveError, match="one is on a disk, the other in an object store"):
            folder_at(link).make_link(folder_at(target))
    assert keys(folder) == PUBLISHED
    assert not list(tmp_path.iterdir())


def test_a_folder_is_described_by_its_names(folder: StorePath) -> None:
    """The error lists its checkpoints, or the names directly below it if it has none."""
    folder.store.put((folder / "logs/version_0/events").key, b"x")
    with pytest.raises(CheckpointFormatError, match=r"it contains logs\. .*a local disk"):
        open_checkpoint(folder)
    for name in ("b.ckpt", "a.ckpt"):
        publish(folder / name)
    folder_at(folder / "last.ckpt").make_link(folder_at(folder / "b.ckpt"))
    names = r"it contains the checkpoints a\.ckpt, b\.ckpt, last\.ckpt\. Pass one of them$"
    with pytest.raises(CheckpointFormatError, match=names):
        open_checkpoint(folder)
    with pytest.raises(
        SaveError, match=r"it contains a\.ckpt, b\.ckpt, last\.ckpt, logs\. Nothing"
    ):
        begin(folder)


@pytest.mark.parametrize("place", ["memory", "s3"])
def test_names_with_a_common_prefix_are_separate(
    place: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of folders and checkpoints, in lists, deletions, links and removals of leftovers."""
    root = "memory://tests"
    if place == "s3":
        root, environment = request.getfixturevalue("s3")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
    above = StorePath(root, str(uuid4()))
    run, other = above / "run", above / "run2"
    for name in ("a.ckpt", "a", "a-v1.ckpt", "a.ckpt2"):
        publish(run / name)
        publish(other / name)
    folder_at(other / "last.ckpt").make_link(folder_at(other / "a.ckpt"))
    begin(other / "a.ckpt3")
    leftover = begin(run / "a.ckpt3")
    elsewhere = keys(other)
    here = {each.path.name for each in folder_at(run / "a.ckpt").siblings()}
    assert here == {"a", "a-v1.ckpt", "a.ckpt2", "a.ckpt3"}
    assert not folder_at(run / "a.ckpt").has_link()
    for name in ("a", "a.ckpt"):
        assert not folder_at(run / name).delete()
    consider_dead(monkeypatch)
    assert remove_leftovers(run) == [leftover.path]
    kept = {name.replace("a.ckpt", k) for k in ("a-v1.ckpt", "a.ckpt2") for name in PUBLISHED}
    assert keys(run) == kept
    assert keys(other) == elsewhere


def test_leftovers_of_a_dead_process_are_removed(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a living process are kept, like the published checkpoint and foreign objects."""
    target = folder / "a.ckpt"
    published = publish(target)
    begin(target)
    assert remove_leftovers(folder) == []
    begin(target)
    dead = begin(folder / "b.ckpt")
    monkeypatch.setattr(store_checkpoints, "IN_FLIGHT_S", -1.0)
    is_dead = ProcessIdentity.is_dead
    monkeypatch.setattr(
        ProcessIdentity, "is_dead", lambda self, s=0.0: self.target == "b.ckpt" or is_dead(self, s)
    )
    assert remove_leftovers(folder) == [dead.path]
    assert not folder.store.objects_below((folder / "b.ckpt").key)
    assert folder_at(target).is_checkpoint()
    # A process that was only suspended does not publish removed files.
    with pytest.raises(SaveError, match="considered dead"):
        dead.put_in_place()
    assert published.path.store.objects_below(published.path.key)


def consider_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cleanup consider the processes of all saves dead at once."""
    monkeypatch.setattr(store_checkpoints, "IN_FLIGHT_S", -1.0)
    monkeypatch.setattr(ProcessIdentity, "is_dead", lambda *_: True)


def at_request(
    folder: StorePath,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    key: str,
    call: Callable[[], object],
    *,
    after: bool = False,
) -> None:
    """Make a call before or after the first request of a kind whose key has this ending."""
    request = getattr(folder.store, name)
    waiting = [call]

    def wrapped(at: str | Collection[str], *args: object) -> object:
        matches = waiting and (at if isinstance(at, str) else min(at)).endswith(key)
        if matches and not after:
            waiting.pop()()
        answer = request(at, *args)
        if matches and after:
            waiting.pop()()
        return answer

    monkeypatch.setattr(folder.store, name, wrapped)


def test_a_save_that_begins_during_a_cleanup_keeps_its_files(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleanup lists the saves before the owners: one whose owner it did not see has files."""
    target = folder / "a.ckpt"
    dead = begin(target)
    monkeypatch.setattr(store_checkpoints, "IN_FLIGHT_S", -1.0)
    monkeypatch.setattr(ProcessIdentity, "is_dead", lambda self, _: self.pid == 7)
    owner = folder / f".zero-owner-{dead.path.name}.json"
    text = folder.store.get(owner.key)[0].decode()
    folder.store.put(owner.key, re.sub('"pid": [0-9]+', '"pid": 7', text).encode())
    began: list[StagedObjects] = []

    def begin_another() -> None:
        monkeypatch.setattr(store_checkpoints, "remove_leftovers", lambda *_: [])
        began.append(begin(target))

    # Between the list of the folder's owners and the following requests.
    at_request(folder, monkeypatch, "get", owner.key, begin_another)
    assert remove_leftovers(folder) == [dead.path]
    [save] = began
    save.put_in_place()
    save.clean(NO_PROGRESS)
    assert keys(folder) == PUBLISHED


def test_a_suspended_writer_does_not_publish_removed_files(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner object is not created again."""
    published = publish(folder / "a.ckpt", b"old")
    suspended = begin(folder / "a.ckpt")
    consider_dead(monkeypatch)
    assert remove_leftovers(folder) == [suspended.path]
    with pytest.raises(SaveError, match="considered dead"):
        suspended.put_in_place()
    suspended.abandon()
    assert keys(folder) == PUBLISHED
    assert published.path.store.get((published.path / FILE).key)[0] == b"old"


@pytest.mark.parametrize("old", [b"old", b""], ids=["overwrite", "new"])
@pytest.mark.parametrize("cleanup", ["has ended", "is suspended"])
def test_a_writer_suspended_before_its_commit_reverts_it(
    folder: StorePath,
    monkeypatch: pytest.MonkeyPatch,
    cleanup: str,
    old: bytes,
) -> None:
    """A cleanup began after the last sign of life, and read the manifest before the commit."""
    target = folder / "a.ckpt"
    if old:
        publish(target, old)
    suspended = begin(target)
    consider_dead(monkeypatch)
    delete_files, kept = store_checkpoints._delete_files, []

    def clean() -> None:
        if cleanup == "is suspended":
            monkeypatch.setattr(store_checkpoints, "_delete_files", lambda *a: kept.append(a))
            monkeypatch.setattr(folder.store, "delete", lambda *a: kept.append(a))
        remove_leftovers(folder)
        monkeypatch.undo()

    at_request(folder, monkeypatch, "swap", "manifest.json", clean)
    with pytest.raises(SaveError, match="considered dead"):
        suspended.put_in_place()
    for args in kept:
        (delete_files if len(args) > 2 else folder.store.delete)(*args)
    suspended.abandon()
    assert folder_at(target).is_checkpoint() == bool(old)
    if old:
        assert keys(folder) == PUBLISHED
    else:
        assert keys(folder) == {"a.ckpt/manifest.json"}


@pytest.mark.parametrize("cleanup", ["has ended", "is suspended"])
def test_a_cleanup_that_sees_the_commit_keeps_the_save(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch, cleanup: str
) -> None:
    """The owner object is gone, but the save is published and succeeds."""
    target = folder / "a.ckpt"
    publish(target, b"old")
    suspended = begin(target, b"new")
    consider_dead(monkeypatch)

    def clean() -> None:
        if cleanup == "is suspended":
            monkeypatch.setattr(store_checkpoints, "_delete_files", lambda *_: None)
            monkeypatch.setattr(folder.store, "delete", lambda *_: None)
        remove_leftovers(folder)
        monkeypatch.undo()

    at_request(folder, monkeypatch, "swap", "manifest.json", clean, after=True)
    suspended.put_in_place()
    suspended.clean(NO_PROGRESS)
    assert keys(folder) == PUBLISHED
    assert suspended.path.store.get((suspended.path / FILE).key)[0] == b"new"


def test_a_late_request_of_a_killed_process_publishes_a_complete_checkpoint(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are kept as long as a store may still execute its last request."""
    target = folder / "a.ckpt"
    killed = begin(target)
    monkeypatch.setattr(ProcessIdentity, "is_dead", lambda *_: True)
    assert remove_leftovers(folder) == []
    folder.store.swap((target / "manifest.json").key, killed._manifest, None)
    monkeypatch.setattr(store_checkpoints, "IN_FLIGHT_S", -1.0)
    assert remove_leftovers(folder) == []
    assert keys(folder) == PUBLISHED


def test_an_owner_that_cannot_be_written_is_reported_once(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save may still succeed, but other runs may consider it dead."""
    staged = begin(folder / "a.ckpt")
    thread = staged.touch_regularly()
    folder.store.delete([(folder / f".zero-owner-{staged.path.name}.json").key])
    thread._call()
    thread._call()
    [line] = [r.getMessage() for r in caplog.records if "other runs consider" in r.getMessage()]
    assert f".zero-owner-{staged.path.name}.json cannot be written" in line


def test_a_touch_with_an_unknown_result_does_not_end_the_save(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store carries it out, but answers neither it nor the read that follows."""
    staged = begin(folder / "a.ckpt")
    with monkeypatch.context() as patched:
        swap = folder.store.swap

        def swap_unseen(*args: Any) -> Version:
            swap(*args)
            raise OSError(errno.EIO, "no answer")

        patched.setattr(folder.store, "swap", swap_unseen)
        with pytest.raises(OSError, match="no answer"):
            staged._touch()
    staged.put_in_place()
    staged.clean(NO_PROGRESS)
    assert keys(folder) == PUBLISHED


def test_a_commit_with_an_unknown_result_leaves_nothing_of_the_replaced_checkpoint(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = publish(folder / "a.ckpt")
    staged = begin(folder / "a.ckpt", b"new")

    def fail() -> None:
        raise OSError(errno.EIO, "no answer")

    at_request(folder, monkeypatch, "swap", "manifest.json", fail, after=True)
    with pytest.raises(SaveError, match="no answer"):
        staged.put_in_place()
    staged.abandon()
    assert not folder.store.objects_below(replaced.path.key)
    assert keys(folder) == PUBLISHED


@pytest.mark.parametrize("last", ["swap", "delete_name"])
def test_a_later_save_ends_the_deletion_of_a_killed_process(
    last: str, folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after it replaced the manifest, or deleted it."""
    publish(folder / "a.ckpt")
    publish(folder / "b.ckpt")

    def kill() -> None:
        raise KeyboardInterrupt

    at_request(folder, monkeypatch, last, "a.ckpt/manifest.json", kill, after=True)
    with pytest.raises(KeyboardInterrupt):
        folder_at(folder / "a.ckpt").delete()
    consider_dead(monkeypatch)
    assert len(remove_leftovers(folder)) == 1
    left = {"a.ckpt/manifest.json"} if last == "swap" else set()
    assert keys(folder) == left | {name.replace("a.ckpt", "b.ckpt") for name in PUBLISHED}
    assert not folder_at(folder / "a.ckpt").exists()


def test_only_the_intended_checkpoint_is_deleted(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another run replaces it before the deletion, or during it."""
    target = folder / "a.ckpt"
    mine = identity_of(publish(target))
    other = begin(target, b"other")
    other.put_in_place()
    other.clean(NO_PROGRESS)
    assert not folder_at(target).delete(mine)
    last = begin(target, b"last")

    def overwrite() -> None:
        last.put_in_place()
        last.clean(NO_PROGRESS)

    at_request(folder, monkeypatch, "swap", "manifest.json", overwrite)
    assert not folder_at(target).delete(identity_of(other))
    assert caplog.text.count("another process has replaced it") == 2
    assert keys(folder) == PUBLISHED
    assert last.path.store.get((last.path / FILE).key)[0] == b"last"
    assert not folder_at(target).delete(identity_of(last))
    assert keys(folder) == set()


def test_a_request_that_fails_does_not_hide_the_newest_checkpoint(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one would be loaded, or the only one deleted."""
    publish(folder / "a.ckpt")
    publish(folder / "b.ckpt")

    def fail() -> None:
        raise OSError(errno.EIO, "no answer")

    at_request(folder, monkeypatch, "get", "b.ckpt/manifest.json", fail)
    with pytest.raises(OSError, match="no answer"):
        checkpoints_in(folder)
    assert checkpoints_in(folder) == {folder / "a.ckpt", folder / "b.ckpt"}


def test_a_save_waits_for_a_deletion_under_way(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last request of the deletion would delete the manifest of the save."""
    target = folder / "a.ckpt"
    publish(target)
    delete, late = folder.store.delete_name, []
    monkeypatch.setattr(folder.store, "delete_name", lambda *args: late.append(args))
    folder_at(target).delete()
    assert not folder_at(target).exists()
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(target)
    waits: list[float] = []

    def carry_out(wait_s: float) -> None:
        waits.append(wait_s)
        delete(*late[0])

    monkeypatch.setattr("time.sleep", carry_out)
    publish(target, b"new")
    assert waits
    assert folder_at(target).is_checkpoint()
    # A process that was killed in between has no request in progress anymore.
    folder_at(target).delete()
    monkeypatch.setattr(store_checkpoints, "DELETION_S", -1.0)
    save = publish(target, b"newer")
    assert folder_at(target).is_checkpoint()
    assert save.path.store.get((save.path / FILE).key)[0] == b"newer"
    assert len(waits) == 1


def test_retention_keeps_a_checkpoint_that_another_run_published(folder: StorePath) -> None:
    """Under the name of a checkpoint of this run."""
    target, queue = folder / "a.ckpt", FileQueue()
    publish(folder / "b.ckpt")
    publish(target)
    queue.end_save(queue.begin_save(folder_at(target)), published=True)
    other = publish(target, b"other")
    queue.delete(str(target))
    assert other.path.store.get((other.path / FILE).key)[0] == b"other"
    assert folder_at(target).is_checkpoint()


def test_a_deletion_that_fails_does_not_end_the_run(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a checkpoint that an earlier run has saved."""

    def get(*_: object) -> None:
        raise OSError(5, "no answer", "there")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "get", get)
        FileQueue().delete(str(folder / "a.ckpt"))
    assert f"{folder}/a.ckpt could not be deleted" in caplog.text


def test_a_store_without_conditions_is_refused(
    folder: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check precedes the first save."""
    monkeypatch.setattr(store_checkpoints, "_probed", set())

    def overwrite(key: str, data: bytes, _: Version | None) -> Version:
        folder.store.put(key, data)
        return {"e_tag": "1"}

    monkeypatch.setattr(folder.store, "swap", overwrite)
    with pytest.raises(SaveError, match=r"memory://tests does not support conditional writes"):
        check_conditional_writes(folder.store, folder)
    assert not folder.store.objects_below(folder.key)


def check_refused(folder: StorePath, entry: FileEntry, why: str) -> None:
    """Check that an object is not read."""
    with (
        VerifiedFile(folder, entry) as file,
        pytest.raises(CheckpointCorruptedError, match=why),
    ):
        file.read(0, file.size_bytes)


def test_ranges_are_read_and_verified(folder: StorePath) -> None:
    """Runs in any chunks; a changed or shorter object is refused."""
    content = bytes(range(256)) * (40 * CHUNK_BYTES // 256) + b"end"
    save_id = new_id()
    with ChecksummedWriter(folder, "file", size_bytes=len(content)) as writer:
        writer.write(content)
        entry = writer.finish(save_id)
    runs = [(0, 10), (CHUNK_BYTES - 1, CHUNK_BYTES + 1), (5 * CHUNK_BYTES, 30 * CHUNK_BYTES)]
    runs += [(32 * CHUNK_BYTES, 32 * CHUNK_BYTES), (len(content) - 1, len(content))]
    store = folder.store
    with VerifiedFile(folder, entry, save_id) as file:
        before = store.requests
        for start, piece in file.read_runs(runs):
            assert piece == content[start : start + piece.nbytes]
        assert store.requests - before <= 4
    key = (folder / "file").key
    store.put(key, content[:-1] + b"X")
    check_refused(folder, entry, "do not match their checksum")
    store.put(key, content[:-4])
    check_refused(folder, entry, "it ends at byte")
    store.delete([key])
    check_refused(folder, entry, "it is missing")
    assert dict(folder_at(folder).sizes(["file.sums"]))["file.sums"]
    assert folder_at(folder).inspect().kind == "other"


def test_each_byte_of_a_file_is_requested_once(folder: StorePath) -> None:
    """Only the ends, at most three chunks, are requested twice: when opened, and in a block."""
    content, save_id = bytes(range(256)) * 80_000, new_id()
    with ChecksummedWriter(folder, FILE) as written:
        written.write(content)
        entry = written.finish(save_id)
    before = folder.store.bytes_read
    with VerifiedFile(folder, entry, save_id) as file:
        assert file.read(0, len(content)) == content
        assert folder.store.bytes_read - before <= file.bytes_read + 3 * CHUNK_BYTES
