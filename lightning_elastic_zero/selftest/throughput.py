"""Throughput of a save, beside that of the same bytes without it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.engine.selftest_engine import WideModel, train, trial_engine
from lightning_elastic_zero.errors import ElasticZeroError, RanksError
from lightning_elastic_zero.selftest.checks import (
    COPY,
    MEASURED,
    PUBLICATION,
    RAW,
    STALL,
    UNMEASURED,
)
from lightning_elastic_zero.selftest.raw_write import MOST_S, write_raw
from lightning_elastic_zero.selftest.worker_protocol import Request, Sender
from lightning_elastic_zero.storage.ownership import delete_checkpoint
from lightning_elastic_zero.tools.report import format_bytes

T = TypeVar("T")

ROUNDS, BUDGET_S = 3, 20.0
"""Rounds, after one that warms up; a slow disk has fewer, or that one only."""

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
            sender.checked(UNMEASURED if is_stall(error) else MEASURED, _text(error))
        else:
            sender.checked(MEASURED)
        finally:
            manager.stop(interrupted=False)


def _measure(
    engine: Any,
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
        write = partial(write_raw, raw, request.measured_bytes, block, ranks.report_progress)
        seconds, written_bytes = _timed(ranks, write)
        raw.unlink()
        slowest_bytes = _least(ranks, written_bytes)
        if slowest_bytes < request.measured_bytes:
            why = f"a rank wrote and synced only {format_bytes(slowest_bytes)} in {MOST_S:g} s"
            sender.checked(UNMEASURED, why)
            return
        figures[RAW].append(seconds)
        figures[COPY].append(_timed(ranks, lambda: copied.copy_(held))[0])
        path = folder / f"measured-{number}.ckpt"
        manager.save_async(handle, path, ranks, {}, SaveOptions())
        train(engine, number + 1, number + 2)
        manager.wait_until_finished(ranks)
        if manager.last_save is not None:
            figures[PUBLICATION].append(manager.last_save.seconds)
            figures[STALL].append(manager.last_save.waited_s)
        if ranks.broadcast("look whether it is enough", partial(_is_enough, path, began)):
            break
    for name, taken in figures.items():
        sender.measured(name, min(taken[1:] or taken))


def is_stall(error: BaseException) -> bool:
    """Whether a rank was slow or lost, and no call has failed: each cause is of that kind too."""
    cause: BaseException | None = error
    while isinstance(cause, RanksError):
        cause = cause.__cause__
    return cause is None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_enough(path: Path, began: float) -> bool:
    """Rank 0: remove what was saved, and return whether that was enough."""
    delete_checkpoint(path)
    return time.monotonic() - began > BUDGET_S


def _least(ranks: Ranks, size_bytes: int) -> int:
    """Return the least of what all ranks have."""
    return min(ranks.all_gather("compare what was written", lambda: size_bytes))


def _timed(ranks: Ranks, work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that this rank takes, while all ranks are at work, and its result."""
    ranks.run_all("begin together", lambda: None)

    def timed() -> tuple[float, T]:
        began = time.perf_counter()
        result = work()
        return time.perf_counter() - began, result

    return ranks.run_all("measure", timed)
