"""Fits with a CheckpointMonitor, and what its loggers have in their files."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_elastic_zero.trainer.monitor import CheckpointMonitor
from tests.support.fits import Data, RegressionNet, elastic, quiet_trainer


class FailsAt(Callback):
    """Raises in the midst of a run."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Raise when so many steps have been taken."""
        if trainer.global_step == self.step:
            msg = "in the midst"
            raise ArithmeticError(msg)


@dataclass(frozen=True)
class MonitoredFit:
    """A fit that saves after each step, with some loggers."""

    root: str
    loggers: tuple[str, ...] = ("tensorboard",)
    epochs: int = 2
    fails_at: int | None = None
    async_save: bool = False
    fingerprint: bool = False
    ckpt_path: str | None = None

    def _loggers(self) -> list[Any]:
        kinds = {"tensorboard": TensorBoardLogger, "csv": CSVLogger}
        return [kinds[name](self.root, name=name, version="v") for name in self.loggers]

    def run(self) -> dict[str, int]:
        """Fit; return the bytes that the saves wrote, by name, of those that are there."""
        saves = ModelCheckpoint(
            self.root, save_top_k=-1, every_n_train_steps=1, filename="{step}", save_last=False
        )
        trainer = quiet_trainer(
            elastic(async_save=self.async_save, fingerprint=self.fingerprint),
            CheckpointMonitor(),
            FailsAt(self.fails_at),
            saves,
            max_epochs=self.epochs,
            logger=self._loggers() or False,
            log_every_n_steps=1,
        )
        torch.manual_seed(0)
        try:
            trainer.fit(RegressionNet(), Data(), ckpt_path=self.ckpt_path)
        except ArithmeticError:
            assert self.fails_at is not None
        return {
            path.name: sum(f.stat().st_size for f in path.rglob("*.pt"))
            for path in sorted(Path(self.root).glob("*.ckpt"))
        }

    def scalars(self) -> dict[str, dict[int, float]]:
        """Return what TensorBoard has in its event files: values by step, by tag."""
        events = EventAccumulator(str(Path(self.root, "tensorboard", "v")))
        events.Reload()
        return {
            tag: {event.step: event.value for event in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]
            if tag.startswith("checkpoint/")
        }

    def texts(self) -> dict[int, str]:
        """Return the fingerprints that TensorBoard has as texts, by step."""
        events = EventAccumulator(str(Path(self.root, "tensorboard", "v")))
        events.Reload()
        tag = "checkpoint/fingerprint/text_summary"
        return {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)}

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the CSV file that tell of checkpoints."""
        path = Path(self.root, "csv", "v", "metrics.csv")
        with path.open(newline="") as file:
            return [
                row
                for row in csv.DictReader(file)
                if any(value and name.startswith("checkpoint/") for name, value in row.items())
            ]
