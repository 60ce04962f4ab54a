"""``selftest`` without engines: the directory, the report, the command."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.selftest.checks import DYING
from lightning_elastic_zero.selftest.directory_rows import SEEN, directory_rows
from lightning_elastic_zero.selftest.engine_rows import WorldReports, _world_rows, unchecked_rows
from lightning_elastic_zero.selftest.environment import Environment, file_system
from lightning_elastic_zero.selftest.report import Row, SelftestReport, report_lines
from lightning_elastic_zero.selftest.work_dir import PREFIX, usable_directory, work_dir
from lightning_elastic_zero.selftest.worker_pool import meeting_point
from lightning_elastic_zero.selftest.worker_protocol import (
    RankReport,
    Sender,
    WorldReport,
    read_report,
)
from lightning_elastic_zero.selftest.worlds import plan_worlds, ranks_started_by
from lightning_elastic_zero.storage.probe import EXCHANGE, LINKS, RENAME, SYNC_FILE, SYNC_NAMES
from tests.timeouts import HANG_TIMEOUT_S
from tests.tools._bad_disk import bad_disk, bad_disk_library

Run = Callable[..., tuple[int, str, str]]

QUICK = settings(deadline=None, max_examples=50)

PROBE = """
import json, sys
from pathlib import Path
from lightning_elastic_zero.storage.probe import probe_capabilities
rows = probe_capabilities(Path(sys.argv[1]))
print(json.dumps([[row.what, row.outcome, row.details] for row in rows]))
"""


def setting_of(directory: Path, *, launched: int = 0, gpus: int = 0, hosts: int = 1) -> Environment:
    """Return a setting on this machine."""
    return Environment(
        directory=directory,
        device="cuda" if gpus else "cpu",
        device_names=("a device",),
        hosts=hosts,
        launched=launched,
        worlds=plan_worlds(launched, gpus),
        file_system=file_system(directory),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what makes disks bad."""
    return bad_disk_library(tmp_path_factory.mktemp("bad"))


# -- the directory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number", "what", "result"),
    [
        ("rename", errno.EIO, RENAME, "FAILS"),
        ("symlink", errno.EIO, LINKS, "FAILS"),
        ("fsync", errno.EIO, SYNC_FILE, "FAILS"),
        ("renameat2", errno.EIO, EXCHANGE, "FAILS"),
        ("symlink", errno.EPERM, LINKS, "does without"),
        ("renameat2", errno.EINVAL, EXCHANGE, "does without"),
    ],
)
def test_what_a_directory_cannot_do_is_found(
    call: str, number: int, what: str, result: str, library: Path, tmp_path: Path
) -> None:
    """A call that fails is a failure by name; one that is not offered is done without."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)],
        env={**os.environ, **bad_disk(library, tmp_path, {call: number})},
        capture_output=True,
        check=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    rows = [Row(*row) for row in json.loads(done.stdout)]
    found = {row.what: row for row in rows}
    assert found[what].result == result
    assert found[what].details
    if result == "FAILS":
        assert os.strerror(number) in found[what].details
    by_fsync = {SYNC_NAMES, LINKS} if call == "fsync" else {LINKS} if call == "rename" else set()
    assert {row.what for row in rows if row.result != "holds"} <= {what, *by_fsync}


def test_a_sound_directory_holds(tmp_path: Path) -> None:
    """Nothing fails where nothing is wrong; on one host visibility between hosts is not checked."""
    rows = {row.what: row for row in directory_rows(OneRank(), tmp_path, setting_of(tmp_path))}
    assert not [row for row in rows.values() if row.result == "FAILS"]
    assert rows[RENAME].result == "holds"
    assert rows[SEEN].result == "not checked"
    assert "one host" in rows[SEEN].details


@pytest.mark.skipif(file_system(Path("/dev/shm"))[0] != "tmpfs", reason="no tmpfs is mounted")  # noqa: S108
def test_nothing_is_said_of_a_disk_where_there_is_none() -> None:
    """On tmpfs a sync is no finding: it is not checked, and does not count as held."""
    with work_dir(Path("/dev/shm")) as folder:  # noqa: S108
        rows = directory_rows(OneRank(), folder, setting_of(folder))
    found = {row.what: row for row in rows}
    for what in (SYNC_FILE, SYNC_NAMES):
        assert found[what].result == "not checked"
        assert "tmpfs is memory" in found[what].details
    assert found[RENAME].result == "holds"


def test_links_to_a_directory_are_followed(tmp_path: Path) -> None:
    """The file system is that of the directory itself, and the report shows where that is."""
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    assert usable_directory(link) == link
    assert file_system(link) == file_system(tmp_path)
    assert setting_of(link).described()["directory"] == f"{link} -> {link.resolve()}"


def test_a_users_files_stay(tmp_path: Path) -> None:
    """One folder of its own is made and removed, also after an error; nothing else is touched."""
    theirs = {name: tmp_path / name for name in ("file", "last.ckpt", f"{PREFIX}mine")}
    for name, path in theirs.items():
        path.write_text(name)
    (tmp_path / "probe-0").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with work_dir(tmp_path) as folder:
        assert folder not in before
        directory_rows(OneRank(), folder, setting_of(tmp_path))
        assert set(tmp_path.iterdir()) == {folder, *tmp_path.glob("[!z]*"), *theirs.values()}

    def fail() -> None:
        with work_dir(tmp_path) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted(tmp_path.rglob("*")) == before
    assert {path.read_text() for path in theirs.values()} == set(theirs)


# -- the command ----------------------------------------------------------------------------------


def test_a_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    """It is told in a sentence with its path and what it is, and nothing is made."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, found in (("none", "is not there"), ("file", "is no directory"), ("link", "nowhere")):
        code, out, err = run("selftest", "--dir", tmp_path / name)
        assert (code, out) == (2, "")
        assert str(tmp_path / name) in err
        assert found in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_a_directory_that_cannot_be_written(run: Run) -> None:
    """It is told in a sentence, with what the system says."""
    code, out, err = run("selftest", "--dir", "/proc/self")
    assert (code, out) == (2, "")
    assert "/proc/self" in err
    assert "cannot be written" in err or "has room for" in err
    with pytest.raises(SaveError, match="cannot be written"), work_dir(Path("/proc/self")):
        pass


