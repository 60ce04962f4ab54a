"""``selftest`` where its own part goes wrong: signals, slow disks, kills that were none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.errors import RanksError, SaveError, UnsupportedError
from lightning_elastic_zero.selftest.checks import (
    DYING,
    GOOD,
    MEASURED,
    NEXT_SAVE,
    TOLD,
    UNMEASURED,
)
from lightning_elastic_zero.selftest.engine_rows import WorldReports, _world_rows
from lightning_elastic_zero.selftest.environment import device_name
from lightning_elastic_zero.selftest.raw_write import write_raw
from lightning_elastic_zero.selftest.report import Row
from lightning_elastic_zero.selftest.throughput import is_stall
from lightning_elastic_zero.selftest.work_dir import work_dir
from lightning_elastic_zero.selftest.worker_protocol import RankReport, WorldReport
from lightning_elastic_zero.selftest.worlds import Worlds
from tests.core._slow_disk import SlowDisk
from tests.timeouts import HANG_TIMEOUT_S
from tests.tools._bad_disk import compiled

Run = Callable[..., tuple[int, str, str]]

BY_KILL = "its process ended by signal 9"

SIGNALS = """
import signal
from lightning_elastic_zero.selftest.interrupts import INTERRUPTS, terminable, uninterrupted

signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run under nohup
signal.signal(signal.SIGHUP, signal.SIG_DFL)
before = [signal.getsignal(number) for number in INTERRUPTS]
for number in INTERRUPTS:
    with terminable():
        with uninterrupted():
            signal.raise_signal(number)
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            print("interrupted")
        for later in INTERRUPTS:
            signal.raise_signal(later)
    with terminable() as ignore_interrupts:
        ignore_interrupts()
        signal.raise_signal(number)
assert [signal.getsignal(number) for number in INTERRUPTS] == before
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with terminable():
    signal.raise_signal(signal.SIGHUP)
"""

FOREIGN_HANDLER = """
#include <signal.h>
static void handle(int number) { (void)number; }
__attribute__((constructor)) static void install(void) { signal(SIGTERM, handle); }
"""

WITH_FOREIGN_HANDLER = """
import signal
from lightning_elastic_zero.selftest.interrupts import terminable, uninterrupted

