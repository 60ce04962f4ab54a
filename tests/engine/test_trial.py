"""The small engines of ``selftest``."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engine._trial_programs import wrong_weights_of_a_changed_weight
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


def test_weights_that_differ_from_their_masters(pools: Pools) -> None:
    """The rank with a wrong weight reports it, after all ranks have read the state together."""
    found = pools.run(2, partial(wrong_weights_of_a_changed_weight, 1))
    assert found == [[], ["embedding.weight"]]
