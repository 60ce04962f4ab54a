"""Metrics of an epoch are the same if the run is resumed inside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.trainer.connectors.logger_connector import result as running
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MinMaxMetric
from typing_extensions import override

from lightning_elastic_zero.trainer.metrics import _own_value
from tests.support.fits import Fit, FitCase, fit, fits
from tests.support.ranks import Pools
from tests.trainer._recorded_runs import EventRecorder, RecordingNet, from_step, recorded

CLASSES = 3


@dataclass
class LoggedValues:
    epochs: dict[str, dict[str, float]] = field(default_factory=dict)
    """Callback metrics when each epoch starts, by its number, and at the end."""
    logged: dict[str, dict[str, float]] = field(default_factory=dict)
    """Values passed to loggers, at the same moments."""
    rates: dict[int, float] = field(default_factory=dict)
    stopped: int = 0
    """The epoch in which ``EarlyStopping`` ended the run."""
    best: float = 0.0
    """The score of the best checkpoint of ``ModelCheckpoint``."""
    warned: list[str] = field(default_factory=list)


class MetricsNet(RecordingNet):
    """A net that logs values with all kinds of reductions and metrics."""

    def __init__(self, run: FitCase, *, logs_to_bar: bool = False) -> None:
        super().__init__(run)
        self.logs_to_bar = logs_to_bar
        self.mean_metric = torchmetrics.MeanMetric()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        both = [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)]
        self.several = torchmetrics.MetricCollection(both, prefix="of ")
        self.all = torchmetrics.CatMetric()
        self.scalars = torchmetrics.CatMetric()
        self.by_hand = torchmetrics.SumMetric()
        self.bounds = MinMaxMetric(torchmetrics.MeanMetric())
        self.best_val = torchmetrics.MaxMetric()
        self.val_mean = torchmetrics.MeanMetric()

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        total = super().training_step(batch, batch_idx)
        x, index = batch
        with torch.no_grad():
            each = self.loss(x)
        self.log("forked", each.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine", each.mean(), on_step=False, on_epoch=True, prog_bar=self.logs_to_bar)
        self.log("now_step", each.mean(), on_step=True, on_epoch=False)
        self.log("most", each.max(), on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("least", each.min(), on_epoch=True, reduce_fx=torch.min, sync_dist=True)
        self.log("sum", each.sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log_dict({"a": each.mean(), "b": -each.mean()}, on_epoch=True, sync_dist=True)
        if self.trainer.global_step % 5 == 0:
            self.log("early", each.mean(), on_epoch=True, on_step=False, sync_dist=True)
        classes = index % CLASSES
        guessed = (self.first(x)[:, :CLASSES]).argmax(1)
        self.accuracy(guessed, classes)
        self.mean_metric.update(each)
        self.all.update(each)
        self.scalars.update(each.sum())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("object", self.mean_metric, on_step=True, on_epoch=True)
        self.several.update(guessed, classes)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.by_hand.update(each)
        self.bounds.update(each)
        return total

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", outputs["loss"].detach() + batch_idx % 2, on_step=False, on_epoch=True)

    @override
    def on_train_epoch_end(self) -> None:
        self.log("by hand", self.by_hand.compute())
        self.by_hand.reset()
        self.log("the mean of all", self.all.compute().mean())
        self.all.reset()
        self.log("scalars", self.scalars.compute().sum(), sync_dist=True)
        self.scalars.reset()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_mean.update(self.loss(batch[0]))
        self.log("val_mean", self.val_mean, on_epoch=True)

    @override
    def on_validation_epoch_end(self) -> None:
        self.best_val.update(-self.val_mean.compute())
        self.log("best", self.best_val.compute())
        self.log("bounds", self.bounds.compute()["max"])

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        made = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.25
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": made, "interval": "epoch", "monitor": "forked_epoch"},
        }


class ValueRecorder(EventRecorder):
    """Records the values of an epoch when the next one starts; its result is ``LoggedValues``."""

    def __init__(self, run: FitCase) -> None:
        super().__init__(run)
        self.values = LoggedValues()

    def _record(self, trainer: pl.Trainer, moment: str) -> None:
        for values_of_kind, live in (
            (self.values.epochs, trainer.callback_metrics),
            (self.values.logged, trainer.logged_metrics),
        ):
            values_of_kind[moment] = {name: float(value) for name, value in live.items()}

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._record(trainer, str(trainer.current_epoch))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._record(trainer, "end")

    @override
    def seen(self, made: Fit, messages: list[str]) -> Any:
        trainer: Any = made.trainer
        best = trainer.checkpoint_callback.best_model_score
        stopped, rates = trainer.early_stopping_callback.stopped_epoch, made.net.rates
        return replace(
            self.values, rates=rates, stopped=stopped, best=float(best or 0.0), warned=messages
        )


pytestmark = pytest.mark.engine

MOMENTS = (
    *("step 0.2", "validating 2", "validated 2", "step 0.5", "epoch 0"),
    *("starting 1", "step 1.3"),
)
NOT_COMPARED = {
    "step 0.2": ("late",),
    "step 0.5": ("late",),
    "step 1.3": ("late",),
    "epoch 0": ("by hand of 1", "the mean of all of 1", "scalars of 1", "bounds"),
}
"""Values that a hook of the module logs or resets after the callback has saved, by moment."""
LOCAL = {"mine", "late", "loss"}
"""Logged without ``sync_dist``: a mean over the samples of one rank."""
OF_VALIDATION = {"val", "val_mean"}
"""Validation samples are padded for three ranks."""


def saving(root: Path, **options: object) -> FitCase:
    """Return a run that saves at all moments, and also validates inside an epoch."""
    run = recorded(
        save=MOMENTS,
        root=str(root),
        batch_size=6,
        epochs=4,
        validate=True,
        net=MetricsNet,
        watch=ValueRecorder,
        callbacks=(STOPPING,),
        checkpoint={
            "monitor": "sum",
            "save_on_train_epoch_end": True,
            "enable_version_counter": True,
        },
        trainer={"val_check_interval": 0.5},
    )
    return replace(run, **options)  # type: ignore[arg-type]


STOPPING = partial(
    EarlyStopping, "object_epoch", patience=1, min_delta=0.7, check_on_train_epoch_end=True
)


def resumed(run: FitCase) -> dict[str, FitCase]:
    """Return the runs that resume from existing saves, by moment."""
    runs = {moment: run.resumed(moment) for moment in run.save}
    return {moment: each for moment, each in runs.items() if Path(str(each.ckpt_path)).exists()}


@pytest.mark.parametrize(
    ("asynchronous", "moments"),
    [*((False, (moment,)) for moment in MOMENTS), (True, ("step 0.2", "step 1.3"))],
)
def test_epoch_values_and_decisions_are_those_of_an_uninterrupted_run(
    asynchronous: bool, moments: tuple[str, ...], worlds: Pools, tmp_path: Path
) -> None:
    """On every rank and from every moment, bitwise."""
    run = saving(tmp_path, save=moments, strategy={"async_save": asynchronous})
    reference = worlds.run(2, partial(fit, run))
    # The resumed runs may log the same value with other options.
    runs = resumed(replace(run, net=partial(MetricsNet, logs_to_bar=True)))
    assert set(runs) == set(moments)
    assert len(set(reference[0].rates.values())) > 1
    assert reference[0].stopped
    ranks = worlds.run(2, partial(fits, list(runs.values())))
    differing = {
        (rank, moment): found
        for rank, rank_values in enumerate(ranks)
        for moment, seen in zip(runs, rank_values, strict=True)
        if (found := _differing(reference[rank], seen, ignored=NOT_COMPARED.get(moment, ())))
    }
    assert not differing


def _differing(
    reference: LoggedValues, seen: LoggedValues, ignored: tuple[str, ...]
) -> dict[str, object]:
    """Return values and decisions that differ from those of the uninterrupted run."""
    first = min(seen.rates)
    rates = from_step(reference.rates, first)
    pairs = {
        "rates": (seen.rates, rates),
        "stopped": (seen.stopped, reference.stopped),
        "best": (seen.best, reference.best),
    }
    for kind, found, expected in (
        ("seen", seen.epochs, reference.epochs),
        ("logged", seen.logged, reference.logged),
    ):
        for epoch in found:
            for name in found[epoch].keys() | expected[epoch].keys():
                pair = (found[epoch].get(name), expected[epoch].get(name))
                pairs[f"{kind} {name} of {epoch}"] = pair
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {name: pair for name, pair in differing.items() if not any(map(name.count, ignored))}


BEGINS_AGAIN = "cover only the batches after the resume"


class ReadsMetrics(Callback):
    """Reads the metrics at the end of an epoch, as ``ModelCheckpoint`` does before it saves."""

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert trainer.callback_metrics


@pytest.mark.parametrize(
    "moment",
    [
        "epoch 0",
        *(pytest.param(m, marks=pytest.mark.long) for m in ("step 0.2", "step 0.5", "starting 1")),
    ],
)
@pytest.mark.parametrize(
    ("saved_on", "world"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((2, 3), (1, 2)))],
)
def test_on_another_world_the_metrics_of_the_epoch_begin_again_with_one_warning(
    saved_on: int, world: int, moment: str, worlds: Pools, tmp_path: Path
) -> None:
    """Decisions at the end of the epoch, and later epochs, are equal from the end of an epoch."""
    run = saving(tmp_path, save=(moment,), trainer={}, callbacks=(ReadsMetrics, STOPPING))
    reference = worlds.run(saved_on, partial(fit, run))[0]
    seen = worlds.run(world, partial(fit, run.resumed(moment)))[0]
    (warning,) = [text for text in seen.warned if BEGINS_AGAIN in text]
    of_epoch = moment.startswith("step")
    assert ("forked" in warning) == of_epoch
    assert "now_step" not in warning
    assert ("best_val" in warning) != of_epoch  # it is never reset
    assert seen.stopped
    if of_epoch:
        return
    assert all(reference.rates[step] == rate for step, rate in seen.rates.items())
    assert seen.stopped == reference.stopped
    for epoch in seen.epochs.keys() - {"0", "1"}:
        for name in reference.epochs[epoch].keys() - {"bounds", "best"} - OF_VALIDATION:
            value = reference.epochs[epoch][name]
            here = seen.epochs[epoch].get(name, math.nan)
            if name in LOCAL or name.endswith("_step"):
                assert math.isfinite(here), (epoch, name)
            else:
                assert math.isclose(here, value, rel_tol=1e-4), (epoch, name)


class CountingNet(RecordingNet):
    """A net that counts the samples of an epoch in a metric that it does not log."""

    @override
    def configure_model(self) -> None:
        super().configure_model()
        self.samples = getattr(self, "samples", torchmetrics.SumMetric())
        self.samples_per_epoch: list[float] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.samples.update(len(batch[1]))
        return super().training_step(batch, batch_idx)

    @override
    def on_train_epoch_end(self) -> None:
        self.samples_per_epoch.append(float(self.samples.compute()))
        self.samples.reset()


class SamplesPerEpoch(EventRecorder):
    @override
    def seen(self, made: Fit, messages: list[str]) -> Any:
        return made.net.samples_per_epoch


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_restart_with_their_epoch(world: int, worlds: Pools, tmp_path: Path) -> None:
    run = recorded(kind="iterable", length=60, batch_size=6, save=("step 1.3",), root=str(tmp_path))
    run = replace(run, net=CountingNet, watch=SamplesPerEpoch)
    assert worlds.run(2, partial(fit, run))[0] == [60, 60]
    policy = {"on_unresumable_data": "restart_epoch"}
    again = run.resumed("step 1.3", batch_size=12 // world, strategy=policy)
    assert worlds.run(world, partial(fit, again))[0] == [60]


def test_one_rank_alone_computes_no_metric_that_consists_of_others() -> None:
    """The parts would wait for all ranks, which may not save."""
    plain: Any = torchmetrics.MeanMetric()
    composed: Any = torchmetrics.MeanMetric() + 1.0
    for metric in (plain, composed):
        metric.update(2.0)
    meta = running._Metadata("training_step", "value", on_step=False, on_epoch=True)
    results = [running._ResultMetric(meta, is_tensor=False) for _ in range(2)]
    results[0].value, results[1].value = plain, composed
    assert [_own_value(result, is_only_rank=True) for result in results] == [2.0, 3.0]
    assert [_own_value(result, is_only_rank=False) for result in results] == [2.0, None]
