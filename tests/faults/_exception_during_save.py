"""A run in processes of its own that ends by an exception while a save goes on behind training."""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_elastic_zero.checkpoint import background as async_save
from lightning_elastic_zero.checkpoint import manager
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.faults._deterministic_training import DeterministicModel, state_digests
from tests.faults._fault_injection import on_nth_write
from tests.support.fits import SMALL_BUCKETS
from tests.support.launch import Job
from tests.support.processes import PROMPT_TIMEOUT_S


@dataclass(frozen=True)
class ExceptionRun:
    """What the processes are told."""

    folder: str
    rank: int
    """Whose disk it is."""
    slow_s: float | None
    """What each of its writes takes; None: the second one never returns."""
    patience_s: float | None
    """How long the save in flight may go on; None: as long as for users."""


class RaiseDuringSave(Callback):
    """Saves after a step; saves again on a bad disk, and then ends the run on all ranks."""

    def __init__(self, exception_run: ExceptionRun, job: Job) -> None:
        self.exception_run, self.job = exception_run, job
        self.disk = ExitStack()  # to the end of the process

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Act after a step."""
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
    """Be one rank of it."""
    warnings.simplefilter("ignore")
    rank = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world_size}
    os.environ.update({key: str(value) for key, value in rank.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if exception_run.patience_s is not None:
        for module in (async_save, manager):
            vars(module)["DRAIN_TIMEOUT_S"] = exception_run.patience_s
    options: dict[str, Any] = {"stage": 2, "async_save": True, **SMALL_BUCKETS}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.world_size,
        strategy=ElasticDeepSpeedStrategy(**options),
        max_steps=3,
        callbacks=[RaiseDuringSave(exception_run, job)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(DeterministicModel())
    except RuntimeError as error:
        job.note("raised", str(error))
    job.note("ended at", time.time())
