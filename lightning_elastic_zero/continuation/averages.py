"""Callbacks that average weights, which look for whole weights in the checkpoint dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

from lightning_elastic_zero.errors import UnsupportedError

WEIGHT_AVERAGING: type[pl.Callback] | None = getattr(callbacks, "WeightAveraging", None)
"""Lightning's callback, which came with 2.6.0; None before."""

CURRENT = "current_model_state"
"""Where ``WeightAveraging`` keeps the weights that are trained, beside their average."""


def check_averaging(trainer: pl.Trainer, *, cut_up: bool) -> None:
    """Refuse to average weights that ZeRO-3 has cut up.

    Raises:
        UnsupportedError: the callback would average empty tensors.
    """
    if WEIGHT_AVERAGING is None or not cut_up:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WEIGHT_AVERAGING):
            msg = (
                f"{type(callback).__name__} averages whole weights, and ZeRO-3 leaves each device "
                "a part: use stage 1 or 2, or keep the average in a module of its own"
            )
            raise UnsupportedError(msg)


def with_current_weights(state: Mapping[str, Any], module: pl.LightningModule) -> dict[str, Any]:
    """Give the trained weights back to ``WeightAveraging``, which loads them once more.

    They are saved as masters, not in this dictionary, and are in the module by now.
    """
    if CURRENT not in state:
        return dict(state)
    return {**state, CURRENT: module.state_dict()}
