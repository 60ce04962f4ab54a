"""The small engines that ``selftest`` looks into."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engine._trial_programs import digests_with_a_changed_weight
from tests.engine._worker_pool import Pools

pytestmark = pytest.mark.engine


def test_weights_that_are_not_their_masters(pools: Pools) -> None:
    """One rank's wrong weight is raised on all ranks, after all have had their part in reading."""
    told = pools.run(2, partial(digests_with_a_changed_weight, 1))
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    assert "1 weights are not their masters, rounded; the first: embedding.weight" in told[0]
