from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_elastic_zero.checkpoint.manager import Retention
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage import ownership as deleting
from lightning_elastic_zero.storage.leftovers import LINK_PREFIX
from lightning_elastic_zero.storage.ownership import DELETING_PREFIX
from tests.support.small_checkpoints import SHARD, fill, names_in


def checkpoint(parent: Path, name: str, *, published: bool = True) -> Path:
    """Make a checkpoint's directory, with or without the mark that it is whole."""
    return fill(parent / name, "data", published=published)


def link(path: Path, target: str) -> None:
    """Point a link at a checkpoint, as ModelCheckpoint does: anew, and relative."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def of_other_software(path: Path) -> None:
    """Leave a manifest as web applications have it."""
    (path / MANIFEST_NAME).write_text('{"name": "app", "icons": []}')


def without_its_manifest_whole(path: Path) -> None:
    """Leave half a manifest."""
    text = (path / MANIFEST_NAME).read_text()
    (path / MANIFEST_NAME).write_text(text[: len(text) // 2])


def without_a_file(path: Path) -> None:
    """Leave out a file that the manifest names."""
    (path / SHARD).unlink()


def with_a_short_file(path: Path) -> None:
    """Cut a file that the manifest names."""
    (path / SHARD).write_text("d")


def of_weights_alone(path: Path) -> None:
    """Make the manifest say that there is no optimizer state."""
    fields = json.loads((path / MANIFEST_NAME).read_text())
    (path / MANIFEST_NAME).write_text(json.dumps({**fields, "weights_only": True}))


SPOILED = [
    of_other_software,
    without_its_manifest_whole,
    without_a_file,
    with_a_short_file,
    of_weights_alone,
]


class TestRemove:
    def test_what_nobody_needs_is_deleted_at_once(self, tmp_path: Path) -> None:
        """With another good checkpoint beside it, one goes away, and leaves nothing."""
        checkpoint(tmp_path, "new.ckpt")
        Retention().remove(checkpoint(tmp_path, "old.ckpt"))
        assert names_in(tmp_path) == ["new.ckpt"]

    def test_what_is_gone_already_is_no_error(self, tmp_path: Path) -> None:
        """Nothing is where a checkpoint was: there is nothing to do."""
        Retention().remove(tmp_path / "old.ckpt")

    def test_a_link_is_deleted_and_not_what_it_names(self, tmp_path: Path) -> None:
        """To remove ``last.ckpt`` is to remove the link."""
        checkpoint(tmp_path, "a.ckpt")
        link(tmp_path / "last.ckpt", "a.ckpt")
        Retention().remove(tmp_path / "last.ckpt")
        assert names_in(tmp_path) == ["a.ckpt"]

    def test_a_directory_vanishes_in_one_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run that is killed while it deletes leaves no half checkpoint, and no rest for long."""
        checkpoint(tmp_path, "new.ckpt")
        seen = []

        def killed(path: Path, _: object, **__: object) -> None:
            seen.append((path.name, names_in(path)))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(deleting, "remove_own_files", killed)
            with pytest.raises(KeyboardInterrupt):
                Retention().remove(checkpoint(tmp_path, "old.ckpt"))
        ((hidden, content),) = seen
        assert names_in(tmp_path) == [hidden, "new.ckpt"]
        assert hidden.startswith(DELETING_PREFIX)
        assert not hidden.endswith(".ckpt")
        assert content == ["checkpoint", MANIFEST_NAME]
        Retention().remove(checkpoint(tmp_path, "older.ckpt"))
        assert names_in(tmp_path) == ["new.ckpt"]

    def test_a_run_does_not_end_because_a_deletion_fails(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What cannot be deleted takes up room; the run is told, and goes on."""
        checkpoint(tmp_path, "new.ckpt")
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()

        def refused(path: Path, target: Path) -> Path:
            raise PermissionError(13, "Permission denied", str(path), None, str(target))

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(Path, "rename", refused)
            retention.remove(old)
        assert f"{old} could not be deleted" in caplog.text
        assert names_in(tmp_path) == ["new.ckpt", "old.ckpt"]
        retention.delete_pending()
        assert names_in(tmp_path) == ["new.ckpt", "old.ckpt"]

    def test_remote_addresses_are_refused(self) -> None:
        """Nothing is deleted at an address that nothing was saved to."""
        with pytest.raises(UnsupportedError, match="remote storage"):
            Retention().remove("s3://bucket/a.ckpt")


class TestResumedFrom:
    def test_it_is_never_deleted(self, tmp_path: Path) -> None:
        """What a run was resumed from outlives the run, whatever else is saved."""
        checkpoint(tmp_path, "new.ckpt")
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        retention.protect(old)
        retention.remove(old)
        retention.delete_pending()
        assert names_in(tmp_path) == ["new.ckpt", "old.ckpt"]

    def test_nor_through_a_link(self, tmp_path: Path) -> None:
        """Resumed from ``last.ckpt``, what the link named then is what is kept."""
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        link(tmp_path / "last.ckpt", "old.ckpt")
        retention.protect(tmp_path / "last.ckpt")
        checkpoint(tmp_path, "new.ckpt")
        link(tmp_path / "last.ckpt", "new.ckpt")
        retention.remove(old)
        retention.remove(tmp_path / "elsewhere" / ".." / "old.ckpt")
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt", "old.ckpt"]

    def test_nor_by_another_way_to_it(self, tmp_path: Path) -> None:
        """A directory that is reached through a link is the same directory."""
        checkpoint(tmp_path / "runs", "new.ckpt")
        old, retention = checkpoint(tmp_path / "runs", "old.ckpt"), Retention()
        (tmp_path / "here").symlink_to("runs")
        retention.protect(tmp_path / "here" / "old.ckpt")
        retention.remove(old)
        assert names_in(tmp_path / "runs") == ["new.ckpt", "old.ckpt"]

    def test_others_are(self, tmp_path: Path) -> None:
        """One checkpoint is protected, not all that look like it."""
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        retention.protect(old)
        retention.remove(checkpoint(tmp_path, "old-v1.ckpt"))
        assert names_in(tmp_path) == ["old.ckpt"]


class TestWaiting:
    def test_a_deletion_waits_while_a_link_names_it(self, tmp_path: Path) -> None:
        """ModelCheckpoint deletes before it moves ``last.ckpt``: the link never dangles."""
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        link(tmp_path / "last.ckpt", "old.ckpt")
        checkpoint(tmp_path, "new.ckpt")
        retention.remove(old)
        assert (tmp_path / "last.ckpt").exists()
        retention.delete_pending()
        assert old.exists()
        link(tmp_path / "last.ckpt", "new.ckpt")
        retention.delete_pending()
        assert names_in(tmp_path) == ["last.ckpt", "new.ckpt"]

    def test_the_last_good_one_stays_until_there_is_another(self, tmp_path: Path) -> None:
        """Whatever is asked for, one published checkpoint remains."""
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        retention.remove(old)
        checkpoint(tmp_path, "torn.ckpt", published=False)
        retention.delete_pending()
        assert old.exists()
        checkpoint(tmp_path, "new.ckpt")
        retention.delete_pending()
        assert names_in(tmp_path) == ["new.ckpt", "torn.ckpt"]

    def test_a_link_that_was_being_made_needs_nothing(self, tmp_path: Path) -> None:
        """What a killed process has left of it does not keep a checkpoint."""
        old = checkpoint(tmp_path, "old.ckpt")
        checkpoint(tmp_path, "new.ckpt")
        link(tmp_path / f"{LINK_PREFIX}last.ckpt.new", "old.ckpt")
        Retention().remove(old)
        assert not old.exists()

    @pytest.mark.parametrize(
        "hidden",
        [
            ".zero-staging-5a7e",
            ".zero-previous-5a7e",
            DELETING_PREFIX + "0",
            LINK_PREFIX + "last.ckpt.old",
        ],
    )
    def test_what_is_hidden_is_no_other_good_one(self, tmp_path: Path, hidden: str) -> None:
        """A save in the making, or the rest of a deletion, may have a manifest."""
        checkpoint(tmp_path, hidden)
        old = checkpoint(tmp_path, "old.ckpt")
        Retention().remove(old)
        assert old.exists()

    @pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
    def test_what_no_run_can_go_on_from_is_no_other_good_one(
        self, spoil: Callable[[Path], None], tmp_path: Path
    ) -> None:
        """Many programs write a ``manifest.json``; and a checkpoint may have lost what it names."""
        spoil(checkpoint(tmp_path, "other.ckpt"))
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        retention.remove(old)
        assert old.exists()
        checkpoint(tmp_path, "new.ckpt")
        retention.delete_pending()
        assert names_in(tmp_path) == ["new.ckpt", "other.ckpt"]

    def test_of_weights_alone_one_takes_the_place_of_another(self, tmp_path: Path) -> None:
        """Where a run saves nothing else, its top-k goes on as ever."""
        old = checkpoint(tmp_path, "old.ckpt")
        for path in (old, checkpoint(tmp_path, "new.ckpt")):
            of_weights_alone(path)
        Retention().remove(old)
        assert names_in(tmp_path) == ["new.ckpt"]

    def test_a_link_to_itself_is_no_other_good_one(self, tmp_path: Path) -> None:
        """``last.ckpt`` that names a checkpoint does not make two of it."""
        old, retention = checkpoint(tmp_path, "old.ckpt"), Retention()
        link(tmp_path / "last.ckpt", "old.ckpt")
        retention.remove(old)
        (tmp_path / "last.ckpt").unlink()
        retention.delete_pending()
        assert old.exists()

    def test_two_are_never_both_deleted(self, tmp_path: Path) -> None:
        """Asked to delete all there are, it keeps one."""
        retention = Retention()
        for path in [checkpoint(tmp_path, "a.ckpt"), checkpoint(tmp_path, "b.ckpt")]:
            retention.remove(path)
        assert names_in(tmp_path) == ["b.ckpt"]

    def test_a_new_checkpoint_under_the_old_name_is_not_deleted(self, tmp_path: Path) -> None:
        """A deletion that waits is for what was there then, not for what is saved there later."""
        best, retention = checkpoint(tmp_path, "best.ckpt"), Retention()
        retention.remove(best)
        again = checkpoint(tmp_path, "staged")
        best.rename(tmp_path / "gone")
        again.rename(best)
        checkpoint(tmp_path, "other.ckpt")
        retention.delete_pending()
        assert best.exists()


class TestSavedAnew:
    """A save to a path that is doomed: what was said before is of what was there before."""

    def scheduled_deletion(self, folder: Path, retention: Retention) -> Path:
        """Leave one that is doomed and waits for a link, with another good one beside it."""
        old = checkpoint(folder, "best.ckpt")
        link(folder / "last.ckpt", "best.ckpt")
        checkpoint(folder, "other.ckpt")
        retention.remove(old)
        assert old.exists()
        return old

    def publish(self, path: Path) -> None:
        """Put a new checkpoint in a path's place."""
        again = checkpoint(path.parent, "staged")
        path.rename(path.parent / ".gone")
        again.rename(path)

    def test_an_old_doom_is_forgotten(self, tmp_path: Path) -> None:
        """What is published anew stays when the link that the old one waited for moves on."""
        retention = Retention()
        best = self.scheduled_deletion(tmp_path, retention)
        retention.on_save_started(best)
        self.publish(best)
        link(tmp_path / "last.ckpt", "other.ckpt")
        retention.on_published(best)
        retention.delete_pending()
        assert (best / MANIFEST_NAME).exists()

    def test_even_where_the_save_fails(self, tmp_path: Path) -> None:
        """The callback counts on a checkpoint at that path again: the old one is better than none.

        Nothing is deleted while the new one is being written either.
        """
        retention = Retention()
        best = self.scheduled_deletion(tmp_path, retention)
        retention.on_save_started(best)
        link(tmp_path / "last.ckpt", "other.ckpt")
        retention.delete_pending()
        assert (best / MANIFEST_NAME).exists()

    def test_a_failure_deletes_nothing(self, tmp_path: Path) -> None:
        """What was doomed stays until a later save has succeeded."""
        retention, other = Retention(), checkpoint(tmp_path, "other.ckpt")
        new = checkpoint(tmp_path, "new.ckpt")
        retention.on_save_started(new)
        retention.remove(other)
        assert other.exists()
        retention.on_save_started(new)
        retention.on_published(new)
        assert not other.exists()

    def test_a_later_doom_counts(self, tmp_path: Path) -> None:
        """Doomed while it is being written, it is deleted as soon as nothing needs it."""
        retention = Retention()
        best = self.scheduled_deletion(tmp_path, retention)
        retention.on_save_started(best)
        retention.remove(best)
        self.publish(best)
        retention.on_published(best)
        assert (best / MANIFEST_NAME).exists()
        link(tmp_path / "last.ckpt", "other.ckpt")
        retention.delete_pending()
        assert not best.exists()

    def test_others_stay_doomed(self, tmp_path: Path) -> None:
        """A save forgets the doom of its own path only; there need not be any."""
        retention = Retention()
        best = self.scheduled_deletion(tmp_path, retention)
        retention.on_save_started(tmp_path / "new.ckpt")
        link(tmp_path / "last.ckpt", "other.ckpt")
        retention.on_published(checkpoint(tmp_path, "new.ckpt"))
        assert not best.exists()
