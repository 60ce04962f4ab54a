"""The checkpoints that are damaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.faults._deterministic_training import Table, undisturbed
from tests.faults._kill_sequence import MODES, KillSequence, MakeChain
from tests.support.checkpoints import Saved, train_and_save
from tests.support.engines import Setup
from tests.support.ranks import Pools


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


@pytest.fixture(scope="session")
def table(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return the state after each step of an undisturbed run: 40 kills and 2 runs, 4 steps each."""
    return undisturbed(pools, tmp_path_factory.mktemp("undisturbed"), 42 * 4)


@pytest.fixture
def chain(pools: Pools, table: Table, tmp_path: Path) -> MakeChain:
    def make(mode: str, row: str) -> KillSequence:
        return KillSequence(pools, tmp_path, table, f"{row} ({mode})", MODES[mode])

    return make
