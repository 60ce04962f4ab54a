"""What a save takes here, beside what the same bytes take without it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint import CheckpointManager, SaveOptions
from lightning_elastic_zero.coordination import Ranks, Timeouts
from lightning_elastic_zero.engine.trial import WideModel, train, trial_engine
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.selftest.checks import COPY, MEASURED, PUBLICATION, RAW, STALL
from lightning_elastic_zero.selftest.messages import Request, Sender
from lightning_elastic_zero.storage import delete_checkpoint

ROUNDS, BUDGET_S = 3, 20.0
"""Rounds, after one that warms up; a slow disk has fewer."""

BYTES_PER_PARAMETER = 12
"""A master in fp32, and Adam's two moments."""

_LAYERS, _WRITE_BYTES = 8, 1 << 20


def measure(request: Request, sender: Sender) -> None:
    """Time, in turn, a raw write, a copy in memory and a save in the background. Collective."""
    world_size = int(os.environ["WORLD_SIZE"])
    elements = request.measured_bytes * world_size / BYTES_PER_PARAMETER
    width = max(int((elements / _LAYERS) ** 0.5), 1)
    with trial_engine(WideModel(width, _LAYERS), 3) as engine:
        handle = engine_handle(engine)
        manager = CheckpointManager(Timeouts(), background=True)
        manager.start(handle, engine.global_rank, [request.folder])
        try:
            with closing(manager.training_ranks()) as ranks:
                _measure(engine, manager, ranks, request, sender)
        except (ElasticZeroError, OSError) as error:
            sender.checked(MEASURED, f"{type(error).__name__}: {error}")
        else:
            sender.checked(MEASURED)
        finally:
            manager.stop(interrupted=False)


def _measure(
    engine: Any,  # noqa: ANN401 (untyped library)
    manager: CheckpointManager,
    ranks: Ranks,
    request: Request,
    sender: Sender,
) -> None:
    """Take the figures, and tell the best of each: what else the machine does slows it down."""
    folder, handle = Path(request.folder), engine_handle(engine)
    train(engine, 0, 1)
    block = os.urandom(_WRITE_BYTES)
    held = torch.empty(request.measured_bytes, dtype=torch.uint8, device=engine.device)
    copied = torch.zeros(request.measured_bytes, dtype=torch.uint8)
    figures: dict[str, list[float]] = {name: [] for name in (RAW, COPY, PUBLICATION, STALL)}
    began = time.monotonic()
    for number in range(ROUNDS + 1):
        raw = folder / f"raw-{number}-{ranks.rank}"
        figures[RAW].append(_timed(ranks, partial(_write, raw, request.measured_bytes, block)))
        raw.unlink()
        figures[COPY].append(_timed(ranks, lambda: copied.copy_(held)))
        path = folder / f"measured-{number}.ckpt"
        manager.save_async(handle, path, ranks, {}, SaveOptions())
        train(engine, number + 1, number + 2)
        manager.wait_until_finished(ranks)
        if manager.last_save is not None:
            figures[PUBLICATION].append(manager.last_save.seconds)
            figures[STALL].append(manager.last_save.waited_s)
        if ranks.broadcast("look whether it is enough", partial(_is_enough, path, number, began)):
            break
    for name, seconds in figures.items():
        sender.measured(name, min(seconds[1:]))


def _is_enough(path: Path, number: int, began: float) -> bool:
    """Rank 0: remove what was saved, and return whether that was enough."""
    delete_checkpoint(path)
    return number > 0 and time.monotonic() - began > BUDGET_S


def _timed(ranks: Ranks, work: Callable[[], object]) -> float:
    """Return the seconds that this rank takes, while all ranks are at work."""
    ranks.run_all("begin together", lambda: None)

    def timed() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return ranks.run_all("measure", timed)


def _write(path: Path, size_bytes: int, block: bytes) -> None:
    """Write a file, and bring it to the disk."""
    with path.open("xb", buffering=0) as file:
        for _ in range(0, size_bytes, len(block)):
            file.write(block)
        os.fsync(file.fileno())
