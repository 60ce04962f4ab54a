"""Whoever is killed at whatever instant of saving: all that is published is what was trained."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine._worker_pool import Pools
from tests.faults._deterministic_training import Table, Training, train
from tests.faults._kill_sequence import KillSequence
from tests.faults._save_modes import MODES
from tests.faults._save_steps import ALL, BY_EACH_RANK, FIRST, OFTEN, OTHER, STEPS, KillPoint
from tests.rotation import Rotation

pytestmark = pytest.mark.engine

SOME = 3
"""Steps that a save is killed at in one turn."""

LANDED, MOST_TRIES = 10, 16
"""Kills that have to land in each step, and how often it is tried."""

MakeChain = Callable[[str, str], KillSequence]


@pytest.fixture(scope="module")
def table(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return what is held after each step, by a run undisturbed and without a save."""
    root = str(tmp_path_factory.mktemp("undisturbed"))
    training = Training(root, stage=1, steps=120, saves=False, recorded=True)
    return pools.run(1, partial(train, training))[0]


@pytest.fixture
def chain(pools: Pools, table: Table, tmp_path: Path) -> MakeChain:
    """Return runs one after another, in a folder of their own."""

    def make(mode: str, row: str) -> KillSequence:
        return KillSequence(pools, tmp_path, table, f"{row} ({mode})", MODES[mode])

    return make


def drawn(step: str, turn: int) -> KillPoint:
    """Return who is killed in turn, at any of the times that the step is reached."""
    draw = random.Random(f"{step}-{turn}")
    return KillPoint(
        step, (ALL, FIRST, OTHER)[turn % 3], nth=1 + draw.randrange(OFTEN.get(step, 3))
    )


@pytest.mark.parametrize("count", [SOME, pytest.param(len(STEPS), marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_each_step(mode: str, count: int, chain: MakeChain, rotation: Rotation) -> None:
    """One kill for each step in turn, of one rank, of rank 0, of all; each restart is the next."""
    runs = chain(mode, "each step once")
    now = rotation.chosen(STEPS, count)
    runs.go_on()
    # Where only rank 0 comes to a step, another's death there changes least.
    turns = [2 if step in BY_EACH_RANK else index % 2 for index, step in enumerate(STEPS)]
    points = [drawn(step, turn) for step, turn in zip(STEPS, turns, strict=True) if step in now]
    landed = [runs.kill(point) for point in points]
    runs.go_on()
    assert not runs.wrong, "\n".join(runs.wrong)
    assert landed.count(False) < len(STEPS) * 0.2, landed
    assert any(landed)


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mode", MODES)
def test_many_kills_at_one_step(mode: str, step: str, chain: MakeChain) -> None:
    """At least ten kills land; each time all that is published is sound, and a run goes on."""
    runs = chain(mode, step)
    runs.go_on()
    landed = 0
    for index in range(MOST_TRIES):
        landed += runs.kill(drawn(step, index))
        if landed >= LANDED:
            break
    runs.go_on()
    assert not runs.wrong, "\n".join(runs.wrong)
    assert landed >= LANDED


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_kills_at_random_instants(mode: str, count: int, chain: MakeChain) -> None:
    """No instant is left out because nobody has thought of it."""
    runs, seed = chain(mode, "any instant"), f"instants-{mode}"
    print("seed", seed)
    draw = random.Random(seed)
    runs.go_on()
    for _ in range(count):
        runs.kill_at_random(draw)
    runs.go_on()
    assert not runs.wrong, "\n".join(runs.wrong)
