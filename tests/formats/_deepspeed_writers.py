"""Programs of ranks that write a checkpoint, and the state of the engine that wrote it.

Nothing here may import ``lightning_elastic_zero``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.formats._fixture_table import FixtureRow
from tests.support.engines import Engine, engine_of, train
from tests.support.oracle import dump

CLIENT_STATE = {"epoch": 3}
MORE = 2
"""Steps trained after the save, by runs whose saved state depends on them."""


def wait_for_gathers() -> None:
    """Make gathers on CPUs finish before they return.

    DeepSpeed before 0.19 copies from a buffer that gloo has not filled yet, and trains on its old
    content. Some releases also gather into a view of a weight, which autograd refuses.
    """
    from deepspeed.comm.comm import cdb

    if hasattr(cdb, "waits"):
        return
    gather = cdb.all_gather_function

    @torch.no_grad()
    def waiting(*args: Any, **kwargs: Any) -> Any:
        work = gather(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    cdb.all_gather_function, cdb.waits = waiting, True


def write(row: FixtureRow, folder: str) -> None:
    """Train, save, and store the state at the save. Collective."""
    wait_for_gathers()
    with engine_of(row.setup, 0) as engine:
        train(engine, row.setup, 0, row.steps)
        keep(dump(engine, row.setup), folder, "truth")
        _save(engine, row, folder, row.steps)
        if row.kind == "two tags":
            train(engine, row.setup, row.steps, row.steps + MORE)
            keep(dump(engine, row.setup), folder, "later")
            _save(engine, row, folder, row.steps + MORE, save_latest=False)


def write_larger(row: FixtureRow, folder: str) -> None:
    larger = replace(row.setup, world=row.setup.world + 1)
    wait_for_gathers()
    with engine_of(larger, 0) as engine:
        train(engine, larger, 0, row.steps)
        _save(engine, row, folder, row.steps)


def _save(engine: Engine, row: FixtureRow, folder: str, steps: int, **options: Any) -> None:
    if row.kind == "dumps":
        _save_by_hand(engine, Path(folder) / "checkpoint")
        return
    engine.save_checkpoint(
        f"{folder}/checkpoint", tag=f"step{steps}", client_state=CLIENT_STATE, **options
    )


def _save_by_hand(engine: Engine, path: Path) -> None:
    """Save as users of Accelerator do, with torch.save for the optimizer."""
    sharded = engine.zero_optimization_stage() == 3
    weights = engine._consolidated_16bit_state_dict() if sharded else engine.module.state_dict()
    rank = distributed.get_rank()
    if rank == 0:
        path.mkdir()
        torch.save(weights, path / "model.pt")
    distributed.barrier()
    torch.save(engine.optimizer.state_dict(), path / f"optimizer.{rank:02d}.pt")
    distributed.barrier()


def keep(held: dict[str, Any] | None, folder: str, name: str) -> None:
    """Store a dump, which only one rank has."""
    if held is not None:
        torch.save(held, Path(folder) / f"{name}.pt")
