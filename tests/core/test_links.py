"""Links to checkpoints: changed in one step, and never to what is not published."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_elastic_zero.checkpoint.manager import CheckpointLinks
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage.leftovers import (
    LINK_PREFIX,
    make_link,
    remove_leftovers,
    repair_target,
)
from tests.support.small_checkpoints import (
    SHARD,
    InterruptAtCall,
    before_each_syscall,
    contents,
    fill,
    names_in,
    whole,
)

NO_EXCHANGE = "lightning_elastic_zero.storage.publish.exchange_names"


checkpoint = fill


def said_by(path: Path) -> str:
    """Return which checkpoint is found at a path, whole; "" if none is."""
    found = contents(path)
    return next((text for text in ("old", "new") if found == whole(text)), "a part" * bool(found))


def nothing(_: Path) -> None:
    """Leave nothing in the link's place."""


def a_link(link: Path) -> None:
    """Leave a link to an older checkpoint."""
    checkpoint(link.parent / "old.ckpt", "old")
    link.symlink_to("old.ckpt")


def a_dangling_link(link: Path) -> None:
    """Leave a link to a checkpoint that is gone."""
    link.symlink_to("gone.ckpt")


def a_directory(link: Path) -> None:
    """Leave a checkpoint in the link's place, as save_last=True does."""
    checkpoint(link, "old")


