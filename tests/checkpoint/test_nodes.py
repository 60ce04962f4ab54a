"""Engines saved on nodes and loaded on fewer, more and other nodes, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.checkpoints import Saved, StateComparison, load, train_and_save
from tests.support.engines import EngineCase
from tests.support.nodes import Nodes, needs_mounts
from tests.support.ranks import ForkServer


@pytest.fixture
def nodes(tmp_path: Path, fork_server: ForkServer) -> Nodes:
    needs_mounts()
    return Nodes(tmp_path, fork_server)


@dataclass(frozen=True)
class SavedOnNodes(Saved):
    """A checkpoint on nodes, with the oracle's dump on the disk that all ranks see."""

    dumped: str = ""

    @property
    def dump_path(self) -> str:
        return self.dumped


def place(nodes: Nodes, world: int, step: int, zero: str = "3", **options: object) -> SavedOnNodes:
    dumped = str(nodes.root / f"dump-{step}")
    return SavedOnNodes(
        EngineCase(world, zero, "bf16"), f"{nodes.url}/step-{step}", options, dumped
    )


def newest(*folders: str) -> str | None:
    from lightning_elastic_zero.api import newest_checkpoint

    return newest_checkpoint(*folders)


def load_newest(
    folder: str, setup: EngineCase, saved: SavedOnNodes, copy_to: SavedOnNodes | None = None
) -> StateComparison | None:
    assert newest(folder) == saved.path
    return load(setup, saved, copy_to=copy_to)


def error_of(call: partial[object]) -> str:
    from lightning_elastic_zero.errors import ElasticZeroError

    try:
        call()
    except ElasticZeroError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.essential
@pytest.mark.engine
def test_the_state_survives_lost_nodes(nodes: Nodes) -> None:
    """Also rank 0's, and an empty node takes its place."""
    first, second, third = place(nodes, 3, 1), place(nodes, 2, 2), place(nodes, 3, 3)
    with nodes.world(0, 1, 2) as run:
        run(partial(train_and_save, first))
    nodes.lose(0)
    with nodes.world(1, 2) as run:
        verdict = run(partial(load_newest, nodes.url, second.setup, first, second))[0]
        assert verdict is not None
        verdict.assert_same()
    nodes.lose(2)
    with nodes.world(3, 1, 0) as run:  # Two empty ones, and rank 0 on one of them.
        verdict = run(partial(load_newest, nodes.url, third.setup, second, third))[0]
        assert verdict is not None
        verdict.assert_same()
    assert not nodes.path(1).joinpath("step-4").exists()
