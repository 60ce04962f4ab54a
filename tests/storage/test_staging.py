from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats.newest import checkpoints_in
from lightning_elastic_zero.storage import ownership
from lightning_elastic_zero.storage.disk_checkpoints import (
    LINK_PREFIX,
    StagedDirectory,
    remove_leftovers,
    repair_all,
    repair_target,
    staging_path,
)
from lightning_elastic_zero.storage.own_files import DELETING_PREFIX
from lightning_elastic_zero.storage.ownership import DEAD_AFTER_S, PeriodicThread
from tests.support.processes import HANG_TIMEOUT_S, wait_until
from tests.support.small_checkpoints import (
    SHARD,
    InterruptAtCall,
    before_each_syscall,
    complete,
    contents,
    fill,
    manifest_of,
    names_in,
    no_exchange,
    publish_staged,
)

ROOT = Path(__file__).parents[2]

SAVE = """
import os, signal, sys
from pathlib import Path
from lightning_elastic_zero.storage.disk_checkpoints import StagedDirectory
from tests.support.small_checkpoints import fill, publish_staged

def die():
    os.kill(os.getpid(), signal.SIGKILL)

_, target, step, way = sys.argv
staged = StagedDirectory.create(Path(target), "new")
fill(staged.path, "new", published=False)
if step == "written":
    die()
fill(staged.path, "new")
publish_staged(staged, exchange=way == "exchange", instant=step, act=die)
"""
"""A save in its own process, which is killed after the given step."""

STEPS = [
    *((step, "exchange") for step in ("written", "synced", "placed", "kept", "cleaned")),
    *((step, "renames") for step in ("synced", "set aside", "placed", "kept", "cleaned")),
]

PLACED = {"placed", "kept", "cleaned"}


def publish(target: Path, content: str, *, exchange: bool = True) -> None:
    staged = StagedDirectory.create(target, content)
    fill(staged.path, content)
    staged.sync()
    with no_exchange(possible=exchange):
        staged.put_in_place()
        staged.clean(NO_PROGRESS)


def killed_save(target: Path, step: str, way: str) -> None:
    arguments = [sys.executable, "-c", SAVE, str(target), step, way]
    assert subprocess.run(arguments, cwd=ROOT, check=False).returncode == -signal.SIGKILL


@pytest.fixture(params=[True, False], ids=["exchange", "renames"])
def exchange(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class TestPublish:
    def test_publishing_replaces_the_whole_checkpoint(self, tmp_path: Path, exchange: bool) -> None:
        target = tmp_path / "last.ckpt"
        publish(target, "old")
        larger = "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt"
        (target / larger).write_text("old")
        (target / "manifest.json").write_text(manifest_of({SHARD: "old", larger: "old"}))
        publish(target, "new", exchange=exchange)
        assert contents(target) == complete("new")
        assert names_in(tmp_path) == ["last.ckpt"]

    def test_publishing_replaces_a_link_but_not_its_target(
        self, tmp_path: Path, exchange: bool
    ) -> None:
        best, target = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
        publish(best, "old")
        target.symlink_to(best.name)
        publish(target, "new", exchange=exchange)
        assert not target.is_symlink()
        assert (contents(best), contents(target)) == (complete("old"), complete("new"))
        assert names_in(tmp_path) == ["best.ckpt", "last.ckpt"]

    def test_publishing_makes_parents_and_replaces_a_dangling_link_within_the_folder(
        self, tmp_path: Path
    ) -> None:
        publish(tmp_path / "a" / "b" / "first.ckpt", "new")
        target = tmp_path / "a" / "b" / "last.ckpt"
        target.symlink_to("gone")
        publish(target, "new")
        assert contents(target) == contents(target.with_name("first.ckpt")) == complete("new")

    def test_a_file_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "a.ckpt").write_text("somebody's only one")
        with pytest.raises(SaveError, match=r"a\.ckpt is a file, "):
            StagedDirectory.create(tmp_path / "a.ckpt", "new")
        assert names_in(tmp_path) == ["a.ckpt"]

    def test_a_failed_second_rename_restores_the_old_checkpoint(self, tmp_path: Path) -> None:
        target = tmp_path / "a.ckpt"
        publish(target, "old")
        staged = StagedDirectory.create(target, "new")
        with pytest.raises(SaveError, match=r"Could not publish .*a\.ckpt"):
            # The staged directory disappears between the two renames.
            publish_staged(
                staged,
                exchange=False,
                instant="set aside",
                act=lambda: staged.path.rename(tmp_path / "elsewhere"),
            )
        assert contents(target) == complete("old")

    def test_a_replaced_checkpoint_is_kept_if_its_successor_may_be_undone(
        self, tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "a.ckpt"
        publish(target, "old")
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")

        def fail(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with (
            no_exchange(possible=exchange),
            pytest.raises(SaveError, match="It is in its place, but a power failure may undo this"),
        ):
            staged.put_in_place()
        monkeypatch.undo()
        staged.abandon()
        assert contents(target) == complete("new")
        kept = staged.path if exchange else tmp_path / ".zero-previous-new"
        assert contents(kept) == complete("old")

    def test_abandoning_leaves_only_the_old_checkpoint(self, tmp_path: Path) -> None:
        publish(tmp_path / "a.ckpt", "old")
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "new")
        fill(staged.path, "half", published=False)
        staged.abandon()
        staged.abandon()
        assert names_in(tmp_path) == ["a.ckpt"]
        assert contents(tmp_path / "a.ckpt") == complete("old")

    def test_a_failed_owner_file_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SaveError, match="No space left"):
            StagedDirectory.create(tmp_path / "a.ckpt", "5a7e")
        assert names_in(tmp_path) == []

    def test_the_target_exists_at_every_instant(self, tmp_path: Path) -> None:
        target, missing, stop = tmp_path / "a.ckpt", 0, threading.Event()
        publish(target, "0")

        def watch() -> None:
            nonlocal missing
            while not stop.is_set():
                missing += not target.is_dir()

        watcher = threading.Thread(target=watch)
        watcher.start()
        for number in range(1, 50):
            publish(target, str(number))
        stop.set()
        watcher.join()
        assert missing == 0


