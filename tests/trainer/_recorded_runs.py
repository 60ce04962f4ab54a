"""Fits that record the samples of each optimizer step, and save at given moments.

``training_step`` records the samples; at the end, the records of all ranks are merged. This does
not depend on the counters of the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import Callback
from torch import distributed, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.support.fits import (
    SMALL_BUCKETS,
    Fit,
    FitCase,
    StockOnCPU,
    Watch,
    digests,
    error_of,
    fit,
    fits,
    quiet_trainer,
)
from tests.support.ranks import Pools
from tests.trainer import _recorded_data
from tests.trainer._recorded_data import WIDTH, IndexedSamples

V = TypeVar("V")


def recorded(**changes: Any) -> FitCase:
    """Return a fit of two epochs of five steps, whose data and saves these fields describe.

    ``fit`` returns its ``RunRecord``.
    """
    of_record = {"net": RecordingNet, "data": loaders_of, "watch": EventRecorder}
    fields = {"checkpoint": None, "global_batch": 12, "epochs": 2, "seed": 3}
    return FitCase(**{**of_record, **fields, **changes})


def loaders_of(run: FitCase) -> dict[str, Any]:
    """Return the loaders for training and for validation."""
    train = _recorded_data.loaders_of(run.kind, run.length, run.batch_size, run.noise, run.loader)
    data = IndexedSamples(8, run.noise if run.validation else 0.0)
    val = DataLoader(data, **{"batch_size": 2, **run.validation}) if run.validate else None
    return {"train_dataloaders": train, "val_dataloaders": val}


@dataclass(frozen=True)
class RunRecord:
    steps: dict[int, list[int]]
    """Sorted sample ids of all ranks, by optimizer step; steps count from 0."""
    losses: dict[int, float]
    """Mean loss over the global batch, by optimizer step."""
    events: list[str]
    validated: dict[int, float]
    """The value of each validation, by the optimizer steps before it."""
    rates: dict[int, float]
    epoch: int
    global_step: int
    axis: list[int]
    """Values of the loggers' step axis, in order."""
    messages: list[str]
    drawn: list[float]
    """Random numbers that this process draws at the end."""
    buffer: list[float]
    """A buffer of the module that every micro-batch changes."""
    weights: dict[str, str]
    """Digests of all weights and buffers at the end."""
    loops: dict[str, dict[str, Any]]
    """All counters of the fit's loops, at the start of each micro-batch and at the end."""


def from_step(values: Mapping[int, V], begin: int) -> dict[int, V]:
    """Return the entries from a step on."""
    return {step: value for step, value in values.items() if step >= begin}


