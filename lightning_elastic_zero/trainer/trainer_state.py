"""What a new run takes of a checkpoint beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl


def without_progress(state: Mapping[str, Any], module: pl.LightningModule | None) -> dict[str, Any]:
    """Give what a new run takes over beside the weights: what the module itself had saved."""
    data = getattr(module.trainer, "datamodule", None) if module is not None else None
    progress = {"loops", "callbacks", type(data).__qualname__}
    kept = {key: value for key, value in state.items() if key not in progress}
    return {**kept, "epoch": 0, "global_step": 0, "lr_schedulers": []}
