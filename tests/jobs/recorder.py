"""A callback that records each step; tests add it to the example on the command line."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override


class Recorder(Callback):
    """Records checksums of samples and the loss of each step; waits while a hold file exists."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.samples: list[int] = []
        self.step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step
        self.write({"event": "start", "step": self.step}, trainer)

    @override
    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        self.samples += [zlib.crc32(sample.numpy().tobytes()) for sample in batch[0]]

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        loss = float(trainer.callback_metrics["train_loss"])
        line = {"event": "step", "step": self.step, "samples": self.samples, "loss": loss}
        self.write(line, trainer)
        self.samples = []
        hold = self.folder / f"hold-{self.step}"
        while hold.exists() and not trainer.received_sigterm:
            time.sleep(0.02)

    def write(self, line: dict[str, Any], trainer: pl.Trainer) -> None:
        """Append a line with the time and the identity of this world."""
        restart = os.environ.get("SLURM_RESTART_COUNT", "")  # A requeued job keeps its port.
        identity = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "met_at": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} {restart}",
            "pid": os.getpid(),
            "time": time.time(),
        }
        with (self.folder / f"steps-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({**line, **identity}) + "\n")
