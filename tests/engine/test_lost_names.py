"""A release of DeepSpeed that lacks a name is refused by that name, and no other release is."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_elastic_zero.core.requirements import DEEPSPEED, version_of
from tests.engine._lost_name_programs import missed_later, refusals, refusals_without_optimizer
from tests.engine._name_tables import CHECKED, CHECKED_WITHOUT_OPTIMIZER, checked_in
from tests.support.engines import DEEPSPEEDS, Setup
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine

WEIGHTS = ("lp_params", "lp_grads")
MOMENTS = [
    (Setup(1, "0", accumulation=2), ()),
    (Setup(1, "0", "fp16", accumulation=2), ()),
    (Setup(1, "1", accumulation=2, round_robin=True), ()),
    (Setup(1, "1", "bf16", accumulation=2), ("hp_params", *WEIGHTS, "optim_states")),
    (Setup(1, "2", accumulation=2), ("hp_params", *WEIGHTS, "optim_states")),
    (Setup(1, "2", accumulation=2, offload=True), ()),
    (Setup(1, "B", "bf16", accumulation=2), ()),
    (Setup(1, "3", "bf16", accumulation=2, grouping="one"), WEIGHTS),
    (Setup(1, "3", accumulation=2, offload=True, offloaded_weights=True), ()),
]
"""Engines whose windows have two micro-batches, and the states that they put on the host."""


@pytest.mark.parametrize("setup", CHECKED, ids=str)
def test_each_missing_deepspeed_name_is_reported(setup: Setup, pools: Pools) -> None:
    if setup.optimizer in DEEPSPEEDS:
        skip_without(DEEPSPEEDS[setup.optimizer][2], pools)
    if setup.nvme:
        skip_without("AsyncIOBuilder", pools)
    found = pools.run(1, partial(refusals, setup))[0]
    assert not found.missed
    assert found.checked == checked_in(setup, found.release)
    assert not found.unreported


needs_newest = pytest.mark.skipif(
    not DEEPSPEED.is_at_least(version_of("deepspeed"), DEEPSPEED.newest_tested),
    reason="what the newest release has is asked for",
)


@pytest.mark.long
@needs_newest
@pytest.mark.parametrize(("setup", "states"), MOMENTS, ids=str)
def test_no_name_is_missing_within_a_window_or_while_offloaded(
    setup: Setup, states: tuple[str, ...], pools: Pools
) -> None:
    missed = pools.run(1, partial(missed_later, setup, states))[0]
    assert len(missed) == (6 if states else 4)
    assert not {moment: said for moment, said in missed.items() if said}


@pytest.mark.long
@needs_newest
@pytest.mark.parametrize("setup", CHECKED_WITHOUT_OPTIMIZER, ids=str)
def test_engines_without_an_optimizer_need_fewer_names(setup: Setup, pools: Pools) -> None:
    found = pools.run(1, partial(refusals_without_optimizer, setup))[0]
    assert not found.missed
    assert found.checked == CHECKED_WITHOUT_OPTIMIZER[setup]
    assert not found.unreported
