"""Nothing is removed or replaced that this library did not write, wherever it lies in the way.

``tests/house/test_deletions.py`` lists the places that remove anything, and which of these tests
puts somebody else's files there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_elastic_zero.checkpoint.load import find_fallback
from lightning_elastic_zero.checkpoint.manager import Retention
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats.deepspeed_files import (
    CLIENT_OBJECTS,
    model_file,
    optimizer_file,
)
from lightning_elastic_zero.storage.leftovers import (
    copy_checkpoint,
    make_link,
    remove_leftovers,
    repair_target,
)
from lightning_elastic_zero.storage.owners import filesystem_time_s
from lightning_elastic_zero.storage.ownership import check_replaceable, classify_files
from lightning_elastic_zero.storage.publish import StagedDirectory
from lightning_elastic_zero.storage.shared import leave_shared, remove_shared
from tests.support.small_checkpoints import (
    SHARD,
    contents,
    fill,
    manifest_of,
    names_in,
    no_exchange,
    publish_staged,
    whole,
)

MINE = "the user's only one"

Place = Callable[[Path], object]


def snapshot(folder: Path) -> dict[str, str]:
    """Return every name below a folder, and what it is or holds."""
    return {
        str(path.relative_to(folder)): (
            f"-> {path.readlink()}"
            if path.is_symlink()
            else path.read_text()
            if path.is_file()
            else "/"
        )
        for path in folder.rglob("*")
    }


# -- what lies in the way -----------------------------------------------------------------------


def with_file(name: str) -> Place:
    """Leave a checkpoint into which a user has put a file."""

    def place(path: Path) -> None:
        fill(path, "old")
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(MINE)

    place.__name__ = f"a_checkpoint_with_{name}"
    return place


def with_a_link(path: Path) -> None:
    """Leave a checkpoint in which a shard was moved elsewhere, and linked."""
    fill(path, "old")
    elsewhere = path.parent / "tier2.pt"
    (path / SHARD).rename(elsewhere)
    (path / SHARD).symlink_to(elsewhere)


def with_a_linked_folder(path: Path) -> None:
    """Leave a checkpoint with a link to a folder of data."""
    fill(path, "old")
    (path.parent / "data").mkdir()
    (path.parent / "data" / "rows").write_text(MINE)
    (path / "data").symlink_to(path.parent / "data")


def overwritten_by_stock(path: Path) -> None:
    """Leave a checkpoint over which DeepSpeed has saved one of its own, with the same names."""
    fill(path, "old")
    (path / SHARD).write_text(MINE)


def a_file(path: Path) -> None:
    """Leave a single file, as Lightning's other strategies write it."""
    path.write_text(MINE)


def a_link_to_a_file(path: Path) -> None:
    """Leave a link to one."""
    (path.parent / "weights.pt").write_text(MINE)
    path.symlink_to("weights.pt")


def a_link_to_a_folder(path: Path) -> None:
    """Leave a link to a folder on another disk."""
    (path.parent / "disk").mkdir()
    (path.parent / "disk" / "notes").write_text(MINE)
    path.symlink_to("disk")


def a_link_to_an_empty_folder(path: Path) -> None:
    """Leave a link to where a user wants checkpoints to be: replacing it would lose that."""
    (path.parent / "disk").mkdir()
    path.symlink_to("disk")


def a_link_to_an_unmounted_disk(path: Path) -> None:
    """Leave a link to a disk that is not mounted."""
    path.symlink_to("../not-mounted/runs")


def a_link_to_an_empty_mount_point(path: Path) -> None:
    """Leave a link below a folder on which a disk is to be mounted."""
    (path.parent / "mount").mkdir(exist_ok=True)
    path.symlink_to("mount/runs")


def a_link_to_a_dangling_link(path: Path) -> None:
    """Leave a link to another link of this folder, whose disk is not mounted."""
    (path.parent / "disk").symlink_to("../not-mounted")
    path.symlink_to("disk")


def deepspeeds(path: Path) -> None:
    """Leave what ``engine.save_checkpoint`` wrote under two tags."""
    for tag in ("global_step10", "global_step20"):
        (path / tag).mkdir(parents=True)
        (path / tag / "mp_rank_00_model_states.pt").write_text(MINE)
    (path / "latest").write_text("global_step20")
    (path / "zero_to_fp32.py").write_text("script")


def stock_lightnings(path: Path) -> None:
    """Leave what Lightning's own DeepSpeedStrategy wrote: the names are those of ours."""
    fill(path, MINE, published=False)
    (path / "latest").write_text("checkpoint")


