"""``selftest``: its directory checks, its report, and real engines, alone and under torchrun."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
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
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero import SaveError, UnsupportedError, run_selftest, selftest
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
    INTACT,
    NEXT_SAVE,
    OTHERS_RAISE,
    PREFIX,
    SEEN,
    SPEED,
    Job,
    Record,
    Results,
    Row,
    SelftestReport,
    Setting,
    device_name,
    directory_rows,
    file_system,
    meeting_point,
    rows_of,
    usable,
    world_sizes,
)
from tests.support.processes import HANG_TIMEOUT_S, free_port, output_of
from tests.support.ranks import ROOT, environment
from tests.support.slow_disk import SlowDisk
from tests.tools._selftest_worker import broken_rank

Run = Callable[..., tuple[int, str, str]]

QUICK = settings(deadline=None, max_examples=50)
SELFTEST = [sys.executable, "-m", "lightning_elastic_zero", "selftest"]
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def setting_of(*, launched: int = 0, gpus: int = 0, hosts: int = 1) -> Setting:
    return Setting("cuda" if gpus else "cpu", hosts, world_sizes(launched, gpus), {})


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
    rows = {row.what: row for row in directory_rows(OneRank(), tmp_path, setting_of())}
    assert "FAILS" not in {row.result for row in rows.values()}
    assert rows[RENAME].result == "holds"
    assert rows[SEEN].result == "not checked"


@pytest.mark.skipif(file_system(Path("/dev/shm")) != "tmpfs", reason="no tmpfs is mounted")  # noqa: S108
def test_syncs_are_not_checked_on_tmpfs() -> None:
    with scratch_folder(Path("/dev/shm"), PREFIX) as folder:  # noqa: S108
        found = {row.what: row for row in directory_rows(OneRank(), folder, setting_of())}
    for what in (SYNC_FILE, SYNC_NAMES):
        assert found[what].result == "not checked"
        assert "tmpfs is memory" in found[what].details
    assert found[RENAME].result == "holds"


def test_links_to_a_directory_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    assert usable(link) == link
    assert file_system(link) == file_system(tmp_path) != "unknown"
    about = Setting.agreed(OneRank(), link).about
    assert about["directory"] == f"{link} -> {link.resolve()}"


def test_a_users_files_are_kept(tmp_path: Path) -> None:
    theirs = {name: tmp_path / name for name in ("file", "last.ckpt", f"{PREFIX}mine")}
    for name, path in theirs.items():
        path.write_text(name)
    (tmp_path / "probe-0").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with scratch_folder(tmp_path, PREFIX) as folder:
        directory_rows(OneRank(), folder, setting_of())
        assert set(tmp_path.iterdir()) == {folder, *tmp_path.glob("[!z]*"), *theirs.values()}
    assert sorted(tmp_path.rglob("*")) == before
    assert {path.read_text() for path in theirs.values()} == set(theirs)


def test_an_unusable_directory_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path, problem in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "link", "which links to nowhere, does not exist"),
        (Path("/proc/self"), "cannot be written|bytes free|B free"),
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
    failed = [row for row in report["rows"] if row["result"] == "FAILS"]
    assert {RENAME, SYNC_FILE, SYNC_NAMES} <= {row["what"] for row in failed}
    assert done.stderr.splitlines() == [f"{row['what']}: {row['details']}" for row in failed]
    engines = [row for row in report["rows"] if row["what"].startswith(("ZeRO", "kill", "speed"))]
    assert {(row["result"], row["details"]) for row in engines} == {
        ("not checked", "the directory checks failed")
    }
    assert not list(directory.iterdir())


# -- devices and launchers ------------------------------------------------------------------------


LAUNCHER = dict(zip(LAUNCHED, ("1", "2", "127.0.0.1", "1"), strict=True))


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"DS_ACCELERATOR": "xpu"}, "DS_ACCELERATOR=xpu"), (LAUNCHER, "LOCAL_RANK is not")],
    ids=["device", "launcher"],
)
def test_an_unsupported_device_or_launcher_is_refused(
    variables: dict[str, str],
    message: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without LOCAL_RANK, all ranks of a host would use its first GPU."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("selftest", "--dir", tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_missing_gpu_is_named() -> None:
    beyond = torch.cuda.device_count()
    with pytest.raises(UnsupportedError, match=rf"LOCAL_RANK={beyond}, but torch finds {beyond} "):
        device_name("cuda", beyond)


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


def test_the_port_of_a_world_is_reserved() -> None:
    with ExitStack() as held:
        address, port = meeting_point(1, held)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore(address, port, 1, is_master=True)
        store.set("a", "b")
        assert TCPStore(address, port, 1, is_master=False).get("a") == b"b"
        del store


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

FOREIGN_HANDLER = """
#include <signal.h>
static void handle(int number) { (void)number; }
__attribute__((constructor)) static void install(void) { signal(SIGTERM, handle); }
"""

WITH_FOREIGN_HANDLER = """
import signal
from lightning_elastic_zero.selftest import _interruptible

