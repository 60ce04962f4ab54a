"""Module weights: averages, weights that hooks remove, saves after a fit, rounded masters."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed import zero
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
)
from typing_extensions import override

from tests.support.fits import FitCase, RegressionNet, digests, error_of, evaluate, fit
from tests.support.outcome import captured_warnings
from tests.support.ranks import Pools

# -- averages ------------------------------------------------------------------------------------


def fit_averaged(plan: FitCase) -> dict[str, Any]:
    """Fit with averaged weights; return the best checkpoint, with its loss and evaluated loss."""
    trainer, net, data, _ = plan.make(EMAWeightAveraging(decay=0.6))
    trainer.fit(net, **data, ckpt_path=plan.ckpt_path)
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    assert callback.best_model_score is not None
    found = {"best": callback.best_model_path, "loss": float(callback.best_model_score)}
    evaluated = trainer.validate(net, **data, ckpt_path="best", verbose=False)[0]["val_loss"]
    return {**found, "in this process": evaluated}


def evaluate_averaged(plan: FitCase, with_callback: bool) -> dict[str, Any]:
    """Validate, test and predict in a new Trainer."""
    found: dict[str, Any] = {}
    for verb in ("validate", "test", "predict"):
        callbacks = [EMAWeightAveraging(decay=0.6)] if with_callback else []
        trainer, net, data, _ = plan.make(*callbacks)
        seen: Any = getattr(trainer, verb)(net, **data, ckpt_path=plan.ckpt_path)
        if verb == "predict":
            loader: Any = trainer.predict_dataloaders
            expected = torch.cat([y for _, y in loader])
            found[verb] = float(torch.nn.functional.mse_loss(torch.cat(seen), expected))
        else:
            found[verb] = next(iter(seen[0].values()))
    return found


# -- weights changed in place ----------------------------------------------------------------------


class ChangesWeights(Callback):
    """Clamps the weights after each step, or validates other weights, in which a save happens."""

    def __init__(self, *, clamps: bool) -> None:
        self.clamps = clamps
        self.trained: dict[torch.nn.Parameter, torch.Tensor] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters() if self.clamps else ():
            parameter.data.clamp_(-0.1, 0.1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.clamps:
            self.trained = {p: p.data for p in pl_module.parameters()}
            for parameter, values in self.trained.items():
                parameter.data = values * 0.5

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter, values in self.trained.items():
            parameter.data = values


def fit_changed(plan: FitCase, *, clamps: bool) -> tuple[str, float]:
    """Fit with weights that change in place; return the best checkpoint and its loss."""
    trainer, net, data, _ = plan.make(ChangesWeights(clamps=clamps))
    trainer.fit(net, **data)
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    assert callback.best_model_score is not None
    return callback.best_model_path, float(callback.best_model_score)


# -- after a fit ---------------------------------------------------------------------------------


def save_after(plan: FitCase, verb: str) -> dict[str, Any]:
    """Fit, save, evaluate and save again; then resume from both checkpoints."""
    trainer, net, data, watch = plan.make()
    trainer.fit(net, **data)
    trainer.save_checkpoint(f"{plan.root}/before.ckpt")
    fitted = digests(net)
    getattr(trainer, verb)(net, **data)
    trainer.save_checkpoint(f"{plan.root}/after.ckpt")
    trainer.save_checkpoint(f"{plan.root}/weights.ckpt", weights_only=True)
    del trainer, net, data, watch
    found: dict[str, Any] = {"fitted": fitted}
    for name in ("before", "after"):
        path, root = f"{plan.root}/{name}.ckpt", f"{plan.root}/of {name}"
        resumed = replace(plan, root=root, epochs=(plan.epochs or 0) + 2, ckpt_path=path, seed=7)
        found[name] = {**fit(resumed), "best": "", "loaded": ""}
    return found


def save_after_a_change(plan: FitCase, change: str, path: str) -> dict[str, Any]:
    """Fit, change the weights or the module, evaluate and save; then load into a third module."""
    trainer, net, data, _ = plan.make()
    trainer.fit(net, **data)
    fitted = digests(net)
    if change == "edited":
        net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    else:
        _, net, data, _ = replace(plan, seed=17).make()
    with captured_warnings(about="saving weights only") as warned:
        trainer.test(net, **data, verbose=False)
        trainer.save_checkpoint(path)
    tested = digests(net)
    del trainer, net, data
    trainer, net, data, _ = replace(plan, seed=18).make()
    trainer.test(net, **data, ckpt_path=path, verbose=False)
    return {"fitted": fitted, "tested": tested, "loaded": digests(net), "warned": warned}


def save_without_fit(plan: FitCase, verb: str, path: str) -> dict[str, Any]:
    """Evaluate, with or without a checkpoint, and save."""
    trainer, net, data, _ = plan.make()
    with captured_warnings(about="nothing was trained here") as warned:
        getattr(trainer, verb)(net, **data, ckpt_path=plan.ckpt_path)
        trainer.save_checkpoint(path)
    return {"weights": digests(net), "warned": warned}


def recovered_shapes(path: str) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(path)
    return {name: list(value.shape) for name, value in found.items()}


# -- layers frozen or unfrozen during a fit --------------------------------------------------------


class Switch(Callback):
    """Freezes or unfreezes a layer in the second epoch, and records its weights."""

    def __init__(self, *, thaw: bool) -> None:
        self.thaw = thaw
        self.weights: list[float] = []

    @staticmethod
    def _switch(module: pl.LightningModule, *, trained: bool) -> None:
        for parameter in module.get_submodule("last").parameters():
            parameter.requires_grad = trained

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.configure_model()
        self._switch(pl_module, trained=not self.thaw)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1:
            self._switch(pl_module, trained=self.thaw)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        with zero.GatheredParameters(list(pl_module.last.parameters())):
            self.weights.append(float(pl_module.last.weight.detach().double().sum()))


def switched(plan: FitCase, thaw: bool) -> dict[str, Any]:
    """Fit while a layer is frozen or unfrozen; return its weights, and the warnings."""
    switch = Switch(thaw=thaw)
    trainer, net, data, _ = plan.make(switch)
    with captured_warnings(about="since the fit began") as warned:
        trainer.fit(net, **data)
    return {"weights": switch.weights, "warned": warned}


# -- weights that a hook removes -------------------------------------------------------------------


class Pruning(RegressionNet):
    """Removes a frozen layer and a buffer from its checkpoints, and adds an entry."""

    removed: tuple[str, ...] = ("frozen.weight", "frozen.bias", "norm.running_mean")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        for name in self.removed:
            del checkpoint["state_dict"][name]
        checkpoint["state_dict"]["of its own"] = torch.ones(3)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        assert "first.weight" in checkpoint["state_dict"]


class Renaming(RegressionNet):
    """Saves its weights under other names, as modules that wrap or compile others do."""

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"inner.{name}": value for name, value in weights.items()}


def run_module(
    plan: FitCase, verb: str = "fit", *, net_class: type[RegressionNet]
) -> dict[str, Any]:
    """Fit or validate a module that changes the weights in its checkpoints."""
    trainer, net, data, watch = replace(plan, net=net_class.of).make()
    if verb == "fit":
        trainer.fit(net, **data, ckpt_path=plan.ckpt_path)
    else:
        trainer.validate(net, **data, ckpt_path=plan.ckpt_path, verbose=False)
    return {"start": watch.at_start, "end": digests(net)}


def size_bytes(path: str) -> int:
    return sum(p.stat().st_size for p in Path(path).rglob("*.pt"))


pytestmark = pytest.mark.engine

BEST = {"monitor": "val_loss", "save_top_k": 1, "filename": "best"}


@pytest.mark.parametrize("options", [{}, {"save_weights_only": True}], ids=["whole", "weights"])
@pytest.mark.parametrize(
    ("world", "stage", "with_callback"), [(2, 1, True), (1, 3, True), (3, 3, False), (3, 2, False)]
)
def test_evaluations_on_any_world_use_the_average(
    world: int,
    stage: int,
    with_callback: bool,
    options: dict[str, bool],
    worlds: Pools,
    tmp_path: Path,
) -> None:
    plan = FitCase(str(tmp_path), 2, epochs=3, checkpoint={**BEST, **options}, hidden=24)
    fitted = worlds.run(2, partial(fit_averaged, plan))[0]
    assert fitted["in this process"] == pytest.approx(fitted["loss"], rel=1e-6)
    new = FitCase(str(tmp_path), stage, ckpt_path=fitted["best"], seed=world, hidden=24)
    for found in worlds.run(world, partial(evaluate_averaged, new, with_callback)):
        assert found["validate"] == pytest.approx(fitted["loss"], rel=1e-5)
        assert found["test"] == pytest.approx(fitted["loss"], rel=1e-5)
        if world == 1:
            assert found["predict"] == pytest.approx(fitted["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("clamps", "options"),
    [(False, {"async_save": True}), (True, {})],
    ids=["swapped", "clamped"],
)
def test_an_evaluation_uses_the_weights_that_were_scored(
    clamps: bool, options: dict[str, Any], worlds: Pools, tmp_path: Path
) -> None:
    kept = {**BEST, "save_weights_only": clamps}
    plan = FitCase(str(tmp_path), 2, epochs=2, strategy=options, checkpoint=kept, hidden=24)
    best, loss = worlds.run(2, partial(fit_changed, plan, clamps=clamps))[0]
    for world, stage in ((2, 2), (1, 3)):
        new = FitCase(str(tmp_path), stage, ckpt_path=best, seed=world, hidden=24)
        for found in worlds.run(world, partial(evaluate, new, "validate")):
            assert found["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.long
def test_averaging_can_start_after_a_resume(worlds: Pools, tmp_path: Path) -> None:
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitCase(root, 2, checkpoint=BEST, hidden=24)))
    plan = FitCase(
        f"{root}/on", 2, epochs=2, ckpt_path=f"{root}/best.ckpt", checkpoint=BEST, hidden=24
    )
    for found in worlds.run(1, partial(fit_averaged, plan)):
        assert found["in this process"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("verb", ["test", "predict"])
def test_a_run_resumes_from_a_save_after_an_evaluation(
    verb: str, stage: int, worlds: Pools, tmp_path: Path
) -> None:
    for found in worlds.run(2, partial(save_after, FitCase(str(tmp_path), stage), verb)):
        assert found["before"]["start"] == found["fitted"]
        assert found["after"] == found["before"]
    before, after = (
        json.loads((tmp_path / f"{name}.ckpt/manifest.json").read_text())["progress"]
        for name in ("before", "after")
    )
    assert before == after
    assert before["sampler"]["loaders"]


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        (2, "edited"),
        pytest.param(2, "another", marks=pytest.mark.long),
        pytest.param(3, "another", marks=pytest.mark.long),
    ],
)
def test_a_save_contains_the_weights_evaluated_last(
    stage: int, change: str, worlds: Pools, tmp_path: Path
) -> None:
    plan, path = FitCase(str(tmp_path), stage), str(tmp_path / "a.ckpt")
    found = worlds.run(2, partial(save_after_a_change, plan, change, path))
    assert [len(result["warned"]) for result in found] == [1, 0]
    # The loaded buffers are those of rank 0.
    assert found[0]["fitted"] != found[0]["tested"] == found[0]["loaded"]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_a_save_without_a_fit_contains_weights_for_new_runs(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    root, path = str(tmp_path), str(tmp_path / "alone.ckpt")
    program = partial(save_without_fit, FitCase(root, stage, seed=3), "validate", path)
    saved = worlds.run(2, program)
    warned = ["nothing was trained here" in "".join(result["warned"]) for result in saved]
    assert warned == [True, False]
    manifest = json.loads((tmp_path / "alone.ckpt" / "manifest.json").read_text())
    assert manifest["weights_only"]
    shapes = {p["name"]: p["shape"] for p in manifest["parameters"]}
    assert shapes.items() <= worlds.run(1, partial(recovered_shapes, path))[0].items()
    # A run starts from it; the run's checkpoint is evaluated and saved as weights again.
    new = FitCase(root, 2, seed=5, ckpt_path=path, strategy={"load_optimizer_state": False})
    runs = worlds.run(3, partial(fit, new))
    assert all(run["start"] == saved[0]["weights"] and run["step"] == 2 for run in runs)
    error = worlds.run(1, partial(error_of, replace(new, strategy={})))[0]
    assert "has no optimizer state" in error
    again = FitCase(root, 4 - stage, seed=6, ckpt_path=f"{root}/last.ckpt")
    evaluated = partial(save_without_fit, again, "predict", f"{root}/again.ckpt")
    weights = worlds.run(2, evaluated)[0]["weights"]
    assert weights == runs[0]["end"]
    new = replace(new, root=f"{root}/on", ckpt_path=f"{root}/again.ckpt")
    assert worlds.run(1, partial(fit, new))[0]["start"] == weights


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("thaw", [True, False], ids=["unfrozen", "frozen"])
def test_layers_frozen_or_unfrozen_later_cause_one_warning_per_epoch(
    thaw: bool, stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """DeepSpeed ignores the change."""
    plan = FitCase(str(tmp_path), stage, epochs=3)
    first, second = worlds.run(2, partial(switched, plan, thaw))
    state = (
        "unfrozen since the fit began, and not trained" if thaw else "frozen since the fit began"
    )
    assert [
        text.startswith(f"Epoch {n}: parameters {state}")
        for n, text in zip((1, 2), first["warned"], strict=True)
    ] == [True, True]
    assert all("last.weight, last.bias" in text and "lr=0" in text for text in first["warned"])
    assert "first" not in first["warned"][0].partition("Or start")[0].partition("To train")[0]
    assert not second["warned"]
    values = len(set(first["weights"]))
    assert values == (1 if thaw else len(first["weights"])), first["weights"]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "target"), [(2, 3), (3, 1)])
def test_frozen_weights_removed_by_a_hook_are_not_saved(
    stage: int, target: int, worlds: Pools, tmp_path: Path
) -> None:
    """Also if the hook adds an entry to the weights."""
    root = str(tmp_path)
    program = partial(run_module, net_class=Pruning)
    ends = worlds.run(2, partial(program, FitCase(root, stage)))
    manifest = json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())
    assert manifest["excluded"] == list(Pruning.removed)
    assert "norm.running_mean" not in manifest["module_buffers"]
    worlds.run(2, partial(fit, FitCase(f"{root}/whole", stage)))
    complete = size_bytes(f"{root}/whole/last.ckpt")
    assert size_bytes(f"{root}/last.ckpt") < complete - 31 * 31 * 4
    for verb in ("fit", "validate"):
        plan = FitCase(f"{root}/{verb}", target, epochs=2, seed=4, ckpt_path=f"{root}/last.ckpt")
        found = worlds.run(1, partial(program, plan, verb))[0]
        loaded = found["start"] if verb == "fit" else found["end"]
        same = {name for name, digest in loaded.items() if digest == ends[0]["end"][name]}
        assert loaded.keys() - same == set(Pruning.removed)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_renamed_by_a_hook_are_saved_once_under_their_names(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    program = partial(run_module, net_class=Renaming)
    ends = worlds.run(2, partial(program, FitCase(root, stage)))
    manifest = json.loads((tmp_path / "last.ckpt" / "manifest.json").read_text())
    assert not manifest["excluded"]
    worlds.run(2, partial(fit, FitCase(f"{root}/whole", stage)))
    assert size_bytes(f"{root}/last.ckpt") <= size_bytes(f"{root}/whole/last.ckpt")
    plan = FitCase(f"{root}/on", stage, epochs=2, seed=4, ckpt_path=f"{root}/last.ckpt")
    assert worlds.run(1, partial(program, plan))[0]["start"] == ends[0]["end"]


# -- rounded masters -------------------------------------------------------------------------------


def masters_are_rounded(root: str, keep_fp32: bool) -> bool:
    """Resume in bf16, with or without the saved fp32 masters; return whether they are rounded."""
    zero = {"stage": 2, "load_from_fp32_weights": keep_fp32}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    plan = FitCase(
        root,
        epochs=2,
        ckpt_path=f"{root}/last.ckpt",
        strategy={"config": config},
        trainer={"precision": "bf16-mixed"},
        checkpoint={"save_top_k": 0},
    )
    rounded: list[bool] = []

    def look(trainer: pl.Trainer, *_: Any) -> None:
        engine: Any = trainer.strategy.model
        masters = engine.optimizer.single_partition_of_fp32_groups
        rounded.extend(torch.equal(master, master.bfloat16().float()) for master in masters)

    fit(plan, LambdaCallback(on_train_start=look))
    return all(rounded) and bool(rounded)


def test_load_from_fp32_weights_selects_rounded_or_saved_masters(
    worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitCase(root, 2, trainer={"precision": "bf16-mixed"})))
    assert worlds.run(1, partial(masters_are_rounded, root, False)) == [True]
    assert worlds.run(1, partial(masters_are_rounded, root, True)) == [False]
