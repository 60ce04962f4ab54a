"""The check of a directory before training: its findings, and the files it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.checkpoint.directory_check import check_directories, find_unseen
from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank, Ranks
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.disk_folder import DiskFolder
from tests.support.processes import HANG_TIMEOUT_S


@pytest.fixture
def two_ranks() -> Iterator[list[Ranks]]:
    store, times = HashStore(), Timeouts()
    with ExitStack() as opened:
        ranks = [StoreRanks(store, rank, 2, name="a", times=times) for rank in range(2)]
        for of_rank in ranks:
            opened.callback(of_rank.close)
        yield [*ranks]


def on_both(ranks: list[Ranks], work: Callable[[Ranks], object]) -> list[object]:
    def outcome(of_rank: Ranks) -> object:
        try:
            return work(of_rank)
        except SaveError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(outcome, of_rank) for of_rank in ranks]
        return [future.result(timeout=HANG_TIMEOUT_S) for future in futures]


def test_only_the_directory_is_left(tmp_path: Path) -> None:
    made = check_directories([tmp_path / "logs" / "checkpoints", None, ""], OneRank())
    assert made == [str(tmp_path / "logs"), str(tmp_path / "logs" / "checkpoints")]
    assert list(tmp_path.rglob("*")) == [tmp_path / "logs", tmp_path / "logs" / "checkpoints"]


def test_a_users_files_are_kept(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints"
    (there / "empty").mkdir(parents=True)
    (there / "mine.txt").write_text("mine")
    check_directories([there], OneRank())
    assert sorted(path.name for path in there.rglob("*")) == ["empty", "mine.txt"]


def test_an_unwritable_directory_is_refused() -> None:
    with pytest.raises(SaveError, match="cannot be written"):
        check_directories(["/proc/self"], OneRank())


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SaveError, match=str(tmp_path / "file" / "checkpoints")):
        check_directories([tmp_path / "file" / "checkpoints"], OneRank())
    assert (tmp_path / "file").read_text() == "mine"


def test_remote_storage_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="ftp://"):
        check_directories(["ftp://bucket/run"], OneRank())


def test_the_folder_of_rank_0_is_checked(two_ranks: list[Ranks], tmp_path: Path) -> None:
    first, second = on_both(
        two_ranks, lambda ranks: check_directories([tmp_path / "0"][ranks.rank :], ranks)
    )
    assert first == second
    assert list(tmp_path.rglob("*")) == [tmp_path / "0"]


def test_ranks_that_do_not_share_files_are_named(
    two_ranks: list[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskFolder, "await_left", partialmethod(DiskFolder.await_left, wait_s=0.2))
    folders = [tmp_path / name / "folder" for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
    errors = on_both(two_ranks, lambda r: find_unseen(r, folders[r.rank], (0, 1), "check"))
    assert errors[0] == errors[1]
    assert "does not see the file seen-by-0 that rank 0 wrote there" in str(errors[0])
    (folders[1] / "seen-by-0").touch()  # as an overlay shows files of its lower layer
    for path in folders[0].iterdir():
        path.unlink()
    errors = on_both(two_ranks, lambda r: find_unseen(r, folders[r.rank], (0, 1), "check"))
    assert errors[0] == errors[1]
    assert f"{folders[0]}: " in str(errors[0])
    assert "does not see the file seen-by-1 that rank 1 wrote there" in str(errors[0])
