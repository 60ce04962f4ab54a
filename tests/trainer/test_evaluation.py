"""Any number of ranks evaluates checkpoints of any other number, from the weights only."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch.utils.data import DataLoader

from tests.support.fits import (
    Data,
    FitCase,
    RegressionNet,
    digests,
    elastic,
    error_of,
    evaluate,
    fit,
    quiet_trainer,
)
from tests.support.outcome import error_text
from tests.support.ranks import Pools
from tests.trainer._recorded_data import IndexedSamples
from tests.trainer._recorded_runs import RecordingNet, fit_stock, recorded
from tests.trainer.test_refused_setups import BY_TRAINER

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("other", [1, 3])
def test_evaluations_on_any_number_of_ranks_are_equal(
    other: int, stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """Validation, test and prediction from a checkpoint."""
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitCase(root, stage, epochs=2)))
    losses, predicted = [], []
    for world in (2, other):
        plan = FitCase(root, stage, ckpt_path=f"{root}/last.ckpt", seed=world)
        for verb in ("validate", "test"):
            losses += [s["loss"] for s in worlds.run(world, partial(evaluate, plan, verb))]
        per_rank = [s["predicted"] for s in worlds.run(world, partial(evaluate, plan, "predict"))]
        predicted.append(sorted(value for values in per_rank for value in values))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert predicted[1] == pytest.approx(predicted[0], rel=1e-5)


@pytest.mark.long
def test_evaluation_and_resume_with_second_copies_find_the_metrics_of_the_save(
    worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    fitted = worlds.run(2, partial(with_second_copies, FitCase(root, 3, epochs=1), "fit"))
    plan = FitCase(root, 3, ckpt_path=f"{root}/last.ckpt", seed=7)
    found = worlds.run(2, partial(with_second_copies, plan, "validate"))
    print([run["metrics"]["val_loss"] for run in fitted], [run["loss"] for run in found])
    for before, after in zip(fitted, found, strict=True):
        assert after["loss"] == before["metrics"]["val_loss"], (before, after)
    uninterrupted = worlds.run(
        2, partial(with_second_copies, FitCase(f"{root}/whole", 3, epochs=2), "fit")
    )
    resumed = worlds.run(2, partial(with_second_copies, replace(plan, epochs=2), "fit"))
    for expected, seen in zip(uninterrupted, resumed, strict=True):
        assert seen["metrics"] == expected["metrics"]
        assert seen["end"] == expected["end"]


def with_second_copies(plan: FitCase, verb: str) -> dict[str, Any]:
    """Fit or evaluate with hpZ; reset the groups that DeepSpeed would use for later engines."""
    zero = {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "stage3_param_persistence_threshold": 10,
    }
    # Without zero_allow_untested_optimizer, which Lightning's evaluation reads too.
    plan = replace(plan, strategy={"config": {"zero_optimization": zero}}, hidden=40)
    try:
        return fit(plan) if verb == "fit" else evaluate(plan, verb)
    finally:
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


OF_TRAINING = ("1-bit Adam", "LAMB", "AutoEP", "sequences by a mesh", "a curriculum")
"""Options that are refused for a fit, but do not affect the engine of an evaluation."""

OF_ZERO = ("ZenFlow", "SuperOffload")
"""Likewise below ZeRO-3; for evaluations with ZeRO-3, Lightning passes this section on."""


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_config_refused_for_training_can_evaluate(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitCase(root, stage)))
    plain = FitCase(root, stage, ckpt_path=f"{root}/last.ckpt", seed=7)
    wanted = [seen["loss"] for seen in worlds.run(2, partial(evaluate, plain, "validate"))]
    for name in (*OF_TRAINING, *(OF_ZERO if stage == 2 else ())):
        section = BY_TRAINER[name].config
        zero = {"stage": stage, **section.get("zero_optimization", {})}
        config = {**section, "zero_optimization": zero}
        plan = replace(plain, strategy={"config": config})
        assert worlds.run(2, partial(error_of, plan))[0].startswith("UnsupportedError"), config
        found = worlds.run(2, partial(evaluate, plan, "validate"))
        assert [seen["loss"] for seen in found] == wanted, config


@pytest.mark.parametrize(("stage", "weights_only"), [(1, False), (2, True), (3, False), (3, True)])
def test_converted_weights_load_into_a_plain_model(
    stage: int, weights_only: bool, worlds: Pools, tmp_path: Path
) -> None:
    """The file loads with `load_from_checkpoint` and any Trainer; the state dict into a module."""
    plan = FitCase(str(tmp_path), stage, checkpoint={"save_weights_only": weights_only})
    path = worlds.run(2, partial(fit, plan))[0]["best"]
    plan = FitCase(str(tmp_path), stage, ckpt_path=path, seed=5)
    wanted = worlds.run(1, partial(evaluate, plan, "test"))[0]["loss"]

    single = str(tmp_path / "model.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert_zero_checkpoint_to_fp32_state_dict(path, single)
        net = RegressionNet.load_from_checkpoint(single)
        state = get_fp32_state_dict_from_zero_checkpoint(path)
        other = RegressionNet(seed=7)
        other.configure_model()
        other.load_state_dict(state)
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
        loaded = trainer.test(net, Data(), verbose=False)
        named = trainer.test(RegressionNet(seed=9), Data(), ckpt_path=single, verbose=False)
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    for found in (loaded, named):
        assert found[0]["test_loss"] == pytest.approx(wanted, rel=1e-5)


def validated_weights(path: str, stage: int) -> tuple[dict[str, str], str]:
    """Return digests of the weights that a validation uses, and the error of a resume."""
    net, strategy = RecordingNet(recorded()), elastic(stage=stage)
    trainer = quiet_trainer(strategy, max_epochs=1)
    batches = DataLoader(IndexedSamples(8, 0.0), batch_size=2)
    trainer.validate(net, batches, ckpt_path=path, verbose=False)
    trainer = quiet_trainer(elastic(stage=stage), max_epochs=1)
    error = error_text(lambda: trainer.fit(RecordingNet(recorded()), batches, ckpt_path=path))
    return digests(net), error


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stock_checkpoint_without_zero_is_evaluated(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    """Its optimizer state is not resumed."""
    run = recorded(stage=0, epochs=1, save=("end",), root=str(tmp_path))
    trained = worlds.run(2, partial(fit_stock, run))[0].weights
    for weights, error in worlds.run(1, partial(validated_weights, f"{tmp_path}/end.ckpt", stage)):
        assert weights == trained
        assert "it has no optimizer state" in error
        assert "load_optimizer_state=False" in error
