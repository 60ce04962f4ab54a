"""What torchrun starts: a fit as a user writes it, which notes the samples of each step.

torchrun ... _torchrun_script.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_elastic_zero import ElasticDeepSpeedStrategy

SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 240, 12, 3, 5
STEPS = SAMPLES // GLOBAL_BATCH * EPOCHS


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are known by their index."""

    def __len__(self) -> int:
        """Return how many there are."""
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a sample, and its index."""
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index


class Net(pl.LightningModule):
    """A small net; a step takes long enough to be met in its midst."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.indices: list[int] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples, indices = batch
        self.indices += indices.tolist()
        time.sleep(0.02)
        loss: torch.Tensor = (self.layers(samples) - samples.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Notes(Callback):
    """Notes each optimizer step of this rank; waits after one that the test holds by a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "steps.jsonl"
        self.steps = -1

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        assert isinstance(pl_module, Net)
        line = {
            "step": self.steps,
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "samples": pl_module.indices,
            "loss": float(trainer.callback_metrics["loss"]),
            "time": time.time(),
            "start": os.environ["MASTER_PORT"],
        }
        pl_module.indices = []
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        hold = self.path.with_name(f"hold-{self.steps}")
        while hold.exists():
            time.sleep(0.05)


def main(folder: Path) -> None:
    """Fit, from the newest checkpoint that there is."""
    warnings.simplefilter("ignore")
    pl.seed_everything(1, verbose=False)
    saves = ModelCheckpoint(
        folder / "checkpoints",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last="link",
        every_n_train_steps=SAVE_EVERY,
        enable_version_counter=False,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=ElasticDeepSpeedStrategy(stage=3, global_batch_size=GLOBAL_BATCH),
        max_epochs=EPOCHS,
        callbacks=[Notes(folder), saves],
        logger=TensorBoardLogger(folder, name=None, version=""),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
