"""Fits with options that only a rank can set: what the trainer is made of is no plain data."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch.callbacks import Callback

from tests.trainer._fitting import Net, Plan
from tests.trainer._refusing import told


def masters_and_weights(plan: Plan) -> list[tuple[list[float], list[float]]]:
    """Load into a fit, and give each trained parameter's master beside its weight."""
    trainer, net, data, _ = plan.make()
    found = []

    class Look(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            """Look, before anything is trained."""
            for parameter in pl_module.parameters():
                if parameter.requires_grad:
                    master = safe_get_full_fp32_param(parameter)
                    found.append((master.flatten().tolist(), parameter.flatten().tolist()))

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    trainer.fit(net, data, ckpt_path=plan.ckpt_path)
    return found


class Colour(enum.Enum):
    """A class that nobody knows to be harmless."""

    RED = 1


def odd_values(kind: str) -> dict[str, Any]:
    """Give hyperparameters beyond numbers and strings."""
    harmless = {"folder": Path("a/b"), "rate": np.float64(0.25), "shape": (1, 2)}
    return harmless if kind == "harmless" else {**harmless, "colour": Colour.RED}


class WithValues(Net):
    """Has hyperparameters of its own."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters("values")
        self.found: dict[str, Any] = {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them back."""
        self.found = checkpoint["hyper_parameters"]["values"]


def fit_with_objects(root: str, kind: str, allow: bool) -> str:
    """Fit from last.ckpt, if it is there, with odd hyperparameters; say what came back."""
    path = f"{root}/{kind}"
    again = Path(path, "last.ckpt").exists()
    plan = Plan(path, 1, 2 if again else 1, "last", strategy={"allow_pickle": allow})
    trainer, _, data, _ = plan.make()
    net = WithValues(odd_values(kind))
    said = told(lambda: trainer.fit(net, data, ckpt_path="last" if again else None))
    if said != "nothing was raised" or not again:
        return said
    same = {k: repr(v) for k, v in net.found.items()} == {
        k: repr(v) for k, v in odd_values(kind).items()
    }
    return "the same" if same else f"others: {net.found}"


class Unpicklable(Callback):
    """Wants a function saved."""

    def state_dict(self) -> dict[str, Any]:
        """Give what cannot be saved."""
        return {"of_mine": lambda: 1}


def fit_with_lambda(root: str) -> str:
    """Fit with a callback whose state cannot be pickled."""
    trainer, net, data, _ = Plan(root, 2).make()
    trainer.callbacks.insert(0, Unpicklable())  # type: ignore[attr-defined]
    return told(lambda: trainer.fit(net, data))


class Forbidding(Net):
    """Gives its state dict to nobody."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Refuse."""
        raise AssertionError

    def configure_optimizers(self) -> Any:  # noqa: ANN401 - one of Lightning's many forms
        """Give an optimizer that gives its own to nobody either."""
        optimizer = torch.optim.SGD(p for p in self.parameters() if p.requires_grad)
        optimizer.register_state_dict_pre_hook(_refuse)
        return optimizer


def _refuse(_: torch.optim.Optimizer) -> None:
    raise AssertionError


def save_with_state_dicts_forbidden(root: str) -> dict[str, Any]:
    """Fit and save where every state dict raises; give what the profiler saw."""
    plan = Plan(root, 2, trainer={"profiler": "simple"})
    trainer, _, data, watch = plan.make()
    trainer.callbacks.remove(watch)  # type: ignore[attr-defined]
    trainer.fit(Forbidding(), data)
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    return {"step": trainer.global_step, "profiled": list(profiler.recorded_durations)}
