"""Each kind of storage behaves as ``storage/folder`` describes."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest

from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.file_write import ChecksummedWriter
from lightning_elastic_zero.storage.folder import Folder, Staged
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import read_file

pytest.importorskip("obstore")

FILE = "checkpoint/mp_rank_00_model_states.pt"


@pytest.fixture(params=["disk", "store"])
def above(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """Return an empty folder."""
    return folder_at(tmp_path if request.param == "disk" else f"memory://tests/{uuid4()}")


def at(folder: Folder, name: str) -> Folder:
    return folder_at(folder.path / name)


def begin(target: Folder, content: bytes = b"content") -> Staged:
    """Write a save up to its last step."""
    save_id = new_id()
    staged = target.stage(save_id)
    assert staged.path == target.staging(save_id).path
    with ChecksummedWriter(staged.path, FILE) as file:
        file.write(content)
        entry = file.finish(save_id)
    files = [{"name": f"{staged.prefix}{entry.name}", "size_bytes": entry.size_bytes}]
    manifest = {"format": "lightning_elastic_zero", "save_id": save_id, "files": files}
    staged.seal(json.dumps(manifest).encode())
    staged.sync()
    return staged


def publish(target: Folder, content: bytes = b"content") -> None:
    staged = begin(target, content)
    staged.put_in_place()
    staged.clean(NO_PROGRESS)


def names_in(folder: Folder) -> set[str]:
    return {entry.path.name for entry in folder.entries()}


def content_of(checkpoint: Folder) -> bytes:
    (file,) = json.loads(checkpoint.read_manifest())["files"]
    return read_file(checkpoint.path / file["name"])


def test_a_save_appears_as_a_whole_and_replaces_another(above: Folder) -> None:
    target = at(above, "a.ckpt")
    assert target.inspect().kind == "nothing"
    assert target.identity() is None
    assert target.published_ns() == 0
    staged = begin(target)
    assert not target.exists()
    staged.put_in_place()
    staged.clean(NO_PROGRESS)
    assert target.exists()
    assert target.is_checkpoint()
    assert target.published_ns() > 0
    first = target.identity()
    second = begin(target, b"second")
    assert content_of(target) == b"content"
    second.put_in_place()
    second.clean(NO_PROGRESS)
    assert content_of(target) == b"second"
    assert target.identity() not in {None, first}
    assert [entry for entry in above.entries() if entry != target] == []


def test_an_abandoned_save_leaves_the_old_checkpoint(above: Folder) -> None:
    publish(at(above, "a.ckpt"))
    for name in ("a.ckpt", "b.ckpt"):
        begin(at(above, name)).abandon()
    assert content_of(at(above, "a.ckpt")) == b"content"
    assert not at(above, "b.ckpt").exists()


def test_a_checkpoint_of_another_identity_or_with_other_files_is_not_deleted(
    above: Folder,
) -> None:
    target = at(above, "a.ckpt")
    publish(target)
    old = target.identity()
    publish(target, b"second")
    assert not target.delete(old)
    assert content_of(target) == b"second"
    target.leave("notes.txt")
    assert "notes.txt" in target.delete(target.identity())
    assert content_of(target) == b"second"
    with pytest.raises(SaveError, match=r"notes\.txt.*othing was written"):
        target.prepare("step-1")
    target.remove_left("notes.txt", "absent")
    assert not target.delete(target.identity())
    assert not target.exists()
    assert names_in(above) == set()


def test_links(above: Folder) -> None:
    """A link names a checkpoint, is replaced in one step, and is deleted without it."""
    first, second, link = (at(above, name) for name in ("a.ckpt", "b.ckpt", "last.ckpt"))
    publish(first)
    publish(second)
    link.make_link(first)
    assert link.is_link()
    assert link.is_checkpoint()
    assert link.follow_links() == link.follow_links_if_exists() == first.follow_links()
    assert first.has_link()
    link.make_link(second)
    assert link.follow_links() == second.follow_links()
    assert not first.has_link()
    assert {entry.path.name for entry in first.siblings()} == {"b.ckpt", "last.ckpt"}
    assert not link.delete()
    assert second.is_checkpoint()
    # A save can replace a link, and a link can replace a checkpoint.
    link.make_link(first)
    publish(link)
    assert not link.is_link()
    link.make_link(first)
    assert names_in(above) == {"a.ckpt", "b.ckpt", "last.ckpt"}
    assert not first.delete()
    assert link.is_link()
    assert not link.exists()
    assert link.inspect().kind == "link"


def test_only_a_complete_checkpoint_can_replace_another(above: Folder) -> None:
    first, second = at(above, "a.ckpt"), at(above, "b.ckpt")
    publish(first)
    assert not second.can_replace(first)
    publish(second)
    assert second.can_replace(first)
    (file,) = json.loads(second.read_manifest())["files"]
    folder, _, name = file["name"].rpartition("/")
    at(second, folder).remove_left(name)
    assert not second.can_replace(first)
    ((_, size),) = second.sizes([file["name"]])
    assert isinstance(size, FileNotFoundError)


def test_entries_below_folders_but_not_below_checkpoints(above: Folder) -> None:
    for name in ("a.ckpt", "val/b.ckpt", "val/loss/c.ckpt", ".hidden/d.ckpt"):
        publish(at(above, name))
    assert names_in(above) == {"a.ckpt", "val"}
    expected: dict[int, set[str]] = {
        0: set(),
        1: {"b.ckpt", "loss"},
        2: {"b.ckpt", "loss", "c.ckpt"},
    }
    for depth, names in expected.items():
        assert {entry.path.name for entry in above.entries_below(depth)} == names


def test_other_ranks_see_the_file_that_a_rank_has_left(above: Folder) -> None:
    target, save_id = at(above, "a.ckpt"), new_id()
    target.stage(save_id)
    folder = target.staging(save_id)
    with pytest.raises(SaveError, match="does not see the file seen that rank 3 wrote there"):
        folder.await_left("seen", wait_s=0.1, writer=3)
    folder.leave("seen")
    folder.await_left("seen")
    folder.remove_left("seen", "absent")
    with pytest.raises(SaveError, match="does not see the file seen"):
        folder.await_left("seen", wait_s=0.1)
