"""Real engines on a slow disk: saves and loads wait while it makes progress, and no longer.

A rank without progress counts as stalled after ``stall_timeout_s``, here 6 s. Each of these saves
and loads waits for the disk twice as long in total.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.errors import RanksError
from tests.support.engines import Engine, EngineCase, engine_of, train
from tests.support.ranks import Pools
from tests.support.slow_disk import SlowDisk

pytestmark = [pytest.mark.engine, pytest.mark.long]

SETUP = EngineCase(2, "1", hidden=2000)
"""A state of 18 MB, most of it frozen weights, which rank 0 writes."""

STALL_TIMEOUT_S = 6.0
SLOW, FAST = 1 << 20, 1 << 40

WORLD = 2


@dataclass(frozen=True)
class Seen:
    message: str
    seconds: float
    differing: list[str]
    """Weights that differ from the saved ones after a load."""


def attempt(act: Callable[[], Any]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        act()
    except RanksError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def save_then_load(disk: SlowDisk, way: str) -> Seen:
    path = disk.folder / f"{way}.ckpt"
    with engine_of(SETUP, 0) as engine:
        train(engine, SETUP, 0, 1)
        held = weights(engine)
        if way == "load":
            engine.save_checkpoint(str(path), tag="step1")
        else:
            turn(disk, SLOW if way == "slow" else 0)
            message, seconds = attempt(partial(save, engine, path))
            # The first rank that fails does this: a rank cannot notice a failure in a call that
            # does not return.
            disk.set_speed(FAST)
            turn(disk, FAST)
            if way == "stalled":
                save(engine, path)
    with engine_of(SETUP, 1, tilt=1.5) as engine:
        if way == "load":
            turn(disk, FAST, latency_s=1.0)
            message, seconds = attempt(partial(load, engine, path))
            turn(disk, FAST)
        else:
            load(engine, path)
        found = weights(engine)
    differing = [name for name in held if not torch.equal(held[name], found[name])]
    return Seen(message, seconds, differing)


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Copy the weights, which in fp32 are their masters."""
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def save(engine: Engine, path: Path) -> None:
    save_checkpoint(engine, path, stall_timeout_s=STALL_TIMEOUT_S)


def load(engine: Engine, path: Path) -> None:
    load_checkpoint(engine, path, stall_timeout_s=STALL_TIMEOUT_S)


def turn(disk: SlowDisk, bytes_per_s: float, *, latency_s: float = 0.0) -> None:
    """Change the speed of the disk for all ranks."""
    distributed.barrier()
    if distributed.get_rank() == 0:
        disk.set_speed(bytes_per_s, latency_s=latency_s)
    distributed.barrier()


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Seen]]]:
    disk = SlowDisk(tmp_path_factory.mktemp("slow"), FAST)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        worlds = Pools()
        try:
            yield lambda way: worlds.run(WORLD, partial(save_then_load, disk, way))
        finally:
            worlds.close()


@pytest.mark.parametrize("way", ["slow", "load"])
def test_slow_saves_and_loads_outlast_the_stall_timeout_and_succeed(
    way: str, on_disk: Callable[[str], list[Seen]]
) -> None:
    """Saves run at 1 MB/s per rank; loads open DeepSpeed's files slowly."""
    ranks = on_disk(way)
    assert [seen.message for seen in ranks] == ["", ""]
    assert min(seen.seconds for seen in ranks) > 2 * STALL_TIMEOUT_S
    assert not any(seen.differing for seen in ranks)


def test_a_hanging_disk_is_reported_on_all_ranks_and_the_next_save_succeeds(
    on_disk: Callable[[str], list[Seen]],
) -> None:
    ranks = on_disk("stalled")
    for seen in ranks:
        assert "alive, but without progress" in seen.message, seen.message
        assert seen.seconds < STALL_TIMEOUT_S + 60
    assert not any(seen.differing for seen in ranks)