class TestNames:
    def test_lightning_does_not_mistake_hidden_names_for_checkpoints(self, tmp_path: Path) -> None:
        for name in ("last.ckpt", "hpc_ckpt_3.ckpt"):
            staged = StagedDirectory.create(tmp_path / name, "5a7e")
            for found in names_in(tmp_path):
                assert found.startswith(".")
                assert not re.search(r"last|hpc_ckpt_|\.ckpt$", found)
            staged.abandon()

    @pytest.mark.parametrize("save_id", ["", "../x", "a/b", "-a", "a" * 65, "a.ckpt"])
    def test_a_save_id_must_be_a_plain_name(self, tmp_path: Path, save_id: str) -> None:
        with pytest.raises(ValueError, match=r"save_id=.*expected at most 64 letters"):
            staging_path(tmp_path / "a.ckpt", save_id)


class TestKilled:
    @pytest.mark.parametrize(("step", "way"), STEPS)
    def test_a_kill_leaves_the_old_or_the_new_checkpoint(
        self, tmp_path: Path, step: str, way: str
    ) -> None:
        target = tmp_path / "last.ckpt"
        publish(target, "old")
        killed_save(target, step, way)
        assert repair_target(target) == (step == "set aside")
        assert contents(target) == complete("new" if step in PLACED else "old")
        remove_leftovers(tmp_path)
        assert names_in(tmp_path) == ["last.ckpt"]
        assert contents(target) == complete("new" if step in PLACED else "old")

    def test_a_killed_first_save_is_removed_by_the_next(self, tmp_path: Path) -> None:
        killed_save(tmp_path / "a.ckpt", "synced", "exchange")
        assert not repair_target(tmp_path / "a.ckpt")
        assert len(remove_leftovers(tmp_path)) == 2
        assert names_in(tmp_path) == []

    def test_repair_finds_every_lost_target(self, tmp_path: Path) -> None:
        publish(tmp_path / "last.ckpt", "old")
        killed_save(tmp_path / "last.ckpt", "set aside", "renames")
        assert repair_all(tmp_path) == [tmp_path / "last.ckpt"]
        assert repair_all(tmp_path) == []
        assert repair_all(tmp_path / "missing") == []

    def test_a_search_finds_a_lost_target(self, tmp_path: Path) -> None:
        target = tmp_path / "last.ckpt"
        publish(target, "old")
        killed_save(target, "set aside", "renames")
        assert names_in(tmp_path)[-1].startswith(".")
        assert checkpoints_in(tmp_path) == {target}

    def test_a_search_finds_a_target_that_a_link_was_about_to_replace(self, tmp_path: Path) -> None:
        publish(tmp_path / "last.ckpt", "old")
        (tmp_path / "last.ckpt").rename(tmp_path / f"{LINK_PREFIX}last.ckpt.old")
        assert checkpoints_in(tmp_path) == {tmp_path / "last.ckpt"}


def interrupted_save(target: Path, exchange: bool, *calls: int) -> bool:
    """Save with interrupts at these calls; return whether all occurred."""
    staged = StagedDirectory.create(target, "new")
    fill(staged.path, "new")
    interrupted = InterruptAtCall(*calls)
    with before_each_syscall(interrupted):
        try:
            try:
                with no_exchange(possible=exchange):
                    staged.sync()
                    staged.put_in_place()
                    staged.clean(NO_PROGRESS)
            except BaseException:
                staged.abandon()
                raise
        except KeyboardInterrupt:
            pass
        is_over = not interrupted.calls
        interrupted.calls = []
    return is_over


