"""Fits of a small net whose middle layer comes, goes, or is frozen between a save and a resume."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.fits import elastic, quiet_trainer
from tests.support.outcome import error_text, log_heard

KEYS = ("master", "exp_avg", "exp_avg_sq")

State = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True)
class MiddleFit:
    """One fit."""

    root: str
    stage: int
    middle: str = "middle"
    """What the middle layer is called."""
    trains: bool = True
    """Whether it requires a gradient when the fit begins."""
    thawed_in: int = -1
    """The epoch in which a callback lets it require one; -1: none."""
    seed: int = 1
    epochs: int = 1
    ckpt_path: str | None = None
    strategy: dict[str, Any] = field(default_factory=dict)

    def resumed(self, **changes: Any) -> MiddleFit:
        """Return the fit that goes on for an epoch, from another seed."""
        fields = {"seed": 2, "epochs": self.epochs + 1, "ckpt_path": f"{self.root}/last.ckpt"}
        return MiddleFit(**{**vars(self), **fields, **changes})


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a fit."""

    start: State
    """By parameter and key, when training began: ``master`` and moments of what is trained."""
    end: State
    weights: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    """Of all parameters, when training began and when it ended."""
    warned: list[str]


class Net(pl.LightningModule):
    """Three layers."""

    def __init__(self, plan: MiddleFit) -> None:
        super().__init__()
        self.plan = plan

    def configure_model(self) -> None:
        """Build the layers, drawn from the seed."""
        if hasattr(self, "first"):
            return
        torch.manual_seed(self.plan.seed)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        layer = nn.Linear(7, 7, bias=True).requires_grad_(self.plan.trains)
        self.add_module(self.plan.middle, layer)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss."""
        hidden = torch.tanh(self.first(batch[0]))
        found = self.last(torch.tanh(self.get_submodule(self.plan.middle)(hidden)))
        return torch.as_tensor(found.pow(2).mean())

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the same samples each time."""
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(x), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Look(Callback):
    """Asks DeepSpeed itself for masters and moments when training starts and ends."""

    def __init__(self, plan: MiddleFit) -> None:
        self.plan = plan
        self.states: list[State] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self._trained: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look."""
        self._trained = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        # Before any step DeepSpeed raises where it is asked for moments.
        self._look(pl_module, KEYS if trainer.global_step else KEYS[:1])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the middle layer require a gradient, where it is its turn."""
        if trainer.current_epoch == self.plan.thawed_in:
            pl_module.get_submodule(self.plan.middle).requires_grad_(True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look."""
        self._look(pl_module, KEYS)

    def _look(self, module: nn.Module, keys: Sequence[str]) -> None:
        """Note masters and moments by parameter, in DeepSpeed's own way: collective."""
        parameters = dict(module.named_parameters())
        self.states.append(
            {
                (name, key): (
                    safe_get_full_fp32_param(parameters[name])
                    if key == "master"
                    else safe_get_full_optimizer_state(parameters[name], key)
                ).clone()
                for name in self._trained
                for key in keys
            }
        )
        with zero.GatheredParameters([*parameters.values()]):
            self.weights.append({name: p.detach().clone() for name, p in parameters.items()})


def fit(plan: MiddleFit) -> Seen:
    """Fit; return what was held, and what was warned of."""
    look = Look(plan)
    saves = ModelCheckpoint(plan.root, save_last=True, enable_version_counter=False)
    strategy = elastic(stage=plan.stage, global_batch_size=6, **plan.strategy)
    trainer = quiet_trainer(strategy, look, saves, max_epochs=plan.epochs)
    with log_heard("lightning_elastic_zero", logging.WARNING) as said:
        trainer.fit(Net(plan), ckpt_path=plan.ckpt_path)
    start, end = look.states
    return Seen(start, end, (look.weights[0], look.weights[1]), said)


def refusal(plan: MiddleFit) -> str:
    """Return what a fit raises."""
    return error_text(lambda: fit(plan))


class Finetuning(BaseFinetuning):
    """Lightning's own way to train a layer later."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        """Freeze the middle layer."""
        pl_module.configure_model()
        self.freeze(pl_module.get_submodule("middle"))

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add it in the second epoch."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.get_submodule("middle"), optimizer)


def finetuning_refusal(plan: MiddleFit) -> str:
    """Return what a fit raises with Lightning's own callback for it."""
    strategy = elastic(stage=plan.stage, global_batch_size=6)
    trainer = quiet_trainer(strategy, Finetuning(), max_epochs=plan.epochs)
    return error_text(lambda: trainer.fit(Net(plan), ckpt_path=plan.ckpt_path))
