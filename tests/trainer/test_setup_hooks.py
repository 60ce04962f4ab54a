"""A ``setup`` hook that asks how many steps there are gets the truth, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import elastic, quiet_trainer
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    EventRecorder,
    RecordingNet,
    RunRecord,
    RunSpec,
    from_step,
    gather_record,
)

LENGTH, GLOBAL_BATCH, EPOCHS = 50, 12, 2


@dataclass(frozen=True)
class Asked:
    """One fit, and the answers to its hooks."""

    accumulation: dict[str, int]
    """``accumulate_grad_batches`` as each ``setup`` hook read it."""
    steps: dict[str, float]
    """``estimated_stepping_batches`` as the hook that asked read it."""
    seen: RunRecord
    own_callbacks: list[str]
    """Classes of the callbacks that trained."""


class Asks:
    """Queries the trainer in a `setup` hook, and records the answers."""

    def __init__(self, asker: str) -> None:
        self.asker = asker
        self.accumulation: dict[str, int] = {}
        self.steps: dict[str, float] = {}

    def ask(self, who: str, trainer: Any) -> None:
        self.accumulation[who] = trainer.accumulate_grad_batches
        if who == self.asker:
            self.steps[who] = trainer.estimated_stepping_batches
            self.accumulation[who] = trainer.accumulate_grad_batches


class AskingNet(RecordingNet):
    """A module that queries in `setup`, and may have loaders that need its `setup`."""

    def __init__(self, run: RunSpec, asks: Asks) -> None:
        super().__init__(run)
        self.asks = asks

    @override
    def setup(self, stage: str) -> None:
        self.data = IndexedSamples(LENGTH, 0.0)
        self.asks.ask("module", self.trainer)


class NetWithLoader(AskingNet):
    """A net with its own loader, which differs before `setup` and after it."""

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
    """A data module whose loader needs its `setup`."""

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
    """Fit, with loaders of a source (`fit`, `datamodule`, `module`) and one hook that queries."""
    pl.seed_everything(3, workers=True, verbose=False)
    run = RunSpec(length=LENGTH, save=("step 1.2",) if save else (), root=save)
    asks, watch = Asks(asker), EventRecorder(run)
    net = (NetWithLoader if source == "module" else AskingNet)(run, asks)
    strategy = elastic(global_batch_size=GLOBAL_BATCH)
    asking = LambdaCallback(setup=lambda trainer, *_, **__: asks.ask("callback", trainer))
    trainer = quiet_trainer(strategy, asking, watch, max_epochs=EPOCHS)
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


pytestmark = pytest.mark.engine

STEPS = EPOCHS * -(-LENGTH // GLOBAL_BATCH)
"""Optimizer steps of a whole fit: the last batch of an epoch is filled up."""

ASKERS = [
    ("fit", "datamodule"),
    ("fit", "callback"),
    ("fit", "module"),
    ("datamodule", "datamodule"),
    ("datamodule", "callback"),
    ("datamodule", "module"),
    ("module", "module"),
]


def fitted(worlds: Pools, source: str, asker: str, **options: str) -> RunRecord:
    """Fit on two ranks, where one hook queries; check its answers, and return the record."""
    asked = worlds.run(2, partial(fit_asking, source, asker, **options))[0]
    assert all(steps == STEPS for steps in asked.steps.values())
    # The hooks that come before the loaders can be made are not told; a data module's own, as yet.
    early = {("module", "callback"), ("datamodule", "datamodule")}
    told = {who: n for who, n in asked.accumulation.items() if (source, who) not in early}
    if source == "module" and asker != "module":
        told.pop("module")
    assert set(told.values()) <= {3}
    assert asked.own_callbacks == ["LambdaCallback", "EventRecorder"]
    return asked.seen


@pytest.mark.parametrize(("source", "asker"), ASKERS)
def test_steps_and_accumulation_are_known_in_setup_hooks(
    source: str, asker: str, worlds: Pools, tmp_path: Path
) -> None:
    """Queries change neither the fit nor the resume."""
    silent = fitted(worlds, source, "")
    seen = fitted(worlds, source, asker, save=str(tmp_path))
    assert (seen.steps, seen.losses) == (silent.steps, silent.losses)
    assert all(len(ids) == GLOBAL_BATCH for ids in seen.steps.values())
    assert seen.global_step == STEPS
    path = str(tmp_path / "step-1.2.ckpt")
    resumed = fitted(worlds, source, asker, ckpt_path=path)
    assert resumed.steps == from_step(silent.steps, STEPS - 3)
