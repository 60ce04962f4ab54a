"""Fits whose ``setup`` hooks ask the trainer how many steps there are to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import elastic, quiet_trainer
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    EventRecorder,
    RecordingNet,
    RunRecord,
    RunSpec,
    gather_record,
)

LENGTH, GLOBAL_BATCH, EPOCHS = 50, 12, 2


@dataclass(frozen=True)
class Asked:
    """One fit, and what its hooks were told."""

    accumulation: dict[str, int]
    """``accumulate_grad_batches`` as each ``setup`` hook read it."""
    steps: dict[str, float]
    """``estimated_stepping_batches`` as the hook that asked read it."""
    seen: RunRecord
    own_callbacks: list[str]
    """Classes of the callbacks that trained."""


class Asks:
    """What a ``setup`` hook asks, and notes."""

    def __init__(self, asker: str) -> None:
        self.asker = asker
        self.accumulation: dict[str, int] = {}
        self.steps: dict[str, float] = {}

    def ask(self, who: str, trainer: Any) -> None:
        """Ask the trainer."""
        self.accumulation[who] = trainer.accumulate_grad_batches
        if who == self.asker:
            self.steps[who] = trainer.estimated_stepping_batches
            self.accumulation[who] = trainer.accumulate_grad_batches


class AskingCallback(Callback):
    """A callback that asks in ``setup``."""

    def __init__(self, asks: Asks) -> None:
        self.asks = asks

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.asks.ask("callback", trainer)


class AskingNet(RecordingNet):
    """A module that asks in ``setup``, and may have loaders that need its ``setup``."""

    def __init__(self, run: RunSpec, asks: Asks) -> None:
        super().__init__(run)
        self.asks = asks

    @override
    def setup(self, stage: str) -> None:
        self.data = IndexedSamples(LENGTH, 0.0)
        self.asks.ask("module", self.trainer)


class NetWithLoader(AskingNet):
    """One that makes its own loader, which is another one before ``setup`` than after it."""

    data = IndexedSamples(LENGTH, 0.0)
    size = 1

    @override
    def setup(self, stage: str) -> None:
        self.size = 2
        super().setup(stage)

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.size, shuffle=True)


class AskingData(pl.LightningDataModule):
    """A data module whose loader needs its ``setup``."""

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.asks = asks

    @override
    def setup(self, stage: str) -> None:
        self.data = IndexedSamples(LENGTH, 0.0)
        self.asks.ask("datamodule", self.trainer)

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=2, shuffle=True)


def fit_asking(source: str, asker: str, ckpt_path: str | None = None, save: str = "") -> Asked:
    """Fit, with loaders of a source (``fit``, ``datamodule``, ``module``) and one who asks."""
    pl.seed_everything(3, workers=True, verbose=False)
    run = RunSpec(length=LENGTH, save=("step 1.2",) if save else (), root=save)
    asks, watch = Asks(asker), EventRecorder(run)
    net = (NetWithLoader if source == "module" else AskingNet)(run, asks)
    strategy = elastic(global_batch_size=GLOBAL_BATCH)
    trainer = quiet_trainer(strategy, AskingCallback(asks), watch, max_epochs=EPOCHS)
    data: dict[str, Any] = {}
    if source == "datamodule":
        data["datamodule"] = AskingData(asks)
    elif source == "fit":
        data["train_dataloaders"] = DataLoader(
            IndexedSamples(LENGTH, 0.0), batch_size=2, shuffle=True
        )
    trainer.fit(net, **data, ckpt_path=ckpt_path)
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return Asked(asks.accumulation, asks.steps, gather_record(trainer, net, watch), names)