class TestInterrupted:
    """Ctrl-C before each system call of a publication."""

    def test_an_interrupt_leaves_the_old_or_the_new_checkpoint(
        self, exchange: bool, tmp_path: Path
    ) -> None:
        found, call = [], 0
        while True:
            folder = tmp_path / str(call)
            target = fill(folder / "last.ckpt", "old")
            was_interrupted = interrupted_save(target, exchange, call)
            found.append("new" if contents(target) == complete("new") else "old")
            assert contents(target) == complete(found[-1]), call
            remove_leftovers(folder)  # an unfinished deletion may remain
            assert names_in(folder) == ["last.ckpt"], call
            if not was_interrupted:
                break
            call += 1
        assert found == sorted(found, reverse=True)
        assert call > 10

    def test_an_interrupt_between_two_renames_publishes_the_new_one(self, tmp_path: Path) -> None:
        target = fill(tmp_path / "last.ckpt", "old")
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish_staged(staged, exchange=False, instant="set aside", act=interrupt)
        staged.abandon()
        assert contents(target) == complete("new")
        assert names_in(tmp_path) == ["last.ckpt"]

    @pytest.mark.parametrize("second", [0, 1, 3, 6])
    def test_a_second_interrupt_leaves_a_repairable_directory(
        self, second: int, tmp_path: Path
    ) -> None:
        for first in range(40):
            folder = tmp_path / str(first)
            target = fill(folder / "last.ckpt", "old")
            interrupted_save(target, False, first, second)
            if (owner_file := folder / ".zero-owner-new.json").exists():
                end_owner(owner_file)
            repair_target(target)
            remove_leftovers(folder)
            assert contents(target) in [complete("old"), complete("new")], first
            assert names_in(folder) == ["last.ckpt"], first


def end_owner(owner_file: Path) -> None:
    """Make the owner a process that has ended."""
    owner_file.write_text(json.dumps({**json.loads(owner_file.read_text()), "started": "12"}))


def move_elsewhere(owner_file: Path) -> None:
    """Make the owner a process on another machine."""
    # No process here has this id, which implies nothing about the other machine.
    fields = {**json.loads(owner_file.read_text()), "machine": "elsewhere", "pid": 2**22 + 1}
    owner_file.write_text(json.dumps(fields))