def refuse_links(number: int, patch: pytest.MonkeyPatch) -> None:
    """Make the file system have no links, or no room for one."""

    def symlink_to(self: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    patch.setattr(Path, "symlink_to", symlink_to)


PLACES = [nothing, a_link, a_dangling_link, a_directory]
IN_PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
WITH_LINKS = pytest.mark.parametrize("has_links", [True, False], ids=["linked", "copied"])


class TestMakeLink:
    @IN_PLACE
    @WITH_LINKS
    def test_what_was_there_gives_way(
        self,
        place: Callable[[Path], None],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_links: bool,
    ) -> None:
        """The link leads to the checkpoint, and nothing hidden is left."""
        target, link = checkpoint(tmp_path / "new.ckpt", "new"), tmp_path / "last.ckpt"
        place(link)
        if not has_links:
            refuse_links(errno.EPERM, monkeypatch)
        make_link(target, link)
        assert link.is_symlink() == has_links
        assert said_by(link) == said_by(target) == "new"
        assert not [name for name in names_in(tmp_path) if name.startswith(".")]

    @pytest.mark.parametrize("place", [a_link, a_directory], ids=lambda place: place.__name__)
    @WITH_LINKS
    def test_a_kill_leaves_the_old_or_the_new_one(
        self,
        place: Callable[[Path], None],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_links: bool,
    ) -> None:
        """At no instant is there none; and what a kill leaves is gone when it is made again."""
        folder, snapshots = tmp_path / "run", tmp_path / "snapshots"
        folder.mkdir()
        snapshots.mkdir()
        target, link = checkpoint(folder / "new.ckpt", "new"), folder / "last.ckpt"
        place(link)
        if not has_links:
            refuse_links(errno.ENOTSUP, monkeypatch)
        seen: list[str] = []

        def look() -> None:
            seen.append(said_by(link))
            shutil.copytree(folder, snapshots / str(len(seen)), symlinks=True)

        with before_each_syscall(look):
            make_link(target, link)
        monkeypatch.undo()
        assert sorted(set(seen)) == ["new", "old"]
        assert seen == sorted(seen, reverse=True)
        assert any(names[0].startswith(LINK_PREFIX) for names in map(names_in, snapshots.iterdir()))
        for left in snapshots.iterdir():
            make_link(left / "new.ckpt", left / "last.ckpt")
            assert said_by(left / "last.ckpt") == "new"
            # A directory that was being deleted goes with the next save.
            assert not [name for name in names_in(left) if name.startswith(LINK_PREFIX)]

    @WITH_LINKS
    def test_an_interrupt_leaves_the_old_or_the_new_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
    ) -> None:
        """Ctrl-C before any system call, where a directory gives way by two renames."""
        monkeypatch.setattr(NO_EXCHANGE, lambda *_: False)
        if not has_links:
            refuse_links(errno.ENOSYS, monkeypatch)
        came, call = True, 0
        while came:
            folder = tmp_path / str(call)
            target, link = checkpoint(folder / "new.ckpt", "new"), folder / "last.ckpt"
            a_directory(link)
            interrupted = InterruptAtCall(call)
            with before_each_syscall(interrupted):
                with suppress(KeyboardInterrupt):
                    make_link(target, link)
                came, interrupted.calls = not interrupted.calls, []
            assert said_by(link) in {"old", "new"}, call
            make_link(target, link)
            assert said_by(link) == "new"
            remove_leftovers(folder)
            assert names_in(folder) == ["last.ckpt", "new.ckpt"], call
            call += 1
        assert call > 10

    def test_a_kill_between_two_renames_is_repaired(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What gave way to the link is put back before the next look for it."""
        target, link = checkpoint(tmp_path / "new.ckpt", "new"), tmp_path / "last.ckpt"
        a_directory(link)
        monkeypatch.setattr(NO_EXCHANGE, lambda *_: False)
        copies = tmp_path.parent / f"{tmp_path.name}-copies"
        copies.mkdir()
        missing = 0

        def look() -> None:
            nonlocal missing
            if not os.path.lexists(link):
                missing += 1
                shutil.copytree(tmp_path, copies / str(missing), symlinks=True)

        with before_each_syscall(look):
            make_link(target, link)
        assert missing
        for left in copies.iterdir():
            assert repair_target(left / "last.ckpt", settle_s=0.0)
            assert said_by(left / "last.ckpt") == "old"

    @WITH_LINKS
    def test_where_names_cannot_be_exchanged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_links: bool
    ) -> None:
        """A directory gives way by two renames."""
        target, link = checkpoint(tmp_path / "new.ckpt", "new"), tmp_path / "last.ckpt"
        a_directory(link)
        monkeypatch.setattr(NO_EXCHANGE, lambda *_: False)
        if not has_links:
            refuse_links(errno.ENOSYS, monkeypatch)
        make_link(target, link)
        assert said_by(link) == "new"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt"]

    def test_the_second_rename_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was there is put back."""
        target, link = checkpoint(tmp_path / "new.ckpt", "new"), tmp_path / "last.ckpt"
        a_directory(link)
        rename = Path.rename

        def only_the_first(self: Path, other: Path) -> Path:
            if self.name.endswith(".new"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return rename(self, other)

        monkeypatch.setattr(NO_EXCHANGE, lambda *_: False)
        monkeypatch.setattr(Path, "rename", only_the_first)
        with pytest.raises(SaveError, match="Input/output error"):
            make_link(target, link)
        assert said_by(link) == "old"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt"]

    @pytest.mark.parametrize(
        ("target", "text"),
        [("a.ckpt", "a.ckpt"), ("deep/a.ckpt", "deep/a.ckpt"), ("../a.ckpt", "../a.ckpt")],
    )
    def test_its_text_is_relative(self, target: str, text: str, tmp_path: Path) -> None:
        """A folder that is moved keeps its links."""
        folder = tmp_path / "run"
        folder.mkdir()
        there = Path(os.path.normpath(folder / target))
        checkpoint(there, "new")
        make_link(there, folder / "last.ckpt")
        assert str((folder / "last.ckpt").readlink()) == text

    def test_a_checkpoint_is_no_link_to_itself(self, tmp_path: Path) -> None:
        """Where both are one path, nothing is done."""
        target = checkpoint(tmp_path / "last.ckpt", "new")
        make_link(target, target)
        assert said_by(target) == "new"
        assert not target.is_symlink()

    def test_a_full_disk_is_no_reason_to_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error names both, and the link stays."""
        target, link = checkpoint(tmp_path / "new.ckpt", "new"), tmp_path / "last.ckpt"
        a_link(link)
        refuse_links(errno.ENOSPC, monkeypatch)
        told = r"Could not link .*last\.ckpt to the published .*new\.ckpt: No space left"
        with pytest.raises(SaveError, match=told):
            make_link(target, link)
        assert said_by(link) == "old"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt", "old.ckpt"]

    def test_a_copy_that_fails_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half a copy is removed, and the link stays."""
        target, link = checkpoint(tmp_path / "new.ckpt", "new"), tmp_path / "last.ckpt"
        a_link(link)
        refuse_links(errno.EPERM, monkeypatch)

        def full(descriptor: int) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SaveError, match="No space left"):
            make_link(target, link)
        assert said_by(link) == "old"
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt", "old.ckpt"]

    def test_a_copy_shows_that_it_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ranks that wait for a large copy hear of every block."""
        target = checkpoint(tmp_path / "new.ckpt", "new")
        with (target / SHARD).open("wb") as file:
            file.truncate(40 << 20)
        sizes = {"name": SHARD, "size_bytes": 40 << 20}
        manifest = json.dumps({"format": "lightning_elastic_zero", "files": [sizes]})
        (target / "manifest.json").write_text(manifest)
        refuse_links(errno.EPERM, monkeypatch)
        heard: list[int] = []
        make_link(target, tmp_path / "last.ckpt", Progress(lambda: heard.append(1)))
        assert len(heard) >= 40
        assert (tmp_path / "last.ckpt" / SHARD).stat().st_size == 40 << 20


class TestLinks:
    @pytest.fixture
    def link(self, tmp_path: Path) -> Path:
        """Return a link to an older checkpoint."""
        a_link(tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"

    def test_it_waits_for_what_is_being_written(self, link: Path) -> None:
        """It leads to the old one until the new one is published; also where one is overwritten."""
        target = link.parent / "new.ckpt"
        links = CheckpointLinks()
        links.on_save_started(target)
        links.make(target, link)
        assert said_by(link) == "old"
        checkpoint(target, "new")
        links.make(target, link)
        assert said_by(link) == "old"
        links.on_save_ended(target, published=True)
        assert said_by(link) == "new"

    def test_after_a_failure_it_stays(self, link: Path) -> None:
        """What could not be written is never linked to: not then, and not later."""
        target = link.parent / "new.ckpt"
        links = CheckpointLinks()
        links.on_save_started(target)
        links.make(target, link)
        links.on_save_ended(target, published=False)
        assert said_by(link) == "old"
        links.make(target, link)
        assert said_by(link) == "old"

    def test_others_do_not_wait(self, link: Path) -> None:
        """While one is being written, a link to another one is made at once."""
        links = CheckpointLinks()
        links.on_save_started(link.parent / "being_written.ckpt")
        links.make(checkpoint(link.parent / "new.ckpt", "new"), link)
        assert said_by(link) == "new"

    def test_nothing_waits_for_what_is_published(self, link: Path) -> None:
        """After the release a link is made at once."""
        target = checkpoint(link.parent / "new.ckpt", "new")
        links = CheckpointLinks()
        links.on_save_started(target)
        links.on_save_ended(target, published=True)
        assert said_by(link) == "old"
        links.make(target, link)
        assert said_by(link) == "new"

    def test_an_older_save_releases_nothing(self, link: Path) -> None:
        """What was given up and ends late does not speak for what is written now."""
        target = link.parent / "new.ckpt"
        links = CheckpointLinks()
        links.on_save_started(target)
        links.make(target, link)
        links.on_save_ended(link.parent / "given_up.ckpt", published=True)
        assert said_by(link) == "old"
        checkpoint(target, "new")
        links.on_save_ended(target, published=True)
        assert said_by(link) == "new"
