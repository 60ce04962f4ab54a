"""Many kills at each step of a save. They take long, so they have their own file."""

from __future__ import annotations

import pytest

from tests.checkpoint._kill_sequence import MODES, MakeChain
from tests.support.save_steps import STEPS, KillPoint

pytestmark = pytest.mark.engine

MORE_TRIES = 6
"""Kills that may come too late for the step, or in runs that do not reach it."""


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_exactly_after_many_kills_at_one_step(
    mode: str, step: str, chain: MakeChain, seed: int, pytestconfig: pytest.Config
) -> None:
    wanted = pytestconfig.getoption("--kills")
    runs = chain(mode, step)
    runs.run_undisturbed()
    landed, first = 0, seed * wanted
    for index in range(first, first + wanted + MORE_TRIES):
        landed += runs.kill(KillPoint.drawn(step, index))
        if landed >= wanted:
            break
    runs.run_undisturbed()
    assert not runs.wrong, "\n".join(runs.wrong)
    assert landed >= wanted