class TestElsewhere:
    @pytest.fixture
    def abandoned(self, tmp_path: Path) -> tuple[StagedDirectory, Path]:
        target = fill(tmp_path / "a.ckpt", "old")
        staged = StagedDirectory.create(target, "5a7e")
        fill(staged.path, "new", published=False)
        owner_file = tmp_path / ".zero-owner-5a7e.json"
        move_elsewhere(owner_file)
        return staged, owner_file

    def test_another_machines_save_is_removed_after_half_an_hour(
        self, abandoned: tuple[StagedDirectory, Path], tmp_path: Path
    ) -> None:
        staged, owner_file = abandoned
        assert remove_leftovers(tmp_path) == []
        for ago_s, removed in (
            (DEAD_AFTER_S - 300, []),
            (DEAD_AFTER_S + 300, [staged.path, owner_file]),
        ):
            then_s = time.time() - ago_s
            os.utime(owner_file, (then_s, then_s))
            assert remove_leftovers(tmp_path) == removed
        assert names_in(tmp_path) == ["a.ckpt"]

    @pytest.mark.parametrize("off_s", [-3e8, 3e8])
    def test_the_age_of_an_owner_file_is_by_the_filesystems_clock(
        self,
        off_s: float,
        abandoned: tuple[StagedDirectory, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        staged, owner_file = abandoned
        now_s = time.time
        monkeypatch.setattr(time, "time", lambda: now_s() + off_s)
        assert remove_leftovers(tmp_path) == []
        then_s = now_s() - DEAD_AFTER_S - 300
        os.utime(owner_file, (then_s, then_s))
        assert remove_leftovers(tmp_path) == [staged.path, owner_file]

    def test_a_running_save_touches_its_owner_file(
        self,
        abandoned: tuple[StagedDirectory, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        staged, owner_file = abandoned
        monkeypatch.setattr(ownership, "TOUCH_INTERVAL_S", 0.01)
        before = set(threading.enumerate())
        with staged.touch_regularly():
            os.utime(owner_file, (0, 0))
            wait_until(lambda: owner_file.stat().st_mtime > 0)
            assert remove_leftovers(tmp_path) == []
            new = set(threading.enumerate()) - before
            (toucher,) = (thread for thread in new if isinstance(thread, PeriodicThread))
        toucher.join(HANG_TIMEOUT_S)
        assert not toucher.is_alive()

    def test_a_save_goes_on_where_no_thread_can_start(
        self, abandoned: tuple[StagedDirectory, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a save in flight at the end of the interpreter, since Python 3.12."""

        def refuse(_: threading.Thread) -> None:
            msg = "can't create new thread at interpreter shutdown"
            raise RuntimeError(msg)

        staged, _ = abandoned
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with staged.touch_regularly():
                fill(staged.path, "new")
        staged.put_in_place()

    def test_a_save_whose_staging_was_removed_fails(
        self, exchange: bool, abandoned: tuple[StagedDirectory, Path], tmp_path: Path
    ) -> None:
        staged, owner_file = abandoned
        fill(staged.path, "new")
        os.utime(owner_file, (0, 0))
        remove_leftovers(tmp_path)
        with pytest.raises(SaveError, match="No such file"), no_exchange(possible=exchange):
            staged.put_in_place()
        staged.abandon()
        assert contents(tmp_path / "a.ckpt") == complete("old")
        assert names_in(tmp_path) == ["a.ckpt"]

    def test_a_checkpoint_set_aside_elsewhere_is_restored(
        self, abandoned: tuple[StagedDirectory, Path], tmp_path: Path
    ) -> None:
        staged, _ = abandoned
        (tmp_path / "a.ckpt").rename(tmp_path / ".zero-previous-5a7e")
        remove_leftovers(tmp_path)
        assert contents(tmp_path / "a.ckpt") == complete("old")
        assert staged.path.is_dir()


class TestLeftovers:
    def test_a_running_save_is_kept_and_found_by_other_ranks(self, tmp_path: Path) -> None:
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "5a7e")
        assert remove_leftovers(tmp_path) == []
        assert staged.path == staging_path(tmp_path / "a.ckpt", "5a7e")
        assert staged.path.is_dir()

    def test_a_reused_process_id_is_not_taken_for_the_owner(self, tmp_path: Path) -> None:
        StagedDirectory.create(tmp_path / "a.ckpt", "5a7e")
        owner_file = tmp_path / ".zero-owner-5a7e.json"
        end_owner(owner_file)
        assert len(remove_leftovers(tmp_path)) == 2

    @pytest.mark.parametrize("text", ["", "[]", '{"target": "../x"}', None])
    def test_without_a_readable_owner_only_age_counts(
        self, tmp_path: Path, text: str | None
    ) -> None:
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "5a7e")
        owner_file = tmp_path / ".zero-owner-5a7e.json"
        owner_file.unlink()
        if text is not None:
            owner_file.write_text(text)
        assert remove_leftovers(tmp_path) == []
        os.utime(staged.path if text is None else owner_file, (0, 0))
        remove_leftovers(tmp_path)
        assert names_in(tmp_path) == []

    def test_the_only_checkpoint_is_not_removed(self, tmp_path: Path) -> None:
        publish(tmp_path / "a.ckpt", "old")
        killed_save(tmp_path / "a.ckpt", "set aside", "renames")
        (tmp_path / ".zero-owner-new.json").unlink()
        os.utime(tmp_path / ".zero-previous-new", (0, 0))
        os.utime(tmp_path / ".zero-staging-new", (0, 0))
        remove_leftovers(tmp_path)
        assert contents(tmp_path / ".zero-previous-new") == complete("old")

    def test_remains_of_a_deletion_are_removed(self, tmp_path: Path) -> None:
        doomed = tmp_path / f"{DELETING_PREFIX}5a7e"
        (doomed / "checkpoint").mkdir(parents=True)
        assert remove_leftovers(tmp_path) == [doomed]
        assert names_in(tmp_path) == []

    @pytest.mark.parametrize("kind", ["link", "directory"])
    def test_an_unfinished_link_is_removed_when_old(self, kind: str, tmp_path: Path) -> None:
        made = tmp_path / f"{LINK_PREFIX}last.ckpt.new"
        if kind == "link":
            made.symlink_to("a.ckpt")
        else:
            (made / "checkpoint").mkdir(parents=True)
        assert remove_leftovers(tmp_path) == []
        assert names_in(tmp_path) == [made.name]
        os.utime(made, (0, 0), follow_symlinks=False)
        assert remove_leftovers(tmp_path) == [made]
        assert names_in(tmp_path) == []

    def test_directories_with_other_names_are_kept(self, tmp_path: Path) -> None:
        names = [".zero-staging-", ".zero-staging-a b", "zero-staging-a", ".staging-a"]
        for name in names:
            (tmp_path / name).mkdir()
            os.utime(tmp_path / name, (0, 0))
        assert remove_leftovers(tmp_path) == []
        assert names_in(tmp_path) == sorted(names)
