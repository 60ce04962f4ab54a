"""A run to which something happens while it saves, and which goes on when it is over."""

from __future__ import annotations

import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from deepspeed import comm
from lightning.pytorch.callbacks import Callback

from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.faults._deterministic_training import DeterministicModel, Table, state_digests
from tests.faults._fault_injection import Fault, hang_marker, inject_fault
from tests.faults._save_modes import wait_for_published
from tests.faults._state_digests import read_digests
from tests.support.fits import elastic, quiet_trainer

STEPS = 3
SHORT = Timeouts(
    heartbeat_interval_s=0.2, heartbeat_timeout_s=4.0, stall_timeout_s=6.0, absent_timeout_s=8.0
)


WAITING, NEXT_SAVE, END = "waiting", "the next save", "the end"
"""When ranks hear of a save that goes on behind training; of one that does not, at once."""


@dataclass
class FaultRunResult:
    """What one rank saw."""

    message: str = "nothing was raised"
    seconds: float = 0.0
    again: str = ""
    """What was raised when all asked again while the fault lasted."""
    again_s: float = 0.0
    held: Table = field(default_factory=dict)
    """What the run held after each step."""
    good: dict[str, str] = field(default_factory=dict)
    """Rank 0: what the last good checkpoint gives when it is over, and the save failed."""
    last: dict[str, str] = field(default_factory=dict)
    """Rank 0: what the next one gives."""
    left: list[str] = field(default_factory=list)
    """Rank 0: names in the folder at the end."""


@dataclass(frozen=True)
class FaultRun:
    """One run of three steps, saved over one checkpoint after each; the second save meets it."""

    folder: str
    fault: Fault
    stage: int = 2
    short: bool = True
    """Ranks wait for one another for seconds, and not as long as they do for users."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    hears: str = WAITING
    """When the ranks ask for that save, and so hear what became of it."""

    @property
    def stopped_s(self) -> float:
        """How long a rank is stopped, where nobody notices: longer than it is waited for."""
        return 8.0 if self.short else Timeouts().heartbeat_timeout_s + 15.0


class SaveWithFault(Callback):
    """Saves after each step, and lets it happen at the second one."""

    def __init__(self, fault_run: FaultRun) -> None:
        self.fault_run, self.endured = fault_run, FaultRunResult()
        self.path = Path(fault_run.folder) / "good.ckpt"
        self.pids = Path(fault_run.folder).parent
        self.trained_at = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record which rank this is; make the waiting short."""
        (self.pids / f"pid-{comm.get_rank()}").write_text(str(os.getpid()))
        strategy = trainer.strategy
        assert isinstance(strategy, ElasticDeepSpeedStrategy)
        if self.fault_run.short:
            strategy._ranks = connect_ranks(SHORT, "short")
            if (writer := strategy._manager._writer) is not None:
                writer._ranks.close()
                writer._ranks = connect_ranks(SHORT, "short in the background")
        comm.barrier()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Save."""
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
        """Hear what became of the save."""
        began = time.monotonic()
        try:
            call()
        except ElasticZeroError as error:
            self.endured.message = f"{type(error).__name__}: {error}"
        self.endured.seconds = time.monotonic() - began

    def _ask_again(self, trainer: pl.Trainer) -> None:
        """Wait for it while the disk still does not answer; then let it."""
        first, first_s = self.endured.message, self.endured.seconds
        self._ask(lambda: wait_for_published(trainer))
        self.endured.again, self.endured.message = self.endured.message, first
        self.endured.again_s, self.endured.seconds = self.endured.seconds, first_s
        comm.barrier()
        hang_marker(self.path.parent).unlink(missing_ok=True)

    def _look_at_the_last_good(self, trainer: pl.Trainer) -> None:
        assert isinstance(trainer.strategy, ElasticDeepSpeedStrategy)
        writer = trainer.strategy._manager._writer
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
                # There is nobody left to train with.
                message = json.dumps([self.endured.message, self.endured.seconds])
                (self.pids / "survivor").write_text(message)
                os._exit(0)
            comm.barrier()
            if wakes is not None:
                wakes.wait()
        if self.fault_run.hears == WAITING:
            self._look_at_the_last_good(trainer)

    def _wake(self, in_s: float) -> subprocess.Popen[bytes] | None:
        """Continue who is stopped, once it is; it cannot do that itself."""
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
    """Train through it, and give what this rank saw."""
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
        callback.endured.left = sorted(p.name for p in Path(fault_run.folder).iterdir())
    return callback.endured
