"""A Trainer that resumes with other parameters than it was saved with (``strict_optimizer``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.fits import elastic, quiet_trainer
from tests.support.outcome import captured_log, error_text
from tests.support.ranks import Pools

KEYS = ("master", "exp_avg", "exp_avg_sq")

State = dict[tuple[str, str], torch.Tensor]


@dataclass(frozen=True)
class MiddleFit:
    root: str
    stage: int
    middle: str = "middle"
    """Name of the middle layer."""
    trains: bool = True
    """Whether it requires gradients at the start of the fit."""
    thawed_in: int = -1
    """The epoch in which a callback unfreezes it; -1: never."""
    seed: int = 1
    epochs: int = 1
    ckpt_path: str | None = None
    strategy: dict[str, Any] = field(default_factory=dict)

    def resumed(self, **changes: Any) -> MiddleFit:
        """Return a fit that continues for an epoch, with another seed."""
        fields = {"seed": 2, "epochs": self.epochs + 1, "ckpt_path": f"{self.root}/last.ckpt"}
        return MiddleFit(**{**vars(self), **fields, **changes})


@dataclass(frozen=True)
class Seen:
    start: State
    """Masters and moments of trained parameters at the start of training."""
    end: State
    weights: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    """Weights of all parameters at the start and at the end of training."""
    warned: list[str]


class Net(pl.LightningModule):
    def __init__(self, plan: MiddleFit) -> None:
        super().__init__()
        self.plan = plan

    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(self.plan.seed)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        layer = nn.Linear(7, 7, bias=True).requires_grad_(self.plan.trains)
        self.add_module(self.plan.middle, layer)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch[0]))
        found = self.last(torch.tanh(self.get_submodule(self.plan.middle)(hidden)))
        return torch.as_tensor(found.pow(2).mean())

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(x), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Look(Callback):
    """Records masters and moments with DeepSpeed's functions at the start and end of training."""

    def __init__(self, plan: MiddleFit) -> None:
        self.plan = plan
        self.states: list[State] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self._trained: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trained = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        # Before the first step, DeepSpeed's function for moments raises.
        self._look(pl_module, KEYS if trainer.global_step else KEYS[:1])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Unfreeze the middle layer in its epoch."""
        if trainer.current_epoch == self.plan.thawed_in:
            pl_module.get_submodule(self.plan.middle).requires_grad_(True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(pl_module, KEYS)

    def _look(self, module: nn.Module, keys: Sequence[str]) -> None:
        """Record masters and moments by parameter. Collective."""
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
    """Fit; return the state and the warnings."""
    look = Look(plan)
    saves = ModelCheckpoint(plan.root, save_last=True, enable_version_counter=False)
    strategy = elastic(stage=plan.stage, global_batch_size=6, **plan.strategy)
    trainer = quiet_trainer(strategy, look, saves, max_epochs=plan.epochs)
    with captured_log("lightning_elastic_zero", logging.WARNING) as warned:
        trainer.fit(Net(plan), ckpt_path=plan.ckpt_path)
    start, end = look.states
    return Seen(start, end, (look.weights[0], look.weights[1]), warned)


def refusal(plan: MiddleFit) -> str:
    return error_text(lambda: fit(plan))


class Finetuning(BaseFinetuning):
    """Lightning's callback to train a layer later."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pl_module.configure_model()
        self.freeze(pl_module.get_submodule("middle"))

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.get_submodule("middle"), optimizer)


def finetuning_refusal(plan: MiddleFit) -> str:
    """Return the error of a fit with this callback."""
    strategy = elastic(stage=plan.stage, global_batch_size=6)
    trainer = quiet_trainer(strategy, Finetuning(), max_epochs=plan.epochs)
    return error_text(lambda: trainer.fit(Net(plan), ckpt_path=plan.ckpt_path))


pytestmark = pytest.mark.engine

KNOWN = ("first.weight", "first.bias", "last.weight", "last.bias")
GONE = ("gone.weight", "gone.bias")
NEW = ("new.weight", "new.bias")
MIDDLE = ("middle.weight", "middle.bias")
LENIENT = {"strict_optimizer": False}


def assert_restored(seen: Seen, saved: Seen) -> None:
    """Fail unless masters and moments of the known parameters bitwise equal the saved ones."""
    for name in KNOWN:
        for key in KEYS:
            assert saved.end[name, key].any()
            assert torch.equal(seen.start[name, key], saved.end[name, key]), (name, key)