assert signal.getsignal(signal.SIGTERM) is None
with _interruptible():
    signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
print("went on")
"""


def test_signals_interrupt_once(tmp_path: Path) -> None:
    """Nohup's SIGHUP, and handlers that are not Python's, are kept."""
    assert run_python(SIGNALS).split() == ["interrupted"] * 3
    source = tmp_path / "handler.c"
    source.write_text(FOREIGN_HANDLER)
    preload = {"LD_PRELOAD": str(compiled(source, tmp_path))}
    assert run_python(WITH_FOREIGN_HANDLER, **preload) == "went on\n"


RAW_WRITE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from lightning_elastic_zero import selftest
from lightning_elastic_zero.core.progress import Progress
calls = []
ranks = SimpleNamespace(progress=Progress(lambda: calls.append(1)))
job = SimpleNamespace(setting=SimpleNamespace(measured_bytes=12 << 20))
selftest._write(Path(sys.argv[1]), job, ranks)
print(len(calls))
"""


def test_the_raw_write_waits_for_at_most_1_mib_per_call(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, 1e12)
    calls = int(run_python(RAW_WRITE, str(disk.folder / "file"), **disk.environment))
    waits = disk.waits()
    assert sum(waits) == 12 << 20
    assert max(waits) <= 1 << 20
    assert calls >= len(waits)


# -- the report -----------------------------------------------------------------------------------

ROWS = st.builds(
    Row,
    st.text(max_size=9),
    st.sampled_from(("holds", "FAILS", "does without", "measured", "not checked")),
    st.text(max_size=9),
)


@QUICK
@given(st.lists(ROWS, max_size=5))
@example([Row("\\|", "holds", "\\\\|"), Row("|", "holds", "\\")])
@example([Row("a\x00b", "holds", "\x1b[31m"), Row("\udc80", "holds", "\u202e")])
def test_a_report_holds_if_nothing_failed_and_each_row_is_one_line(rows: list[Row]) -> None:
    report = SelftestReport({"torch": "2"}, tuple(rows))
    results = [row.result for row in rows]
    assert report.holds == ("FAILS" not in results and "holds" in results)
    assert len(report.failures()) == results.count("FAILS")
    assert report.to_plain()["holds"] == report.holds
    lines = list(report.lines())
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
    """Return the cells of a row of a Markdown table, in which a backslash escapes."""
    assert line.startswith("|")
    parts = re.findall(r"((?:\\.|[^\\|])*)\|", line[1:])
    assert sum(len(part) + 1 for part in parts) == len(line) - 1
    return [re.sub(r"\\(.)", r"\1", part).strip() for part in parts]


def test_nothing_holds_without_records() -> None:
    assert {row.result for row in rows_of([], setting_of())} == {"not checked"}


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
    (row,) = [row for row in rows_of(recorded, setting_of()) if row.what == INTACT]
    assert row.result == result
    assert details in row.details


def test_records_survive_a_kill(tmp_path: Path) -> None:
    job = Job("save", 2, tmp_path, setting_of(), {})
    results = Results(job, 1)
    results.put("a", value={"c": "d"})
    with results.check("b", last=False):
        pass
    with results.check("b"):
        pass
    with results.check("c"):
        (tmp_path / "missing").rmdir()
    *records, failed, ended = selftest._read(job, 1, 0)
    assert records == [Record(1, "a", "", {"c": "d"}), Record(1, "b")]
    assert (failed.rank, failed.check) == (1, "c")
    assert failed.problem.startswith("FileNotFoundError: ")
    assert ended == Record(1, job.finished)
    assert selftest._read(job, 0, 1) == [
        Record(0, job.finished, "its process ended with exit code 1")
    ]


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


