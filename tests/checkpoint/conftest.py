"""Checkpoints and runs that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint._kill_sequence import MODES, KillSequence, MakeChain
from tests.support.checkpoints import Saved, train_and_save
from tests.support.deterministic_training import Table, undisturbed
from tests.support.engines import EngineCase
from tests.support.ranks import Pools


@pytest.fixture(scope="session")
def saved(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function that saves a run with a ZeRO stage after some steps, once per session."""
    folder = tmp_path_factory.mktemp("saved")
    made: dict[tuple[str, int], Path] = {}

    def get(stage: str, steps: int = 3) -> Path:
        if (stage, steps) not in made:
            path = folder / f"{stage}-{steps}.ckpt"
            pools.run(
                2, partial(train_and_save, Saved(EngineCase(2, stage), str(path)), steps=steps)
            )
            made[stage, steps] = path
        return made[stage, steps]

    return get


@pytest.fixture(scope="session")
def table(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return the state after each step of an undisturbed run, as long as 42 runs of 4 steps."""
    return undisturbed(pools, tmp_path_factory.mktemp("undisturbed"), 42 * 4)


@pytest.fixture
def chain(pools: Pools, table: Table, tmp_path: Path) -> MakeChain:
    def make(mode: str, row: str) -> KillSequence:
        return KillSequence(pools, tmp_path, table, f"{row} ({mode})", MODES[mode])

    return make
