"""Files that this library did not write are never removed or replaced (house/test_deletions.py)."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_elastic_zero.checkpoint.fallback import find_fallback
from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.checkpoint.types import LoadOptions
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.core.save_files import CLIENT_OBJECTS, model_file, optimizer_file
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.storage import disk_checkpoints
from lightning_elastic_zero.storage.disk_checkpoints import (
    StagedDirectory,
    copy_checkpoint,
    remove_leftovers,
    repair_target,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.own_files import check_replaceable, classify_files
from lightning_elastic_zero.storage.ownership import (
    ProcessIdentity,
    filesystem_time_s,
)
from tests.support.processes import finishes
from tests.support.small_checkpoints import (
    SHARD,
    before_each_syscall,
    complete,
    contents,
    fill,
    manifest_of,
    names_in,
    no_exchange,
    publish_staged,
)

MINE = "the user's only one"

Place = Callable[[Path], object]


def snapshot(folder: Path) -> dict[str, str]:
    def held(path: Path) -> str:
        if path.is_symlink():
            return f"-> {path.readlink()}"
        return path.read_text() if path.is_file() else "/"

    return {str(path.relative_to(folder)): held(path) for path in folder.rglob("*")}


# -- existing files at the target ---------------------------------------------------------------


def place(name: str, tree: Mapping[str, str | Path | None], *, old: bool = False) -> Place:
    """Return a function that makes files, links (paths) and folders (None) at a path."""

    def put(path: Path) -> None:
        if old:
            fill(path, "old")
        for relative, what in tree.items():
            target = Path(os.path.normpath(path / relative))
            target.parent.mkdir(parents=True, exist_ok=True)
            if what is None:
                target.mkdir(exist_ok=True)
            elif isinstance(what, Path):
                target.unlink(missing_ok=True)
                target.symlink_to(what)
            else:
                target.write_text(what)

    put.__name__ = name
    return put


def with_file(name: str) -> Place:
    return place(f"a_checkpoint_with_{name}", {name: MINE}, old=True)


def with_manifest(name: str, text: str) -> Place:
    return place(name, {"manifest.json": text}, old=True)


INFINITE = re.sub(r'"size_bytes": \d+', '"size_bytes": 1e999', manifest_of({SHARD: "old"}))

a_file = place("a_file", {"": MINE})
a_link_to_a_file = place("a_link_to_a_file", {"../weights.pt": MINE, "": Path("weights.pt")})
a_link_to_a_folder = place("a_link_to_a_folder", {"../disk/notes": MINE, "": Path("disk")})
a_link_to_an_empty_folder = place("a_link_to_an_empty_folder", {"../disk": None, "": Path("disk")})
a_link_to_an_unmounted_disk = place(
    "a_link_to_an_unmounted_disk", {"": Path("../not-mounted/runs")}
)
a_link_to_an_empty_mount_point = place(
    "a_link_to_an_empty_mount_point", {"../mount": None, "": Path("mount/runs")}
)
a_link_to_a_dangling_link = place(
    "a_link_to_a_dangling_link", {"../disk": Path("../not-mounted"), "": Path("disk")}
)
with_a_link = place("with_a_link", {"../tier2.pt": "old", SHARD: Path("../../tier2.pt")}, old=True)
with_a_linked_folder = place(
    "with_a_linked_folder", {"../data/rows": MINE, "data": Path("../data")}, old=True
)
overwritten_by_stock = place("overwritten_by_stock", {SHARD: MINE}, old=True)
deepspeeds = place(
    "deepspeeds",
    {
        "global_step10/mp_rank_00_model_states.pt": MINE,
        "global_step20/mp_rank_00_model_states.pt": MINE,
        "latest": "global_step20",
        "zero_to_fp32.py": "script",
    },
)
stock_lightnings = place("stock_lightnings", {SHARD: MINE, "latest": "checkpoint"})
of_other_software = place(
    "of_other_software", {"manifest.json": '{"name": "a web page", "files": []}'}
)
damaged = with_manifest("damaged", manifest_of({SHARD: "old"})[:-9])
nested = with_manifest("nested", "[" * 200_000)  # more deeply than Python reads
of_no_size = with_manifest("of_no_size", INFINITE)
CODE = ("train.py", "data/train.csv", "lightning_logs/version_0/hparams.yaml")
a_root = place("a_root", dict.fromkeys(CODE, MINE))


def a_dirpath(path: Path) -> None:
    for name in ("step=1.ckpt", "step=2.ckpt"):
        fill(path / name, "old")


WITH_FILE = with_file("pytorch_model.bin")
DIRECTORIES: list[Place] = [
    WITH_FILE,
    with_file("checkpoint/notes.txt"),
    with_file("eval/results.json"),
    with_file("checkpoint/zero_pp_rank_7_mp_rank_00_model_states.pt"),
    *(with_a_link, with_a_linked_folder, overwritten_by_stock, deepspeeds, stock_lightnings),
    *(of_other_software, damaged, nested, of_no_size, a_dirpath, a_root),
]
DANGLING: list[Place] = [
    a_link_to_an_unmounted_disk,
    a_link_to_an_empty_mount_point,
    a_link_to_a_dangling_link,
]
OTHERS: list[Place] = [
    *(a_file, a_link_to_a_file, a_link_to_a_folder, a_link_to_an_empty_folder, *DANGLING),
]


def existing(places: list[Place]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", places, ids=lambda place: place.__name__)


NOT_OURS = r"not a checkpoint of this library \(its manifest\.json"


class TestSaving:
    @existing([*DIRECTORIES, *OTHERS])
    def test_saving_over_foreign_files_is_refused_first(self, place: Place, tmp_path: Path) -> None:
        target = tmp_path / "last.ckpt"
        place(target)
        before = snapshot(tmp_path)
        with pytest.raises(
            SaveError, match=r"last\.ckpt .*nothing was written\. Save to "
        ) as refused:
            check_replaceable(target, "step")
        assert snapshot(tmp_path) == before
        instead = Path(str(refused.value).split("Save to ")[1].split(", or")[0])
        check_replaceable(instead, "")

    @pytest.mark.parametrize(
        ("place", "message"),
        [
            (WITH_FILE, r"last contains files that this library did not write: pytorch_model\.bin"),
            (overwritten_by_stock, rf"contains files that this library did not write: {SHARD}"),
            (a_file, "is a file, expected a directory"),
            (a_link_to_a_folder, r"is a link to .*disk, which is not a"),
            (a_link_to_an_unmounted_disk, r"link to .*not-mounted/runs, which does not exist: its"),
            (deepspeeds, r"DeepSpeed saved there \(global_step10, global_step20, latest\)"),
            (stock_lightnings, r"DeepSpeed saved there \(checkpoint, latest\)"),
            *((what, rf"{NOT_OURS} is damaged\)") for what in (damaged, nested, of_no_size)),
            (of_other_software, f"{NOT_OURS} was written by other"),
            (a_dirpath, r"it contains the checkpoints \(step=1\.ckpt, step=2\.ckpt\)"),
            (a_root, r"\(it has no manifest\.json\): it contains data, lightning_logs, train"),
        ],
    )
    def test_the_error_names_what_is_there_and_another_path(
        self, place: Place, message: str, tmp_path: Path
    ) -> None:
        place(tmp_path / "last")
        with pytest.raises(SaveError, match=message) as refused:
            check_replaceable(tmp_path / "last", "step-20")
        below = place in {deepspeeds, stock_lightnings, of_other_software, a_dirpath, a_root}
        instead = "last/step-20" if below or place in {damaged, nested, of_no_size} else "last-v1"
        if place is not a_link_to_a_folder:
            assert f"Save to {tmp_path / instead}, or" in str(refused.value)

    @existing(DANGLING)
    def test_a_dangling_link_above_the_target_is_refused(
        self, place: Place, tmp_path: Path
    ) -> None:
        place(tmp_path / "runs")
        before = snapshot(tmp_path)
        with pytest.raises(SaveError, match=r"runs is a link to .* does not exist\. Mount"):
            StagedDirectory.create(tmp_path / "runs" / "a" / "b.ckpt", "new")
        assert snapshot(tmp_path) == before

    def test_the_working_directory_is_not_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "run").mkdir()
        monkeypatch.chdir(tmp_path / "run")
        with pytest.raises(SaveError, match=r"working directory.* Save to .*run/step-3, or"):
            check_replaceable(tmp_path / "run", "step-3")
        fill(tmp_path / "a.ckpt", "old")
        monkeypatch.chdir(tmp_path / "a.ckpt" / "checkpoint")
        with pytest.raises(SaveError, match="working directory of this process, or contains it"):
            check_replaceable(tmp_path / "a.ckpt", "")
        assert contents(tmp_path / "a.ckpt") == complete("old")

    def test_the_root_and_mount_points_are_not_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SaveError, match="Save to /step-0, or"):
            check_replaceable(Path("/"), "step-0")
        (tmp_path / "volume").mkdir()
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
        with pytest.raises(SaveError, match=r"is a mount point.* Save to .*volume/step-0, or"):
            check_replaceable(tmp_path / "volume", "step-0")
        assert names_in(tmp_path) == ["volume"]

    @pytest.mark.parametrize("exchange", [True, False])
    @pytest.mark.parametrize(
        "trifle",
        [
            ".DS_Store",
            "checkpoint/.nfs00000000001",
            "__pycache__/zero_to_fp32.cpython-311.pyc",
            "empty/",
        ],
    )
    def test_system_files_and_empty_folders_are_replaced(
        self, trifle: str, exchange: bool, tmp_path: Path
    ) -> None:
        target = fill(tmp_path / "last.ckpt", "old")
        (target / trifle).parent.mkdir(exist_ok=True)
        (target / trifle).mkdir() if trifle.endswith("/") else (target / trifle).touch()
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")
        publish_staged(staged, exchange=exchange)
        assert (contents(target), names_in(tmp_path)) == (complete("new"), ["last.ckpt"])

    @pytest.mark.parametrize("place", [lambda _: None, Path.mkdir, lambda p: fill(p, "old")])
    def test_nothing_empty_folders_and_own_checkpoints_are_replaced(
        self, place: Place, tmp_path: Path
    ) -> None:
        place(tmp_path / "a.ckpt")
        (tmp_path / "a.ckpt" / SHARD).unlink(missing_ok=True)
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "new")
        fill(staged.path, "new")
        staged.put_in_place()
        staged.clean(NO_PROGRESS)
        assert contents(tmp_path / "a.ckpt") == complete("new")


class TestRaces:
    @pytest.mark.parametrize("exchange", [True, False])
    @pytest.mark.parametrize("instant", ["synced", "placed", "set aside"])
    def test_a_directory_with_a_new_file_is_kept(
        self, instant: str, exchange: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        target = fill(tmp_path / "last.ckpt", "old")
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")

        def put() -> None:
            aside = [p for p in tmp_path.iterdir() if contents(p) == complete("old")]
            (aside[0] / "pytorch_model.bin").write_text(MINE)

        with caplog.at_level(logging.WARNING):
            acted = publish_staged(staged, exchange=exchange, instant=instant, act=put)
        assert acted == (instant != "set aside" or not exchange)
        if not acted:
            return
        assert contents(target) == complete("new")
        (kept,) = tmp_path.glob("last.ckpt.kept-*")
        assert contents(kept) == {**complete("old"), "pytorch_model.bin": MINE}
        assert names_in(tmp_path) == ["last.ckpt", kept.name]
        assert f"The replaced {target} was kept as {kept}: it contains files" in caplog.text

    @existing([a_file, a_link_to_a_folder, a_root, stock_lightnings, *DANGLING])
    def test_a_name_taken_during_the_save_is_refused(self, place: Place, tmp_path: Path) -> None:
        target = tmp_path / "last.ckpt"
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")

        staged.sync()
        place(target)
        with pytest.raises(SaveError, match=r"It appeared after the save began"):
            staged.put_in_place()
        staged.abandon()
        expected = tmp_path.parent / f"{tmp_path.name}-expected"
        expected.mkdir()
        place(expected / "last.ckpt")
        assert snapshot(tmp_path) == snapshot(expected)

    def test_abandoning_leaves_foreign_files(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "new")
        (staged.path / "mine").write_text(MINE)
        staged.abandon()
        assert contents(staged.path) == {"mine": MINE}
        assert f"{staged.path} was not removed: it contains files" in caplog.text
        assert "this library did not write: mine" in caplog.text

    def test_files_for_other_ranks_are_made_and_removed_by_name(self, tmp_path: Path) -> None:
        (tmp_path / ".seen-other").write_bytes(b"other")
        folder_at(tmp_path).leave(".seen-mine")
        with pytest.raises(SaveError):
            folder_at(tmp_path).leave(".seen-other")
        assert contents(tmp_path) == {".seen-other": "other", ".seen-mine": ""}
        folder_at(tmp_path).remove_left(".seen-mine", ".seen-absent")
        assert contents(tmp_path) == {".seen-other": "other"}


class TestDeleting:
    @existing([*DIRECTORIES, *OTHERS, Path.mkdir])
    def test_retention_skips_foreign_files_and_warns_once(
        self, place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        fill(tmp_path / "other.ckpt", "other")
        place(tmp_path / "best.ckpt")
        before, queue = snapshot(tmp_path), FileQueue()
        queue.delete(tmp_path / "best.ckpt")
        queue.delete_waiting()
        assert snapshot(tmp_path) == before
        assert caplog.text.count("best.ckpt is not deleted, because it ") == 1

    def test_a_file_added_before_the_rename_is_restored(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(tmp_path / "other.ckpt", "other")
        best, rename = fill(tmp_path / "best.ckpt", "old"), Path.rename

        def late(path: Path, to: Path) -> Path:
            if path == best:
                (path / "mine").write_text(MINE)
            return rename(path, to)

        monkeypatch.setattr(Path, "rename", late)
        FileQueue().delete(best)
        assert contents(best) == {**complete("old"), "mine": MINE}
        assert names_in(tmp_path) == ["best.ckpt", "other.ckpt"]

    def test_a_file_added_during_deletion_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(tmp_path / "other.ckpt", "other")
        best, unlink = fill(tmp_path / "best.ckpt", "old"), os.unlink

        def late(name: str, *, dir_fd: int) -> None:
            if name == "manifest.json":
                Path(f"/proc/self/fd/{dir_fd}/mine").write_text(MINE)
            unlink(name, dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", late)
        FileQueue().delete(best)
        (rest,) = tmp_path.glob(".zero-removed-*")
        assert contents(rest) == {"mine": MINE}
        remove_leftovers(tmp_path)
        assert contents(rest) == {"mine": MINE}

    def test_fallback_deletes_nothing(self, tmp_path: Path) -> None:
        damaged(tmp_path / "last.ckpt")
        a_dirpath(tmp_path / "runs")
        fill(tmp_path / "older.ckpt", "old")
        before = snapshot(tmp_path)
        last = tmp_path / "last.ckpt"
        assert find_fallback(last, OneRank(), lambda _: True, LoadOptions()) is None
        assert snapshot(tmp_path) == before


HIDDEN = [f".zero-{kind}-5a7e" for kind in ("staging", "previous", "export", "removed")]

of_an_export = place(
    "of_an_export", dict.fromkeys(("model.safetensors", "config.json", "latest"), MINE)
)


def plant_owner(folder: Path) -> None:
    """Leave the owner file of a save of a dead process, whose target exists."""
    owner = replace(ProcessIdentity.of_this_process("a.ckpt"), started="12")
    (folder / ".zero-owner-5a7e.json").write_bytes(owner.to_json())
    fill(folder / "a.ckpt", "old")


class TestLeftovers:
    @pytest.mark.parametrize(
        "name",
        [
            *(f".zero-{kind}-5a7e" for kind in ("staging", "previous", "removed")),
            *(f".zero-link-last.ckpt.{which}" for which in ("new", "old")),
        ],
    )
    @existing([WITH_FILE, with_file("checkpoint/mine.pt"), a_root])
    def test_a_users_file_under_a_hidden_name_is_kept(
        self, place: Place, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        place(tmp_path / name)
        fill(tmp_path / "last.ckpt", "new")  # so that the hidden one is not restored
        before = contents(tmp_path / name)
        os.utime(tmp_path / name, (0, 0))
        remove_leftovers(tmp_path)
        assert contents(tmp_path / name) == before
        is_last = (
            name == ".zero-previous-5a7e"
        )  # no checkpoint has replaced it, so it is not checked
        assert is_last or f"{name} was not removed: it contains files" in caplog.text

    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_files_and_links_with_a_hidden_name_are_kept(self, kind: str, tmp_path: Path) -> None:
        a_root(tmp_path / "project")
        for name in (*HIDDEN, ".zero-link-a.new"):
            if kind == "file":
                (tmp_path / name).write_text(MINE)
            else:
                (tmp_path / name).symlink_to("project")
            os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
        before = snapshot(tmp_path)
        remove_leftovers(tmp_path)
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("name", [*HIDDEN, ".zero-link-a.old"])
    @pytest.mark.parametrize("at", ["", "sub", "checkpoint"])
    def test_a_planted_link_is_not_followed(self, at: str, name: str, tmp_path: Path) -> None:
        theirs, shared = fill(tmp_path / "theirs", MINE), tmp_path / "shared"
        for folder in (theirs, theirs / "checkpoint"):
            of_an_export(folder)
        before = snapshot(theirs)
        (shared / name / at).parent.mkdir(parents=True)
        (shared / name / at).symlink_to(theirs / at if at == "checkpoint" else theirs)
        os.utime(shared / name, (0, 0), follow_symlinks=False)
        plant_owner(shared)
        remove_leftovers(shared)
        assert snapshot(theirs) == before

    @pytest.mark.parametrize("name", HIDDEN)
    @pytest.mark.parametrize("at", ["", "checkpoint"])
    def test_a_link_planted_during_the_removal_is_not_followed(
        self, at: str, name: str, tmp_path: Path
    ) -> None:
        theirs = fill(tmp_path / "theirs", "x")
        of_an_export(theirs / "checkpoint")
        before = snapshot(theirs)
        for number in itertools.count():
            hidden = tmp_path / f"shared{number}" / name
            if "export" in name:
                of_an_export(hidden / "checkpoint")
            else:
                fill(hidden, "x")
            os.utime(hidden, (0, 0))
            plant_owner(hidden.parent)
            calls = itertools.count()

            def swap(
                path: Path = hidden / at, calls: Iterator[int] = calls, number: int = number
            ) -> None:
                if next(calls) == number and path.is_dir():
                    path.rename(tmp_path / f"away{number}")
                    path.symlink_to(theirs / at)

            with before_each_syscall(swap):
                remove_leftovers(hidden.parent)
            assert snapshot(theirs) == before
            if next(calls) <= number:
                assert not os.path.lexists(hidden)
                break
        assert number > 20

    def test_a_folder_nested_too_deeply_is_kept(self, tmp_path: Path) -> None:
        above = os.open(tmp_path, os.O_RDONLY)
        for name in (".zero-removed-5a7e", *["d"] * 1200):
            os.mkdir(name, dir_fd=above)
            below = os.open(name, os.O_RDONLY, dir_fd=above)
            os.close(above)
            above = below
        os.close(above)
        try:
            assert remove_leftovers(tmp_path) == []
            assert names_in(tmp_path) == [".zero-removed-5a7e"]
        finally:
            subprocess.run(["rm", "-r", tmp_path / ".zero-removed-5a7e"], check=True)

    def test_pipes_and_huge_files_in_place_of_owner_files_are_not_read(
        self, tmp_path: Path
    ) -> None:
        fill(tmp_path / ".zero-previous-1", "old")
        fill(tmp_path / ".zero-previous-2", "old")
        for save_id in ("1", "5a7e"):
            os.mkfifo(tmp_path / f".zero-owner-{save_id}.json")
        (tmp_path / ".zero-owner-2.json").touch()
        os.truncate(tmp_path / ".zero-owner-2.json", 1 << 40)
        before = names_in(tmp_path)

        def work() -> None:
            remove_leftovers(tmp_path)
            repair_target(tmp_path / "lost.ckpt", 0.0)

        assert finishes(work)
        assert names_in(tmp_path) == before

    @pytest.mark.parametrize(
        "changes",
        [
            *({"target": name} for name in ("", ".", "..", "../a", "a\0b", "\ud800")),
            {"pid": 1 << 80},
        ],
        ids=ascii,
    )
    def test_an_owner_file_with_impossible_values_is_of_an_unknown_process(
        self, changes: dict[str, Any], tmp_path: Path
    ) -> None:
        fill(tmp_path / ".zero-previous-5a7e", "old")
        owner = replace(ProcessIdentity.of_this_process("lost.ckpt"), **changes)
        (tmp_path / ".zero-owner-5a7e.json").write_bytes(owner.to_json())
        before = names_in(tmp_path)
        assert remove_leftovers(tmp_path) == []
        assert not repair_target(tmp_path / "lost.ckpt", 0.0)
        assert names_in(tmp_path) == before

    def test_a_users_file_in_a_replaced_checkpoint_becomes_visible(self, tmp_path: Path) -> None:
        target = fill(tmp_path / "last.ckpt", "old")
        staged = StagedDirectory.create(target, "5a7e")
        fill(staged.path, "new")

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish_staged(staged, instant="kept", act=interrupt)
        (staged.path / "mine").write_text(MINE)
        owner_file = tmp_path / ".zero-owner-5a7e.json"
        owner_file.write_text(json.dumps({**json.loads(owner_file.read_text()), "started": "12"}))
        remove_leftovers(tmp_path)
        (kept,) = tmp_path.glob("last.ckpt.kept-*")
        assert contents(kept) == {**complete("old"), "mine": MINE}
        assert names_in(tmp_path) == ["last.ckpt", kept.name]

    def test_repair_replaces_nothing(self, tmp_path: Path) -> None:
        fill(tmp_path / ".zero-link-last.ckpt.old", "old")
        (tmp_path / "last.ckpt").write_text(MINE)
        assert not repair_target(tmp_path / "last.ckpt", 0.0)
        assert (tmp_path / "last.ckpt").read_text() == MINE

    def test_the_clock_probe_does_not_replace_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "probe").write_text(MINE)
        os.utime(tmp_path / "probe", (1, 1))
        assert abs(filesystem_time_s(tmp_path / "probe") - time.time()) < 3600
        assert (tmp_path / "probe").read_text() == MINE
        assert (tmp_path / "probe").stat().st_mtime == 1


class TestLinks:
    @existing([*DIRECTORIES, *OTHERS])
    def test_a_link_does_not_replace_foreign_files(self, place: Place, tmp_path: Path) -> None:
        target = fill(tmp_path / "new.ckpt", "new")
        place(tmp_path / "last.ckpt")
        before = snapshot(tmp_path)
        with pytest.raises(SaveError, match=r"Could not link .*last\.ckpt to the .*last\.ckpt .+"):
            folder_at(tmp_path / "last.ckpt").make_link(folder_at(target))
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("exchanged", [True, False])
    def test_a_directory_with_a_new_file_is_kept(
        self, exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, link = fill(tmp_path / "new.ckpt", "new"), fill(tmp_path / "last.ckpt", "old")
        symlink_to = Path.symlink_to

        def late(path: Path, *args: Any) -> None:
            (link / "mine").write_text(MINE)
            symlink_to(path, *args)

        monkeypatch.setattr(Path, "symlink_to", late)
        with no_exchange(possible=exchanged):
            folder_at(link).make_link(folder_at(target))
        (kept,) = tmp_path.glob("last.ckpt.kept-*")
        assert contents(kept) == {**complete("old"), "mine": MINE}
        assert link.is_symlink()
        assert names_in(tmp_path) == ["last.ckpt", kept.name, "new.ckpt"]

    def test_a_copy_has_only_files_of_the_checkpoint(self, tmp_path: Path) -> None:
        target = fill(tmp_path / "new.ckpt", "new")
        (target / "pytorch_model.bin").write_text(MINE)
        copy_checkpoint(target, tmp_path / "copy", NO_PROGRESS)
        assert contents(tmp_path / "copy") == complete("new")
        (tmp_path / "taken").write_text(MINE)
        with pytest.raises(FileExistsError):
            copy_checkpoint(target, tmp_path / "taken", NO_PROGRESS)
        with pytest.raises(OSError, match="it has no manifest"):
            copy_checkpoint(tmp_path, tmp_path / "other", NO_PROGRESS)

    def test_a_copy_that_cannot_read_leaves_no_file_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = fill(tmp_path / "new.ckpt", "new")

        def refused(path: Path, *_: Any) -> None:
            raise PermissionError(path)

        monkeypatch.setattr(disk_checkpoints, "open_file", refused)
        before = len([*Path("/proc/self/fd").iterdir()])
        with pytest.raises(PermissionError):
            copy_checkpoint(target, tmp_path / "copy", NO_PROGRESS)
        assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_all_names_that_a_save_writes_are_classified_as_ours(tmp_path: Path) -> None:
    names = {
        *(optimizer_file(rank, dtype) for rank in (0, 1, 1023) for dtype in ("fp32", "bf16")),
        *(model_file(rank, stage) for rank in (0, 1, 1023) for stage in (1, 2, 3)),
        CLIENT_OBJECTS,
    }
    names |= {f"{name}.sums" for name in names}
    names |= {"latest", "zero_to_fp32.py", ".seen-5a7e"}
    (tmp_path / "checkpoint").mkdir()
    for name in names:
        (tmp_path / name).touch()
    found = classify_files(tmp_path, hidden=True)
    assert (set(found.ours), found.foreign) == (names, ())
    assert not classify_files(
        tmp_path
    ).ours  # only a manifest identifies files in a visible directory