def printed_rows(out: str) -> list[Row]:
    cells = [cells_of(line) for line in out.splitlines() if line.startswith("| ")]
    return [Row(*row) for row in [row for row in cells if len(row) == 3][2:]]  # type: ignore[arg-type]


def assert_held(rows: list[Row], saves: int, loads: int) -> None:
    found = {row.what: row.result for row in rows}
    assert "FAILS" not in found.values(), rows
    assert found[SPEED] == "measured"
    unchecked = {what for what, result in found.items() if result == "not checked"}
    assert {SEEN} <= unchecked <= {SEEN, SYNC_FILE, SYNC_NAMES}
    for stage in range(4):
        assert found[f"ZeRO-{stage}, blocking, {saves} to {loads}"] == "holds"
    assert sum(", background, " in what for what in found) == 4
    assert {found[what] for what in (OTHERS_RAISE, INTACT, NEXT_SAVE)} == {"holds"}


@pytest.mark.long
def test_selftest_holds_alone(tmp_path: Path) -> None:
    """On 2 and 3 processes, through a relative path and a link; a user's files are kept."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    theirs = tmp_path / "real" / "raw-0-0"
    theirs.write_text("a user's")
    with started([*SELFTEST, "--dir", "link"], tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert_held(printed_rows(out), 2, 3)
    assert f"{tmp_path / 'link'} -> {(tmp_path / 'real').resolve()}" in out
    assert list((tmp_path / "real").iterdir()) == [theirs]
    assert theirs.read_text() == "a user's"


@pytest.mark.long
def test_selftest_holds_without_exchanges_and_links(library: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    refused = {"renameat2": errno.EINVAL, "symlink": errno.EPERM, "link": errno.EPERM}
    variables = bad_disk(library, disk, refused)
    with started([*SELFTEST, "--dir", str(disk)], tmp_path, variables) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    rows = printed_rows(out)
    assert_held(rows, 2, 3)
    assert [row.what for row in rows if row.result == "does without"] == [EXCHANGE, LINKS]
    assert not list(disk.iterdir())


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, *SELFTEST[1:]]


@pytest.mark.long
def test_selftest_holds_under_torchrun(tmp_path: Path) -> None:
    launch = torchrun("--nproc-per-node=2", f"--master-port={free_port()}")
    with started([*launch, "--dir", str(tmp_path)], tmp_path) as process:
        out, err = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode == 0, err
    assert out.count("### lightning-elastic-zero selftest: holds") == 1
    assert "started by a launcher" in out
    assert_held(printed_rows(out), 2, 1)
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
            stack.enter_context(started([*command, "--dir", str(disk)], tmp_path))
            for command in commands
        ]
        outputs = list(pool.map(lambda agent: agent.communicate(timeout=HANG_TIMEOUT_S), agents))
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert [out.count("selftest: holds") for out, _ in outputs] == [1, 0]
    assert_held(printed_rows(outputs[0][0]), 2, 1)
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
    assert failed == ["ZeRO-1 into ZeRO-2, background, 2 to 3"]
    (sentence,) = report.failures()
    assert "1 of 30 differ: exp_avg of " in sentence
    assert found["ZeRO-1, blocking, 2 to 3"].result == "holds"
    assert found["ZeRO-2, blocking, 2 to 3"].result == "not checked"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("not_launched")
def test_a_hanging_world_is_killed(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    report = run_selftest(tmp_path, timeout_s=0.01)
    assert not report.holds
    failed = {row.what: row.details for row in report.rows if row.result == "FAILS"}
    assert set(failed) == {"processes: save on 2", "processes: load on 3", OTHERS_RAISE}
    assert "did not finish in time, and was killed" in failed["processes: load on 3"]
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
        setting = setting_of(launched=2, hosts=2)
        pairs = zip(ranks, folders, strict=True)
        futures = [threads.submit(directory_rows, r, f, setting) for r, f in pairs]
        found = [future.result(timeout=HANG_TIMEOUT_S) for future in futures]
    assert found[0] == found[1]
    (row,) = found[0]
    assert (row.what, row.result) == (SEEN, "FAILS")
    assert "does not see the file seen-by-0 that rank 0 wrote there" in row.details
