"""Programs of ranks that write checkpoints with Lightning and Accelerate.

Nothing here may import ``lightning_elastic_zero``.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from tests.formats._deepspeed_writers import MORE, keep, wait_for_gathers
from tests.formats._fixture_table import FixtureRow
from tests.support.engines import EngineCase, Net, batch, group_members, make_optimizer
from tests.support.fits import StockOnCPU, quiet_trainer
from tests.support.oracle import dump

DECAY = 0.75
"""Factor of the learning rate in each step."""


class Steps(Dataset[Any]):
    """A rank's part of each batch, which depends only on step and rank."""

    def __init__(self, setup: EngineCase, steps: int) -> None:
        self.setup, self.steps = setup, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Any:
        if step >= self.steps:
            raise IndexError(step)
        return batch(step, distributed.get_rank(), self.setup.world)


class LitNet(Net, pl.LightningModule):
    """The toy model as a LightningModule, with hyperparameters and a schedule per step."""

    def __init__(
        self, setup: EngineCase, seed: int = 0, hidden: int = 5, note: str = "toy"
    ) -> None:
        super().__init__(seed, hidden=hidden)
        self.save_hyperparameters(ignore=["setup"])
        self.setup_, self.losses = setup, list[float]()

    def training_step(self, pair: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        self.bn.eval()
        x, y = pair
        loss: torch.Tensor = (self(x).float() - y).pow(2).mean()
        self.losses.append(float(loss))
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        members = group_members(self, self.setup_.grouping)
        optimizer = make_optimizer(self.setup_.optimizer, members, 1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=DECAY)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of complete batches; the epoch is longer than the run."""
        return DataLoader(Steps(self.setup_, 8), batch_size=None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tensor": torch.arange(3), "name": "net"}


class EveryGradientNet(LitNet):
    """Gives each parameter a gradient, since torch keeps no state for others."""

    @override
    def training_step(self, pair: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        return super().training_step(pair, _) + 0 * self.never.sum()


class Watch(Callback):
    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rank": distributed.get_rank(), "common": [1, 2.5, "three"]}


class OnCPU(StockOnCPU):
    """Lightning's own strategy on CPUs; records the engine's state before it saves."""

    def __init__(self, row: FixtureRow, folder: str) -> None:
        super().__init__(config=row.setup.config())
        self.row, self.folder = row, folder

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        keep(dump(self.deepspeed_engine, self.row.setup), self.folder, "truth")
        super().save_checkpoint(*args, **kwargs)


def fit(row: FixtureRow, folder: str) -> None:
    """Fit with a ModelCheckpoint that saves in the middle of an epoch. Collective."""
    warnings.simplefilter("ignore")
    wait_for_gathers()
    strategy = OnCPU(row, folder)
    saves = ModelCheckpoint(
        dirpath=f"{folder}/checkpoint",
        filename=f"step{row.steps}",
        every_n_train_steps=row.steps,
        monitor="loss",
        save_top_k=2,
    )
    precision: Any = "bf16-true" if row.setup.precision == "bf16" else "32-true"
    steps = {"max_steps": row.steps + MORE, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, saves, Watch(), precision=precision, **steps)
    trainer.fit(LitNet(row.setup, hidden=row.setup.hidden))


def accelerate(row: FixtureRow, folder: str) -> None:
    """Train with an Accelerator, and save its state. Collective."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import (  # only its rows need it
        Accelerator,
        DeepSpeedPlugin,
        InitProcessGroupKwargs,
    )

    plugin = DeepSpeedPlugin(hf_ds_config=row.setup.config())
    gloo = InitProcessGroupKwargs(
        backend="gloo"
    )  # Otherwise it starts one process on machines without GPUs.
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    model = row.setup.model(0)
    optimizer = make_optimizer(row.setup.optimizer, group_members(model, row.setup.grouping), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=DECAY)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    for step in range(row.steps):
        model.module.bn.eval()
        x, y = batch(step, distributed.get_rank(), row.setup.world)
        loss = (model(x).float() - y).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    keep(dump(model, row.setup), folder, "truth")
    accelerator.save_state(str(Path(folder) / "checkpoint"))
