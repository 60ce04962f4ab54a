"""Elastic ZeRO-3 as DeepSpeed #8031 describes it; see ``_after_8031`` for what that can show."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine._pool import Pools
from tests.foreign._after_8031 import write_after_8031
from tests.foreign._data import Fixture
from tests.foreign._restoring import Case, another, restore
from tests.foreign._rows import Row, small

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "in flat order"])
def test_comes_back(by_name: bool, pools: Pools, tmp_path: Path) -> None:
    """Lean shards by parameter come back bit for bit, with the groups of the live model."""
    setup = small(3, "3", grouping="two", sub_group=15)
    row = Row("after 8031", setup, "elastic ZeRO-3")
    pools.run(3, partial(write_after_8031, row, str(tmp_path), by_name))
    fixture = Fixture(tmp_path, setup, {"steps": row.steps})
    for target in (setup, another(setup, 0), another(setup, 1)):
        case = Case(fixture, target, str(fixture.checkpoint), groups=False)
        outcome = pools.run(target.world, partial(restore, case))[0]
        assert outcome is not None
        outcome.verdict.assert_same()
