"""A Trainer that goes on with other parameters than it was saved with (``strict_optimizer``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine._worker_pool import Pools
from tests.outcome import error_text, log_heard
from tests.trainer._quiet_trainer import elastic, quiet_trainer

pytestmark = pytest.mark.engine

KEYS = ("master", "exp_avg", "exp_avg_sq")
KNOWN = ("first.weight", "first.bias", "last.weight", "last.bias")
GONE = ("gone.weight", "gone.bias")
NEW = ("new.weight", "new.bias")

State = dict[tuple[str, str], torch.Tensor]


class Net(pl.LightningModule):
    """Three layers, of which the second is called ``gone``, or ``new`` and of another size."""

    def __init__(self, middle: str, seed: int) -> None:
        super().__init__()
        self.middle, self.seed = middle, seed

    def configure_model(self) -> None:
        """Build the layers, drawn from the seed."""
        if hasattr(self, "first"):
            return
        torch.manual_seed(self.seed)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.add_module(self.middle, nn.Linear(7, 7, bias=True))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss."""
        hidden = torch.tanh(self.first(batch[0]))
        found = self.last(torch.tanh(self.get_submodule(self.middle)(hidden)))
        return torch.as_tensor(found.pow(2).mean())

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the same samples each time."""
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(x), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on all of them."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@dataclass
class Look(Callback):
    """Asks DeepSpeed itself for masters and moments when training starts and ends."""

    seen: dict[str, State] = field(default_factory=dict)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look."""
        # Before any step DeepSpeed raises where it is asked for moments.
        self.seen["start"] = state_of(pl_module, KEYS if trainer.global_step else KEYS[:1])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look."""
        self.seen["end"] = state_of(pl_module, KEYS)

    def __hash__(self) -> int:
        """Lightning keeps callbacks in sets."""
        return id(self)


def state_of(module: nn.Module, keys: Sequence[str]) -> State:
    """Return masters and moments by parameter, in DeepSpeed's own way: collective."""
    return {
        (name, key): (
            safe_get_full_fp32_param(parameter)
            if key == "master"
            else safe_get_full_optimizer_state(parameter, key)
        ).clone()
        for name, parameter in module.named_parameters()
        for key in keys
    }


def fit(
    root: str, stage: int, middle: str, seed: int, *, resumed: bool, **options: Any
) -> tuple[dict[str, State], list[str]]:
    """Fit for an epoch, or for one more; return what was held, and what was warned of."""
    look = Look()
    saves = ModelCheckpoint(root, save_last=True, enable_version_counter=False)
    trainer = quiet_trainer(
        elastic(stage=stage, global_batch_size=6, **options),
        look,
        saves,
        max_epochs=2 if resumed else 1,
    )
    with log_heard("lightning_elastic_zero", logging.WARNING) as said:
        trainer.fit(Net(middle, seed), ckpt_path=f"{root}/last.ckpt" if resumed else None)
    return look.seen, said


def refusal(root: str, stage: int) -> str:
    """Return what a fit raises that resumes with another layer, as it is by default."""
    return error_text(lambda: fit(root, stage, "new", 2, resumed=True))


@pytest.mark.parametrize(
    ("source", "ranks", "target", "more"), [(2, 2, 3, 3), (3, 3, 1, 2), (1, 1, 2, 2)]
)
def test_known_parameters_go_on_and_others_are_listed(
    source: int, ranks: int, target: int, more: int, worlds: Pools, tmp_path: Path
) -> None:
    """A layer that was added begins anew, one that was removed stays out, the rest is restored."""
    root, other = str(tmp_path / "run"), str(tmp_path / "other")
    run: Callable[..., Any] = partial(fit, root)
    saved = worlds.run(ranks, partial(run, source, "gone", 1, resumed=False))[0][0]["end"]
    for message in worlds.run(more, partial(refusal, root, target)):
        assert message.startswith("CheckpointMismatchError")
        assert "strict_optimizer=False" in message
        assert all(name in message for name in (*NEW, *GONE))
    lenient = partial(run, target, "new", 2, resumed=True, strict_optimizer=False)
    fresh = partial(fit, other, target, "new", 2, resumed=False)
    configured = worlds.run(more, fresh)[0][0]["start"]
    found = worlds.run(more, lenient)
    for seen, _ in found:
        start = seen["start"]
        assert {name for name, _ in start} == {*KNOWN, *NEW}
        for name in KNOWN:
            for key in KEYS:
                assert saved[name, key].any()
                assert torch.equal(start[name, key], saved[name, key]), (name, key)
        for name in NEW:
            assert torch.equal(start[name, "master"], configured[name, "master"])
            assert not start[name, "exp_avg"].any()
            assert not start[name, "exp_avg_sq"].any()
            assert not torch.equal(seen["end"][name, "master"], start[name, "master"])
    told = found[0][1]
    assert [sum(name in text for text in told) for name in (*NEW, *GONE)] == [1, 1, 1, 1]
    assert not [text for text in told if any(name in text for name in KNOWN)]
