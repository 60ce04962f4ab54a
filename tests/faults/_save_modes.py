"""The ways in which the strategy saves: each fault is tried in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

MODES: dict[str, Mapping[str, Any]] = {
    "blocking": {},
    "background": {"async_save": True},
}
"""Options of the strategy, by the name that the tables have."""


def wait_for_published(trainer: pl.Trainer) -> None:
    """Wait until what was saved is published, where that goes on behind training.

    Raises:
        ElasticZeroError: it could not be.
    """
    wait_for_save = getattr(trainer.strategy, "wait_for_save", None)
    if wait_for_save is not None:
        wait_for_save()
