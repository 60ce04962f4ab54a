"""Fits in which weights are averaged, taken out, unfrozen, or saved when the fit is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed import zero
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from typing_extensions import override

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy
from tests.support.fits import FitSpec, RegressionNet, digests, fit
from tests.support.outcome import warnings_heard


def trainer_with(plan: FitSpec, *callbacks: Callback) -> tuple[pl.Trainer, RegressionNet, Any, Any]:
    """Make a plan's trainer with more callbacks, which come first."""
    trainer, net, data, watch = plan.make()
    trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
    return trainer, net, data, watch


# -- averages ------------------------------------------------------------------------------------


def fit_averaged(plan: FitSpec) -> dict[str, Any]:
    """Fit with an average; give the loss that the best checkpoint was chosen for."""
    trainer, net, data, _ = trainer_with(plan, EMAWeightAveraging(decay=0.6))
    trainer.fit(net, data, ckpt_path=plan.ckpt_path)
    kept = trainer.checkpoint_callback
    assert isinstance(kept, ModelCheckpoint)
    assert kept.best_model_score is not None
    found = {"best": kept.best_model_path, "loss": float(kept.best_model_score)}
    again = trainer.validate(net, data, ckpt_path="best", verbose=False)[0]["val_loss"]
    return {**found, "in this process": again}


def evaluate_averaged(plan: FitSpec, with_callback: bool) -> dict[str, Any]:
    """Validate, test and predict in a new Trainer."""
    found: dict[str, Any] = {}
    for verb in ("validate", "test", "predict"):
        more = [EMAWeightAveraging(decay=0.6)] if with_callback else []
        trainer, net, data, _ = trainer_with(plan, *more)
        seen: Any = getattr(trainer, verb)(net, data, ckpt_path=plan.ckpt_path)
        if verb == "predict":
            loader: Any = trainer.predict_dataloaders
            mine = torch.cat([y for _, y in loader])
            found[verb] = float(torch.nn.functional.mse_loss(torch.cat(seen), mine))
        else:
            found[verb] = next(iter(seen[0].values()))
    return found


# -- after a fit ---------------------------------------------------------------------------------


def save_after(plan: FitSpec, verb: str) -> dict[str, Any]:
    """Fit, save, evaluate, save again; then resume from both."""
    trainer, net, data, watch = plan.make()
    trainer.fit(net, data)
    trainer.save_checkpoint(f"{plan.root}/before.ckpt")
    fitted = digests(net)
    getattr(trainer, verb)(net, data)
    trainer.save_checkpoint(f"{plan.root}/after.ckpt")
    trainer.save_checkpoint(f"{plan.root}/weights.ckpt", weights_only=True)
    del trainer, net, data, watch
    found: dict[str, Any] = {"fitted": fitted}
    for name in ("before", "after"):
        path, root = f"{plan.root}/{name}.ckpt", f"{plan.root}/of {name}"
        resumed = replace(plan, root=root, epochs=plan.epochs + 2, ckpt_path=path, seed=7)
        found[name] = {**fit(resumed), "best": ""}
    return found


def save_after_a_change(plan: FitSpec, how: str, path: str) -> dict[str, Any]:
    """Fit, change the weights or take another module, evaluate, save; then load into a third."""
    trainer, net, data, _ = plan.make()
    trainer.fit(net, data)
    fitted = digests(net)
    if how == "edited":
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    else:
        _, net, data, _ = replace(plan, seed=17).make()
    with warnings_heard(about="saving weights only") as said:
        trainer.test(net, data, verbose=False)
        trainer.save_checkpoint(path)
    tested = digests(net)
    del trainer, net, data
    trainer, net, data, _ = replace(plan, seed=18).make()
    trainer.test(net, data, ckpt_path=path, verbose=False)
    return {"fitted": fitted, "tested": tested, "loaded": digests(net), "said": said}


def save_without_fit(
    plan: FitSpec, verb: str, path: str, precision: str | None = None
) -> dict[str, Any]:
    """Evaluate, with a checkpoint or without, and save what is there."""
    more = {"precision": precision} if precision else {}
    trainer, net, data, _ = replace(plan, trainer=more).make()
    with warnings_heard(about="nothing was trained here") as said:
        getattr(trainer, verb)(net, data, ckpt_path=plan.ckpt_path)
        trainer.save_checkpoint(path)
    return {"weights": digests(net), "said": said}


def recovered(path: str) -> dict[str, Any]:
    """Return what DeepSpeed's own script makes of a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(path)
    return {name: list(value.shape) for name, value in found.items()}


# -- frozen and unfrozen -------------------------------------------------------------------------


class Switch(Callback):
    """Lets a layer require gradients from an epoch on, or none, and notes its weights."""

    def __init__(self, *, thaw: bool) -> None:
        self.thaw = thaw
        self.weights: list[float] = []

    @staticmethod
    def _switch(module: pl.LightningModule, *, trains: bool) -> None:
        for parameter in module.get_submodule("last").parameters():
            parameter.requires_grad = trains

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.configure_model()
        self._switch(pl_module, trains=not self.thaw)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1:
            self._switch(pl_module, trains=self.thaw)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        with zero.GatheredParameters(list(pl_module.last.parameters())):
            self.weights.append(float(pl_module.last.weight.detach().double().sum()))


def switched(plan: FitSpec, thaw: bool) -> dict[str, Any]:
    """Fit while a layer is frozen or unfrozen; give its weights, and what was said."""
    switch = Switch(thaw=thaw)
    trainer, net, data, _ = trainer_with(plan, switch)
    with warnings_heard(about="since the fit began") as said:
        trainer.fit(net, data)
    return {"weights": switch.weights, "said": said}


# -- weights that a hook takes out -----------------------------------------------------------------


class Pruning(RegressionNet):
    """Takes a frozen layer, a buffer, and where told a trained one, out of its checkpoints."""

    took: tuple[str, ...] = ("frozen.weight", "frozen.bias", "norm.running_mean")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        for name in self.took:
            del checkpoint["state_dict"][name]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        assert "first.weight" in checkpoint["state_dict"]


class PruningAndAdding(Pruning):
    """Puts an entry of its own into the weights as well."""

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"]["of its own"] = torch.ones(3)


class Renaming(RegressionNet):
    """Saves its weights under other names, as modules do that wrap or compile others."""

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"inner.{name}": value for name, value in weights.items()}


def pruned(plan: FitSpec, verb: str = "fit", of: type[RegressionNet] = Pruning) -> dict[str, Any]:
    """Fit or validate a module that takes weights out of its checkpoints."""
    trainer, _, data, watch = plan.make()
    net = of(plan.lr, plan.seed, plan.hidden)
    if verb == "fit":
        trainer.fit(net, data, ckpt_path=plan.ckpt_path)
    else:
        trainer.validate(net, data, ckpt_path=plan.ckpt_path, verbose=False)
    assert isinstance(trainer.strategy, ElasticDeepSpeedStrategy)
    return {"start": watch.at_start, "end": digests(net)}


def sizes(path: str) -> int:
    """Add up a checkpoint's files."""
    return sum(p.stat().st_size for p in Path(path).rglob("*.pt"))
