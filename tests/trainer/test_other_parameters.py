"""A Trainer that resumes with other parameters than it was saved with (``strict_optimizer``)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.fits import FitCase, error_of, fit
from tests.support.outcome import captured_log
from tests.support.ranks import Pools
from tests.trainer.test_half_precision import STATES, Held, StateRecorder


def middle_fit(
    root: Path,
    stage: int,
    middle: str = "middle",
    *,
    trains: bool = True,
    thawed_in: int = -1,
    **changes: Any,
) -> FitCase:
    """Return a fit whose result is its ``Seen``.

    Args:
        root: folder of its saves.
        stage: of ZeRO.
        middle: name of the middle layer.
        trains: whether it requires gradients at the start of the fit.
        thawed_in: the epoch in which a callback unfreezes it; -1: never.
        changes: other fields.
    """
    fields = {
        "net": partial(Net, middle, trains),
        "data": no_data,
        "watch": StateRecorder,
        "callbacks": (partial(Thaws, middle, thawed_in),),
        "global_batch": 6,
        "seed": 1,
    }
    return FitCase(str(root), stage, **{**fields, **changes})


def no_data(_: FitCase) -> dict[str, Any]:
    """Return nothing: the module has its own loader."""
    return {}


@dataclass(frozen=True)
class Seen:
    start: Held
    end: Held
    warned: list[str]


class Net(pl.LightningModule):
    def __init__(self, middle: str, trains: bool, case: FitCase) -> None:
        super().__init__()
        self.name, self.trains, self.seed = middle, trains, case.seed

    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(self.seed)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        layer = nn.Linear(7, 7, bias=True).requires_grad_(self.trains)
        self.add_module(self.name, layer)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch[0]))
        found = self.last(torch.tanh(self.get_submodule(self.name)(hidden)))
        return torch.as_tensor(found.pow(2).mean())

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(x), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Thaws(Callback):
    """Unfreezes the middle layer."""

    def __init__(self, middle: str, epoch: int) -> None:
        self.middle, self.epoch = middle, epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            pl_module.get_submodule(self.middle).requires_grad_(True)


def fit_and_warn(case: FitCase) -> Seen:
    """Fit; return the state at the start and end of training, and the warnings."""
    with captured_log("lightning_elastic_zero", logging.WARNING) as warned:
        start, end = fit(case)
    return Seen(start, end, warned)


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


pytestmark = pytest.mark.engine

KNOWN = ("first.weight", "first.bias", "last.weight", "last.bias")
GONE = ("gone.weight", "gone.bias")
NEW = ("new.weight", "new.bias")
MIDDLE = ("middle.weight", "middle.bias")
FROZEN = ("frozen/middle.weight", "frozen/middle.bias")
LENIENT = {"strict_optimizer": False}


def trained(held: Held) -> set[str]:
    return {key.removeprefix("master/") for key in held if key.startswith("master/")}


def continued(case: FitCase) -> dict[str, Any]:
    """Return the fields of a fit that continues for an epoch, with another seed."""
    again = case.resumed("last", epochs=(case.epochs or 0) + 1, seed=2)
    return {name: getattr(again, name) for name in ("ckpt_path", "epochs", "seed")}


def assert_restored(seen: Seen, saved: Seen) -> None:
    """Fail unless masters and moments of the known parameters bitwise equal the saved ones."""
    for key in (f"{kind}/{name}" for kind in STATES for name in KNOWN):
        assert saved.end[key].any()
        assert torch.equal(seen.start[key], saved.end[key]), key


def assert_fresh(seen: Seen, name: str, start: torch.Tensor) -> None:
    """Fail unless a parameter starts with a master and without moments, and is trained."""
    assert torch.equal(seen.start[f"master/{name}"], start)
    assert not seen.start[f"exp_avg/{name}"].any()
    assert not seen.start[f"exp_avg_sq/{name}"].any()
    assert not torch.equal(seen.end[f"master/{name}"], start)


def assert_warned(warned: list[str], *names: str) -> None:
    """Fail unless each name is in one warning, and no restored parameter in any."""
    assert [sum(name in text for text in warned) for name in names] == [1] * len(names), warned
    assert not [text for text in warned if any(name in text for name in KNOWN)]


def assert_refused(worlds: Pools, world: int, plan: FitCase, *names: str) -> None:
    """Fail unless every rank refuses a resume, and names the parameters and the option."""
    for message in worlds.run(world, partial(error_of, plan)):
        assert message.startswith("CheckpointMismatchError")
        assert "strict_optimizer=False" in message
        assert all(name in message for name in names)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 1, 2), (1, 1, 2, 2)]
)
def test_known_parameters_are_restored_and_others_are_listed(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """An added layer starts fresh, and a removed one is ignored."""
    first = middle_fit(tmp_path / "run", source, "gone")
    saved = worlds.run(ranks, partial(fit_and_warn, first))[0]
    again = middle_fit(tmp_path / "run", target, "new", **continued(first))
    assert_refused(worlds, more, again, *NEW, *GONE)
    other = middle_fit(tmp_path / "other", target, "new", seed=2)
    configured = worlds.run(more, partial(fit_and_warn, other))[0].start
    found = worlds.run(more, partial(fit_and_warn, replace(again, strategy=LENIENT)))
    for seen in found:
        assert trained(seen.start) == {*KNOWN, *NEW}
        assert_restored(seen, saved)
        for name in NEW:
            assert_fresh(seen, name, configured[f"master/{name}"])
    assert_warned(found[0].warned, *NEW, *GONE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 2, 1), (3, 2, 3, 3), (2, 3, 2, 2)]
)
def test_a_layer_unfrozen_before_a_resume_starts_from_its_saved_weights(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """A layer that a callback unfroze before the save was not trained, and needs no option."""
    first = middle_fit(tmp_path / "run", source, trains=False, thawed_in=1, epochs=2)
    saved = worlds.run(ranks, partial(fit_and_warn, first))[0]
    assert trained(saved.end) == {*KNOWN}
    other = tmp_path / "as before"
    as_before = middle_fit(other, target, trains=False, thawed_in=2, **continued(first))
    for seen in worlds.run(more, partial(fit_and_warn, as_before)):
        assert_restored(seen, saved)
        for key in FROZEN:
            for held in (seen.start, seen.end):
                assert torch.equal(held[key], saved.end[key])
    again = middle_fit(tmp_path / "run", target, **continued(first))
    assert_refused(worlds, more, again, *MIDDLE)
    found = worlds.run(more, partial(fit_and_warn, replace(again, strategy=LENIENT)))
    for seen in found:
        assert trained(seen.start) == {*KNOWN, *MIDDLE}
        assert_restored(seen, saved)
        for name, key in zip(MIDDLE, FROZEN, strict=True):
            assert_fresh(seen, name, saved.end[key])
    assert_warned(found[0].warned, *MIDDLE)


@pytest.mark.parametrize(("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 2, 2)])
def test_a_layer_frozen_before_a_resume_keeps_its_masters(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    first = middle_fit(tmp_path / "run", source)
    saved = worlds.run(ranks, partial(fit_and_warn, first))[0]
    again = middle_fit(tmp_path / "run", target, trains=False, **continued(first))
    assert_refused(worlds, more, again, *MIDDLE)
    found = worlds.run(more, partial(fit_and_warn, replace(again, strategy=LENIENT)))
    for seen in found:
        assert trained(seen.start) == {*KNOWN}
        assert_restored(seen, saved)
        for name, key in zip(MIDDLE, FROZEN, strict=True):
            for held in (seen.start, seen.end):
                assert torch.equal(held[key], saved.end[f"master/{name}"])
    assert_warned(found[0].warned, *MIDDLE)


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_refuses_its_finetuning_callback(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    first = middle_fit(tmp_path / "run", stage, callbacks=(Finetuning,), checkpoint=None)
    for case in (first, replace(first, **continued(first))):
        for message in worlds.run(2, partial(error_of, case)):
            assert message.startswith("NotImplementedError")
            assert "does not support running with the DeepSpeed strategy" in message
