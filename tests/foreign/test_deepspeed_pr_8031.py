"""Elastic ZeRO-3 as DeepSpeed #8031 describes it; see ``_after_8031`` for what that can show."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine._worker_pool import Pools
from tests.foreign._deepspeed_pr_8031 import write_pr_8031
from tests.foreign._fixture_table import FixtureRow, small
from tests.foreign._fixtures import Fixture
from tests.foreign._restore_programs import Case, another, restore

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "in flat order"])
def test_comes_back(by_name: bool, pools: Pools, tmp_path: Path) -> None:
    """Lean shards by parameter come back bit for bit, with the groups of the live model."""
    setup = small(3, "3", grouping="two", sub_group=15)
    row = FixtureRow("after 8031", setup, "elastic ZeRO-3")
    pools.run(3, partial(write_pr_8031, row, str(tmp_path), by_name))
    fixture = Fixture(tmp_path, setup, {"steps": row.steps, "kind": "stock"})
    for target in (setup, another(setup, 0), another(setup, 1)):
        case = Case(fixture, target, str(fixture.checkpoint), groups=False)
        outcome = pools.run(target.world, partial(restore, case))[0]
        assert outcome is not None
        outcome.verdict.assert_same()
