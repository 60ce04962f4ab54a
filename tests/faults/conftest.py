"""The checkpoints that are damaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine._save_load_programs import Saved, train_and_save
from tests.engine._setup import Setup
from tests.engine._worker_pool import Pools


@pytest.fixture(scope="session")
def saved(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return the checkpoint of a run with a ZeRO stage after some steps, made once per session."""
    folder = tmp_path_factory.mktemp("saved")
    made: dict[tuple[str, int], Path] = {}

    def give(stage: str, steps: int = 3) -> Path:
        if (stage, steps) not in made:
            path = folder / f"{stage}-{steps}.ckpt"
            pools.run(2, partial(train_and_save, Saved(Setup(2, stage), str(path)), steps=steps))
            made[stage, steps] = path
        return made[stage, steps]

    return give
