"""``selftest``: its report, and real engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lightning_elastic_zero import SaveError, run_selftest, selftest
from lightning_elastic_zero.checkpoint.directory_check import scratch_folder
from lightning_elastic_zero.selftest import (
    BACKGROUND,
    BLOCKING,
    FINISHED,
    PREFIX,
    Record,
    Row,
    SelftestReport,
    rows_of,
    world_sizes,
)
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import environment
from tests.tools._selftest_worker import broken_rank

Run = Callable[..., tuple[int, str, str]]

SELFTEST = [sys.executable, "-m", "lightning_elastic_zero", "selftest"]
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_an_unusable_directory_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path, problem in (
        (tmp_path / "none", "is not a directory"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "link", "is not a directory"),
        (Path("/proc/self"), "cannot be written"),
    ):
        code, out, err = run("selftest", "--dir", path)
        assert (code, out) == (2, "")
        assert str(path) in err
        assert re.search(problem, err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    with pytest.raises(SaveError, match="cannot be written"), scratch_folder(Path("/proc"), "x"):
        pass


def test_an_unsupported_device_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    code, out, err = run("selftest", "--dir", tmp_path)
    assert (code, out) == (2, "")
    assert "DS_ACCELERATOR=xpu" in err
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_launcher_are_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run("selftest", "--dir", tmp_path)
    assert (code, out) == (2, "")
    assert "selftest starts its own ranks" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpus", "sizes"), [(0, (2, 3)), (1, (1, 1)), (2, (2, 1)), (16, (8, 7))])
def test_the_number_of_devices_changes_if_it_can(gpus: int, sizes: tuple[int, int]) -> None:
    assert world_sizes(gpus) == sizes


def test_a_report_holds_if_every_check_holds() -> None:
    good, bad, unknown = Row("a", "holds"), Row("b", "FAILS", "no\nreason"), Row("c", "not checked")
    for rows, holds in (((good,), True), ((good, bad), False), ((good, unknown), False)):
        report = SelftestReport({"torch": "2"}, rows)
        assert report.holds == holds == report.to_plain()["holds"]
        assert len(report.failures()) == rows.count(bad)
    assert list(SelftestReport({"torch": "2"}, (good, bad)).lines()) == [
        "### lightning-elastic-zero selftest: FAILS",
        *("```", "torch  2", "", "a  holds", "b  FAILS  no reason", "```"),
    ]


def test_nothing_holds_without_records() -> None:
    assert {row.result for row in rows_of([], 2, 3)} == {"not checked"}


@pytest.mark.parametrize(
    ("records", "result", "details"),
    [
        ([(0, ""), (1, ""), (2, "")], "holds", ""),
        ([(0, ""), (1, "")], "not checked", "did not get that far"),
        ([(0, ""), (1, "wrong"), (2, "")], "FAILS", "rank 1: wrong"),
        ([(2, "wrong")], "FAILS", "rank 2: wrong"),
        ([(1, "wrong"), (2, "other")], "FAILS", "rank 1 (and 1 other ranks): wrong"),
    ],
)
def test_a_check_holds_if_all_ranks_record_success(
    records: list[tuple[int, str]], result: str, details: str
) -> None:
    recorded = [Record(rank, BLOCKING[1], problem) for rank, problem in records]
    (row,) = [row for row in rows_of(recorded, 2, 3) if row.what == BLOCKING[1]]
    assert row.result == result
    assert details in row.details


@contextmanager
def started(folder: Path, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command in its own process group, which ends with the context."""
    process = subprocess.Popen(
        [*SELFTEST, "--dir", str(directory), "--json"],
        cwd=folder,
        env={k: v for k, v in environment().items() if k not in LAUNCHED},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    below = psutil.Process(process.pid)
    try:
        yield process
    finally:
        for worker in below.children(recursive=True) if process.poll() is None else []:
            worker.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
def test_selftest_holds(tmp_path: Path) -> None:
    """On 2 and 3 processes, through a relative path and a link; a user's files are kept."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    theirs = tmp_path / "real" / "save-0.log"
    theirs.write_text("a user's")
    with started(tmp_path, Path("link")) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    rows = [Row(**row) for row in json.loads(out)["rows"]]
    checks = {*BLOCKING.values(), *BACKGROUND.values(), *FINISHED.values()}
    assert {row.what for row in rows if row.result == "holds"} == checks
    assert "2 save, 3 load" in out
    assert f"{tmp_path / 'link'}, which is {(tmp_path / 'real').resolve()} on " in out
    assert list((tmp_path / "real").iterdir()) == [theirs]
    assert theirs.read_text() == "a user's"


@pytest.mark.long
@pytest.mark.usefixtures("not_launched")
def test_a_wrong_bit_fails_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_run_rank", broken_rank)
    report = run_selftest(tmp_path)
    assert not report.holds
    found = {row.what: row for row in report.rows}
    failed = [row.what for row in report.rows if row.result == "FAILS"]
    assert failed == [BACKGROUND[1]]
    (sentence,) = report.failures()
    assert re.search("1 of [0-9]+ values differ from the saved state: exp_avg of ", sentence)
    assert found[BLOCKING[1]].result == "holds"
    assert found[BLOCKING[2]].result == "not checked"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("not_launched")
def test_a_hanging_world_is_killed(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    report = run_selftest(tmp_path, timeout_s=0.01)
    assert not report.holds
    failed = {row.what: row.details for row in report.rows if row.result == "FAILS"}
    assert set(failed) == {*FINISHED.values()}
    assert "did not finish in time, and was killed" in failed[FINISHED["load"]]
    assert "holds" not in {row.result for row in report.rows}
    assert not list(tmp_path.iterdir())
    remaining = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in remaining if "resource_tracker" not in " ".join(p.cmdline())]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_end_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, tmp_path) as process:
        while not list(tmp_path.glob(f"{PREFIX}*/*.ckpt")):
            assert process.poll() is None
            time.sleep(0.05)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
        psutil.wait_procs(ranks, timeout=HANG_TIMEOUT_S)
        assert not [rank for rank in ranks if rank.is_running()]
    remaining = [path.name for path in tmp_path.iterdir()]
    if number == signal.SIGKILL:
        assert [name[: len(PREFIX)] for name in remaining] == [PREFIX]
    else:
        assert (process.returncode, out) == (2, "")
        assert "interrupted" in err
        assert not remaining