assert signal.getsignal(signal.SIGTERM) is None
with terminable(), uninterrupted():
    signal.raise_signal(signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
print("went on")
"""

RAW_WRITE = """
import sys
from pathlib import Path
from lightning_elastic_zero.selftest.raw_write import write_raw
told = []
size_bytes = write_raw(Path(sys.argv[1]), 12 << 20, bytes(1 << 20), lambda: told.append(1))
print(size_bytes, len(told))
"""


def said_by(program: str, *args: str, **variables: str) -> str:
    """Run a program in Python; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- signals ---------------------------------------------------------------------------------------


def test_one_signal_interrupts() -> None:
    """Each interrupts once, later ones wait, none disturbs a removal; nohup's SIGHUP is ignored."""
    assert said_by(SIGNALS).split() == ["interrupted"] * 3


def test_a_handler_that_is_not_pythons_stays(tmp_path: Path) -> None:
    """A handler that Python cannot put back is neither replaced nor an error."""
    source = tmp_path / "handler.c"
    source.write_text(FOREIGN_HANDLER)
    library = compiled(source, tmp_path)
    assert said_by(WITH_FOREIGN_HANDLER, LD_PRELOAD=str(library)) == "went on\n"


def test_a_removal_goes_on_where_others_have_given_up(tmp_path: Path) -> None:
    """It tells of progress, and what that raises leaves nothing behind."""
    told = []

    def tell() -> None:
        told.append(1)
        raise RanksError

    with work_dir(tmp_path, tell) as folder:
        for name in ("one", "two"):
            (folder / name).mkdir()
            (folder / name / "file").touch()
    assert not list(tmp_path.iterdir())
    assert len(told) == 2


# -- measuring -------------------------------------------------------------------------------------


def test_a_slow_disk_is_waited_for_in_pieces(tmp_path: Path) -> None:
    """No wait of the raw write is for more than 1 MiB, and each is followed by progress."""
    disk = SlowDisk(tmp_path, 1e12)
    said = said_by(RAW_WRITE, str(disk.folder / "file"), **disk.environment)
    size_bytes, told = map(int, said.split())
    waits = disk.waits()
    assert size_bytes == sum(waits) == 12 << 20
    assert max(waits) <= 1 << 20
    assert told >= len(waits)


def test_a_raw_write_ends(tmp_path: Path) -> None:
    """Where its time is up it tells how little it has written, and writes no more."""
    path = tmp_path / "file"
    assert write_raw(path, 8, bytes(4), lambda: None, most_s=0.0) == path.stat().st_size == 0
    assert write_raw(tmp_path / "all", 8, bytes(4), lambda: None) == 8


def test_a_stall_is_no_failed_call() -> None:
    """Ranks that are slow or lost are told from calls that fail, whoever raises them."""
    assert is_stall(RanksError("alive, but without progress"))
    stalled = RanksError("in the background")
    stalled.__cause__ = RanksError("alive, but without progress")
    assert is_stall(stalled)
    failed = RanksError("step 'measure' failed")
    failed.__cause__ = OSError(5, "Input/output error")
    for error in (failed, failed.__cause__, SaveError("the disk is full")):
        assert not is_stall(error)


def rows_of(saves: WorldReport, loads: WorldReport | None = None) -> dict[str, Row]:
    """Return the rows by what they are about, where files are as a kill should leave them."""
    found = WorldReports(saves, loads, kept="", unpublished="")
    size = len(saves.ranks)
    return {row.what: row for row in _world_rows(found, Worlds(size, 1, size))}


def test_a_stall_in_measuring_fails_nothing() -> None:
    """Its rows are not checked, with the reason; a call that fails in measuring is a failure."""
    stalled = rows_of(WorldReport((RankReport(0, {UNMEASURED: "too slow"}),)))
    speeds = [row for what, row in stalled.items() if what.startswith(("speed", "background"))]
    assert len(speeds) == 4
    assert {(row.result, row.details) for row in speeds} == {("not checked", "rank 0: too slow")}
    failed = rows_of(WorldReport((RankReport(0, {MEASURED: "EIO"}),)))
    assert failed["speed"].result == "FAILS"


# -- the kill --------------------------------------------------------------------------------------

LOADED = WorldReport((RankReport(0, {GOOD: "", NEXT_SAVE: ""}, finished=True),))
SURVIVOR = RankReport(0, {GOOD: "", TOLD: ""}, finished=True)
VICTIM = RankReport(1, {GOOD: "", DYING: ""}, ended=BY_KILL)


def test_a_kill_holds() -> None:
    """All rows hold where the victim told that it was about to die, and did by SIGKILL."""
    rows = rows_of(WorldReport((SURVIVOR, VICTIM), 1), LOADED)
    kills = [row for what, row in rows.items() if what.startswith("kill")]
    assert [row.result for row in kills] == ["holds"] * 5


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ((SURVIVOR, RankReport(1, {GOOD: "", TOLD: ""}, finished=True)), "came to the end"),
        ((SURVIVOR, RankReport(1, {GOOD: ""}, ended=BY_KILL)), "signal 9"),
        ((SURVIVOR, RankReport(1, {GOOD: "", DYING: ""}, ended="exit code 1")), "exit code 1"),
        ((RankReport(0, {GOOD: ""}, ended="it was killed"), VICTIM), "did not tell"),
        ((RankReport(0, {GOOD: "", TOLD: "no error"}), VICTIM), "did not tell"),
    ],
)
def test_nothing_holds_where_nothing_was_killed(ranks: tuple[RankReport, ...], why: str) -> None:
    """A kill that was none, or that nobody was told of, is not checked: no row of it holds."""
    rows = rows_of(WorldReport(ranks, 1), LOADED)
    kills = [row for what, row in rows.items() if what.startswith("kill")]
    assert len(kills) == 5
    assert "holds" not in {row.result for row in kills}
    assert why in rows["kill: the last good checkpoint is whole"].details


def test_a_kill_of_the_one_rank() -> None:
    """With one rank nobody can be told; the rest holds if that rank was killed in its save."""
    problems = {GOOD: "", DYING: ""}
    killed = WorldReport((RankReport(0, problems, ended=BY_KILL),), 0)
    ended = WorldReport((RankReport(0, problems, finished=True),), 0)
    for world, results in ((killed, {"not checked", "holds"}), (ended, {"not checked"})):
        rows = rows_of(world, LOADED)
        assert {row.result for what, row in rows.items() if what.startswith("kill")} == results


# -- launchers -------------------------------------------------------------------------------------


def test_a_launcher_that_tells_no_local_rank(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by the variable's name: all ranks of a host would take its first GPU."""
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    code, out, err = run("selftest", "--dir", tmp_path)
    assert (code, out) == (2, "")
    assert "LOCAL_RANK is not" in err
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there() -> None:
    """A rank with a number beyond its GPUs is told both, by the variables' names."""
    beyond = torch.cuda.device_count()
    with pytest.raises(UnsupportedError, match=rf"LOCAL_RANK={beyond}, but torch sees {beyond} "):
        device_name("cuda", beyond)
