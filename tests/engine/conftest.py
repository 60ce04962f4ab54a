"""Checkpoints that several tests load, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine._late_saves import train_and_save_late
from tests.support.checkpoints import Saved, train_and_save
from tests.support.engines import Setup
from tests.support.ranks import ForkServer, Pools


@pytest.fixture(scope="session")
def saved_by(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Return a function that saves a run once per session.

    With ``late``, it saves through the adversarial copy engine.
    """
    folder: Path = tmp_path_factory.mktemp("saved")
    made: dict[str, Saved] = {}

    def get(setup: Setup, *, steps: int = 3, late: bool = False, **options: Any) -> Saved:
        name = f"{setup!r}-{steps}-{late}-{sorted(options.items())}"
        if name not in made:
            saved = Saved(setup, str(folder / f"{len(made)}.ckpt"), options)
            run = partial(train_and_save, saved, steps=steps)
            pools.run(setup.world, partial(train_and_save_late, saved) if late else run)
            made[name] = saved
        return made[name]

    return get


@pytest.fixture(scope="session")
def pr_8031(pytestconfig: pytest.Config) -> Iterator[Pools]:
    """Yield worlds of ranks that run the code of DeepSpeed pull request 8031."""
    folder = pytestconfig.getoption("--pr-8031")
    if folder is None:
        pytest.skip("needs --pr-8031, the code of DeepSpeed pull request 8031")
    started = Pools(server := ForkServer(Path(folder).resolve()))
    yield started
    started.close()
    server.close()
