"""Fits that write down which samples each optimizer step consumed, and save wherever they are told.

What a step consumed is seen where it happens, in ``training_step``; the ranks put their parts
together at the end. Nothing in here knows how the library counts.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from deepspeed import comm
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import distributed, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)
from typing_extensions import override

from lightning_elastic_zero import ElasticDeepSpeedStrategy
from tests.trainer._epoch_counting_data import counting_loader

WIDTH = 5
SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}


@dataclass(frozen=True)
class RunSpec:
    """One fit."""

    save: tuple[str, ...] = ()
    """Moments at which to save: ``batch 7`` (after the epoch's 7th micro-batch of epoch 0), ..."""
    root: str = ""
    ckpt_path: str | None = None
    stage: int = 2
    length: int = 53
    global_batch: int | None = 12
    batch_size: int = 2
    epochs: int | None = 2
    max_steps: int = -1
    validate: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    kind: str = "plain"
    """Of the data: see ``loaders_of``."""
    schedule: str = "none"
    rate: float = 0.01
    manual: bool = False
    """Optimized by the module itself."""
    dropout: float = 0.0
    noise: float = 0.0
    """Drawn for each sample as it is fetched: in the process that fetches it."""
    seed: int = 3


@dataclass(frozen=True)
class RunRecord:
    """What one rank saw."""

    steps: dict[int, list[int]]
    """Sample ids of each optimizer step, of all ranks, sorted; steps count from 0."""
    losses: dict[int, float]
    """Mean loss of each optimizer step over the global batch."""
    events: list[str]
    rates: dict[int, float]
    epoch: int
    global_step: int
    axis: list[int]
    """Where each optimizer step is on the loggers' axis."""
    messages: list[str]
    drawn: list[float]
    """Random numbers of this process at the end."""
    buffer: list[float]
    """Of the module, which every micro-batch changes."""
    loops: dict[str, dict[str, Any]]
    """Every counter of the fit's loops, when each micro-batch begins, and at the end."""


class IndexedSamples(Dataset[Any]):
    """Samples that tell their index."""

    def __init__(self, length: int, noise: float) -> None:
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x + self.noise * torch.randn(WIDTH), index


class Backwards(Sampler[int]):
    """A sampler of a user's own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist()[::-1])


class OwnGenerator(Sampler[int]):
    """A sampler that draws from generators of its own, as users write them."""

    def __init__(self, length: int, kind: str) -> None:
        self.length, self.kind = length, kind
        self.rng = np.random.default_rng(5)
        self.parts: dict[str, Any] = {
            "numbers": random.Random(5),
            "torch": torch.Generator().manual_seed(5),
        }
        self.epochs = 0
        self.begin = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        match self.kind:
            case "numpy":
                return iter(self.rng.permutation(self.length).tolist())
            case "random":
                return iter(self.parts["numbers"].sample(range(self.length), self.length))
            case "torch":
                return iter(torch.randperm(self.length, generator=self.parts["torch"]).tolist())
            case "counts":
                begin = 7 * self.epochs
            case "changed":
                begin = self.begin
            case "ranks, later":
                begin = comm.get_rank() * (self.epochs > 1)
            case _:
                begin = comm.get_rank()
        return iter([(begin + index) % self.length for index in range(self.length)])


class Stream(IterableDataset[Any]):
    """Every rank's part of some samples in a row, in each epoch the same."""

    def __init__(self, length: int) -> None:
        self.length, self.first = length, 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for index in range(first + comm.get_rank(), self.length, comm.get_world_size()):
            yield torch.full((WIDTH,), float(index)), index


class SeekableStream(Stream):
    """One that can be told where to begin."""

    def resume_at(self, epoch: int, samples: int) -> None:
        """Begin after so many samples."""
        del epoch
        self.first = samples


class ContinuingStream(Stream):
    """A stream that does not begin anew in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        while self.first < self.length:
            index = self.first + comm.get_rank()
            self.first += comm.get_world_size()
            yield torch.full((WIDTH,), float(index)), index


class StatefulLoader(DataLoader[Any]):
    """A loader that keeps what its rank has consumed."""

    taken = 0
    skip = 0

    @override
    def __iter__(self) -> Any:
        skip, self.skip, self.taken = self.skip, 0, 0
        for batch in super().__iter__():
            self.taken += 1
            if self.taken > skip:
                yield batch

    def state_dict(self) -> dict[str, int]:
        """Keep it."""
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Skip it."""
        self.skip = state_dict["taken"]


class OwnBatchSampler(BatchSampler):
    """A batch sampler of a user's own: each rank's samples, back to front."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.batch_size, self.drop_last = length, size, True
        self.samples = 0
        self.sampler = range(length)

    def _own(self) -> list[list[int]]:
        own = list(range(self.length))[::-1][comm.get_rank() :: comm.get_world_size()]
        return [own[i : i + self.batch_size] for i in range(0, len(own), self.batch_size)]

    @override
    def __len__(self) -> int:
        return len(self._own())

    @override
    def __iter__(self) -> Iterator[list[int]]:
        begin = self.samples // comm.get_world_size() // self.batch_size
        self.samples = 0
        return iter(self._own()[begin:])

    def resume_at(self, epoch: int, samples: int) -> None:
        """Begin after so many samples."""
        del epoch
        self.samples = samples


class PlaceLess(OwnBatchSampler):
    """One that cannot be told where to begin."""

    resume_at = None  # type: ignore[assignment]


class RecordingNet(pl.LightningModule):
    """A small net that notes what it is given."""

    def __init__(self, run: RunSpec) -> None:
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
        """Return the loss of each sample, shape ``(batch,)``."""
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
        of_loaders = batch.values() if isinstance(batch, dict) else batch
        parts = [part for part in of_loaders if part is not None] if several else [batch]
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


def schedule_of(net: RecordingNet, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:  # noqa: C901, PLR0911, PLR0912
    """Return the scheduler that a run asks for."""
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


class EventRecorder(Callback):
    """Saves at the moments that it was told, and notes what happens."""

    def __init__(self, run: RunSpec) -> None:
        self.of = run
        self.events: list[str] = []
        self.axis: list[int] = []
        self.loops: dict[str, dict[str, Any]] = {}

    def _count(self, trainer: pl.Trainer, moment: str) -> None:
        self.loops[moment] = counts_of(trainer.fit_loop.state_dict())

    def _save(self, trainer: pl.Trainer, moment: str) -> None:
        if moment in self.of.save:
            trainer.save_checkpoint(Path(self.of.root) / f"{moment.replace(' ', '-')}.ckpt")

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
        begun = trainer.fit_loop.total_batch_idx
        self._count(trainer, f"batch {begun}")
        axis = trainer.fit_loop.epoch_loop._batches_that_stepped
        if axis not in self.axis:
            self.axis.append(axis)


def counts_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state of loops, but for what loaders keep, which is no counter."""
    flat: dict[str, Any] = {}
    for key, value in copy.deepcopy(state).items():
        if isinstance(value, dict):
            value.pop("combined_loader", None)
            flat.update({f"{key}.{name}": v for name, v in counts_of(value).items()})
        else:
            flat[key] = value
    return flat


def _none_for_one(samples: list[Any]) -> Any:  # noqa: ANN401 - a batch
    """Return None in the place of the batch that has the 13th sample."""
    return None if any(index == 12 for _, index in samples) else default_collate(samples)


def loaders_of(run: RunSpec) -> Any:  # noqa: ANN401, C901, PLR0911, PLR0912, PLR0915 - a table
    """Return the training loaders."""
    data = IndexedSamples(run.length, run.noise)
    made: Any = partial(DataLoader, batch_size=run.batch_size, **run.loader)
    match run.kind:
        case kind if kind.startswith("counting"):
            return counting_loader(kind, run.length, run.batch_size)
        case "plain" | "skips":
            return made(data, shuffle=True)
        case "positional":
            return DataLoader(data, run.batch_size, True, **run.loader)
        case "sampler":
            return made(data, sampler=Backwards(run.length))
        case "own generator":
            return made(data, shuffle=True, generator=torch.Generator().manual_seed(5))
        case "replacement":
            return made(data, sampler=RandomSampler(data, replacement=True))
        case "explicit SequentialSampler":
            return made(data, sampler=SequentialSampler(data))
        case "None instead of a batch":
            return made(data, sampler=range(run.length), collate_fn=_none_for_one)
        case "in order":
            return made(data)
        case "range":
            return made(data, sampler=range(run.length))
        case "numpy" | "random" | "torch" | "counts" | "ranks" | "ranks, later" | "changed":
            return made(data, sampler=OwnGenerator(run.length, run.kind))
        case "user's loader":
            return DataLoader(data, batch_sampler=PlaceLess(run.length, run.batch_size))
        case "no length":
            return [torch.zeros(2, WIDTH)] * 4
        case "iterable":
            return DataLoader(Stream(run.length), batch_size=run.batch_size)
        case "stateful":
            return StatefulLoader(Stream(run.length), batch_size=run.batch_size)
        case "seeks":
            return DataLoader(SeekableStream(run.length), batch_size=run.batch_size)
        case "goes on":
            return DataLoader(ContinuingStream(run.length), batch_size=run.batch_size)
        case "two, one uncut":
            return [made(data, shuffle=True), DataLoader(Stream(run.length), batch_size=3)]
        case "own distributed sampler":
            shared: DistributedSampler[Any] = DistributedSampler(
                data, comm.get_world_size(), comm.get_rank(), shuffle=False
            )
            return made(data, sampler=shared)
        case "two, as long as the longer":
            two = [made(data, shuffle=True), made(IndexedSamples(29, 0.0), shuffle=True)]
            return CombinedLoader(two, "max_size")
        case "own batches":
            return DataLoader(data, batch_sampler=OwnBatchSampler(run.length, run.batch_size))
        case "torchdata":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(data, batch_size=run.batch_size, shuffle=True)
        case "two":
            return {"a": made(data, shuffle=True), "b": made(IndexedSamples(29, 0.0), shuffle=True)}
    raise ValueError(run.kind)


def fit(run: RunSpec) -> RunRecord:
    """Fit, and give what this rank saw, with the samples of all ranks."""
    with warnings.catch_warnings(record=True) as warned, _heard() as said:
        warnings.simplefilter("always")
        seen = _fit(run)
    return replace(seen, messages=[*(str(w.message) for w in warned), *said])


def warned_by_default(run: RunSpec) -> tuple[RunRecord, list[str]]:
    """Fit without any filter of warnings but those of libraries; return what was warned too."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.resetwarnings()
        seen = _fit(run)
    return seen, [str(w.message) for w in warned]


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Hear what Lightning logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def error_of(run: RunSpec) -> str:
    """Return what a run raises."""
    try:
        fit(run)
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fits(runs: list[RunSpec]) -> list[RunRecord]:
    """Fit one run after the other."""
    return [fit(run) for run in runs]


def _fit(run: RunSpec) -> RunRecord:
    """Fit, and give what this rank saw."""
    pl.seed_everything(run.seed, workers=True, verbose=False)
    torch.manual_seed(run.seed + comm.get_rank())  # the streams of ranks differ, as on devices
    net, watch = RecordingNet(run), EventRecorder(run)
    trainer = trainer_of(run, [watch])
    val = DataLoader(IndexedSamples(8, 0.0), batch_size=2) if run.validate else None
    trainer.fit(net, loaders_of(run), val, ckpt_path=run.ckpt_path)
    if "after" in run.save:
        trainer.save_checkpoint(Path(run.root) / "after.ckpt")
    return gather_record(trainer, net, watch)


def trainer_of(run: RunSpec, callbacks: list[Callback]) -> pl.Trainer:
    """Return a trainer."""
    options = dict(SMALL_BUCKETS, **run.strategy)
    if run.global_batch is not None:
        options["global_batch_size"] = run.global_batch
    return pl.Trainer(
        accelerator="cpu",
        devices=comm.get_world_size(),
        strategy=ElasticDeepSpeedStrategy(stage=run.stage, **options),
        max_epochs=run.epochs,
        max_steps=run.max_steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"num_sanity_val_steps": 0, "enable_checkpointing": False, **run.trainer},
    )


def gather_record(trainer: pl.Trainer, net: RecordingNet, watch: EventRecorder) -> RunRecord:
    """Put the ranks' parts together."""
    everyone: list[Any] = [None] * comm.get_world_size()
    distributed.all_gather_object(everyone, net.ids)
    steps: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for of_rank in everyone:
        for step, ids, loss in of_rank:
            steps.setdefault(step, []).extend(ids)
            losses[step] = losses.get(step, 0.0) + loss
    return RunRecord(
        steps={step: sorted(ids) for step, ids in steps.items()},
        losses={step: loss / len(steps[step]) for step, loss in losses.items()},
        events=watch.events,
        rates=net.rates,
        epoch=trainer.current_epoch,
        global_step=trainer.global_step,
        axis=watch.axis,
        messages=[],
        drawn=torch.rand(2).tolist(),
        buffer=net.mean.tolist(),
        loops=watch.loops,
    )
