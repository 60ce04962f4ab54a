"""Runs that save into one folder detect each other, and ignore runs that have ended."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_elastic_zero.storage import writers as concurrent_runs
from lightning_elastic_zero.storage.writers import (
    DEAD_AFTER_S,
    RUN_MARKER_PREFIX,
    ConcurrentRunMonitor,
    ProcessIdentity,
)
from tests.support.processes import HANG_TIMEOUT_S, wait_until

CHILD = """
import sys
from lightning_elastic_zero.storage.writers import ConcurrentRunMonitor
monitor = ConcurrentRunMonitor(sys.argv[1:])
monitor.begin()
print("in", flush=True)
for _ in sys.stdin:
    monitor.look()
    print("looked", flush=True)
monitor.end()
"""


@contextmanager
def another_run(*folders: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    call = [sys.executable, "-c", CHILD, *map(str, folders)]
    with subprocess.Popen(call, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "in\n"
        try:
            yield child
        finally:
            child.kill()


def markers(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{RUN_MARKER_PREFIX}*"))


def leave_marker(folder: Path, owner: ProcessIdentity) -> Path:
    path = folder / f"{RUN_MARKER_PREFIX}{owner.pid}.json"
    path.write_bytes(owner.to_json())
    return path


def test_a_live_run_is_named_once_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = ConcurrentRunMonitor([tmp_path, str(tmp_path), None])
    ours.begin()
    assert len(markers(tmp_path)) == 1
    with another_run(tmp_path) as child:
        for _ in range(3):
            ours.look()
        assert len(markers(tmp_path)) == 2
        assert child.stdin is not None
        output, warnings = child.communicate("look\nlook\n")
        assert output == "looked\nlooked\n"
    host = os.uname().nodename
    (record,) = caplog.records
    assert f"(process {child.pid} on {host}) saves into {tmp_path}." in record.getMessage()
    assert warnings.count(f"(process {os.getpid()} on {host})") == 1
    ours.end()
    ours.end()
    assert not list(tmp_path.iterdir())


def test_runs_that_begin_together_warn_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrent_runs, "TOUCH_INTERVAL_S", 2 * HANG_TIMEOUT_S)
    folder = tmp_path / "later"
    ours = ConcurrentRunMonitor([folder])
    ours.begin()
    with another_run(folder) as child:
        folder.mkdir()
        ours.look_soon()
        wait_until(lambda: markers(folder))
        assert child.stdin is not None
        assert child.stdout is not None
        print("look", file=child.stdin, flush=True)
        assert child.stdout.readline() == "looked\n"
        ours.look_soon()
        wait_until(lambda: caplog.records)
        _, warnings = child.communicate()
    (record,) = caplog.records
    assert f"(process {child.pid} on " in record.getMessage()
    assert "Give each run its own dirpath" in record.getMessage()
    assert warnings.count(f"process {os.getpid()} on") == 1
    ours.end()
    assert not markers(folder)


def assert_removed_silently(marker: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that the next run removes the marker of a dead run, without a warning."""
    ours = ConcurrentRunMonitor([marker.parent])
    ours.look()
    assert marker not in markers(marker.parent)
    ours.end()
    assert not list(marker.parent.iterdir())
    assert not caplog.records


def test_a_killed_run_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with another_run(tmp_path):
        (marker,) = markers(tmp_path)
    assert marker.exists()
    assert_removed_silently(marker, caplog)


def test_a_second_fit_of_one_process_is_not_another_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    first, second = (
        ConcurrentRunMonitor([tmp_path / "a"]),
        ConcurrentRunMonitor([tmp_path / "link", tmp_path]),
    )
    for monitor in (first, second, first):
        monitor.look()
    first.end()
    second.end()
    assert not caplog.records
    assert not markers(tmp_path)
    assert not markers(tmp_path / "a")


ELSEWHERE = replace(ProcessIdentity.of_this_process("a"), machine="node7 boot pid:[1]", pid=77)


def test_another_machines_run_is_alive_if_its_marker_is_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = leave_marker(tmp_path, ELSEWHERE)
    ours = ConcurrentRunMonitor([tmp_path])
    for _ in range(3):
        ours.look()
    assert not caplog.records
    os.utime(marker)
    for _ in range(3):
        ours.look()
    (record,) = caplog.records
    assert f"(process 77 on node7) saves into {tmp_path}." in record.getMessage()
    ours.end()
    assert markers(tmp_path) == [marker]


def test_another_machines_silent_run_is_dead_after_half_an_hour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = leave_marker(tmp_path, ELSEWHERE)
    long_ago = marker.stat().st_mtime - DEAD_AFTER_S - 60
    os.utime(marker, (long_ago, long_ago))
    assert_removed_silently(marker, caplog)


def test_foreign_files_with_the_name_of_a_marker_are_kept(tmp_path: Path) -> None:
    mine = {
        f"{RUN_MARKER_PREFIX}mine.json": "the user's only one",
        f"{RUN_MARKER_PREFIX}list.json": json.dumps([1]),
    }
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    (tmp_path / f"{RUN_MARKER_PREFIX}folder.json").mkdir()
    real = tmp_path / "real.json"
    real.write_bytes(replace(ProcessIdentity.of_this_process("a"), pid=2**22 + 1).to_json())
    (tmp_path / f"{RUN_MARKER_PREFIX}link.json").symlink_to(real)
    before = {path.name for path in tmp_path.iterdir()}
    ours = ConcurrentRunMonitor([tmp_path])
    ours.look()
    (own,) = {path.name for path in tmp_path.iterdir()} - before
    (tmp_path / own).write_text("a user has written into it")
    ours.end()
    assert {path.name for path in tmp_path.iterdir()} == before | {own}
    assert {name: (tmp_path / name).read_text() for name in mine} == mine


def test_a_marker_is_written_once_the_folder_exists(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    ours = ConcurrentRunMonitor([folder, "s3://bucket/run"])
    ours.look()
    assert not folder.exists()
    folder.mkdir()
    ours.look()
    assert len(markers(folder)) == 1
    ours.end()
    ours.look()
    assert not markers(folder)


def test_an_unwritable_folder_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    ours = ConcurrentRunMonitor([tmp_path / "file" / "below", "/proc/self"])
    ours.begin()
    ours.end()
    assert not caplog.records


def test_a_copied_monitor_does_not_affect_the_marker(tmp_path: Path) -> None:
    ours = ConcurrentRunMonitor([tmp_path])
    ours.begin()
    other = copy.deepcopy(ours)
    other.begin()
    other.end()
    assert len(markers(tmp_path)) == 1
    ours.end()
