"""A rank of a run that ``goodput.py`` repeatedly starts and kills."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
from goodput_run import RunSettings  # type: ignore[import-not-found] # scripts in this folder
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from subject import Mlp, width_of  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, TensorDataset

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

# Every engine tries to import it, and some releases lack it. It loads torch's compiler, which takes
# seconds in each process, so it is imported once, before ranks are forked.
with suppress(ModuleNotFoundError):
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

SAMPLES = 1_000_000  # more than any run uses


class EventLogger(Callback):
    """Writes the end of each step and the cost of each save, for the process that watches."""

    def __init__(self, event_log: Path, strategy: ElasticDeepSpeedStrategy) -> None:
        self.event_log, self.strategy = event_log, strategy
        self.noted = strategy.last_save

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the step from which the run continues."""
        self._note(trainer, "start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Write the step, and a save that was published since the previous step."""
        save = self.strategy.last_save
        if save is not None and save is not self.noted:
            self.noted = save
            self._note(trainer, "save", stall_s=save.waited_s, save_s=save.seconds)
        self._note(trainer, "step")

    def _note(self, trainer: pl.Trainer, event: str, **figures: float) -> None:
        if trainer.is_global_zero:
            # All processes of a machine share this clock.
            line = {"event": event, "step": trainer.global_step, "at": time.monotonic(), **figures}
            with self.event_log.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Regression(pl.LightningModule):
    """The model of the benchmarks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        """Build the model in the hook in which ZeRO-3 can partition it."""
        if not hasattr(self, "model"):
            self.model = Mlp(self.width)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return a loss of noise."""
        loss: torch.Tensor = self.model(batch[0].expand(-1, self.width))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam: fp32 masters and two moments are the state."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(settings: RunSettings, rank: int, port: int, limit_s: int) -> None:
    """Train as one rank, from the last checkpoint, until it is killed.

    Args:
        settings: settings of the run.
        rank: this process's rank.
        port: port on which the ranks meet.
        limit_s: seconds after which the process ends by itself, in case nothing else ends it.
    """
    signal.alarm(limit_s)
    log = os.open(settings.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ.update(here, NODE_RANK="0", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pl.seed_everything(1, verbose=False)
    strategy = ElasticDeepSpeedStrategy(stage=settings.stage, async_save=settings.async_save)
    callbacks: list[Callback] = [EventLogger(settings.event_log, strategy)]
    if settings.interval_s is not None:
        saves = ModelCheckpoint(
            dirpath=settings.folder / "checkpoints",
            filename="{step}",
            train_time_interval=timedelta(seconds=settings.interval_s),
            save_last="link",
            enable_version_counter=False,
        )
        callbacks.append(saves)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=settings.ranks,
        strategy=strategy,
        plugins=[LightningEnvironment()],
        max_epochs=1,
        callbacks=callbacks,
        enable_checkpointing=settings.interval_s is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, SAMPLES)[:, None]), settings.batch)
    ckpt_path = None if settings.interval_s is None else "last"
    trainer.fit(Regression(width_of(settings.parameters)), data, ckpt_path=ckpt_path)