class RecordingNet(pl.LightningModule):
    """A small net that records its inputs."""

    def __init__(self, run: FitCase) -> None:
        super().__init__()
        self.of = run
        self.automatic_optimization = not run.manual
        self.ids: list[tuple[int, list[int], float]] = []
        self.rates: dict[int, float] = {}

    @override
    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, 7)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(7))
        self.last = nn.Linear(7, 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, shape `(batch,)`."""
        hidden = torch.tanh(self.first(x))
        hidden = nn.functional.dropout(hidden, self.of.dropout, training=self.training)
        target = x.sum(1)
        return torch.as_tensor((self.last(hidden).squeeze(1) - target).square())

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.of.kind == "skips" and batch_idx == 7 else None

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        several = isinstance(batch, dict) or not isinstance(batch[0], torch.Tensor)
        batches = batch.values() if isinstance(batch, dict) else batch
        parts = [part for part in batches if part is not None] if several else [batch]
        total, ids = torch.zeros(()), []
        for x, index in parts:
            total = total + self.loss(x).mean()
            ids += index.tolist()
        self.mean.lerp_(self.first(x).detach().mean(0), 0.1)
        step = self.trainer.global_step
        self.ids.append((step, ids, float(total.detach()) * len(ids)))
        self.rates[step] = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log("loss", total)
        if self.of.manual:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(total)
            optimizer.step()
        return total

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[0]).mean(), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        rate = np.float32(self.of.rate) if self.of.schedule == "numpy" else self.of.rate
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate)
        made = schedule_of(self, optimizer)
        return optimizer if made is None else {"optimizer": optimizer, "lr_scheduler": made}


def schedule_of(net: RecordingNet, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    rates = torch.optim.lr_scheduler
    made: Any
    match net.of.schedule:
        case "step":
            return {"scheduler": rates.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}
        case "frequency":
            made = rates.ExponentialLR(optimizer, 0.9)
            return {"scheduler": made, "interval": "step", "frequency": 3}
        case "epoch":
            return {"scheduler": rates.ExponentialLR(optimizer, 0.7), "interval": "epoch"}
        case "onecycle":
            total = int(net.trainer.estimated_stepping_batches)
            made = rates.OneCycleLR(optimizer, max_lr=5 * net.of.rate, total_steps=total)
            return {"scheduler": made, "interval": "step"}
        case "warmup":
            warm = rates.LinearLR(optimizer, 0.1, total_iters=4)
            cosine = rates.CosineAnnealingLR(optimizer, T_max=6)
            made = rates.SequentialLR(optimizer, [warm, cosine], milestones=[4])
            return {"scheduler": made, "interval": "step"}
        case "lambda":
            return {"scheduler": rates.LambdaLR(optimizer, _factor), "interval": "step"}
        case "numpy":
            made = rates.LambdaLR(optimizer, lambda step: np.float32(_factor(step)))
            return {"scheduler": made, "interval": "step"}
        case "plateau, stepwise":
            made = rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            return {"scheduler": made, "interval": "step", "monitor": "val", "strict": False}
        case "plateau":
            made = rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
            return {"scheduler": made, "interval": "epoch", "monitor": "val"}
    return None


def _factor(step: int) -> float:
    return 1.0 / (1 + step)


class EventRecorder(Watch):
    """Records events, and saves at the moments of ``FitCase.save``.

    Moments: ``step E.N`` and ``inside E.N`` (after the N-th step of epoch E, or in the next
    window), ``starting E``, ``epoch E`` (its end), ``validating S``, ``validated S``, ``end`` and
    ``after`` the fit.
    """

    def __init__(self, run: FitCase) -> None:
        super().__init__(run)
        self.events: list[str] = []
        self.axis: list[int] = []
        self.validated: dict[int, float] = {}
        self.loops: dict[str, dict[str, Any]] = {}

    def _count(self, trainer: pl.Trainer, moment: str) -> None:
        self.loops[moment] = counts_of(trainer.fit_loop.state_dict())

    def _save(self, trainer: pl.Trainer, moment: str) -> None:
        if moment in self.of.save:
            trainer.save_checkpoint(self.of.path(moment))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        done, per_step = progress.current.processed, trainer.accumulate_grad_batches
        epoch = trainer.current_epoch
        if done % per_step == 0 or progress.is_last_batch:
            self._save(trainer, f"step {epoch}.{-(-done // per_step)}")
        elif done % per_step == 1:
            self._save(trainer, f"inside {epoch}.{done // per_step}")

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.events.append(f"validate at {trainer.global_step}")

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save(trainer, f"validating {trainer.global_step}")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated[trainer.global_step] = float(trainer.callback_metrics["val"])
        self._save(trainer, f"validated {trainer.global_step}")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.events.append(f"epoch {trainer.current_epoch} starts at {trainer.global_step}")
        if self.of.kind == "changed":
            elastic: Any = trainer.train_dataloader
            elastic.sampler.sampler.begin = 7 * (trainer.current_epoch + 1)
        self._save(trainer, f"starting {trainer.current_epoch}")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.events.append(f"epoch {trainer.current_epoch} ends at {trainer.global_step}")
        self._save(trainer, f"epoch {trainer.current_epoch}")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._count(trainer, "end")
        self._save(trainer, "end")

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._count(trainer, f"batch {trainer.fit_loop.total_batch_idx}")
        axis = trainer.fit_loop.epoch_loop._batches_that_stepped
        if axis not in self.axis:
            self.axis.append(axis)

    @override
    def seen(self, made: Fit, messages: list[str]) -> RunRecord:
        self._save(made.trainer, "after")
        return gather_record(made.trainer, made.net, self, messages)


class AccumulatesByEpoch(Callback):
    """Changes the accumulation at the start of each epoch."""

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


def counts_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the full state of loops, except the states of loaders."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict) and key != "combined_loader":
            flat.update({f"{key}.{name}": v for name, v in counts_of(value).items()})
        elif key != "combined_loader":
            flat[key] = value  # the loops have copied it
    return flat


def record(worlds: Pools, world: int, run: FitCase) -> RunRecord:
    """Fit on a world of ranks; return the record of the first rank."""
    seen: RunRecord = worlds.run(world, partial(fit, run))[0]
    return seen


def records(worlds: Pools, world: int, runs: Iterable[FitCase]) -> list[RunRecord]:
    """Fit several runs in the same processes; return the records of the first rank."""
    seen: list[RunRecord] = worlds.run(world, partial(fits, list(runs)))[0]
    return seen


def assert_continued(
    worlds: Pools,
    world: int,
    saving: FitCase,
    reference: RunRecord,
    points: Mapping[str, int],
    **changes: Any,
) -> list[RunRecord]:
    """Resume from each save; fail unless the samples continue those of the reference run.

    ``points`` maps each moment of a save to the first step after it.
    """
    seen = records(worlds, world, [saving.resumed(point, **changes) for point in points])
    for resumed, (point, begin) in zip(seen, points.items(), strict=True):
        assert resumed.steps == from_step(reference.steps, begin), (world, point)
    return seen


def assert_refused(worlds: Pools, world: int, run: FitCase, error: str, *parts: str) -> None:
    """Fail unless each rank raises an error that starts with ``error`` and contains all parts."""
    for message in worlds.run(world, partial(error_of, run)):
        assert message.startswith(error), message
        assert all(part in message for part in parts), message


def fit_stock(run: FitCase, *, ddp: bool = False) -> RunRecord:
    """Fit with Lightning's own strategy for DeepSpeed, or for DDP."""
    pl.seed_everything(run.seed, workers=True, verbose=False)
    net, watch = RecordingNet(run), EventRecorder(run)
    options = {**SMALL_BUCKETS, **run.strategy}
    strategy: Any = "ddp"
    if not ddp:
        strategy = StockOnCPU(stage=run.stage, zero_allow_untested_optimizer=True, **options)
    trainer = quiet_trainer(strategy, watch, max_epochs=run.epochs, **run.trainer)
    trainer.fit(net, loaders_of(run)["train_dataloaders"])
    return gather_record(trainer, net, watch)


def gather_record(
    trainer: pl.Trainer, net: RecordingNet, watch: EventRecorder, messages: Sequence[str] = ()
) -> RunRecord:
    """Merge the records of all ranks."""
    all_ids: list[Any] = [None] * comm.get_world_size()
    distributed.all_gather_object(all_ids, net.ids)
    steps: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for rank_ids in all_ids:
        for step, ids, loss in rank_ids:
            steps.setdefault(step, []).extend(ids)
            losses[step] = losses.get(step, 0.0) + loss
    return RunRecord(
        steps={step: sorted(ids) for step, ids in steps.items()},
        losses={step: loss / len(steps[step]) for step, loss in losses.items()},
        events=watch.events,
        validated=watch.validated,
        rates=net.rates,
        epoch=trainer.current_epoch,
        global_step=trainer.global_step,
        axis=watch.axis,
        messages=[*messages],
        drawn=torch.rand(2).tolist(),
        buffer=net.mean.tolist(),
        weights=digests(net),
        loops=watch.loops,
    )
