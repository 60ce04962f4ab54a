"""A run that ends with an exception ends soon, even if the disk delays a save in progress."""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_elastic_zero.checkpoint import manager
from lightning_elastic_zero.checkpoint.background import DRAIN_TIMEOUT_S
from lightning_elastic_zero.storage.disk_checkpoints import remove_leftovers
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.checkpoint._fault_injection import on_nth_write
from tests.support.deterministic_training import DeterministicModel, state_digests
from tests.support.fits import elastic, quiet_trainer
from tests.support.launch import Job, run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer
from tests.support.state_digests import read_digests


@dataclass(frozen=True)
class ExceptionRun:
    folder: str
    rank: int
    """The rank with the bad disk."""
    slow_s: float | None
    """Seconds that each of its writes takes; None: the second one never returns."""
    patience_s: float | None
    """Time limit of the save in progress; None: the default."""


class RaiseDuringSave(Callback):
    """Saves after a step; saves again on a bad disk, and then ends the run on all ranks."""

    def __init__(self, exception_run: ExceptionRun, job: Job) -> None:
        self.exception_run, self.job = exception_run, job
        self.disk = ExitStack()  # to the end of the process

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ElasticDeepSpeedStrategy)
        path = Path(self.exception_run.folder) / "good.ckpt"
        if trainer.global_step == 1:
            trainer.save_checkpoint(path)
            strategy.wait_for_save()
            self.job.note("held", state_digests(trainer, pl_module))
            return
        reached = threading.Event()
        if self.job.rank == self.exception_run.rank:
            self.disk.enter_context(on_nth_write(2, lambda: self._meet(reached), every=True))
        trainer.save_checkpoint(path)
        if self.job.rank == self.exception_run.rank:
            assert reached.wait(PROMPT_TIMEOUT_S)
        strategy.barrier()
        self.job.note("raised at", time.time())
        msg = "the user's own"
        raise RuntimeError(msg)

    def _meet(self, reached: threading.Event) -> None:
        reached.set()
        if self.exception_run.slow_s is None:
            os.read(os.pipe()[0], 1)  # nobody writes into it
        else:
            time.sleep(self.exception_run.slow_s)


def raise_while_saving(exception_run: ExceptionRun, job: Job) -> None:
    warnings.simplefilter("ignore")
    job.set_environment()
    if exception_run.patience_s is not None:
        vars(manager)["DRAIN_TIMEOUT_S"] = exception_run.patience_s
    callback = RaiseDuringSave(exception_run, job)
    trainer = quiet_trainer(elastic(async_save=True), callback, max_steps=3)
    try:
        trainer.fit(DeterministicModel())
    except RuntimeError as error:
        job.note("raised", str(error))
    job.note("ended at", time.time())


pytestmark = pytest.mark.engine

SHORT_S = 1.5

SLOW_S = {SHORT_S: 0.2, DRAIN_TIMEOUT_S: 0.8}
"""Seconds of each of about sixty writes, which together exceed the time limit."""


@pytest.mark.parametrize(
    ("slow", "rank", "patience_s"),
    [
        (True, 0, SHORT_S),
        (False, 1, SHORT_S),
        *(
            pytest.param(slow, rank, patience_s, marks=pytest.mark.long)
            for slow, rank, patience_s in [
                (True, 1, SHORT_S),
                (False, 0, SHORT_S),
                (True, 0, DRAIN_TIMEOUT_S),
                (True, 1, DRAIN_TIMEOUT_S),
                (False, 0, DRAIN_TIMEOUT_S),
                (False, 1, DRAIN_TIMEOUT_S),
            ]
        ),
    ],
)
def test_an_exception_ends_processes_during_a_save(
    *,
    slow: bool,
    rank: int,
    patience_s: float,
    tmp_path: Path,
    fork_server: ForkServer,
) -> None:
    """A slow disk leaves nothing behind; a hanging one leaves files for the next save to remove."""
    folder = tmp_path / "saves"
    folder.mkdir()
    short_s = None if patience_s == DRAIN_TIMEOUT_S else patience_s
    exception_run = ExceptionRun(str(folder), rank, SLOW_S[patience_s] if slow else None, short_s)
    results = run_ranks(partial(raise_while_saving, exception_run), 2, fork_server)
    ended_at = time.time()
    assert [r.notes.get("raised") for r in results] == ["the user's own"] * 2, results
    raised_at = min(result.notes["raised at"] for result in results)
    took_s = max(result.notes["ended at"] for result in results) - raised_at
    print(f"slow: {slow}, rank {rank}: the run ended {took_s:.1f} s after its exception, its")
    print(f"processes {ended_at - raised_at - took_s:.1f} s later")
    # The process reports that the save was cancelled, and that nothing waited for it.
    assert patience_s <= took_s < PROMPT_TIMEOUT_S
    assert ended_at < raised_at + took_s + PROMPT_TIMEOUT_S
    assert "Cancelled the save of" in results[rank].stderr
    if slow:
        assert [p.name for p in folder.iterdir()] == ["good.ckpt"]
    remove_leftovers(folder)
    assert [p.name for p in folder.iterdir()] == ["good.ckpt"]
    held = {key: bits for key, bits in results[0].notes["held"].items() if key != "lr"}
    assert held.items() <= read_digests(folder / "good.ckpt").items()
