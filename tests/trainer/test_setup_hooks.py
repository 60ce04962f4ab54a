"""A ``setup`` hook can query the number of steps, which does not change the run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import FitCase, elastic, quiet_trainer
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    EventRecorder,
    RecordingNet,
    RunRecord,
    from_step,
    gather_record,
    recorded,
)

LENGTH, GLOBAL_BATCH, EPOCHS = 50, 12, 2


STEPS = EPOCHS * -(-LENGTH // GLOBAL_BATCH)
"""Optimizer steps of the full fit; the last batch of each epoch is padded."""

EARLY = {"fit": set(), "datamodule": {"datamodule"}, "module": {"callback", "module"}}
"""By source of the loaders: hooks before these can be created, which see no accumulation yet."""


class Queries:
    """Checks values of the trainer in ``setup`` hooks; one hook also reads the number of steps."""

    def __init__(self, source: str, hook: str) -> None:
        self.source, self.hook = source, hook
        self.read_in: set[str] = set()

    def read(self, hook: str, trainer: Any) -> None:
        self.read_in.add(hook)
        if hook == self.hook:
            assert trainer.estimated_stepping_batches == STEPS
        if hook == self.hook or hook not in EARLY[self.source]:
            assert trainer.accumulate_grad_batches == 2


class QueryingNet(RecordingNet):
    """A module that queries the trainer in `setup`."""

    def __init__(self, run: FitCase, queries: Queries) -> None:
        super().__init__(run)
        self.queries = queries

    @override
    def setup(self, stage: str) -> None:
        self.data = IndexedSamples(LENGTH, 0.0)
        self.queries.read("module", self.trainer)


class NetWithLoader(QueryingNet):
    """A net with its own loader, which differs before `setup` and after it."""

    data = IndexedSamples(LENGTH, 0.0)
    size = 1

    @override
    def setup(self, stage: str) -> None:
        self.size = 3
        super().setup(stage)

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.size, shuffle=True)


class QueryingData(pl.LightningDataModule):
    """A data module whose loader needs its `setup`."""

    def __init__(self, queries: Queries) -> None:
        super().__init__()
        self.queries = queries

    @override
    def setup(self, stage: str) -> None:
        self.data = IndexedSamples(LENGTH, 0.0)
        self.queries.read("datamodule", self.trainer)

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=3, shuffle=True)


def fit_and_query(
    source: str, hook: str, ckpt_path: str | None = None, save: str = ""
) -> RunRecord:
    """Fit with loaders of a source (`fit`, `datamodule`, `module`); one hook reads the steps."""
    pl.seed_everything(3, workers=True, verbose=False)
    run = recorded(length=LENGTH, save=("step 1.2",) if save else (), root=save)
    queries, watch = Queries(source, hook), EventRecorder(run)
    net = (NetWithLoader if source == "module" else QueryingNet)(run, queries)
    strategy = elastic(global_batch_size=GLOBAL_BATCH)
    querying = LambdaCallback(setup=lambda trainer, *_, **__: queries.read("callback", trainer))
    trainer = quiet_trainer(strategy, querying, watch, max_epochs=EPOCHS)
    data: dict[str, Any] = {}
    if source == "datamodule":
        data["datamodule"] = QueryingData(queries)
    elif source == "fit":
        data["train_dataloaders"] = DataLoader(
            IndexedSamples(LENGTH, 0.0), batch_size=3, shuffle=True
        )
    trainer.fit(net, **data, ckpt_path=ckpt_path)
    assert queries.read_in >= {"callback", "module"}
    assert trainer.callbacks == [querying, watch]  # type: ignore[attr-defined]
    return gather_record(trainer, net, watch)


pytestmark = pytest.mark.engine

HOOKS = [
    ("fit", "datamodule"),
    ("fit", "callback"),
    ("fit", "module"),
    ("datamodule", "datamodule"),
    ("datamodule", "callback"),
    ("datamodule", "module"),
    ("module", "module"),
]


def fitted(worlds: Pools, source: str, hook: str, **options: str) -> RunRecord:
    seen: RunRecord = worlds.run(2, partial(fit_and_query, source, hook, **options))[0]
    return seen


@pytest.mark.parametrize(("source", "hook"), HOOKS)
def test_steps_and_accumulation_are_known_in_setup_hooks(
    source: str, hook: str, worlds: Pools, tmp_path: Path
) -> None:
    """Queries change neither the fit nor the resume."""
    without = fitted(worlds, source, "")
    seen = fitted(worlds, source, hook, save=str(tmp_path))
    assert (seen.steps, seen.losses) == (without.steps, without.losses)
    assert all(len(ids) == GLOBAL_BATCH for ids in seen.steps.values())
    assert seen.global_step == STEPS
    path = str(tmp_path / "step-1.2.ckpt")
    resumed = fitted(worlds, source, hook, ckpt_path=path)
    assert resumed.steps == from_step(without.steps, STEPS - 3)
