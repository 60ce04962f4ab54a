"""Quiet Trainers that fit, evaluate and save inside ranks that are already running."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from deepspeed import comm, zero
from deepspeed.accelerator import get_accelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import Self, override

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.outcome import captured_log, captured_warnings, error_text

SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
"""Options of a strategy; by default each bucket takes a gigabyte."""


def elastic(**options: Any) -> ElasticDeepSpeedStrategy:
    return ElasticDeepSpeedStrategy(**{"stage": 2, **SMALL_BUCKETS, **options})


class StockOnCPU(DeepSpeedStrategy):
    """Lightning's own strategy, allowed on CPUs."""

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        found = self._parallel_devices
        return found and [torch.device("cpu", index) for index in range(len(found))]

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @override
    def setup_environment(self) -> None:
        # DeepSpeedStrategy's own method refuses devices other than CUDA.
        super(DeepSpeedStrategy, self).setup_environment()


def quiet_trainer(strategy: Any, *callbacks: Callback, **options: Any) -> pl.Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    quiet = {
        "logger": False,
        "enable_checkpointing": saves,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(
        accelerator=get_accelerator().device_name(),
        devices=dist.get_world_size(),
        strategy=strategy,
        callbacks=[*callbacks],
        **{**quiet, **options},
    )


SAMPLES, GLOBAL_BATCH, WIDTH = 24, 12, 13


class Norm(nn.BatchNorm1d):
    """BatchNorm in the precision of its buffers, which may differ from that of the weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        mean, var = self.running_mean, self.running_var
        assert mean is not None
        x, weight, bias = (t.to(mean.dtype) for t in (input, self.weight, self.bias))
        found = nn.functional.batch_norm(x, mean, var, weight, bias, training=self.training)
        return found.to(input.dtype)


class RegressionNet(pl.LightningModule):
    def __init__(self, lr: float = 0.01, seed: int = 0, hidden: int = 31) -> None:
        super().__init__()
        self.lr, self.seed, self.hidden = lr, seed, hidden
        self.mine: dict[str, Any] = {}

    @classmethod
    def of(cls, case: FitCase) -> Self:
        return cls(case.rate, case.seed, case.hidden)

    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(self.seed)
        self.first = nn.Linear(WIDTH, self.hidden)
        self.norm = Norm(self.hidden) if self.hidden == 31 else nn.Identity()
        self.frozen = nn.Linear(self.hidden, 31).requires_grad_(requires_grad=False)
        self.last = nn.Linear(31, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)))
        return torch.as_tensor(self.last(torch.tanh(self.frozen(hidden))))

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        # The same type for both: torch 2.6 computes no gradient for mixed types.
        return nn.functional.mse_loss(self(x).float(), y.float())

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.as_tensor(self(batch[0]).float())

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": trained[:2], "lr": self.lr},
            {"params": trained[2:], "lr": 2 * self.lr, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"epoch": self.current_epoch, "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]


class Data(pl.LightningDataModule):
    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.options = options or {}
        self.loaded: dict[str, Any] = {}

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        y = x.sum(1, keepdim=True)
        assert self.trainer is not None
        batch = GLOBAL_BATCH // self.trainer.world_size
        return DataLoader(TensorDataset(x, y), batch_size=batch, **self.options)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def data_of(case: FitCase) -> dict[str, Any]:
    return {"datamodule": Data(case.loader)}


class Watch(Callback):
    """Observes a fit."""

    def __init__(self, case: FitCase) -> None:
        self.of = case

    def seen(self, made: Fit, messages: list[str]) -> Any:
        """Return what ``fit`` returns after the fit, which has caused messages. Collective."""
        raise NotImplementedError


class WeightRecorder(Watch):
    """Saves the rank, of which rank 0's is restored, and digests the weights at start and end."""

    def __init__(self, case: FitCase) -> None:
        super().__init__(case)
        self.loaded: dict[str, Any] = {}
        self.at_start: dict[str, str] = {}
        self.at_end: dict[str, str] = {}
        self.lrs: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rank": comm.get_rank(), "common": [1, 2.5, "three"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_start = digests(pl_module)
        self.lrs = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_end = digests(pl_module)

    def seen(self, made: Fit, messages: list[str]) -> dict[str, Any]:
        trainer, net = made.trainer, made.net
        load = elastic_strategy_of(trainer).last_load
        return {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "start": self.at_start,
            "end": self.at_end,
            "lrs": self.lrs,
            "lrs at end": [group["lr"] for group in trainer.optimizers[0].param_groups],
            "callback": self.loaded,
            "module": {k: v.tolist() if torch.is_tensor(v) else v for k, v in net.mine.items()},
            "data": made.data["datamodule"].loaded,
            "best": str(getattr(trainer.checkpoint_callback, "best_model_path", "")),
            "loaded": load.path if load else "",
            "read": load.bytes if load else 0,
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        }


def elastic_strategy_of(trainer: pl.Trainer) -> ElasticDeepSpeedStrategy:
    assert isinstance(trainer.strategy, ElasticDeepSpeedStrategy)
    return trainer.strategy


def digests(module: nn.Module) -> dict[str, str]:
    """Digest every weight (gathered, under ZeRO-3) and buffer as the module uses it."""
    found = {}
    for name, parameter in module.named_parameters():
        with zero.GatheredParameters([parameter]):
            found[name] = digest(parameter)
    return found | {name: digest(buffer) for name, buffer in module.named_buffers()}


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()[:16]


class Fit(NamedTuple):
    """A case in a rank, before or after the fit."""

    trainer: pl.Trainer
    net: Any
    data: dict[str, Any]
    """Keyword arguments of ``Trainer.fit``."""
    watch: Any


@dataclass(frozen=True)
class FitCase:
    """A fit of a Trainer, which ``fit`` runs."""

    root: str = ""
    """The folder of its saves."""
    stage: int = 2
    epochs: int | None = 1
    max_steps: int = -1
    ckpt_path: str | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    checkpoint: dict[str, Any] | None = field(default_factory=lambda: {"save_last": True})
    """Options of ``ModelCheckpoint``; without options, it has none."""
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Callback], ...] = ()
    """Create further callbacks in the rank."""
    net: Callable[[FitCase], Any] = RegressionNet.of
    """Creates the module."""
    data: Callable[[FitCase], dict[str, Any]] = data_of
    """Creates the data module, or the loaders for training and validation."""
    watch: Callable[[FitCase], Any] = WeightRecorder
    """Creates the ``Watch``, or another callback if the test itself runs the Trainer."""
    seed: int = 0
    rate: float = 0.01
    """The learning rate."""
    hidden: int = 31
    """Size of the inner layer of ``RegressionNet``."""
    strict: bool = True
    """``strict_loading`` of the module."""
    loader: dict[str, Any] = field(default_factory=dict)
    """Options of the ``DataLoader``."""

    kind: str = "plain"
    """Kind of the data; see ``_recorded_data.loaders_of``. The rest is of recorded fits only."""
    length: int = 53
    batch_size: int = 2
    noise: float = 0.0
    """Scale of random numbers that are added to each sample in the process that fetches it."""
    validate: bool = False
    validation: dict[str, Any] = field(default_factory=dict)
    """Options of the validation's ``DataLoader``; with workers, samples have the run's noise."""
    schedule: str = "none"
    manual: bool = False
    """Use manual optimization."""
    dropout: float = 0.0
    save: tuple[str, ...] = ()
    """Moments at which to save, such as ``step 0.3``; see ``EventRecorder``."""

    def path(self, name: str) -> Path:
        return Path(self.root) / f"{name.replace(' ', '-')}.ckpt"

    def resumed(self, name: str, **changes: Any) -> FitCase:
        """Return a fit that resumes from a save, such as ``last``; by default without moments."""
        return replace(self, **{"save": (), "ckpt_path": str(self.path(name)), **changes})

    def make(self, *first: Callback) -> Fit:
        """Seed the rank and create its Trainer, with callbacks that come first."""
        pl.seed_everything(self.seed, workers=True, verbose=False)
        # Data ranks draw different numbers, as on devices.
        torch.manual_seed(self.seed + dist.get_rank() // self.strategy.get(TENSOR_RANKS, 1))
        watch = self.watch(self)
        callbacks = [*first, *(make() for make in self.callbacks), watch]
        if self.checkpoint is not None:
            fixed = {"dirpath": self.root, "enable_version_counter": False}
            callbacks.append(ModelCheckpoint(**{**fixed, **self.checkpoint}))
        options = dict(self.strategy)
        if config := options.get("config"):
            zero_config = {**SMALL_BUCKETS, **config["zero_optimization"]}
            options["config"] = {**config, "zero_optimization": zero_config}
        strategy = elastic(stage=self.stage, global_batch_size=self.global_batch, **options)
        limits = {"max_epochs": self.epochs, "max_steps": self.max_steps}
        trainer = quiet_trainer(strategy, *callbacks, **{**limits, **self.trainer})
        net = self.net(self)
        net.strict_loading = self.strict
        return Fit(trainer, net, self.data(self), watch)


TENSOR_RANKS = "tensor_parallel_size"


def fit(case: FitCase, *first: Callback) -> Any:
    """Fit; return what the watch has seen."""
    logger = "lightning.pytorch.utilities.rank_zero"
    with captured_warnings() as warned, captured_log(logger, logging.INFO) as logged:
        made = case.make(*first)
        made.trainer.fit(made.net, **made.data, ckpt_path=case.ckpt_path)
    return made.watch.seen(made, [*warned, *logged])


def fits(cases: Sequence[FitCase]) -> list[Any]:
    """Fit one after the other in the same process."""
    return [fit(case) for case in cases]


def evaluate(case: FitCase, verb: str) -> dict[str, Any]:
    trainer, net, data, _ = case.make()
    found = getattr(trainer, verb)(net, **data, ckpt_path=case.ckpt_path)
    load = elastic_strategy_of(trainer).last_load
    assert load is not None
    if verb == "predict":
        return {"loss": None, "predicted": torch.cat(found).flatten().tolist()}
    return {"loss": next(iter(found[0].values())), "read": load.bytes}


def error_of(case: FitCase, verb: str = "fit") -> str:
    return error_text(lambda: fit(case) if verb == "fit" else evaluate(case, verb))


def listing(root: str) -> dict[str, bool]:
    return {p.name: (p / "manifest.json").is_file() for p in sorted(Path(root).iterdir())}
