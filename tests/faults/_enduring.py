"""A run to which something happens while it saves, and which goes on when it is over."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from deepspeed import comm
from lightning.pytorch.callbacks import Callback

from lightning_elastic_zero import ElasticDeepSpeedStrategy
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.ranks import RankTimes, current_ranks
from tests.faults._faults import Fault, happening
from tests.faults._modes import settle
from tests.faults._reading import read_whole
from tests.faults._training import Known, Table, held_by
from tests.trainer._fitting import SMALL_BUCKETS

STEPS = 3
SHORT = RankTimes(beat_s=0.2, dead_s=4.0, stalled_s=6.0, absent_s=8.0)


@dataclass
class Endured:
    """What one rank saw."""

    said: str = "nothing was raised"
    seconds: float = 0.0
    held: Table = field(default_factory=dict)
    """What the run held after each step."""
    good: dict[str, str] = field(default_factory=dict)
    """Rank 0: what the last good checkpoint gives when it is over, and the save failed."""
    last: dict[str, str] = field(default_factory=dict)
    """Rank 0: what the next one gives."""
    left: list[str] = field(default_factory=list)
    """Rank 0: names in the folder at the end."""


@dataclass(frozen=True)
class Enduring:
    """One run of three steps, saved over one checkpoint after each; the second save meets it."""

    folder: str
    fault: Fault
    stage: int = 2
    short: bool = True
    """Ranks wait for one another for seconds, and not as long as they do for users."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    saves_again: bool = True
    """Save after the last step too."""


class Meets(Callback):
    """Saves after each step, and lets it happen at the second one."""

    def __init__(self, enduring: Enduring) -> None:
        self.enduring, self.endured = enduring, Endured()
        self.path = Path(enduring.folder) / "good.ckpt"
        self.pids = Path(enduring.folder).parent

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say who this is; make the waiting short."""
        (self.pids / f"pid-{comm.get_rank()}").write_text(str(os.getpid()))
        strategy = trainer.strategy
        assert isinstance(strategy, ElasticDeepSpeedStrategy)
        if self.enduring.short:
            strategy._ranks = current_ranks(SHORT, "short")
        comm.barrier()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Save."""
        if trainer.global_step == 2:
            self._save_badly(trainer)
        elif trainer.global_step == 1 or self.enduring.saves_again:
            trainer.save_checkpoint(self.path)
            settle(trainer)
            if comm.get_rank() == 0:
                self.endured.last = read_whole(self.path)
        self.endured.held[trainer.global_step] = held_by(trainer, pl_module)

    def _save_badly(self, trainer: pl.Trainer) -> None:
        fault, began = self.enduring.fault, time.monotonic()
        comm.barrier()
        with happening(fault, self.path.parent, comm.get_rank()):
            try:
                trainer.save_checkpoint(self.path)
                settle(trainer)
            except ElasticZeroError as error:
                self.endured.said = f"{type(error).__name__}: {error}"
            self.endured.seconds = time.monotonic() - began
            self._wake()
            if fault.kind == "a rank dies":
                # There is nobody left to train with.
                said = json.dumps([self.endured.said, self.endured.seconds])
                (self.pids / "survivor").write_text(said)
                os._exit(0)
            comm.barrier()
        comm.barrier()
        if comm.get_rank() == 0:
            self.endured.good = read_whole(self.path)

    def _wake(self) -> None:
        """Let go on who was stopped."""
        if self.enduring.fault.kind == "a rank stalls":
            pid = (self.pids / f"pid-{self.enduring.fault.rank}").read_text()
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGCONT)


def endure(enduring: Enduring) -> Endured:
    """Train through it, and give what this rank saw."""
    warnings.simplefilter("ignore")
    meets = Meets(enduring)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=comm.get_world_size(),
        strategy=ElasticDeepSpeedStrategy(
            stage=enduring.stage, **{**SMALL_BUCKETS, **enduring.strategy}
        ),
        max_steps=STEPS,
        callbacks=[meets],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Known())
    if comm.get_rank() == 0:
        meets.endured.left = sorted(p.name for p in Path(enduring.folder).iterdir())
    return meets.endured
