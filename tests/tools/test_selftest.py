"""``selftest``: its directory checks, its report, and real engines, alone and under torchrun."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from hypothesis import settings
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero import SaveError, run_selftest, selftest
from lightning_elastic_zero.checkpoint.directory_check import (
    EXCHANGE,
    LINKS,
    RENAME,
    SYNC_FILE,
    SYNC_NAMES,
    scratch_folder,
)
from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.selftest import (
    BACKGROUND,
    BLOCKING,
    FINISHED,
    INTACT,
    NEXT_SAVE,
    OTHERS_RAISE,
    PREFIX,
    SEEN,
    SPEED,
    Job,
    Record,
    Row,
    SelftestReport,
    directory_rows,
    rows_of,
    world_sizes,
)
from tests.support.processes import HANG_TIMEOUT_S, free_port, output_of
from tests.support.ranks import ROOT, environment
from tests.tools._selftest_worker import broken_rank

Run = Callable[..., tuple[int, str, str]]

QUICK = settings(deadline=None, max_examples=50)
SELFTEST = [sys.executable, "-m", "lightning_elastic_zero", "selftest"]
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_python(program: str, *args: str, **variables: str) -> str:
    return output_of((sys.executable, "-c", program, *args), ROOT, {**os.environ, **variables})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that makes calls to a disk fail."""
    return compiled(Path(__file__).with_name("bad_disk.c"), tmp_path_factory.mktemp("bad"))


def compiled(source: Path, folder: Path) -> Path:
    """Compile a library for LD_PRELOAD from C; skip without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a library for LD_PRELOAD needs a C compiler")
    library = folder / f"{source.stem}.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=HANG_TIMEOUT_S)
    return library


def bad_disk(library: Path, directory: Path, refused: Mapping[str, int]) -> dict[str, str]:
    """Return the environment of a process for which calls fail below a directory."""
    calls = ",".join(f"{call}={number}" for call, number in refused.items())
    return {"LD_PRELOAD": str(library), "BAD_DISK": str(directory), "BAD_CALLS": calls}


# -- the directory --------------------------------------------------------------------------------

PROBE = """
import json, sys
from pathlib import Path
from lightning_elastic_zero.checkpoint.directory_check import probe_capabilities
rows = probe_capabilities(Path(sys.argv[1]))
print(json.dumps([[row.what, row.outcome, row.details] for row in rows]))
"""


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
def test_a_failing_call_fails_its_row_and_a_missing_one_is_worked_around(
    call: str, number: int, what: str, result: str, library: Path, tmp_path: Path
) -> None:
    refused = bad_disk(library, tmp_path, {call: number})
    rows = [Row(*row) for row in json.loads(run_python(PROBE, str(tmp_path), **refused))]
    found = {row.what: row for row in rows}
    assert found[what].result == result
    assert found[what].details
    if result == "FAILS":
        assert os.strerror(number) in found[what].details
    by_fsync = {SYNC_NAMES, LINKS} if call == "fsync" else {LINKS} if call == "rename" else set()
    assert {row.what for row in rows if row.result != "holds"} <= {what, *by_fsync}


def test_a_good_directory_holds(tmp_path: Path) -> None:
    rows = {row.what: row for row in directory_rows(OneRank(), tmp_path, hosts=1)}
    assert "FAILS" not in {row.result for row in rows.values()}
    assert rows[RENAME].result == "holds"
    assert rows[SEEN].result == "not checked"


def test_a_users_files_are_kept(tmp_path: Path) -> None:
    theirs = {name: tmp_path / name for name in ("file", "last.ckpt", f"{PREFIX}mine")}
    for name, path in theirs.items():
        path.write_text(name)
    (tmp_path / "probe-0").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with scratch_folder(tmp_path, PREFIX) as folder:
        directory_rows(OneRank(), folder, hosts=1)
        assert set(tmp_path.iterdir()) == {folder, *tmp_path.glob("[!z]*"), *theirs.values()}
    assert sorted(tmp_path.rglob("*")) == before
    assert {path.read_text() for path in theirs.values()} == set(theirs)


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


def test_a_bad_disk_ends_the_selftest_early(library: Path, tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    refused = {"rename": errno.EIO, "fsync": errno.EIO}
    done = subprocess.run(
        [*SELFTEST, "--dir", "disk", "--json"],
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
    assert not [row for row in report["rows"] if not row["what"].startswith("directory")]
    failed = [row for row in report["rows"] if row["result"] == "FAILS"]
    assert {RENAME, SYNC_FILE, SYNC_NAMES} <= {row["what"] for row in failed}
    assert done.stderr.splitlines() == [f"{row['what']}: {row['details']}" for row in failed]
    assert not list(directory.iterdir())


# -- devices and launchers ------------------------------------------------------------------------


def test_an_unsupported_device_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    code, out, err = run("selftest", "--dir", tmp_path)
    assert (code, out) == (2, "")
    assert "DS_ACCELERATOR=xpu" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("launched", "gpus", "sizes"),
    [
        *((0, 0, (2, 3)), (0, 1, (1, 1)), (0, 2, (2, 1))),
        *((0, 16, (8, 7)), (1, 0, (1, 1)), (5, 0, (5, 4))),
    ],
)
def test_the_number_of_devices_changes_if_it_can(
    launched: int, gpus: int, sizes: tuple[int, int]
) -> None:
    assert world_sizes(launched, gpus) == sizes


SIGNALS = """
import signal
from lightning_elastic_zero.selftest import _interruptible

signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run under nohup
signal.signal(signal.SIGHUP, signal.SIG_DFL)
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
before = [signal.getsignal(number) for number in numbers]
for number in numbers:
    with _interruptible():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            print("interrupted")
        for later in numbers:
            signal.raise_signal(later)
    with _interruptible() as ignore_signals:
        ignore_signals()
        signal.raise_signal(number)
assert [signal.getsignal(number) for number in numbers] == before
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with _interruptible():
    signal.raise_signal(signal.SIGHUP)
"""


def test_signals_interrupt_once() -> None:
    """Nohup's SIGHUP is kept."""
    assert run_python(SIGNALS).split() == ["interrupted"] * 3


# -- the report -----------------------------------------------------------------------------------


def test_a_report_holds_if_nothing_failed_and_something_was_checked() -> None:
    good, bad, unknown = Row("a", "holds"), Row("b", "FAILS", "no\nreason"), Row("c", "not checked")
    for rows, holds in (((good, unknown), True), ((good, bad), False), ((unknown,), False)):
        report = SelftestReport({"torch": "2"}, rows)
        assert report.holds == holds == report.to_plain()["holds"]
        assert len(report.failures()) == rows.count(bad)
    assert list(SelftestReport({"torch": "2"}, (good, bad)).lines()) == [
        "### lightning-elastic-zero selftest: FAILS (1 checks)",
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
    recorded = [Record(rank, INTACT, problem) for rank, problem in records]
    (row,) = [row for row in rows_of(recorded, 2, 3) if row.what == INTACT]
    assert row.result == result
    assert details in row.details


def test_records_survive_a_kill(tmp_path: Path) -> None:
    job = Job("save", 2, "cpu", tmp_path, 1.0, rank=1)
    job.put("a", value={"c": "d"})
    with job.failures_of("b"):
        (tmp_path / "missing").rmdir()
    *records, failed, ended = selftest.read_records(job, 0)
    assert records == [Record(1, "a", "", {"c": "d"})]
    assert (failed.rank, failed.check) == (1, "b")
    assert failed.problem.startswith("FileNotFoundError: ")
    assert ended == Record(1, FINISHED["save"])
    other = Job("save", 2, "cpu", tmp_path, 1.0, rank=0)
    ended = Record(0, FINISHED["save"], "its process ended with exit code 1")
    assert selftest.read_records(other, 1) == [ended]


# -- real engines ---------------------------------------------------------------------------------


@contextmanager
def started(
    command: list[str], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own process group, which ends with the context."""
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


@pytest.fixture
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def assert_held(out: str) -> list[Row]:
    """Check the report that was printed as JSON; return its rows."""
    rows = [Row(**row) for row in json.loads(out)["rows"]]
    found = {row.what: row.result for row in rows}
    assert "FAILS" not in found.values(), rows
    assert found[SPEED] == "measured"
    assert {what for what, result in found.items() if result == "not checked"} == {SEEN}
    engines = {*BLOCKING.values(), *BACKGROUND.values(), OTHERS_RAISE, INTACT, NEXT_SAVE}
    assert {found[what] for what in engines} == {"holds"}
    return rows


@pytest.mark.long
def test_selftest_holds_alone(tmp_path: Path) -> None:
    """On 2 and 3 processes, through a relative path and a link; a user's files are kept."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    theirs = tmp_path / "real" / "raw-0-0"
    theirs.write_text("a user's")
    with started([*SELFTEST, "--dir", "link", "--json"], tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert_held(out)
    assert "2 save, 3 load" in out
    assert f"{tmp_path / 'link'}, which is {(tmp_path / 'real').resolve()} on " in out
    assert list((tmp_path / "real").iterdir()) == [theirs]
    assert theirs.read_text() == "a user's"


@pytest.mark.long
def test_selftest_holds_without_exchanges_and_links(library: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    refused = {"renameat2": errno.EINVAL, "symlink": errno.EPERM, "link": errno.EPERM}
    variables = bad_disk(library, disk, refused)
    with started([*SELFTEST, "--dir", str(disk), "--json"], tmp_path, variables) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    rows = assert_held(out)
    assert [row.what for row in rows if row.result == "does without"] == [EXCHANGE, LINKS]
    assert not list(disk.iterdir())


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, *SELFTEST[1:]]


@pytest.mark.long
def test_selftest_holds_under_torchrun(tmp_path: Path) -> None:
    launch = torchrun("--nproc-per-node=2", f"--master-port={free_port()}")
    with started([*launch, "--dir", str(tmp_path), "--json"], tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode == 0, err
    assert "2 save, 1 load, on 1 hosts, started by a launcher" in out
    assert_held(out)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_selftest_holds_under_two_agents(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    node = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.2")
    port = free_port()
    commands = [
        torchrun(
            *node, f"--master-port={port}", f"--node-rank={n}", f"--local-addr=127.0.0.{n + 2}"
        )
        for n in range(2)
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        agents = [
            stack.enter_context(started([*command, "--dir", str(disk), "--json"], tmp_path))
            for command in commands
        ]
        outputs = list(pool.map(lambda agent: agent.communicate(timeout=HANG_TIMEOUT_S), agents))
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert not outputs[1][0]
    assert_held(outputs[0][0])
    assert not list(disk.iterdir())


@pytest.mark.long
def test_a_failure_under_torchrun_is_printed(tmp_path: Path) -> None:
    launch = torchrun("--nproc-per-node=2", f"--master-port={free_port()}")
    with started([*launch, "--dir", str(tmp_path), "--timeout", "0.5"], tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode == 1
    assert out.count("### lightning-elastic-zero selftest: FAILS") == 1
    assert err.count("did not finish in time, and was killed") == 2
    assert "interrupted" not in err
    assert not list(tmp_path.iterdir())


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
    assert set(failed) == {*FINISHED.values(), OTHERS_RAISE}
    assert "did not finish in time, and was killed" in failed[FINISHED["load"]]
    assert "was not killed while it saved" in failed[OTHERS_RAISE]
    held = {row.what for row in report.rows if row.result == "holds"}
    assert not [what for what in held if not what.startswith("directory")]
    assert not list(tmp_path.iterdir())
    remaining = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in remaining if "resource_tracker" not in " ".join(p.cmdline())]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    with started([*SELFTEST, "--dir", str(tmp_path)], tmp_path) as process:
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


@pytest.mark.long
def test_a_directory_that_is_not_shared_fails(tmp_path: Path) -> None:
    store, times = HashStore(), Timeouts()
    folders = [tmp_path / name / "folder" for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
    with ExitStack() as opened, ThreadPoolExecutor(2) as threads:
        ranks = [StoreRanks(store, rank, 2, name="a", times=times) for rank in range(2)]
        for of_rank in ranks:
            opened.callback(of_rank.close)
        pairs = zip(ranks, folders, strict=True)
        futures = [threads.submit(directory_rows, r, f, hosts=2) for r, f in pairs]
        found = [future.result(timeout=HANG_TIMEOUT_S) for future in futures]
    assert found[0] == found[1]
    (row,) = found[0]
    assert (row.what, row.result) == (SEEN, "FAILS")
    assert "does not see the file seen-by-0 that rank 0 wrote there" in row.details
