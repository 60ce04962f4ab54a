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
        full_state,
        train,
        trial_engine,
    )

    def wrong_weights() -> list[str]:
        found = full_state(engine)
        return [name for name in found if name.startswith("weight") and not found[name]]

    with trial_engine(TrialModel(1), stage) as engine:
        train(engine, 0, 1)
        assert wrong_weights() == []
        if distributed.get_rank() == 1:
            engine.module.embedding.weight.data[0, 0] += 1
        return wrong_weights()


pytestmark = pytest.mark.engine


def test_weights_that_differ_from_their_masters_are_reported_by_their_rank(pools: Pools) -> None:
    found = pools.run(2, partial(wrong_weights_of_a_changed_weight, 1))
    assert found == [[], ["weight embedding.weight equals its rounded master"]]
