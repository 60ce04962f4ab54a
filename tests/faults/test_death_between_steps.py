"""Where a rank dies between two steps, the others end at once, and wait for no timeout."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.faults._death_between_steps import lose_a_rank
from tests.support.launch import run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("dies", "stage"),
    [
        (2, 1),
        *(
            pytest.param(dies, stage, marks=pytest.mark.long)
            for dies in range(4)
            for stage in (0, 1, 3)
            if (dies, stage) != (2, 1)
        ),
    ],
)
def test_the_others_end(dies: int, stage: int, fork_server: ForkServer, tmp_path: Path) -> None:
    """Lightning hides that its broadcast before the next batch has failed.

    A rank without a connection to the dead one would then wait for one that is a collective ahead.
    """
    program = partial(lose_a_rank, str(tmp_path), dies, stage)
    ranks = run_ranks(program, 4, fork_server, store_of_launcher=True, timeout_s=PROMPT_TIMEOUT_S)
    codes = {rank: result.returncode for rank, result in enumerate(ranks)}
    assert codes.pop(dies) == -signal.SIGKILL
    assert set(codes.values()) == {1}, ranks
    for rank in codes:
        raised = ranks[rank].notes["raised"]
        assert "gloo" in raised  # a connection that was lost
        assert "Timed out" not in raised
