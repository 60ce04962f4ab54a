"""Any number of ranks evaluates what any other number has trained, on weights alone."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fits import FitSpec, error_of, evaluate, fit
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

WIDE = 12000
"""A hidden layer whose moments fill several chunks of their own, in each rank's file."""

CHUNK_BYTES = 65536


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_ranks_find_the_same(stage: int, worlds: Pools, tmp_path: Path) -> None:
    """Any rank count validates, tests and predicts from a checkpoint, with equal results."""
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitSpec(root, stage, epochs=2)))
    losses, predicted = [], []
    for world in (1, 2, 3):
        plan = FitSpec(root, stage, ckpt_path=f"{root}/last.ckpt", seed=world)
        for verb in ("validate", "test"):
            losses += [s["loss"] for s in worlds.run(world, partial(evaluate, plan, verb))]
        of_ranks = [s["predicted"] for s in worlds.run(world, partial(evaluate, plan, "predict"))]
        predicted.append(sorted(value for values in of_ranks for value in values))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    for others in predicted[1:]:
        assert others == pytest.approx(predicted[0], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "target"), [(1, 3), (2, 2), (3, 1)])
def test_evaluation_finds_the_metrics_of_the_save_without_optimizer_state(
    stage: int, target: int, worlds: Pools, tmp_path: Path
) -> None:
    """Optimizer state is damaged, chunk by chunk: a read of one byte would fail."""
    root = str(tmp_path)
    found = worlds.run(2, partial(fit, FitSpec(root, stage, hidden=WIDE)))[0]["metrics"]["val_loss"]
    assert damage_optimizer_state(tmp_path / "last.ckpt") > 10
    for world in (1, 3):
        plan = FitSpec(root, target, ckpt_path=f"{root}/last.ckpt", seed=7, hidden=WIDE)
        for seen in worlds.run(world, partial(evaluate, plan, "validate")):
            assert seen["loss"] == pytest.approx(found, rel=1e-5)
    plan = FitSpec(root, target, epochs=2, ckpt_path="last", hidden=WIDE)
    for message in worlds.run(2, partial(error_of, plan)):
        assert message.startswith("CheckpointCorruptedError"), message


def test_evaluation_and_resume_with_second_copies_find_the_metrics_of_the_save(
    worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    fitted = worlds.run(2, partial(with_second_copies, FitSpec(root, 3, epochs=1), "fit"))
    plan = FitSpec(root, 3, ckpt_path=f"{root}/last.ckpt", seed=7)
    found = worlds.run(2, partial(with_second_copies, plan, "validate"))
    print([run["metrics"]["val_loss"] for run in fitted], [run["loss"] for run in found])
    for before, after in zip(fitted, found, strict=True):
        assert after["loss"] == before["metrics"]["val_loss"], (before, after)
    uninterrupted = worlds.run(
        2, partial(with_second_copies, FitSpec(f"{root}/whole", 3, epochs=2), "fit")
    )
    resumed = worlds.run(2, partial(with_second_copies, replace(plan, epochs=2), "fit"))
    for whole, half in zip(uninterrupted, resumed, strict=True):
        assert half["metrics"] == whole["metrics"]
        assert half["end"] == whole["end"]


def with_second_copies(plan: FitSpec, verb: str) -> dict[str, Any]:
    """Fit or evaluate with hpZ, which DeepSpeed would continue to use in each later engine."""
    zero = {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "stage3_param_persistence_threshold": 10,
    }
    # No zero_allow_untested_optimizer, which Lightning's evaluation reads all the same.
    plan = replace(plan, strategy={"config": {"zero_optimization": zero}}, hidden=40)
    try:
        return fit(plan) if verb == "fit" else evaluate(plan, verb)
    finally:
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def damage_optimizer_state(checkpoint: Path) -> int:
    """Change a byte in each chunk of optimizer state only; return their number."""
    damaged = 0
    for shard in checkpoint.glob("checkpoint/*_optim_states.pt"):
        data = bytearray(shard.read_bytes())
        held = torch.load(shard, weights_only=True)["optimizer_state_dict"]
        masters = held.get("fp32_flat_groups") or held["single_partition_of_fp32_groups"]
        spared = {0, len(data) // CHUNK_BYTES, len(data) // CHUNK_BYTES - 1}  # pickle, directory
        for master in masters:
            start = data.find(master.numpy().tobytes())
            assert start >= 0
            stop = start + master.numel() * master.element_size()
            spared.update(range(start // CHUNK_BYTES, stop // CHUNK_BYTES + 1))
        for chunk in set(range(len(data) // CHUNK_BYTES)) - spared:
            data[chunk * CHUNK_BYTES + 77] ^= 1
            damaged += 1
        shard.write_bytes(bytes(data))
    return damaged


OF_TRAINING: dict[str, dict[str, Any]] = {
    "1-bit Adam": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01}}},
    "LAMB": {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "AutoTP": {"tensor_parallel": {"autotp_size": 2}},
    "AutoEP": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "sequences by a mesh": {"sequence_parallel_size": 2, "data_parallel_size": 1},
    "a curriculum": {
        "data_efficiency": {
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            },
        }
    },
}
"""What a fit is refused for, and an evaluation's engine is not made of: DeepSpeed reads it only."""

OF_ZERO: dict[str, dict[str, Any]] = {
    "ZenFlow": {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}},
    "SuperOffload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
}
"""Likewise, below ZeRO-3, whose section alone Lightning hands to an evaluation's engine."""


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_config_refused_for_training_can_evaluate(
    stage: int, worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitSpec(root, stage)))
    plain = FitSpec(root, stage, ckpt_path=f"{root}/last.ckpt", seed=7)
    wanted = [seen["loss"] for seen in worlds.run(2, partial(evaluate, plain, "validate"))]
    sections: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, section) for section in OF_TRAINING.values()
    ]
    if stage == 2:
        sections += [(options, {}) for options in OF_ZERO.values()]
    for options, section in sections:
        config = {"zero_optimization": {"stage": stage, **options}, **section}
        plan = replace(plain, strategy={"config": config})
        assert worlds.run(2, partial(error_of, plan))[0].startswith("UnsupportedError"), config
        found = worlds.run(2, partial(evaluate, plan, "validate"))
        assert [seen["loss"] for seen in found] == wanted, config


def test_a_test_of_a_missing_checkpoint_is_refused(worlds: Pools, tmp_path: Path) -> None:
    """It must not run on fresh weights."""
    plan = FitSpec(str(tmp_path), 3, ckpt_path=f"{tmp_path}/none.ckpt")
    for message in worlds.run(2, partial(error_of, plan, "test")):
        assert message.startswith("CheckpointNotFoundError")
        assert "none.ckpt" in message
