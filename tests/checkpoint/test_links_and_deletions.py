"""Links to checkpoints and the deletion of old ones."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_elastic_zero.checkpoint import file_queue
from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage import disk_folder, own_files
from lightning_elastic_zero.storage.disk_checkpoints import (
    LINK_PREFIX,
    remove_leftovers,
    repair_target,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.own_files import DELETING_PREFIX
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.small_checkpoints import (
    SHARD,
    InterruptAtCall,
    before_each_syscall,
    complete,
    contents,
    fill,
    names_in,
    no_exchange,
)


def checkpoint_at(path: Path) -> str:
    """Return the checkpoint at a path: "old", "new", "a part" (of one), or "" for none."""
    found = contents(path)
    return next(
        (text for text in ("old", "new") if found == complete(text)), "a part" * bool(found)
    )


def a_link(link: Path) -> None:
    fill(link.parent / "old.ckpt", "old")
    link.symlink_to("old.ckpt")


def a_directory(link: Path) -> None:
    fill(link, "old")


def refuse_links(number: int, patch: pytest.MonkeyPatch) -> None:
    def symlink_to(self: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    patch.setattr(Path, "symlink_to", symlink_to)


PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "a link": a_link,
    "a dangling link": lambda link: link.symlink_to("gone.ckpt"),
    "a directory": a_directory,
}


def target_and_link(
    folder: Path, place: Callable[[Path], object] = a_directory
) -> tuple[Path, Path]:
    """Make a checkpoint to link to, and something at the path of the link; return both paths."""
    target, link = fill(folder / "new.ckpt", "new"), folder / "last.ckpt"
    place(link)
    return target, link


class TestMakeLink:
    @pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
    @pytest.mark.parametrize("error", [0, errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
    @pytest.mark.parametrize("exchange", [True, False])
    def test_a_link_or_a_copy_replaces_what_was_there(
        self,
        place: Callable[[Path], None],
        error: int,
        exchange: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        target, link = target_and_link(tmp_path, place)
        if error:
            refuse_links(error, monkeypatch)
        with no_exchange(possible=exchange):
            folder_at(link).make_link(folder_at(target))
        assert link.is_symlink() == (not error)
        assert checkpoint_at(link) == checkpoint_at(target) == "new"
        assert not [name for name in names_in(tmp_path) if name.startswith(".")]

    @pytest.mark.parametrize("place", [a_link, a_directory])
    @pytest.mark.parametrize("error", [0, errno.ENOTSUP])
    def test_a_kill_leaves_the_old_or_the_new_link(
        self,
        place: Callable[[Path], None],
        error: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder, snapshots = tmp_path / "run", tmp_path / "snapshots"
        snapshots.mkdir()
        target, link = target_and_link(folder, place)
        if error:
            refuse_links(error, monkeypatch)
        seen: list[str] = []

        def look() -> None:
            seen.append(checkpoint_at(link))
            shutil.copytree(folder, snapshots / str(len(seen)), symlinks=True)

        with before_each_syscall(look):
            folder_at(link).make_link(folder_at(target))
        monkeypatch.undo()
        assert sorted(set(seen)) == ["new", "old"]
        assert seen == sorted(seen, reverse=True)
        assert any(names[0].startswith(LINK_PREFIX) for names in map(names_in, snapshots.iterdir()))
        for snapshot in snapshots.iterdir():
            folder_at(snapshot / "last.ckpt").make_link(folder_at(snapshot / "new.ckpt"))
            assert checkpoint_at(snapshot / "last.ckpt") == "new"
            # The next save continues an interrupted deletion.
            assert not [name for name in names_in(snapshot) if name.startswith(LINK_PREFIX)]

    @pytest.mark.parametrize("error", [0, errno.ENOSYS])
    def test_an_interrupt_leaves_the_old_or_the_new_link(
        self, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if error:
            refuse_links(error, monkeypatch)
        was_interrupted, call = True, 0
        while was_interrupted:
            folder = tmp_path / str(call)
            target, link = target_and_link(folder)
            interrupted = InterruptAtCall(call)
            with no_exchange(), before_each_syscall(interrupted):
                with suppress(KeyboardInterrupt):
                    folder_at(link).make_link(folder_at(target))
                was_interrupted, interrupted.calls = not interrupted.calls, []
            assert checkpoint_at(link) in {"old", "new"}, call
            folder_at(link).make_link(folder_at(target))
            assert checkpoint_at(link) == "new"
            remove_leftovers(folder)
            assert names_in(folder) == ["last.ckpt", "new.ckpt"], call
            call += 1
        assert call > 10

    def test_a_kill_between_two_renames_is_repaired(self, tmp_path: Path) -> None:
        target, link = target_and_link(tmp_path)
        copies = tmp_path.parent / f"{tmp_path.name}-copies"
        copies.mkdir()
        missing = 0

        def look() -> None:
            nonlocal missing
            if not os.path.lexists(link):
                missing += 1
                shutil.copytree(tmp_path, copies / str(missing), symlinks=True)

        with no_exchange(), before_each_syscall(look):
            folder_at(link).make_link(folder_at(target))
        assert missing
        for copy in copies.iterdir():
            assert repair_target(copy / "last.ckpt", settle_s=0.0)
            assert checkpoint_at(copy / "last.ckpt") == "old"

    def test_a_failed_second_rename_restores_the_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, link = target_and_link(tmp_path)
        rename = Path.rename

        def only_the_first(self: Path, other: Path) -> Path:
            if self.name.endswith(".new"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return rename(self, other)

        monkeypatch.setattr(Path, "rename", only_the_first)
        with no_exchange(), pytest.raises(SaveError, match="Input/output error"):
            folder_at(link).make_link(folder_at(target))
        assert checkpoint_at(link) == "old"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt"]

    @pytest.mark.parametrize("target", ["a.ckpt", "deep/a.ckpt", "../a.ckpt"])
    def test_links_are_relative(self, target: str, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        there = Path(os.path.normpath(folder / target))
        fill(there, "new")
        folder_at(folder / "last.ckpt").make_link(folder_at(there))
        assert str((folder / "last.ckpt").readlink()) == target

    def test_a_checkpoint_is_not_linked_to_itself(self, tmp_path: Path) -> None:
        target = fill(tmp_path / "last.ckpt", "new")
        folder_at(target).make_link(folder_at(target))
        assert checkpoint_at(target) == "new"
        assert not target.is_symlink()

    def test_a_full_disk_raises_instead_of_copying(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, link = target_and_link(tmp_path, a_link)
        refuse_links(errno.ENOSPC, monkeypatch)
        message = r"Could not link .*last\.ckpt to the published .*new\.ckpt: No space left"
        with pytest.raises(SaveError, match=message):
            folder_at(link).make_link(folder_at(target))
        assert checkpoint_at(link) == "old"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt", "old.ckpt"]

    def test_a_failed_copy_leaves_the_old_link(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, link = target_and_link(tmp_path, a_link)
        refuse_links(errno.EPERM, monkeypatch)

        def full(descriptor: int) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SaveError, match="No space left"):
            folder_at(link).make_link(folder_at(target))
        assert checkpoint_at(link) == "old"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt", "old.ckpt"]

    def test_copying_reports_progress(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = fill(tmp_path / "new.ckpt", "new")
        with (target / SHARD).open("wb") as file:
            file.truncate(40 << 20)
        sizes = {"name": SHARD, "size_bytes": 40 << 20}
        manifest = json.dumps({"format": "lightning_elastic_zero", "files": [sizes]})
        (target / "manifest.json").write_text(manifest)
        refuse_links(errno.EPERM, monkeypatch)
        calls: list[int] = []
        link = folder_at(tmp_path / "last.ckpt")
        link.make_link(folder_at(target), Progress(lambda: calls.append(1)))
        assert len(calls) >= 40
        assert (tmp_path / "last.ckpt" / SHARD).stat().st_size == 40 << 20


class TestLinks:
    @pytest.fixture
    def link(self, tmp_path: Path) -> Path:
        a_link(tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"

    @pytest.fixture
    def target(self, link: Path) -> Path:
        return link.parent / "new.ckpt"

    def test_a_link_waits_until_its_checkpoint_is_published(self, link: Path, target: Path) -> None:
        queue = FileQueue()
        given_up = queue.begin_save(folder_at(link.parent / "given_up.ckpt"))
        save = queue.begin_save(folder_at(target))
        queue.link(folder_at(target), folder_at(link))
        assert checkpoint_at(link) == "old"
        queue.end_save(given_up, published=True)
        assert checkpoint_at(link) == "old", "the end of another save releases no link"
        fill(target, "new")
        queue.link(folder_at(target), folder_at(link))
        assert checkpoint_at(link) == "old"
        queue.end_save(save, published=True)
        assert checkpoint_at(link) == "new"

    def test_a_link_never_names_a_failed_save(self, link: Path, target: Path) -> None:
        queue = FileQueue()
        save = queue.begin_save(folder_at(target))
        queue.link(folder_at(target), folder_at(link))
        queue.end_save(save, published=False)
        assert checkpoint_at(link) == "old"
        queue.link(folder_at(target), folder_at(link))
        assert checkpoint_at(link) == "old"

    @pytest.mark.parametrize("ended", [True, False])
    def test_links_to_published_and_other_checkpoints_are_made_at_once(
        self, ended: bool, link: Path, target: Path
    ) -> None:
        queue = FileQueue()
        save = queue.begin_save(folder_at(target))
        if ended:
            queue.end_save(save, published=True)
        other = target if ended else link.parent / "other.ckpt"
        fill(other, "new")
        assert checkpoint_at(link) == "old"
        queue.link(folder_at(other), folder_at(link))
        assert checkpoint_at(link) == "new"


def link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def make_weights_only(path: Path) -> None:
    fields = json.loads((path / MANIFEST_NAME).read_text())
    (path / MANIFEST_NAME).write_text(json.dumps({**fields, "weights_only": True}))


SPOILED: dict[str, Callable[[Path], object]] = {
    "of other software": lambda path: (path / MANIFEST_NAME).write_text('{"icons": []}'),
    "half a manifest": lambda path: os.truncate(path / MANIFEST_NAME, 40),
    "a missing file": lambda path: (path / SHARD).unlink(),
    "a short file": lambda path: (path / SHARD).write_text("d"),
    "weights only": make_weights_only,
}


class TestRemove:
    def test_a_checkpoint_is_deleted_if_another_good_one_exists(self, tmp_path: Path) -> None:
        fill(tmp_path / "new.ckpt", "data")
        FileQueue().delete(fill(tmp_path / "old.ckpt", "data"))
        assert names_in(tmp_path) == ["new.ckpt"]

    def test_a_missing_checkpoint_is_ignored(self, tmp_path: Path) -> None:
        FileQueue().delete(tmp_path / "old.ckpt")

    def test_a_link_is_deleted_but_not_its_target(self, tmp_path: Path) -> None:
        fill(tmp_path / "a.ckpt", "data")
        link(tmp_path / "last.ckpt", "a.ckpt")
        FileQueue().delete(tmp_path / "last.ckpt")
        assert names_in(tmp_path) == ["a.ckpt"]

    def test_a_killed_deletion_leaves_only_a_hidden_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(tmp_path / "new.ckpt", "data")
        seen = []

        def killed(path: Path, _: object, **__: object) -> None:
            seen.append((path.name, names_in(path)))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(disk_folder, "remove_own_files", killed)
            with pytest.raises(KeyboardInterrupt):
                FileQueue().delete(fill(tmp_path / "old.ckpt", "data"))
        ((hidden, content),) = seen
        assert names_in(tmp_path) == [hidden, "new.ckpt"]
        assert hidden.startswith(DELETING_PREFIX)
        assert not hidden.endswith(".ckpt")
        assert content == ["checkpoint", MANIFEST_NAME]
        FileQueue().delete(fill(tmp_path / "older.ckpt", "data"))
        assert names_in(tmp_path) == ["new.ckpt"]

    def test_a_failed_deletion_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        fill(tmp_path / "new.ckpt", "data")
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()

        def refused(path: Path, target: Path) -> Path:
            raise PermissionError(13, "Permission denied", str(path), None, str(target))

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(Path, "rename", refused)
            queue.delete(old)
        assert f"{old} could not be deleted" in caplog.text
        assert names_in(tmp_path) == ["new.ckpt", "old.ckpt"]
        queue.delete_waiting()
        assert names_in(tmp_path) == ["new.ckpt", "old.ckpt"]

    @pytest.mark.parametrize("moment", ["before", "during"])
    def test_a_checkpoint_that_another_run_has_published_is_kept(
        self,
        moment: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        target, other = fill(tmp_path / "a.ckpt", "data"), fill(tmp_path / "other", "other")
        fill(tmp_path / "new.ckpt", "data")
        mine = folder_at(target).identity()

        def replace() -> None:
            target.rename(tmp_path / "old")
            other.rename(target)

        rename = own_files.rename_for_deletion

        def rename_after(path: Path) -> Path:
            replace()
            return rename(path)

        if moment == "before":
            replace()
        else:
            monkeypatch.setattr(disk_folder, "rename_for_deletion", rename_after)
        assert not folder_at(target).delete(mine)
        assert "a.ckpt is not deleted: another process has replaced it" in caplog.text
        assert contents(target) == complete("other")
        monkeypatch.setattr(disk_folder, "rename_for_deletion", rename)
        assert not folder_at(target).delete(folder_at(target).identity())
        assert names_in(tmp_path) == ["new.ckpt", "old"]

    def test_a_rename_may_change_inodes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        target = fill(tmp_path / "a.ckpt", "data")
        fill(tmp_path / "new.ckpt", "data")

        def copied(path: Path, name: Path) -> Path:
            shutil.copytree(path, name)
            shutil.rmtree(path)
            return name

        monkeypatch.setattr(Path, "rename", copied)
        assert not folder_at(target).delete(folder_at(target).identity())
        assert names_in(tmp_path) == ["new.ckpt"]
        assert not caplog.text

    def test_remote_addresses_are_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="ftp://"):
            FileQueue().delete("ftp://bucket/a.ckpt")


class TestResumedFrom:
    @pytest.mark.parametrize("folder", ["runs", "here"])
    def test_the_resumed_checkpoint_is_never_deleted(self, folder: str, tmp_path: Path) -> None:
        """Including one that was resumed through a linked folder."""
        fill(tmp_path / "runs" / "new.ckpt", "data")
        old, queue = fill(tmp_path / "runs" / "old.ckpt", "data"), FileQueue()
        (tmp_path / "here").symlink_to("runs")
        queue.protect(tmp_path / folder / "old.ckpt")
        queue.delete(old)
        queue.delete_waiting()
        assert names_in(tmp_path / "runs") == ["new.ckpt", "old.ckpt"]

    def test_the_resumed_target_of_a_moved_link_is_not_deleted(self, tmp_path: Path) -> None:
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        link(tmp_path / "last.ckpt", "old.ckpt")
        queue.protect(tmp_path / "last.ckpt")
        fill(tmp_path / "new.ckpt", "data")
        link(tmp_path / "last.ckpt", "new.ckpt")
        queue.delete(old)
        queue.delete(tmp_path / "elsewhere" / ".." / "old.ckpt")
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt", "old.ckpt"]

    @pytest.mark.parametrize(("is_newer", "lasts"), [(True, True), (False, True), (True, False)])
    def test_it_is_deleted_after_a_run_that_has_published_a_newer_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_newer: bool, lasts: bool
    ) -> None:
        """An older one may be of an earlier fit in this process, or of one that was given up.

        One in the memory of nodes does not last.
        """
        on_nodes = lambda path: not lasts and "new.ckpt" in str(path)  # noqa: E731
        monkeypatch.setattr(file_queue, "is_on_nodes", on_nodes)
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        queue.protect(old)
        fill(tmp_path / "neighbour.ckpt", "data")
        queue.release()
        queue.delete(old)
        assert old.exists()
        saved = queue.begin_save(folder_at(fill(tmp_path / "new.ckpt", "data")))
        ns = (old / MANIFEST_NAME).stat().st_mtime_ns + (1 if is_newer else -1)
        os.utime(tmp_path / "new.ckpt" / MANIFEST_NAME, ns=(ns, ns))
        queue.end_save(saved, published=True)
        queue.release()
        queue.delete(old)
        assert old.exists() == (not (is_newer and lasts))

    def test_other_checkpoints_are_deleted(self, tmp_path: Path) -> None:
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        queue.protect(old)
        queue.delete(fill(tmp_path / "old-v1.ckpt", "data"))
        assert names_in(tmp_path) == ["old.ckpt"]


class TestWaiting:
    def test_a_deletion_waits_until_no_link_names_the_checkpoint(self, tmp_path: Path) -> None:
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        link(tmp_path / "last.ckpt", "old.ckpt")
        fill(tmp_path / "new.ckpt", "data")
        queue.delete(old)
        assert (tmp_path / "last.ckpt").exists()
        queue.delete_waiting()
        assert old.exists()
        link(tmp_path / "last.ckpt", "new.ckpt")
        queue.delete_waiting()
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt"]

    def test_the_last_good_checkpoint_is_kept_until_there_is_another(self, tmp_path: Path) -> None:
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        queue.delete(old)
        fill(tmp_path / "torn.ckpt", "data", published=False)
        queue.delete_waiting()
        assert old.exists()
        fill(tmp_path / "new.ckpt", "data")
        queue.delete_waiting()
        assert names_in(tmp_path) == ["new.ckpt", "torn.ckpt"]

    def test_an_unfinished_link_does_not_keep_a_checkpoint(self, tmp_path: Path) -> None:
        old = fill(tmp_path / "old.ckpt", "data")
        fill(tmp_path / "new.ckpt", "data")
        link(tmp_path / f"{LINK_PREFIX}last.ckpt.new", "old.ckpt")
        FileQueue().delete(old)
        assert not old.exists()

    @pytest.mark.parametrize(
        "hidden",
        [
            *(".zero-staging-5a7e", ".zero-previous-5a7e"),
            *(f"{DELETING_PREFIX}0", f"{LINK_PREFIX}last.ckpt.old"),
        ],
    )
    def test_hidden_directories_do_not_count_as_good(self, tmp_path: Path, hidden: str) -> None:
        fill(tmp_path / hidden, "data")
        old = fill(tmp_path / "old.ckpt", "data")
        FileQueue().delete(old)
        assert old.exists()

    @pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
    def test_unusable_checkpoints_do_not_count_as_good(
        self, spoil: Callable[[Path], None], tmp_path: Path
    ) -> None:
        spoil(fill(tmp_path / "other.ckpt", "data"))
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        queue.delete(old)
        assert old.exists()
        fill(tmp_path / "new.ckpt", "data")
        queue.delete_waiting()
        assert names_in(tmp_path) == ["new.ckpt", "other.ckpt"]

    def test_weights_only_checkpoints_replace_each_other(self, tmp_path: Path) -> None:
        old = fill(tmp_path / "old.ckpt", "data")
        for path in (old, fill(tmp_path / "new.ckpt", "data")):
            make_weights_only(path)
        FileQueue().delete(old)
        assert names_in(tmp_path) == ["new.ckpt"]

    def test_a_link_to_a_checkpoint_does_not_count_as_another(self, tmp_path: Path) -> None:
        old, queue = fill(tmp_path / "old.ckpt", "data"), FileQueue()
        link(tmp_path / "last.ckpt", "old.ckpt")
        queue.delete(old)
        (tmp_path / "last.ckpt").unlink()
        queue.delete_waiting()
        assert old.exists()

    def test_deleting_all_keeps_one(self, tmp_path: Path) -> None:
        queue = FileQueue()
        for path in [fill(tmp_path / name, "data") for name in ("a.ckpt", "b.ckpt")]:
            queue.delete(path)
        assert names_in(tmp_path) == ["b.ckpt"]

    def test_a_pending_deletion_spares_a_new_checkpoint_of_that_name(self, tmp_path: Path) -> None:
        best, queue = fill(tmp_path / "best.ckpt", "data"), FileQueue()
        queue.delete(best)
        again = fill(tmp_path / "staged", "other")
        best.rename(tmp_path / "gone")
        again.rename(best)
        fill(tmp_path / "other.ckpt", "data")
        queue.delete_waiting()
        assert best.exists()


class TestSavedAgain:
    """Saves to a path whose deletion is pending."""

    def scheduled_deletion(self, folder: Path) -> tuple[FileQueue, Path]:
        queue, old = FileQueue(), fill(folder / "best.ckpt", "data")
        link(folder / "last.ckpt", "best.ckpt")
        fill(folder / "other.ckpt", "data")
        queue.delete(old)
        assert old.exists()
        return queue, old

    def publish(self, path: Path) -> None:
        again = fill(path.parent / "staged", "data")
        path.rename(path.parent / ".gone")
        again.rename(path)

    @pytest.mark.parametrize("succeeds", [True, False])
    def test_a_save_cancels_the_pending_deletion(self, succeeds: bool, tmp_path: Path) -> None:
        queue, best = self.scheduled_deletion(tmp_path)
        save = queue.begin_save(folder_at(best))
        if succeeds:
            self.publish(best)
        link(tmp_path / "last.ckpt", "other.ckpt")
        queue.end_save(save, published=succeeds)
        queue.delete_waiting()
        assert (best / MANIFEST_NAME).exists()

    def test_pending_deletions_wait_for_a_successful_save(self, tmp_path: Path) -> None:
        queue, other = FileQueue(), fill(tmp_path / "other.ckpt", "data")
        new = fill(tmp_path / "new.ckpt", "data")
        failed = queue.begin_save(folder_at(new))
        queue.delete(other)
        queue.end_save(failed, published=False)
        queue.delete_waiting()
        assert other.exists()
        queue.end_save(queue.begin_save(folder_at(new)), published=True)
        assert not other.exists()

    @pytest.mark.parametrize("advances", [True, False])
    def test_a_link_reports_progress_as_long_as_a_deletion_makes_some(
        self, advances: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queue, old = FileQueue(), fill(tmp_path / "old.ckpt", "data")
        new, last = fill(tmp_path / "new.ckpt", "data"), tmp_path / "last.ckpt"
        looked, reported, deletes = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(file_queue, "_GLANCE_S", 0.01)

        def delete(_: object, __: object, progress: Progress) -> str:
            deletes.set()
            while not (reported if advances else looked).wait(0.01):
                if advances:
                    progress.check()
            return ""

        with monkeypatch.context() as patch:
            patch.setattr(disk_folder.DiskFolder, "delete", delete)
            thread = threading.Thread(target=queue.delete, args=(old,))
            thread.start()
            assert deletes.wait(HANG_TIMEOUT_S)
            threading.Timer(0.2, looked.set).start()
            queue.link(folder_at(new), folder_at(last), Progress(reported.set))
            thread.join()
        assert reported.is_set() == advances
        assert last.readlink() == Path("new.ckpt")

    def test_a_deletion_requested_during_the_save_counts(self, tmp_path: Path) -> None:
        queue, best = self.scheduled_deletion(tmp_path)
        save = queue.begin_save(folder_at(best))
        queue.delete(best)
        self.publish(best)
        queue.end_save(save, published=True)
        assert (best / MANIFEST_NAME).exists()
        link(tmp_path / "last.ckpt", "other.ckpt")
        queue.delete_waiting()
        assert not best.exists()

    def test_a_save_cancels_the_deletion_of_its_own_path_only(self, tmp_path: Path) -> None:
        queue, best = self.scheduled_deletion(tmp_path)
        save = queue.begin_save(folder_at(tmp_path / "new.ckpt"))
        link(tmp_path / "last.ckpt", "other.ckpt")
        fill(tmp_path / "new.ckpt", "data")
        queue.end_save(save, published=True)
        assert not best.exists()