def of_other_software(path: Path) -> None:
    """Leave a folder with a manifest.json that is not of this library."""
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "a web page", "files": []}')


def damaged(path: Path) -> None:
    """Leave a checkpoint whose manifest cannot be read: which files are whose is not known."""
    fill(path, "old")
    (path / "manifest.json").write_text(manifest_of({SHARD: "old"})[:-9])


def nested(path: Path) -> None:
    """Leave a checkpoint whose manifest is nested more deeply than Python reads."""
    fill(path, "old")
    (path / "manifest.json").write_text("[" * 200_000)


def of_no_size(path: Path) -> None:
    """Leave a checkpoint whose manifest has an infinite number for a size."""
    fill(path, "old")
    text = re.sub(r'"size_bytes": \d+', '"size_bytes": 1e999', manifest_of({SHARD: "old"}))
    (path / "manifest.json").write_text(text)


def a_dirpath(path: Path) -> None:
    """Leave a folder full of checkpoints."""
    for name in ("step=1.ckpt", "step=2.ckpt"):
        fill(path / name, "old")


def a_root(path: Path) -> None:
    """Leave a project: code, data, logs, and runs."""
    for name in ("train.py", "data/train.csv", "lightning_logs/version_0/hparams.yaml"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(MINE)


WITH_FILE = with_file("pytorch_model.bin")
DIRECTORIES: list[Place] = [
    WITH_FILE,
    with_file("checkpoint/notes.txt"),
    with_file("eval/results.json"),
    with_file("checkpoint/zero_pp_rank_7_mp_rank_00_model_states.pt"),
    with_a_link,
    with_a_linked_folder,
    overwritten_by_stock,
    deepspeeds,
    stock_lightnings,
    of_other_software,
    damaged,
    nested,
    of_no_size,
    a_dirpath,
    a_root,
]
DANGLING: list[Place] = [
    a_link_to_an_unmounted_disk,
    a_link_to_an_empty_mount_point,
    a_link_to_a_dangling_link,
]
OTHERS: list[Place] = [
    a_file,
    a_link_to_a_file,
    a_link_to_a_folder,
    a_link_to_an_empty_folder,
    *DANGLING,
]


def in_the_way(places: list[Place]) -> pytest.MarkDecorator:
    """Run a test once for each thing that lies in the way."""
    return pytest.mark.parametrize("place", places, ids=lambda place: place.__name__)


class TestSaving:
    @in_the_way([*DIRECTORIES, *OTHERS])
    def test_refused_before_a_byte_is_written(self, place: Place, tmp_path: Path) -> None:
        """Whatever is not ours is left, nothing lies beside it, and the error names a way out."""
        target = tmp_path / "last.ckpt"
        place(target)
        before = snapshot(tmp_path)
        with pytest.raises(SaveError, match=r"last\.ckpt .*nothing was written\. Save to ") as told:
            check_replaceable(target, "step")
        assert snapshot(tmp_path) == before
        instead = Path(str(told.value).split("Save to ")[1].split(", or")[0])
        check_replaceable(instead, "")

    @pytest.mark.parametrize(
        ("place", "says"),
        [
            (WITH_FILE, r"last contains files that this library did not write: pytorch_model\.bin"),
            (overwritten_by_stock, rf"contains files that this library did not write: {SHARD}"),
            (a_file, "is a file, expected a directory"),
            (a_link_to_a_folder, r"is a link to .*disk, which is not a"),
            (
                a_link_to_an_unmounted_disk,
                r"is a link to .*not-mounted/runs, which does not exist: its disk may not",
            ),
            (deepspeeds, r"DeepSpeed saved there \(global_step10, global_step20, latest\)"),
            (stock_lightnings, r"DeepSpeed saved there \(checkpoint, latest\)"),
            (damaged, r"not a checkpoint of this library \(its manifest\.json is damaged\)"),
            (nested, r"not a checkpoint of this library \(its manifest\.json is damaged\)"),
            (of_no_size, r"not a checkpoint of this library \(its manifest\.json is damaged\)"),
            (
                of_other_software,
                r"not a checkpoint of this library \(its manifest\.json was written by other",
            ),
            (a_dirpath, r"it contains the checkpoints \(step=1\.ckpt, step=2\.ckpt\)"),
            (a_root, r"\(it has no manifest\.json\): it contains data, lightning_logs, train"),
        ],
    )
    def test_the_error_names_what_lies_there(self, place: Place, says: str, tmp_path: Path) -> None:
        """And a folder of many things is told the name of a checkpoint in it."""
        place(tmp_path / "last")
        with pytest.raises(SaveError, match=says) as told:
            check_replaceable(tmp_path / "last", "step-20")
        below = place in {deepspeeds, stock_lightnings, of_other_software, a_dirpath, a_root}
        instead = "last/step-20" if below or place in {damaged, nested, of_no_size} else "last-v1"
        if place is not a_link_to_a_folder:
            assert f"Save to {tmp_path / instead}, or" in str(told.value)

    @in_the_way(DANGLING)
    def test_a_folder_that_is_not_mounted(self, place: Place, tmp_path: Path) -> None:
        """A link above the target that leads to nothing is named, and stays."""
        place(tmp_path / "runs")
        before = snapshot(tmp_path)
        with pytest.raises(SaveError, match=r"runs is a link to .* does not exist\. Mount"):
            StagedDirectory.create(tmp_path / "runs" / "a" / "b.ckpt", "new")
        assert snapshot(tmp_path) == before

    def test_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It and what contains it are not replaced, though empty: every later path would fail."""
        (tmp_path / "run").mkdir()
        monkeypatch.chdir(tmp_path / "run")
        with pytest.raises(SaveError, match=r"working directory.* Save to .*run/step-3, or"):
            check_replaceable(tmp_path / "run", "step-3")
        fill(tmp_path / "a.ckpt", "old")
        monkeypatch.chdir(tmp_path / "a.ckpt" / "checkpoint")
        with pytest.raises(SaveError, match="working directory of this process, or contains it"):
            check_replaceable(tmp_path / "a.ckpt", "")
        assert contents(tmp_path / "a.ckpt") == whole("old")

    def test_the_root_and_mount_points(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the system would refuse at the end is refused at the beginning."""
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
    def test_trifles_are_no_obstacle(self, trifle: str, exchange: bool, tmp_path: Path) -> None:
        """What a system makes by itself, and folders without files, go with the checkpoint."""
        target = fill(tmp_path / "last.ckpt", "old")
        (target / trifle).parent.mkdir(exist_ok=True)
        (target / trifle).mkdir() if trifle.endswith("/") else (target / trifle).touch()
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")
        publish_staged(staged, exchange=exchange)
        assert (contents(target), names_in(tmp_path)) == (whole("new"), ["last.ckpt"])

    @pytest.mark.parametrize("place", [lambda _: None, Path.mkdir, lambda p: fill(p, "old")])
    def test_what_may_be_replaced(self, place: Place, tmp_path: Path) -> None:
        """Nothing, an empty directory, and a checkpoint of ours, whose shards may be missing."""
        place(tmp_path / "a.ckpt")
        (tmp_path / "a.ckpt" / SHARD).unlink(missing_ok=True)
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "new")
        fill(staged.path, "new")
        staged.publish()
        assert contents(tmp_path / "a.ckpt") == whole("new")


