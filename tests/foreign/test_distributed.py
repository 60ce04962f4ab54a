"""Directories of ``torch.distributed.checkpoint`` come back bit for bit on any number of devices.

FSDP2 writes them over gloo on two and three ranks, in the layouts of Lightning's strategies, of
plain torch and of its tutorial. What is compared is what the writers held in memory.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine._pool import Pools
from tests.engine._setup import Setup
from tests.foreign import _torch_writers as writers
from tests.foreign._loads import TARGETS, assert_restored, refused
from tests.foreign._torch_writers import Run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def sharded(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Give what a world has saved in a layout, made once per session."""
    folder = tmp_path_factory.mktemp("sharded")
    made: dict[tuple[str, int], Run] = {}

    def give(layout: str, world: int) -> Run:
        if (layout, world) not in made:
            run = Run(str(folder / f"{len(made)}.any"), world)
            pools.run(world, partial(writers.save_sharded, run, layout))
            made[layout, world] = run
        return made[layout, world]

    return give


def rest_of(layout: str, run: Run) -> dict[str, Any]:
    """Give what is to come back as client state."""
    lightning = layout in ("fsdp", "model parallel")
    return writers.lightning_rest(run) if lightning else {"epoch": 1}


CASES = [
    *(("fsdp", 2, target) for target in TARGETS),
    *(("model parallel", 3, target) for target in TARGETS),
    ("plain", 2, TARGETS[2]),
    ("flattened", 3, TARGETS[1]),
    ("app", 2, TARGETS[0]),
    ("fsdp", 3, Setup(2, "B", "bf16", bucket=5000)),
]


@pytest.mark.parametrize(("layout", "world", "target"), CASES, ids=str)
def test_all_comes_back(
    layout: str, world: int, target: Setup, pools: Pools, sharded: Callable[..., Run]
) -> None:
    """Weights, moments, steps, hyperparameters, buffers and the trainer's state: all of it."""
    run = sharded(layout, world)
    # Counters are Lightning's; plain torch has none.
    counters = "global_step" in rest_of(layout, run)
    assert_restored(pools, run, target, rest_of(layout, run), counters=counters)
