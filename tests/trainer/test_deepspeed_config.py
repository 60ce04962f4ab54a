"""Settings in a user's DeepSpeed config that speak of checkpoints mean what they say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests.support.fits import FitSpec, fit
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


def masters_are_rounded(root: str, keep_fp32: bool) -> bool:
    """Resume in bf16, with or without the fp32 masters of the checkpoint."""
    zero = {"stage": 2, "load_from_fp32_weights": keep_fp32}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    plan = FitSpec(
        root,
        epochs=2,
        ckpt_path=f"{root}/last.ckpt",
        strategy={"config": config},
        trainer={"precision": "bf16-mixed"},
        checkpoint={"save_top_k": 0},
    )
    trainer, net, data, _ = plan.make()
    rounded: list[bool] = []

    def look(trainer: pl.Trainer, *_: Any) -> None:
        engine: Any = trainer.strategy.model
        masters = engine.optimizer.single_partition_of_fp32_groups
        rounded.extend(torch.equal(master, master.bfloat16().float()) for master in masters)

    trainer.callbacks.append(LambdaCallback(on_train_start=look))  # type: ignore[attr-defined]
    trainer.fit(net, data, ckpt_path=plan.ckpt_path)
    return all(rounded) and bool(rounded)


def test_load_from_fp32_weights_selects_rounded_or_saved_masters(
    worlds: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    worlds.run(2, partial(fit, FitSpec(root, 2, trainer={"precision": "bf16-mixed"})))
    assert worlds.run(1, partial(masters_are_rounded, root, False)) == [True]
    assert worlds.run(3, partial(masters_are_rounded, root, True)) == [False] * 3
