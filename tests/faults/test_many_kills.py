"""Whoever is killed, many times at each step of a save: a file of its own, as it takes long."""

from __future__ import annotations

import pytest

from tests.faults._kill_sequence import MakeChain
from tests.faults._save_modes import MODES
from tests.faults._save_steps import STEPS, KillPoint

pytestmark = pytest.mark.engine

LANDED, MOST_TRIES = 10, 16
"""Kills that have to land in each step, and how often it is tried."""


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mode", MODES)
def test_many_kills_at_one_step(mode: str, step: str, chain: MakeChain) -> None:
    """At least ten kills land; each time all that is published is sound, and a run goes on."""
    runs = chain(mode, step)
    runs.go_on()
    landed = 0
    for index in range(MOST_TRIES):
        landed += runs.kill(KillPoint.drawn(step, index))
        if landed >= LANDED:
            break
    runs.go_on()
    assert not runs.wrong, "\n".join(runs.wrong)
    assert landed >= LANDED
