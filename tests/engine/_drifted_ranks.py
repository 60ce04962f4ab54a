"""Ranks whose rates have drifted apart: programs for ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import distributed

from tests.support.engines import Setup, engine_of, train


@dataclass(frozen=True)
class Drifted:
    """What a rank had when it saved."""

    rates: list[float]
    warnings: list[str]


def save_drifted(setup: Setup, path: str, rates: list[float], *, steps: int = 0) -> Drifted:
    """Save where each rank trains with a rate of its own, and has a scheduler to match.

    Args:
        setup: of the run.
        path: of the checkpoint.
        rates: of each rank.
        steps: trained with them.
    """
    from lightning_elastic_zero.api import save_checkpoint

    warned = _Kept()
    log = logging.getLogger("lightning_elastic_zero")
    log.addHandler(warned)
    rank = distributed.get_rank()
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        groups = engine.optimizer.param_groups
        groups[0]["lr"] = rates[rank]
        train(engine, setup, 1, 1 + steps)
        scheduler = {"_last_lr": [rates[rank]], "num_bad_epochs": rank}
        state = {"lr_schedulers": [scheduler], "mine": rank, "epoch": 3}
        try:
            save_checkpoint(engine, path, state)
        finally:
            log.removeHandler(warned)
        return Drifted([group["lr"] for group in groups], warned.messages)


def resume_drifted(setup: Setup, path: str) -> tuple[list[float], dict[str, Any]]:
    """Load, and give the rates of this rank and its part of the client state."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        loaded = load_checkpoint(engine, path)
        return [group["lr"] for group in engine.optimizer.param_groups], loaded.client_state


class _Kept(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
