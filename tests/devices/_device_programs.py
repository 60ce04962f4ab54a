"""What ranks on a device do beside what ``tests.engine`` has: saves behind training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.engine import selftest_engine
from tests.support.checkpoints import STEPS, Saved
from tests.support.engines import Engine, engine_of, train
from tests.support.oracle import dump

ROUNDS, MEASURED_BYTES = 4, 64 << 20


@contextmanager
def background_saves(
    engine: Engine, path: str, snapshot_bytes: int | None = None
) -> Iterator[tuple[CheckpointManager, Ranks]]:
    """Yield what saves behind an engine's training, as the strategy does."""
    from lightning_elastic_zero.api import engine_handle

    manager = CheckpointManager(Timeouts(), background=True, max_snapshot_bytes=snapshot_bytes)
    manager.start(engine_handle(engine), engine.global_rank, [Path(path).parent])
    try:
        with closing(manager.training_ranks()) as ranks:
            yield manager, ranks
    finally:
        manager.stop(interrupted=False)


def save_behind_training(saved: Saved, snapshot_bytes: int | None) -> bool:
    """Save in the background while the run goes on; return whether the copy is in pinned memory.

    ``saved`` has the oracle's dump of what the run held when it was told to save.
    """
    from lightning_elastic_zero.api import engine_handle

    setup = saved.setup
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, STEPS)
        held = dump(engine, setup)
        with background_saves(engine, saved.path, snapshot_bytes) as (manager, ranks):
            handle = engine_handle(engine)
            manager.save_async(handle, saved.path, ranks, {"epoch": STEPS}, SaveOptions())
            train(engine, setup, STEPS, 2 * STEPS)
            assert manager._writer is not None
            block = manager._writer._snapshotter._memory._block
            pinned = block is not None and block.is_pinned()
            manager.wait_until_finished(ranks)
        if held is not None:
            torch.save(held, saved.dump_path)
    return pinned


@dataclass(frozen=True)
class Stall:
    """The best of some rounds, in seconds."""

    stall_s: float
    """For how long training waited for a save in the background."""
    copy_s: float
    """Of as many bytes from the device to the host, into pinned memory where it can be."""


def stall_beside_copy(folder: str) -> Stall:
    """Measure both in turn; the first round warms up."""
    from lightning_elastic_zero.api import engine_handle

    model = selftest_engine.TrialModel(1, state_bytes=MEASURED_BYTES)
    with (
        selftest_engine.trial_engine(model, 3) as engine,
        background_saves(engine, f"{folder}/0.ckpt") as (manager, ranks),
    ):
        selftest_engine.train(engine, 0, 1)
        held = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, device=engine.device)
        host = torch.zeros(MEASURED_BYTES, dtype=torch.uint8, pin_memory=held.is_cuda)
        stalls, copies = [], []
        for number in range(ROUNDS):
            began = time.perf_counter()
            host.copy_(held)
            copies.append(time.perf_counter() - began)
            path = f"{folder}/{number}.ckpt"
            manager.save_async(engine_handle(engine), path, ranks, {}, SaveOptions())
            selftest_engine.train(engine, number + 1, number + 2)
            manager.wait_until_finished(ranks)
            assert manager.last_save is not None
            stalls.append(manager.last_save.waited_s)
    return Stall(min(stalls[1:]), min(copies[1:]))
