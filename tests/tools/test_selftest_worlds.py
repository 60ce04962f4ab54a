"""``selftest`` as users start it: real engines, alone, under torchrun, broken and stopped."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.selftest import worker_pool
from lightning_elastic_zero.selftest.directory_rows import SEEN, directory_rows
from lightning_elastic_zero.selftest.report import Row
from lightning_elastic_zero.selftest.run import run_selftest
from lightning_elastic_zero.selftest.work_dir import PREFIX
from lightning_elastic_zero.storage.probe import EXCHANGE, LINKS
from tests.engine._worker_pool import environment
from tests.ports import free_port
from tests.timeouts import HANG_TIMEOUT_S
from tests.tools import _selftest_worker, _slow_removal
from tests.tools._bad_disk import bad_disk, bad_disk_library
from tests.tools.test_selftest import setting_of

SELFTEST = [sys.executable, "-m", "lightning_elastic_zero", "selftest"]
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def started(
    command: list[str], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Start a command as a process group of its own; none of it outlives the context."""
    kept = {k: v for k, v in environment().items() if k not in LAUNCHED} | dict(variables)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=kept,
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


def rows_of(out: str) -> list[Row]:
    """Return the rows of a printed table."""
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    table = [[cell.strip() for cell in row] for row in cells if len(row) == 3]
    return [Row(*row) for row in table[1:]]  # type: ignore[arg-type]


def assert_held(rows: list[Row], saves: int, loads: int) -> None:
    """Fail unless all that engines can show here was shown."""
    found = {row.what: row.result for row in rows}
    assert "FAILS" not in found.values()
    figures = [row for row in rows if row.what.startswith(("speed: ", "background: "))]
    assert len(figures) == 4
    assert len({row.result for row in figures}) == 1
    if figures[0].result != "measured":  # A busy disk is no failure, here neither.
        assert re.search("only .* in 60 s|without progress", figures[0].details), figures
    unchecked = {what for what, result in found.items() if result == "not checked"}
    unchecked -= {row.what for row in figures}
    assert unchecked <= {SEEN, "on GPUs", "directory: sync of files", "directory: sync of names"}
    assert {"on GPUs", SEEN} <= unchecked
    for stage in range(4):
        for mode in ("blocking", "background"):
            assert found[f"ZeRO-{stage}, {mode}, {saves} -> {loads}"] == "holds"
    assert sum(what.startswith("kill: ") for what in found) == 5


