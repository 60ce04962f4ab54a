"""After a kill at any moment of a save, every published checkpoint equals the trained state."""

from __future__ import annotations

import random

import pytest

from tests.checkpoint._kill_sequence import MODES, MakeChain
from tests.support.save_steps import BY_EACH_RANK, STEPS, KillPoint

pytestmark = pytest.mark.engine

SOME = 2
"""Steps at which saves are killed in ``make test``."""


@pytest.mark.parametrize("count", [SOME, pytest.param(len(STEPS), marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_exactly_after_a_kill_at_each_step(
    mode: str, count: int, chain: MakeChain, seed: int
) -> None:
    """Kills one rank, rank 0 and all ranks in turn; each restart is the next run."""
    runs = chain(mode, "each step once")
    now = random.Random(f"{seed} {mode}").sample(STEPS, count)
    runs.run_undisturbed()
    # If only rank 0 reaches a step, the death of another rank there changes least.
    turns = [2 if step in BY_EACH_RANK else index % 2 for index, step in enumerate(STEPS)]
    points = [
        KillPoint.drawn(step, turn) for step, turn in zip(STEPS, turns, strict=True) if step in now
    ]
    landed = [runs.kill(point) for point in points]
    runs.run_undisturbed()
    assert not runs.wrong, "\n".join(runs.wrong)
    assert landed.count(False) < len(STEPS) * 0.2, landed
    assert any(landed)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_exactly_after_kills_at_random_instants(
    mode: str, count: int, chain: MakeChain, seed: int
) -> None:
    runs, draw = chain(mode, "any instant"), random.Random(f"instants-{mode}-{seed}")
    runs.run_undisturbed()
    for _ in range(count):
        runs.kill_at_random(draw)
    runs.run_undisturbed()
    assert not runs.wrong, "\n".join(runs.wrong)
