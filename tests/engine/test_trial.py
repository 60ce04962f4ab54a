"""The small engines of ``selftest``."""

from __future__ import annotations

from functools import partial

import pytest
from torch import distributed

from tests.support.ranks import Pools


def wrong_weights_of_a_changed_weight(stage: int) -> list[str]:
    """Change a weight, but not its master, on rank 1; return the reported names."""
    from lightning_elastic_zero.engine.selftest_engine import (
        TrialModel,
        gather_full_state,
        train,
        trial_engine,
    )

    with trial_engine(TrialModel(1), stage) as engine:
        train(engine, 0, 1)
        assert gather_full_state(engine)[1] == []
        if distributed.get_rank() == 1:
            engine.module.embedding.weight.data[0, 0] += 1
        return gather_full_state(engine)[1]


pytestmark = pytest.mark.engine


def test_weights_that_differ_from_their_masters_are_reported_by_their_rank(pools: Pools) -> None:
    found = pools.run(2, partial(wrong_weights_of_a_changed_weight, 1))
    assert found == [[], ["embedding.weight"]]
