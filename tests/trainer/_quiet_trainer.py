"""Trainers and strategies as most tests want them: small, and saying nothing."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
"""Options of a strategy; by default each bucket has a gigabyte."""


def elastic(**options: Any) -> ElasticDeepSpeedStrategy:
    """Return a strategy with small buckets, of stage 2 unless told otherwise."""
    return ElasticDeepSpeedStrategy(**{"stage": 2, **SMALL_BUCKETS, **options})


def quiet_trainer(strategy: Any, *callbacks: Callback, **options: Any) -> pl.Trainer:
    """Return a Trainer on this world's ranks; it saves checkpoints where a callback does."""
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    quiet = {
        "logger": False,
        "enable_checkpointing": saves,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(
        accelerator=get_accelerator().device_name(),
        devices=dist.get_world_size(),
        strategy=strategy,
        callbacks=[*callbacks],
        **{**quiet, **options},
    )