def assert_fresh(seen: Seen, name: str) -> None:
    """Fail unless a parameter starts without moments and is trained."""
    assert not seen.start[name, "exp_avg"].any()
    assert not seen.start[name, "exp_avg_sq"].any()
    assert not torch.equal(seen.end[name, "master"], seen.start[name, "master"])


def assert_warned(warned: list[str], *names: str) -> None:
    """Fail unless each name is in one warning, and no restored parameter in any."""
    assert [sum(name in text for text in warned) for name in names] == [1] * len(names), warned
    assert not [text for text in warned if any(name in text for name in KNOWN)]


def assert_refused(worlds: Pools, world: int, plan: MiddleFit, *names: str) -> None:
    """Fail unless every rank refuses a resume, and names the parameters and the option."""
    for message in worlds.run(world, partial(refusal, plan)):
        assert message.startswith("CheckpointMismatchError")
        assert "strict_optimizer=False" in message
        assert all(name in message for name in names)


@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 1, 2), (1, 1, 2, 2)]
)
def test_known_parameters_are_restored_and_others_are_listed(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """An added layer starts fresh, and a removed one is ignored."""
    first = MiddleFit(str(tmp_path / "run"), source, "gone")
    saved = worlds.run(ranks, partial(fit, first))[0]
    again = first.resumed(stage=target, middle="new")
    assert_refused(worlds, more, again, *NEW, *GONE)
    other = MiddleFit(str(tmp_path / "other"), target, "new", seed=2)
    configured = worlds.run(more, partial(fit, other))[0].start
    found = worlds.run(more, partial(fit, replace(again, strategy=LENIENT)))
    for seen in found:
        assert {name for name, _ in seen.start} == {*KNOWN, *NEW}
        assert_restored(seen, saved)
        for name in NEW:
            assert torch.equal(seen.start[name, "master"], configured[name, "master"])
            assert_fresh(seen, name)
    assert_warned(found[0].warned, *NEW, *GONE)


@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 2, 1), (3, 2, 3, 3), (2, 3, 2, 2)]
)
def test_a_layer_unfrozen_before_a_resume_starts_from_its_saved_weights(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """A layer that a callback unfroze before the save was not trained, and needs no option."""
    first = MiddleFit(str(tmp_path / "run"), source, trains=False, thawed_in=1, epochs=2)
    saved = worlds.run(ranks, partial(fit, first))[0]
    assert {name for name, _ in saved.end} == {*KNOWN}
    as_before = first.resumed(stage=target, root=str(tmp_path / "as before"), thawed_in=2)
    for seen in worlds.run(more, partial(fit, as_before)):
        assert_restored(seen, saved)
        for name in MIDDLE:
            for weights in seen.weights:
                assert torch.equal(weights[name], saved.weights[1][name])
    again = first.resumed(stage=target, trains=True)
    assert_refused(worlds, more, again, *MIDDLE)
    found = worlds.run(more, partial(fit, replace(again, strategy=LENIENT)))
    for seen in found:
        assert {name for name, _ in seen.start} == {*KNOWN, *MIDDLE}
        assert_restored(seen, saved)
        for name in MIDDLE:
            assert torch.equal(seen.start[name, "master"], saved.weights[1][name])
            assert_fresh(seen, name)
    assert_warned(found[0].warned, *MIDDLE)


@pytest.mark.parametrize(("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 2, 2)])
def test_a_layer_frozen_before_a_resume_keeps_its_masters(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    first = MiddleFit(str(tmp_path / "run"), source)
    saved = worlds.run(ranks, partial(fit, first))[0]
    again = first.resumed(stage=target, trains=False)
    assert_refused(worlds, more, again, *MIDDLE)
    found = worlds.run(more, partial(fit, replace(again, strategy=LENIENT)))
    for seen in found:
        assert {name for name, _ in seen.start} == {*KNOWN}
        assert_restored(seen, saved)
        for name in MIDDLE:
            for weights in seen.weights:
                assert torch.equal(weights[name], saved.end[name, "master"])
    assert_warned(found[0].warned, *MIDDLE)


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_refuses_its_finetuning_callback(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    first = MiddleFit(str(tmp_path / "run"), stage)
    for plan in (first, first.resumed()):
        for message in worlds.run(2, partial(finetuning_refusal, plan)):
            assert message.startswith("NotImplementedError")
            assert "does not support running with the DeepSpeed strategy" in message
