"""Faults of disks and ranks in a save: a prompt error on all ranks, and no lost checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from deepspeed import comm
from lightning.pytorch.callbacks import Callback

from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.checkpoint._fault_injection import ON_TMPFS, Fault, hang_marker, inject_fault, tmpfs
from tests.checkpoint._kill_sequence import MODES, wait_for_published
from tests.support.deterministic_training import (
    DeterministicModel,
    Table,
    state_digests,
    undisturbed,
)
from tests.support.fits import elastic, quiet_trainer
from tests.support.processes import HANG_TIMEOUT_S, PROMPT_TIMEOUT_S
from tests.support.ranks import Pools
from tests.support.state_digests import read_digests
from tests.support.tables import FAULTS

STEPS = 3
SHORT = Timeouts(
    heartbeat_interval_s=0.2, heartbeat_timeout_s=4.0, stall_timeout_s=6.0, absent_timeout_s=8.0
)


WAITING, NEXT_SAVE, END = "waiting", "the next save", "the end"
"""When ranks learn of a failed background save. A blocking save raises at once."""


@dataclass
class FaultRunResult:
    message: str = "nothing was raised"
    seconds: float = 0.0
    again: str = ""
    """The error of a second request while the fault lasted."""
    again_s: float = 0.0
    held: Table = field(default_factory=dict)
    """The state of the run after each step."""
    good: dict[str, str] = field(default_factory=dict)
    """Rank 0: the last good checkpoint, after the save failed."""
    last: dict[str, str] = field(default_factory=dict)
    """Rank 0: the checkpoint of the next save."""
    remaining: list[str] = field(default_factory=list)
    """Rank 0: names in the folder at the end."""


@dataclass(frozen=True)
class FaultRun:
    """One run of three steps with a save after each; the fault hits the second save."""

    folder: str
    fault: Fault
    stage: int = 2
    short: bool = True
    """Whether ranks wait for each other for seconds, instead of the default timeouts."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    hears: str = WAITING
    """When the ranks ask for the result of that save."""

    @property
    def stopped_s(self) -> float:
        """Seconds for which a rank is stopped: longer than the heartbeat timeout."""
        return 8.0 if self.short else Timeouts().heartbeat_timeout_s + 15.0