class TestRaces:
    """What somebody puts there while a save goes on."""

    @pytest.mark.parametrize("exchange", [True, False])
    @pytest.mark.parametrize("instant", ["synced", "placed", "set aside"])
    def test_a_file_that_came_meanwhile(
        self, instant: str, exchange: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The new checkpoint is published, and the old one is kept whole beside it, visibly."""
        target = fill(tmp_path / "last.ckpt", "old")
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")

        def put() -> None:
            aside = [p for p in tmp_path.iterdir() if contents(p) == whole("old")]
            (aside[0] / "pytorch_model.bin").write_text(MINE)

        with caplog.at_level(logging.WARNING):
            came = publish_staged(staged, exchange=exchange, instant=instant, act=put)
        assert came == (instant != "set aside" or not exchange)
        if not came:
            return
        assert contents(target) == whole("new")
        (kept,) = tmp_path.glob("last.ckpt.kept-*")
        assert contents(kept) == {**whole("old"), "pytorch_model.bin": MINE}
        assert names_in(tmp_path) == ["last.ckpt", kept.name]
        assert f"The replaced {target} was kept as {kept}: it contains files" in caplog.text

    @in_the_way([a_file, a_link_to_a_folder, a_root, stock_lightnings, *DANGLING])
    def test_a_name_that_was_taken_meanwhile(self, place: Place, tmp_path: Path) -> None:
        """It is not exchanged for the checkpoint: the save fails, and all of it is as it was."""
        target = tmp_path / "last.ckpt"
        staged = StagedDirectory.create(target, "new")
        fill(staged.path, "new")

        staged.sync()
        place(target)
        with pytest.raises(SaveError, match=r"It appeared after the save began"):
            staged.publish()
        staged.abandon()
        expected = tmp_path.parent / f"{tmp_path.name}-expected"
        expected.mkdir()
        place(expected / "last.ckpt")
        assert snapshot(tmp_path) == snapshot(expected)

    def test_abandoning_leaves_what_is_not_of_the_save(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also in the hidden directory itself, and the user is told where it is."""
        staged = StagedDirectory.create(tmp_path / "a.ckpt", "new")
        (staged.path / "mine").write_text(MINE)
        staged.abandon()
        assert contents(staged.path) == {"mine": MINE}
        assert f"{staged.path} was not removed: it contains files" in caplog.text
        assert "this library did not write: mine" in caplog.text

    def test_shared_files_are_left_and_removed_by_their_own_names(self, tmp_path: Path) -> None:
        """Nothing that is there is written over, and what has another name stays."""
        (tmp_path / ".compared-other").write_bytes(b"other")
        leave_shared(tmp_path, ".compared-mine", b"mine")
        with pytest.raises(SaveError):
            leave_shared(tmp_path, ".compared-other", b"mine")
        assert contents(tmp_path) == {".compared-other": "other", ".compared-mine": "mine"}
        remove_shared(tmp_path, ".compared-mine", ".compared-absent")
        assert contents(tmp_path) == {".compared-other": "other"}


class TestDeleting:
    @in_the_way([*DIRECTORIES, *OTHERS, Path.mkdir])
    def test_retention_leaves_it(
        self, place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Top-k does not delete what is not ours; it says so once, and does not try again."""
        fill(tmp_path / "other.ckpt", "other")
        place(tmp_path / "best.ckpt")
        before, retention = snapshot(tmp_path), Retention()
        for _ in range(2):
            retention.remove(
                tmp_path / "best.ckpt"
            ) if not caplog.text else retention.delete_pending()
        assert snapshot(tmp_path) == before
        assert caplog.text.count("best.ckpt is not deleted, and will not be: it ") == 1

    def test_what_comes_just_before_the_rename(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is looked at again under the hidden name, and gets its own back."""
        fill(tmp_path / "other.ckpt", "other")
        best, rename = fill(tmp_path / "best.ckpt", "old"), Path.rename

        def late(path: Path, to: Path) -> Path:
            if path == best:
                (path / "mine").write_text(MINE)
            return rename(path, to)

        monkeypatch.setattr(Path, "rename", late)
        Retention().remove(best)
        assert contents(best) == {**whole("old"), "mine": MINE}
        assert names_in(tmp_path) == ["best.ckpt", "other.ckpt"]

    def test_what_comes_while_it_is_emptied(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files are removed by name, never a whole tree: what appears then stays."""
        fill(tmp_path / "other.ckpt", "other")
        best, unlink = fill(tmp_path / "best.ckpt", "old"), Path.unlink

        def late(path: Path, *, missing_ok: bool = False) -> None:
            if path.name == "manifest.json":
                path.with_name("mine").write_text(MINE)
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", late)
        Retention().remove(best)
        (rest,) = tmp_path.glob(".zero-removed-*")
        assert contents(rest) == {"mine": MINE}
        remove_leftovers(tmp_path)
        assert contents(rest) == {"mine": MINE}

    def test_falling_back_deletes_nothing(self, tmp_path: Path) -> None:
        """Looking for an older checkpoint leaves the damaged one, and what lies around it."""
        damaged(tmp_path / "last.ckpt")
        a_dirpath(tmp_path / "runs")
        fill(tmp_path / "older.ckpt", "old")
        before = snapshot(tmp_path)
        assert find_fallback(tmp_path / "last.ckpt", OneRank(), lambda _: True) is None
        assert snapshot(tmp_path) == before


class TestLeftovers:
    @pytest.mark.parametrize(
        "name",
        [
            ".zero-staging-5a7e",
            ".zero-previous-5a7e",
            ".zero-removed-5a7e",
            ".zero-link-last.ckpt.new",
            ".zero-link-last.ckpt.old",
        ],
    )
    @in_the_way([WITH_FILE, with_file("checkpoint/mine.pt"), a_root])
    def test_a_users_file_under_a_hidden_name(
        self, place: Place, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """However old, it is kept, and the user is told where."""
        place(tmp_path / name)
        before = contents(tmp_path / name)
        os.utime(tmp_path / name, (0, 0))
        remove_leftovers(tmp_path)
        assert contents(tmp_path / name) == before
        is_last = name == ".zero-previous-5a7e"  # nothing replaced it, so that it is not looked at
        assert is_last or f"{name} was not removed: it contains files" in caplog.text

    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_what_only_has_such_a_name(self, kind: str, tmp_path: Path) -> None:
        """A file and a link that leads elsewhere are not of a save."""
        a_root(tmp_path / "project")
        for name in (".zero-staging-1", ".zero-removed-1", ".zero-link-a.new"):
            if kind == "file":
                (tmp_path / name).write_text(MINE)
            else:
                (tmp_path / name).symlink_to("project")
            os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
        before = snapshot(tmp_path)
        remove_leftovers(tmp_path)
        assert snapshot(tmp_path) == before

    def test_the_rest_of_a_publication(self, tmp_path: Path) -> None:
        """Killed before it removed what it replaced: with a user's file, that becomes visible."""
        target = fill(tmp_path / "last.ckpt", "old")
        staged = StagedDirectory.create(target, "5a7e")
        fill(staged.path, "new")

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish_staged(staged, instant="kept", act=interrupt)
        (staged.path / "mine").write_text(MINE)
        note = tmp_path / ".zero-owner-5a7e.json"
        note.write_text(json.dumps({**json.loads(note.read_text()), "started": "12"}))
        remove_leftovers(tmp_path)
        (kept,) = tmp_path.glob("last.ckpt.kept-*")
        assert contents(kept) == {**whole("old"), "mine": MINE}
        assert names_in(tmp_path) == ["last.ckpt", kept.name]

    def test_repairing_takes_no_name_from_anybody(self, tmp_path: Path) -> None:
        """What was set aside is put back only where nothing is."""
        fill(tmp_path / ".zero-link-last.ckpt.old", "old")
        (tmp_path / "last.ckpt").write_text(MINE)
        assert not repair_target(tmp_path / "last.ckpt", 0.0)
        assert (tmp_path / "last.ckpt").read_text() == MINE

    def test_the_clocks_file_is_a_new_one(self, tmp_path: Path) -> None:
        """A file that has its name is not touched."""
        (tmp_path / "probe").write_text(MINE)
        os.utime(tmp_path / "probe", (1, 1))
        assert abs(filesystem_time_s(tmp_path / "probe") - time.time()) < 3600
        assert (tmp_path / "probe").read_text() == MINE
        assert (tmp_path / "probe").stat().st_mtime == 1


class TestLinks:
    @in_the_way([*DIRECTORIES, *OTHERS])
    def test_a_link_takes_no_place_of_others(self, place: Place, tmp_path: Path) -> None:
        """last.ckpt that is not ours stays; the error says what it is."""
        target = fill(tmp_path / "new.ckpt", "new")
        place(tmp_path / "last.ckpt")
        before = snapshot(tmp_path)
        with pytest.raises(SaveError, match=r"Could not link .*last\.ckpt to the .*last\.ckpt .+"):
            make_link(target, tmp_path / "last.ckpt")
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("exchanged", [True, False])
    def test_a_file_that_came_meanwhile(
        self, exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The link is made, and what was there is kept whole beside it."""
        target, link = fill(tmp_path / "new.ckpt", "new"), fill(tmp_path / "last.ckpt", "old")
        symlink_to = Path.symlink_to

        def late(path: Path, *args: Any) -> None:
            (link / "mine").write_text(MINE)
            symlink_to(path, *args)

        monkeypatch.setattr(Path, "symlink_to", late)
        with no_exchange(possible=exchanged):
            make_link(target, link)
        (kept,) = tmp_path.glob("last.ckpt.kept-*")
        assert contents(kept) == {**whole("old"), "mine": MINE}
        assert link.is_symlink()
        assert names_in(tmp_path) == ["last.ckpt", kept.name, "new.ckpt"]

    def test_a_copy_is_of_the_checkpoint_only(self, tmp_path: Path) -> None:
        """Where there are no links: a user's file is not copied, or the copy could never go."""
        target = fill(tmp_path / "new.ckpt", "new")
        (target / "pytorch_model.bin").write_text(MINE)
        copy_checkpoint(target, tmp_path / "copy", NO_PROGRESS)
        assert contents(tmp_path / "copy") == whole("new")
        (tmp_path / "taken").write_text(MINE)
        with pytest.raises(FileExistsError):
            copy_checkpoint(target, tmp_path / "taken", NO_PROGRESS)
        with pytest.raises(OSError, match="it has no manifest"):
            copy_checkpoint(tmp_path, tmp_path / "other", NO_PROGRESS)


def test_unfinished_checkpoints_are_recognised_by_their_names(tmp_path: Path) -> None:
    """Every name that a save writes is one of ours, in each stage, precision and rank."""
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
    assert not classify_files(tmp_path).ours  # unless it is hidden, only a manifest says so
