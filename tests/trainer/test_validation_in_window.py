"""Validations inside accumulation windows, in runs that are resumed before and inside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from deepspeed import comm
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import FitCase
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import (
    EventRecorder,
    RecordingNet,
    RunRecord,
    from_step,
    gather_record,
    loaders_of,
    recorded,
    trainer_of,
)

pytestmark = pytest.mark.engine

RUN = recorded(length=96, epochs=3, global_batch=None, batch_size=2, validate=True, dropout=0.2)
"""Without a global batch, so that integer intervals count micro-batches: 24 per epoch and rank."""


def _processed_batches(trainer: pl.Trainer) -> int:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.total.processed)


class Counter(Callback):
    """Counts validations, saves in a validation or after a micro-batch, and ends a run early."""

    def __init__(self, root: str, saves_at: int, saves_in: str, dies_at: int) -> None:
        self.path = f"{root}/mine.ckpt"
        self.saves_at, self.saves_in, self.dies_at = saves_at, saves_in, dies_at
        self.began, self.ended = 0, 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began, "ended": self.ended}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.began, self.ended = state_dict["began"], state_dict["ended"]

    def _save(self, trainer: pl.Trainer, moment: str) -> None:
        if (_processed_batches(trainer), moment) == (self.saves_at, self.saves_in):
            trainer.save_checkpoint(self.path)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began += 1

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ended += 1
        self._save(trainer, "validation")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, "training")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if _processed_batches(trainer) == self.dies_at:
            raise KeyError


class Net(RecordingNet):
    """A net with a metric that only validations update, and that is never reset."""

    def __init__(self, run: FitCase) -> None:
        super().__init__(run)
        self.validated = torchmetrics.SumMetric()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.update(self.loss(batch[0]).mean())


@dataclass(frozen=True)
class Case:
    accumulate: int
    interval: int
    saves_at: int
    """Micro-batches after which the first run saves."""
    saves_in: str = "training"
    dies_at: int = 0
    """Micro-batches after which the first run ends; 0: as soon as it has saved."""
    every_n_epochs: int | None = 1
    patience: int = 4
    min_epochs: int | None = None
    by_steps: bool = False
    """A third ModelCheckpoint saves after each step, as soon as the metric exists."""

    def run(self, root: Path) -> FitCase:
        trainer = {
            "accumulate_grad_batches": self.accumulate,
            "val_check_interval": self.interval,
            "check_val_every_n_epoch": self.every_n_epochs,
            "min_epochs": self.min_epochs,
        }
        return replace(RUN, root=str(root), trainer=trainer)


@dataclass(frozen=True)
class Decisions:
    record: RunRecord
    counted: tuple[int, int]
    stopping: dict[str, Any]
    best: list[dict[str, float]]
    """Names and scores of the best checkpoints of each ModelCheckpoint."""
    metrics: dict[str, float]
    validated: float


def decided(case: Case, run: FitCase, dies_at: int = -1) -> Decisions | None:
    pl.seed_everything(run.seed, workers=True, verbose=False)
    torch.manual_seed(run.seed + comm.get_rank())
    net, watch = Net(run), EventRecorder(run)
    counter = Counter(run.root, case.saves_at, case.saves_in, dies_at)
    stopping = EarlyStopping("val", patience=case.patience, min_delta=100.0)
    made = partial(ModelCheckpoint, run.root, monitor="val", save_top_k=3)
    saves = [
        made(filename="first {step}"),
        made(filename="second {step}", mode="max", save_last=True, enable_version_counter=False),
    ]
    if case.by_steps:
        saves.insert(0, made(filename="third {step}", every_n_train_steps=1, save_top_k=-1))
    trainer = trainer_of(run, [stopping, counter, watch, *saves])
    val = DataLoader(IndexedSamples(8, 0.0), batch_size=2)
    try:
        trainer.fit(net, loaders_of(run), val, ckpt_path=run.ckpt_path)
    except KeyError:
        return None
    return Decisions(
        gather_record(trainer, net, watch),
        (counter.began, counter.ended),
        {k: float(v) for k, v in stopping.state_dict().items() if not isinstance(v, str | None)},
        [{Path(p).name: float(s) for p, s in each.best_k_models.items()} for each in saves],
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        float(net.validated.compute()),
    )


CASES = {
    "after one": Case(4, 6, 8),
    "over epochs": Case(4, 6, 8, every_n_epochs=None),
    "at a step and inside": Case(4, 2, 8, "validation", dies_at=9),
    "before it": Case(4, 6, 4),
    "several in a window": Case(8, 3, 8),
    "a save that waits for it": Case(4, 6, 4, by_steps=True),
    "a stop that waits for min_epochs": Case(4, 18, 44, patience=1, min_epochs=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions_are_those_of_an_uninterrupted_run(
    case: Case, worlds: Pools, tmp_path: Path
) -> None:
    reference, seen = reference_and_resumed(case, worlds, tmp_path)
    assert seen.counted == reference.counted
    assert seen.stopping == reference.stopping
    assert seen.record.global_step == reference.record.global_step
    assert seen.metrics == reference.metrics
    assert seen.validated == reference.validated
    first = min(seen.record.steps)
    assert seen.record.steps == from_step(reference.record.steps, first)
    assert seen.record.losses == from_step(reference.record.losses, first)
    # Otherwise, the interrupted run has also saved after the checkpoint.
    if case.dies_at == 0:
        assert seen.best == reference.best
        names = [
            sorted(p.name for p in (tmp_path / folder).glob("*.ckpt"))
            for folder in ("resumed", "whole")
        ]
        assert names[0] == names[1]


@pytest.mark.long
@pytest.mark.parametrize("saves_in", ["validation", "training"])
def test_a_validation_in_a_repeated_window_is_counted_twice(
    saves_in: str, worlds: Pools, tmp_path: Path
) -> None:
    """Saved at its end, or before it in the same window: the weights are those of the step."""
    case = Case(4, 6, 6, saves_in, dies_at=7, patience=99)
    reference, seen = reference_and_resumed(case, worlds, tmp_path)
    more = 1 if saves_in == "validation" else 0
    assert seen.counted == (reference.counted[0] + more, reference.counted[1] + more)
    first = min(seen.record.steps)
    assert first == 1
    assert seen.record.steps == from_step(reference.record.steps, first)


def reference_and_resumed(case: Case, worlds: Pools, folder: Path) -> tuple[Decisions, Decisions]:
    """Return an uninterrupted run, and one that is resumed from the save of a run that ended."""
    (reference, *_) = worlds.run(2, partial(decided, case, case.run(folder / "whole")))
    root = folder / "resumed"
    dies_at = case.dies_at or case.saves_at
    assert worlds.run(2, partial(decided, case, case.run(root), dies_at)) == [None, None]
    again = replace(case.run(root), ckpt_path=str(root / "mine.ckpt"))
    (seen, *_) = worlds.run(2, partial(decided, case, again))
    assert reference is not None
    assert seen is not None
    return reference, seen
