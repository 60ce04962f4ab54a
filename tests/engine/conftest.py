"""Checkpoints that several tests load: made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine._figures import Figures
from tests.engine._pool import Pools
from tests.engine._programs import Saved, train_and_save
from tests.engine._setup import Setup

FIGURES = Figures()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the matrix has compared."""
    if FIGURES.rows:
        terminalreporter.section("state saved on N devices, restored on M")
        for line in FIGURES.table():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Give the figures that are shown at the end."""
    return FIGURES


@pytest.fixture(scope="session")
def saved_by(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Give the checkpoint that a run of some setup has saved, made once per session."""
    folder: Path = tmp_path_factory.mktemp("saved")
    made: dict[str, Saved] = {}

    def give(setup: Setup, *, steps: int = 3, **options: Any) -> Saved:
        name = f"{setup}-{steps}-{sorted(options.items())}"
        if name not in made:
            saved = Saved(setup, str(folder / f"{len(made)}.ckpt"), options)
            pools.run(setup.world, partial(train_and_save, saved, steps=steps))
            made[name] = saved
        return made[name]

    return give
