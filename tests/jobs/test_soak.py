"""After random losses and gains, each restart is from the newest intact save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs._soak_run import SAVE_EVERY
from tests.jobs.soak import Soak, report, soak_job, wrong_restarts

MINUTES = 3


@pytest.mark.engine
@pytest.mark.long
def test_a_short_soak_has_no_wrong_restart(seed: int, tmp_path: Path) -> None:
    with soak_job(tmp_path / "run") as nodes:
        soak = Soak(nodes, seed)
        soak.run(MINUTES * 60)
        wrong = wrong_restarts(soak, nodes.folder)
    print(*report(soak.events), sep="\n")
    assert not wrong
    assert soak.events
    for event in soak.events:
        # One background save may be unfinished, and another checkpoint may be damaged.
        assert event.lost <= SAVE_EVERY * 3, event