class SaveWithFault(Callback):
    def __init__(self, fault_run: FaultRun) -> None:
        self.fault_run, self.endured = fault_run, FaultRunResult()
        self.path = Path(fault_run.folder) / "good.ckpt"
        self.pids = Path(fault_run.folder).parent
        self.trained_at = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self.pids / f"pid-{comm.get_rank()}").write_text(str(os.getpid()))
        strategy = trainer.strategy
        assert isinstance(strategy, ElasticDeepSpeedStrategy)
        if self.fault_run.short:
            strategy._ranks = connect_ranks(SHORT, "short")
            if (writer := strategy.checkpoint_manager._writer) is not None:
                writer._ranks.close()
                writer._ranks = connect_ranks(SHORT, "short in the background")
        comm.barrier()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        hears = self.fault_run.hears
        if trainer.global_step == 2:
            self._save_badly(trainer)
        if trainer.global_step == STEPS and hears == NEXT_SAVE:
            self._ask(lambda: trainer.save_checkpoint(self.path))
            if self.fault_run.fault.kind == "hanging disk":
                self._ask_again(trainer)
            self._look_at_the_last_good(trainer)
        if trainer.global_step == 1 or (trainer.global_step == STEPS and hears != END):
            self._save(trainer)
            if comm.get_rank() == 0:
                self.endured.last = read_digests(self.path)
        self.endured.held[trainer.global_step] = state_digests(trainer, pl_module)
        self.trained_at = time.monotonic()

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        wait_for_published(trainer)

    def _ask(self, call: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            call()
        except ElasticZeroError as error:
            self.endured.message = f"{type(error).__name__}: {error}"
        self.endured.seconds = time.monotonic() - began

    def _ask_again(self, trainer: pl.Trainer) -> None:
        """Wait for the save while the disk does not answer; then let it answer."""
        first, first_s = self.endured.message, self.endured.seconds
        self._ask(lambda: wait_for_published(trainer))
        self.endured.again, self.endured.message = self.endured.message, first
        self.endured.again_s, self.endured.seconds = self.endured.seconds, first_s
        comm.barrier()
        hang_marker(self.path.parent).unlink(missing_ok=True)

    def _look_at_the_last_good(self, trainer: pl.Trainer) -> None:
        assert isinstance(trainer.strategy, ElasticDeepSpeedStrategy)
        writer = trainer.strategy.checkpoint_manager._writer
        while writer is not None and writer.busy:
            time.sleep(0.01)
        comm.barrier()
        if comm.get_rank() == 0:
            self.endured.good = read_digests(self.path)
        comm.barrier()

    def _save_badly(self, trainer: pl.Trainer) -> None:
        fault = self.fault_run.fault
        comm.barrier()
        with inject_fault(fault, self.path.parent, comm.get_rank()):
            if self.fault_run.hears == WAITING:
                self._ask(lambda: self._save(trainer))
                wakes = self._wake(in_s=0.0)
            else:
                trainer.save_checkpoint(self.path)
                wakes = self._wake(in_s=self.fault_run.stopped_s)
            if fault.kind == "a rank dies":
                # No other rank is left to train with.
                message = json.dumps([self.endured.message, self.endured.seconds])
                (self.pids / "survivor").write_text(message)
                os._exit(0)
            comm.barrier()
            if wakes is not None:
                wakes.wait()
        if self.fault_run.hears == WAITING:
            self._look_at_the_last_good(trainer)

    def _wake(self, in_s: float) -> subprocess.Popen[bytes] | None:
        """Continue the stopped rank, which cannot continue by itself."""
        fault = self.fault_run.fault
        if fault.kind == "hanging disk":
            while not hang_marker(self.path.parent).exists():
                time.sleep(0.01)
        if fault.kind != "a rank stalls" or comm.get_rank() == fault.rank:
            return None
        pid = (self.pids / f"pid-{fault.rank}").read_text()
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        return subprocess.Popen(["/bin/sh", "-c", f"sleep {in_s}; kill -CONT {pid}"])


def run_with_fault(fault_run: FaultRun) -> FaultRunResult:
    warnings.simplefilter("ignore")
    callback = SaveWithFault(fault_run)
    strategy = elastic(stage=fault_run.stage, **fault_run.strategy)
    trainer = quiet_trainer(strategy, callback, max_steps=STEPS)
    if fault_run.hears == END:
        callback._ask(lambda: trainer.fit(DeterministicModel()))
        callback.endured.seconds = time.monotonic() - callback.trained_at
    else:
        trainer.fit(DeterministicModel())
    if comm.get_rank() == 0:
        if fault_run.hears == END:
            callback.endured.good = read_digests(callback.path)
        callback.endured.remaining = sorted(p.name for p in Path(fault_run.folder).iterdir())
    return callback.endured


pytestmark = pytest.mark.engine

RAISING = [
    *(Fault("I/O error", rank, nth) for rank in (0, 1) for nth in (1, 4)),
    Fault("no space", 1, 3),
    Fault("quota", 0, 2),
    Fault("the directory vanishes", 1, 2),
    Fault("the folder is moved away"),
    Fault("read-only"),
    *(Fault("full disk", room_bytes=kib << 10) for kib in (0, 8, 300, 700, 1000)),
]

MESSAGES = {
    "I/O error": "Input/output error",
    "no space": "No space left on device",
    "quota": "quota exceeded",
    "the directory vanishes": "No such file or directory",
    "the folder is moved away": "is a file, not a directory",
    "read-only": "Read-only file system",
    "full disk": "No space left on device",
}
"""Expected texts of the errors, in addition to the path."""


@pytest.fixture(scope="module")
def table(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return the state after each step of an undisturbed run without saves."""
    return undisturbed(pools, tmp_path_factory.mktemp("undisturbed"), STEPS)


def same(wanted: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Return whether a checkpoint contains the trained state, bit for bit."""
    return bool(found) and all(found.get(k) == v for k, v in wanted.items() if k != "lr")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(
    pools: Pools, folder: Path, fault: Fault, table: Table, mode: str, **options: Any
) -> list[FaultRunResult]:
    """Run two ranks through a fault; check their state after each step."""
    row = f"{fault.kind} ({mode})"
    FAULTS.count(row, "tried")
    fault_run = FaultRun(str(folder), fault, strategy=MODES[mode], **options)
    ranks = pools.run(2, partial(run_with_fault, fault_run))
    for rank in ranks:
        assert rank.held == {step: table[step] for step in range(1, STEPS + 1)}
    FAULTS.count(row, "training intact")
    assert ranks[0].remaining == ["good.ckpt"]
    if fault_run.hears != END:
        assert same(table[STEPS], ranks[0].last), "the next save differs from the trained state"
        FAULTS.count(row, "next save sound")
    return ranks


def check(
    ranks: list[FaultRunResult],
    row: str,
    table: Table,
    message: str,
    steps: tuple[int, ...] = (1,),
) -> None:
    """Check that all ranks raised in bounded time, and a checkpoint of these steps is intact."""
    for rank in ranks:
        assert message in rank.message, rank.message
        assert rank.seconds < PROMPT_TIMEOUT_S
    FAULTS.count(row, "raised on all ranks")
    assert any(same(table[step], ranks[0].good) for step in steps)
    FAULTS.count(row, "last good sound")


@pytest.mark.parametrize("fault", RAISING, ids=str)
def test_a_disk_fault_is_raised_on_all_ranks_and_the_run_continues(
    fault: Fault, mode: str, pools: Pools, table: Table, tmp_path: Path
) -> None:
    folder = tmp_path / "saves"
    if fault.kind in ON_TMPFS:
        try:
            with tmpfs(folder):
                ranks = run(pools, folder, fault, table, mode)
        except PermissionError as error:
            pytest.skip(str(error))
    else:
        folder.mkdir()
        ranks = run(pools, folder, fault, table, mode)
    assert all(rank.message.startswith("SaveError") for rank in ranks), ranks[0].message
    check(ranks, f"{fault.kind} ({mode})", table, MESSAGES[fault.kind])


@pytest.mark.long
def test_a_save_to_a_disk_slower_than_the_stall_timeout_succeeds(
    mode: str, pools: Pools, table: Table, tmp_path: Path
) -> None:
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", Fault("slow disk", 1), table, mode)
    assert [rank.message for rank in ranks] == ["nothing was raised"] * 2
    assert ranks[1].seconds > SHORT.stall_timeout_s
    assert same(table[2], ranks[0].good)


@pytest.mark.long
@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as for users"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_on_all_ranks(
    rank: int,
    short: bool,
    mode: str,
    pools: Pools,
    table: Table,
    tmp_path: Path,
) -> None:
    """A writer that continues just in time may still finish a background save."""
    fault = Fault("a rank stalls", rank, 2)
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", fault, table, mode, short=short)
    assert all(seen.message.startswith("RanksError") for seen in ranks), ranks[0].message
    steps = (1, 2) if mode == "background" else (1,)
    check(ranks, f"{fault.kind} ({mode})", table, f"rank {rank}", steps)


@pytest.mark.long
@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as for users"]
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hears", [NEXT_SAVE, END])
def test_a_background_save_of_a_stopped_rank_fails_once(
    hears: str, rank: int, short: bool, pools: Pools, table: Table, tmp_path: Path
) -> None:
    fault = Fault("a rank stalls", rank, 2)
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", fault, table, "background", short=short, hears=hears)
    for seen in ranks:
        assert "could not be saved in the background" in seen.message, seen.message
    check(ranks, f"{fault.kind} (background)", table, f"rank {rank}")


@pytest.mark.long
@pytest.mark.parametrize(
    "rank", [1, pytest.param(0, marks=pytest.mark.long)], ids=["rank 1", "rank 0"]
)
def test_no_background_save_hangs_with_the_disk(
    rank: int, pools: Pools, table: Table, tmp_path: Path
) -> None:
    fault = Fault("hanging disk", rank, 2)
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", fault, table, "background", hears=NEXT_SAVE)
    message = f"rank {rank} of 2: alive, but without progress"
    check(ranks, "hanging disk (background)", table, message)
    for seen in ranks:
        assert "is still being written" in seen.again, seen.again
        assert seen.again_s < PROMPT_TIMEOUT_S


@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as for users"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_is_reported_and_the_last_checkpoint_is_intact(
    rank: int,
    short: bool,
    mode: str,
    pools: Pools,
    table: Table,
    tmp_path: Path,
) -> None:
    fault = Fault("a rank dies", rank, 2)
    row = f"{fault.kind} ({mode})"
    FAULTS.count(row, "tried")
    (tmp_path / "saves").mkdir()
    world = pools.start(2)
    try:
        for connection in world.ranks:
            fault_run = FaultRun(str(tmp_path / "saves"), fault, short=short, strategy=MODES[mode])
            connection.send(partial(run_with_fault, fault_run))
        wait([world.ranks[1 - rank]], timeout=HANG_TIMEOUT_S)
    finally:
        world.end()
    message, seconds = json.loads((tmp_path / "survivor").read_text())
    assert message.startswith("RanksError")
    assert f"rank {rank}" in message
    assert seconds < PROMPT_TIMEOUT_S
    FAULTS.count(row, "raised on all ranks")
    assert same(table[1], read_digests(tmp_path / "saves" / "good.ckpt"))
    FAULTS.count(row, "last good sound")