def test_a_device_that_is_not_known(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed has more accelerators than are tested here: that is told, and nothing is made."""
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    code, out, err = run("selftest", "--dir", tmp_path)
    assert (code, out) == (2, "")
    assert "DS_ACCELERATOR=xpu" in err
    assert not list(tmp_path.iterdir())


def test_a_bad_disk_ends_it_early(library: Path, tmp_path: Path) -> None:
    """A directory that does not hold fails by a sentence each; engines are not tried, nor held."""
    directory = tmp_path / "disk"
    directory.mkdir()
    refused = {"rename": errno.EIO, "fsync": errno.EIO}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_elastic_zero", "selftest", "--dir", "disk", "--json"],
        env={**os.environ, **bad_disk(library, directory, refused)},
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["holds"]
    failed = [row for row in report["rows"] if row["result"] == "FAILS"]
    assert {RENAME, SYNC_FILE, SYNC_NAMES} <= {row["what"] for row in failed}
    said = done.stderr.splitlines()
    assert said == [f"{row['what']}: {row['details']}" for row in failed]
    engines = [row for row in report["rows"] if row["what"].startswith(("ZeRO", "kill", "speed"))]
    assert {row["result"] for row in engines} == {"not checked"}
    assert not list(directory.iterdir())


# -- the report -----------------------------------------------------------------------------------

ROWS = st.builds(
    Row,
    st.text(max_size=9),
    st.sampled_from(("holds", "FAILS", "does without", "measured", "not checked")),
    st.text(max_size=9),
)


@QUICK
@given(st.lists(ROWS, max_size=5))
def test_it_holds_where_nothing_fails(rows: list[Row]) -> None:
    """What was not checked, or measured, is neither held nor failed; nothing checked holds not."""
    report = SelftestReport({"torch": "2"}, tuple(rows))
    results = [row.result for row in rows]
    assert report.holds == ("FAILS" not in results and "holds" in results)
    assert len(report.failures()) == results.count("FAILS")
    assert report.to_plain()["holds"] == report.holds


@QUICK
@given(st.lists(ROWS, max_size=5))
@example([Row("\\|", "holds", "\\\\|"), Row("|", "holds", "\\")])
@example([Row("a\x00b", "holds", "\x1b[31m"), Row("\udc80", "holds", "\u202e")])
def test_a_row_is_a_line_of_the_table(rows: list[Row]) -> None:
    """Whatever is in a cell stays in it, and is read from it again: pipes, backslashes, lines."""
    lines = list(report_lines(SelftestReport({}, tuple(rows))))
    table = lines[lines.index("", 2) + 1 :]
    assert len(table) == len(rows) + 2
    for line in table:
        assert line.splitlines() == [line]
        assert line.isprintable()
        assert len(cells_of(line)) == 3
    for line, row in zip(table[2:], rows, strict=True):
        if row.what.isprintable() and row.details.isprintable():
            wanted = [" ".join(text.split()) for text in (row.what, row.result, row.details)]
            assert cells_of(line) == wanted


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table, in which a backslash escapes."""
    assert line.startswith("|")
    parts = re.findall(r"((?:\\.|[^\\|])*)\|", line[1:])
    assert sum(len(part) + 1 for part in parts) == len(line) - 1
    return [re.sub(r"\\(.)", r"\1", part).strip() for part in parts]


@pytest.mark.parametrize(("wide", "columns"), [("日本語", 6), ("e\u0301tude", 5)])
def test_columns_stand_below_each_other(wide: str, columns: int) -> None:
    """In a terminal, where some characters take two columns, and accents take none."""
    rows = (Row(wide, "holds"), Row("a longer name", "holds"))
    *_, first, second = report_lines(SelftestReport({}, rows))
    assert first.index("|", 1) - len(wide) + columns == second.index("|", 1)


def test_nothing_that_was_not_run_holds(tmp_path: Path) -> None:
    """Where no engine was made, each of their rows is not checked, with the reason."""
    nothing = _world_rows(WorldReports(), plan_worlds(2, 0))
    assert {row.result for row in nothing} == {"not checked"}
    *rows, last = unchecked_rows(setting_of(tmp_path), "because")
    assert rows
    assert {(row.result, row.details) for row in rows} == {("not checked", "because")}
    assert (last.what, last.result) == ("on GPUs", "not checked")
    assert "processors were used" in last.details


@pytest.mark.parametrize(
    ("told", "killed", "problem"),
    [
        ([{"a": ""}, {"a": ""}], None, ""),
        ([{"a": ""}, {}], None, None),
        ([{"a": ""}, {}], 1, ""),
        ([{}, {}], 1, None),
        ([{"a": ""}, {"a": "wrong"}], None, "rank 1: wrong"),
        ([{"a": "wrong"}, {}], None, "rank 0: wrong"),
        ([{}], 0, None),
    ],
)
def test_a_check_holds_where_all_ranks_tell_so(
    told: list[dict[str, str]], killed: int | None, problem: str | None
) -> None:
    """A rank that told nothing is no rank for which it held, but for one that was to be killed."""
    ranks = tuple(RankReport(rank, problems) for rank, problems in enumerate(told))
    assert WorldReport(ranks, killed).problem("a") == problem


def test_an_end_that_was_not_meant_is_reported() -> None:
    """Only the rank that was to die may, only by SIGKILL, in the save that it told of."""
    kill, crash = "its process ended by signal 9", "its process ended by exit code 1"
    good = RankReport(0, {"good": "", DYING: ""}, ended=kill)
    assert not WorldReport((good,), 0).unfinished()
    assert WorldReport((good,), None).unfinished() == {0: kill}
    assert WorldReport((RankReport(0, {DYING: ""}, ended=kill),), 0).unfinished() == {0: kill}
    assert WorldReport((RankReport(0, {"good": ""}, ended=kill),), 0).unfinished() == {0: kill}
    assert WorldReport((replace(good, ended=crash),), 0).unfinished() == {0: crash}


def test_what_a_killed_worker_told_counts(tmp_path: Path) -> None:
    """Lines that were told are kept, in order; one that a kill has cut is none."""
    file = tmp_path / "told"
    with file.open("wb") as opened:
        sender = Sender(opened.fileno(), 1)
        sender.checked("a")
        sender.saved("b", {"c": "d"})
        sender.measured("e", 0.5)
        opened.write(b'["problems", "cut')
    report = read_report(file.read_bytes(), 1, "by signal 9")
    assert report == RankReport(1, {"a": ""}, {"b": {"c": "d"}}, {"e": 0.5}, False, "by signal 9")
    finished = read_report(b'["finished", "", true]\n', 1, "exit code 0")
    assert finished.finished
    assert not finished.ended


# -- worlds ---------------------------------------------------------------------------------------


def test_the_port_of_a_world_is_kept_for_it() -> None:
    """Nobody else gets it while workers are still importing; a store that is told it listens."""
    with ExitStack() as held:
        address, port = meeting_point(1, held)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore(address, port, 1, is_master=True)
        store.set("a", "b")
        assert TCPStore(address, port, 1, is_master=False).get("a") == b"b"
        del store


@QUICK
@given(st.integers(1, 64))
def test_each_rank_is_started_once(launched: int) -> None:
    """By torchrun's ranks together, or by the one process; a device has one rank at most."""
    worlds = plan_worlds(launched, 0)
    for size in (worlds.saves, worlds.loads, worlds.returns):
        assert 1 <= size <= launched
        started = Counter(r for s in range(launched) for r in ranks_started_by(s, launched, size))
        assert started == Counter(range(size))
        assert list(ranks_started_by(0, 1, size)) == list(range(size))


@pytest.mark.parametrize("gpus", [0, 1, 2, 16])
def test_the_number_of_devices_changes_where_it_can(gpus: int) -> None:
    """With one GPU it cannot, and that is said; without any there are 2, 3 and 1 processes."""
    worlds = plan_worlds(0, gpus)
    assert worlds.changes == (gpus != 1)
    rows = unchecked_rows(setting_of(Path.cwd(), gpus=gpus), "because")
    assert ("another number of devices" in {row.what for row in rows}) == (gpus == 1)
    assert ("on processors" in {row.what for row in rows}) == (gpus > 0)