@pytest.mark.long
def test_it_holds_alone(tmp_path: Path) -> None:
    """On 2, 3 and 1 processes, in a directory by a relative path and a link; only a table is left.

    A user's files that are there stay, and no other comes.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    theirs = tmp_path / "real" / "raw-0-0"
    theirs.write_text("a user's")
    with started([*SELFTEST, "--dir", "link"], tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert_held(rows_of(out), 2, 3)
    assert f"{tmp_path / 'link'} -> {(tmp_path / 'real').resolve()}" in out
    assert list((tmp_path / "real").iterdir()) == [theirs]
    assert theirs.read_text() == "a user's"


@pytest.mark.long
def test_it_holds_where_names_are_neither_exchanged_nor_linked(tmp_path: Path) -> None:
    """As on exFAT: both are done without, all else holds, and the exit code is 0."""
    disk = tmp_path / "disk"
    disk.mkdir()
    refused = {"renameat2": errno.EINVAL, "symlink": errno.EPERM, "link": errno.EPERM}
    variables = bad_disk(bad_disk_library(tmp_path), disk, refused)
    with started([*SELFTEST, "--dir", str(disk)], tmp_path, variables) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    rows = rows_of(out)
    assert_held(rows, 2, 3)
    assert [row.what for row in rows if row.result == "does without"] == [EXCHANGE, LINKS]
    assert not list(disk.iterdir())


@pytest.mark.long
def test_it_holds_under_torchrun(tmp_path: Path) -> None:
    """Each rank starts one of every world; rank 0 alone prints, and no launched rank is killed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launch += [f"--master-port={free_port()}", *SELFTEST[1:], "--dir", str(tmp_path)]
    with started(launch, tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode == 0, err
    assert out.count("### lightning-elastic-zero selftest: holds here") == 1
    assert "2 ranks by a launcher" in out
    assert_held(rows_of(out), 2, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_it_holds_under_two_agents(tmp_path: Path) -> None:
    """Of two nodes, each with an address of its own: one table, printed by the node of rank 0."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--master-addr=127.0.0.2", f"--master-port={free_port()}"]
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*SELFTEST[1:], "--dir", str(disk)]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        agents = [
            stack.enter_context(
                started(
                    [*launch, f"--node-rank={n}", f"--local-addr=127.0.0.{n + 2}", *command],
                    tmp_path,
                )
            )
            for n in range(2)
        ]
        said = list(pool.map(lambda agent: agent.communicate(timeout=HANG_TIMEOUT_S), agents))
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [out.count("selftest: holds here") for out, _ in said] == [1, 0]
    assert_held(rows_of(said[0][0]), 2, 1)
    assert not list(disk.iterdir())


@pytest.mark.long
def test_a_failure_under_torchrun_is_told(tmp_path: Path) -> None:
    """What fails is printed, and nothing stays, though removing takes longer than ranks are given.

    torchrun ends all ranks as soon as one of them has ended with an error.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launch += [f"--master-port={free_port()}", "-m", _slow_removal.__name__, *SELFTEST[3:]]
    launch += ["--dir", str(tmp_path), "--timeout", "0.5"]
    with started(launch, tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode == 1
    assert out.count("### lightning-elastic-zero selftest: DOES NOT HOLD here: 3 of") == 1
    assert err.count("its process did not end in time, and was killed") == 3
    assert "interrupted" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_broken_load_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one rank's state fails the row of its checkpoint, by the parameter, and no other.

    What the processes did not come to is not checked, and does not hold.
    """
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker_pool, "WORKER", _selftest_worker.__name__)
    report = run_selftest(tmp_path)
    assert not report.holds
    found = {row.what: row for row in report.rows}
    assert [row.what for row in report.rows if row.result == "FAILS"] == [
        "ZeRO-1, background, 2 -> 3"
    ]
    (sentence,) = report.failures()
    assert "1 of 30 differ: exp_avg of " in sentence
    assert found["ZeRO-1, blocking, 2 -> 3"].result == "holds"
    assert found["ZeRO-2, blocking, 2 -> 3"].result == "not checked"
    assert found["kill: the other ranks are told"].result == "not checked"
    assert not list(tmp_path.iterdir())


def test_what_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that takes longer than it may is reported as such; nothing of it stays, or holds."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    before = set(psutil.Process().children(recursive=True))
    report = run_selftest(tmp_path, world_timeout_s=0.01)
    assert not report.holds
    failed = [row for row in report.rows if row.result == "FAILS"]
    assert {row.what.split(",")[0] for row in failed} == {"processes"}
    assert len(failed) == 3
    assert all("did not end in time, and was killed" in row.details for row in failed)
    held = {row.what for row in report.rows if row.result == "holds"}
    assert not [what for what in held if not what.startswith("directory")]
    assert not list(tmp_path.iterdir())
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """In the midst of its worlds: all processes end, and what was written is removed.

    Where it is killed nothing can be removed; the folder's name says what it is.
    """
    with started([*SELFTEST, "--dir", str(tmp_path)], tmp_path) as process:
        ranks = _workers_that_save(process, tmp_path)
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
        psutil.wait_procs(ranks, timeout=HANG_TIMEOUT_S)
        assert not [rank for rank in ranks if rank.is_running()]
    left = [path.name for path in tmp_path.iterdir()]
    if number == signal.SIGKILL:
        assert [name[: len(PREFIX)] for name in left] == [PREFIX]
    else:
        assert (process.returncode, out) == (2, "")
        assert "interrupted" in err
        assert not left


def _workers_that_save(process: subprocess.Popen[str], folder: Path) -> list[psutil.Process]:
    """Wait until a checkpoint is published; return the processes that save."""
    while not list(folder.glob(f"{PREFIX}*/*.ckpt")):
        assert process.poll() is None
        time.sleep(0.05)
    found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    assert len(found) >= 2
    return found


@pytest.mark.long
def test_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    """Ranks that have another directory under the same path are told, with what to do."""
    store, times = HashStore(), Timeouts()
    folders = [tmp_path / name / "folder" for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
    with ExitStack() as opened, ThreadPoolExecutor(2) as threads:
        ranks = [StoreRanks(store, rank, 2, name="a", times=times) for rank in range(2)]
        for of_rank in ranks:
            opened.callback(of_rank.close)
        setting = setting_of(tmp_path, launched=2, hosts=2)
        pairs = zip(ranks, folders, strict=True)
        told = [threads.submit(directory_rows, r, f, setting) for r, f in pairs]
        found = [future.result(timeout=HANG_TIMEOUT_S) for future in told]
    assert found[0] == found[1]
    (row,) = found[0]
    assert (row.what, row.result) == (SEEN, "FAILS")
    assert "does not see the directory that rank 0 made" in row.details
