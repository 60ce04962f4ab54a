"""A rank of a run that ``goodput.py`` starts, kills and starts again."""

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
from goodput_run import RunSettings  # type: ignore[import-not-found] # scripts, beside this one
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from subject import Mlp, width_of  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, TensorDataset

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

# What every engine looks at, and some releases lack: it loads torch's compiler, which takes each
# process seconds. So it is imported once, before ranks are forked.
with suppress(ModuleNotFoundError):
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

SAMPLES = 1_000_000  # more than any run takes


class EventLogger(Callback):
    """Notes when each step has ended and what each save has cost, for those who watch."""

    def __init__(self, diary: Path, strategy: ElasticDeepSpeedStrategy) -> None:
        self.diary, self.strategy = diary, strategy
        self.noted = strategy.last_save

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note from which step it goes on."""
        self._note(trainer, "start")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Note the step, and a save that was published since the one before."""
        save = self.strategy.last_save
        if save is not None and save is not self.noted:
            self.noted = save
            self._note(trainer, "save", stall_s=save.waited_s, save_s=save.seconds)
        self._note(trainer, "step")

    def _note(self, trainer: pl.Trainer, event: str, **figures: float) -> None:
        if trainer.is_global_zero:
            # Of one clock for all processes of a machine.
            line = {"event": event, "step": trainer.global_step, "at": time.monotonic(), **figures}
            with self.diary.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Regression(pl.LightningModule):
    """The benchmarks' model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        """Build it where ZeRO-3 can cut it."""
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
    """Train as one rank, from the last checkpoint on, until it is killed.

    Args:
        settings: of the run.
        rank: of all, on this machine.
        port: where they meet.
        limit_s: after so many seconds the process ends by itself, should nobody be left to end it.
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
    callbacks: list[Callback] = [EventLogger(settings.diary, strategy)]
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
    go_on = None if settings.interval_s is None else "last"
    trainer.fit(Regression(width_of(settings.parameters)), data, ckpt_path=go_on)
