"""What ranks do to make a checkpoint, and to say what the engine held that wrote it.

Nothing here may import ``lightning_elastic_zero``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.engine._oracle import dump
from tests.engine._setup import Engine, engine_of, train
from tests.foreign._rows import Row

CLIENT_STATE = {"epoch": 3}
MORE = 2
"""Steps of the writer's own continuation."""


def write(row: Row, folder: str) -> None:
    """Train, save, say what was held; train on, and say that too. Collective."""
    with engine_of(row.setup, 0) as engine:
        train(engine, row.setup, 0, row.steps)
        _keep(dump(engine, row.setup), folder, "truth")
        _save(engine, row, folder, row.steps)
        losses = train(engine, row.setup, row.steps, row.steps + MORE)
        if row.kind == "two tags":
            _save(engine, row, folder, row.steps + MORE, save_latest=False)
        everyone: list[Any] = [None] * row.setup.world
        distributed.all_gather_object(everyone, losses)
        after = dump(engine, row.setup)
        _keep(after and {"losses": everyone, "dump": after}, folder, "continued")


def write_larger(row: Row, folder: str) -> None:
    """Save a run of one more rank. Collective."""
    larger = replace(row.setup, world=row.setup.world + 1)
    with engine_of(larger, 0) as engine:
        train(engine, larger, 0, row.steps)
        _save(engine, row, folder, row.steps)


def _save(engine: Engine, row: Row, folder: str, steps: int, **options: Any) -> None:
    engine.save_checkpoint(
        f"{folder}/checkpoint", tag=f"step{steps}", client_state=CLIENT_STATE, **options
    )


def _keep(held: dict[str, Any] | None, folder: str, name: str) -> None:
    if held is not None:
        torch.save(held, Path(folder) / f"{name}.pt")
