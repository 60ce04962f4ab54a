"""A run that ends by an exception ends soon, whatever the disk does to the save in flight."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from lightning_elastic_zero.checkpoint.background import DRAIN_TIMEOUT_S
from lightning_elastic_zero.storage.leftovers import remove_leftovers
from tests.faults._exception_during_save import ExceptionRun, raise_while_saving
from tests.faults._state_digests import read_digests
from tests.support.launch import run_ranks
from tests.support.processes import PROMPT_TIMEOUT_S
from tests.support.ranks import ForkServer

pytestmark = pytest.mark.engine

SHORT_S = 1.5

SLOW_S = {SHORT_S: 0.2, DRAIN_TIMEOUT_S: 0.8}
"""What each of some sixty writes takes: more in all than the patience."""


@pytest.mark.parametrize(
    ("slow", "rank", "patience_s"),
    [
        (True, 0, SHORT_S),
        (False, 1, SHORT_S),
        *(
            pytest.param(slow, rank, patience_s, marks=pytest.mark.long)
            for slow, rank, patience_s in [
                (True, 1, SHORT_S),
                (False, 0, SHORT_S),
                (True, 0, DRAIN_TIMEOUT_S),
                (True, 1, DRAIN_TIMEOUT_S),
                (False, 0, DRAIN_TIMEOUT_S),
                (False, 1, DRAIN_TIMEOUT_S),
            ]
        ),
    ],
)
def test_a_save_in_flight_is_given_up(
    *,
    slow: bool,
    rank: int,
    patience_s: float,
    tmp_path: Path,
    fork_server: ForkServer,
) -> None:
    """It has its patience, and no more: the processes end, and the last good one is what it was.

    Where the disk is only slow, nothing is left behind; where it does not answer at all, what lies
    in the hidden directory goes with the next save.
    """
    folder = tmp_path / "saves"
    folder.mkdir()
    short_s = None if patience_s == DRAIN_TIMEOUT_S else patience_s
    exception_run = ExceptionRun(str(folder), rank, SLOW_S[patience_s] if slow else None, short_s)
    results = run_ranks(partial(raise_while_saving, exception_run), 2, fork_server)
    ended_at = time.time()
    assert [r.notes.get("raised") for r in results] == ["the user's own"] * 2, results
    raised_at = min(result.notes["raised at"] for result in results)
    took_s = max(result.notes["ended at"] for result in results) - raised_at
    print(f"slow: {slow}, rank {rank}: the run ended {took_s:.1f} s after its exception, its")
    print(f"processes {ended_at - raised_at - took_s:.1f} s later")
    # That it did not end on its own, and nobody waited for that, is what the process says.
    assert patience_s <= took_s < PROMPT_TIMEOUT_S
    assert ended_at < raised_at + took_s + PROMPT_TIMEOUT_S
    assert "Cancelled the save of" in results[rank].stderr
    if slow:
        assert [p.name for p in folder.iterdir()] == ["good.ckpt"]
    remove_leftovers(folder)
    assert [p.name for p in folder.iterdir()] == ["good.ckpt"]
    held = {key: bits for key, bits in results[0].notes["held"].items() if key != "lr"}
    assert held.items() <= read_digests(folder / "good.ckpt").items()
