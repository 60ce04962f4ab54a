"""What of a trainer's run is refused, each as soon as it can be seen.

By DeepSpeed's config before there is a model, by the optimizer before DeepSpeed is given it, by the
engine before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_elastic_zero import engine as engines
from lightning_elastic_zero.trainer.lightning_internals import (
    check_lightning_release,
    is_evaluating,
)
from lightning_elastic_zero.trainer.weight_averaging import check_averaging

check_release = check_lightning_release
"""Refuse a release of Lightning, before anything of it is relied upon."""


def check_config(trainer: pl.Trainer | None, config: Mapping[str, Any] | None) -> None:
    """Refuse a run by DeepSpeed's config; an evaluation by what its engine is made of alone.

    Args:
        trainer: that begins to run.
        config: the user's, or None for what the strategy makes of its options.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    engines.check_config(config or {}, trains=not is_evaluating(trainer))


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any] | None,
    module: pl.LightningModule,
) -> None:
    """Refuse an optimizer that a module has configured.

    Raises:
        UnsupportedError: with every reason that was found.
    """
    engines.check_optimizer(optimizer, config or {}, module)


def check_engine(trainer: pl.Trainer, engine: Any, *, cut_up: bool) -> None:
    """Refuse a run by its engine, and by callbacks that do not fit it.

    Args:
        trainer: that runs.
        engine: DeepSpeed's.
        cut_up: whether each rank has a part of the weights (ZeRO-3).

    Raises:
        UnsupportedError: with every reason that was found.
    """
    engines.check_supported(engine)
    check_averaging(trainer, cut_up=cut_up)
