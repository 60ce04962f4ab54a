"""Any stage, world, precision and partitioning to any other, bit for bit, on real engines.

Every save, while training waits and behind it, and every load goes through the adversarial copy
engine (``tests/core/_copy_engine``), as if the state lay on devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.engine._matrix_cases import (
    EACH_STAGE,
    SECONDARY,
    full_sources,
    full_targets,
    small_matrix,
)
from tests.support.checkpoints import Saved, StateComparison, load
from tests.support.engines import Setup
from tests.support.oracle import differences, expected_in
from tests.support.ranks import Pools
from tests.support.tables import MATRIX

pytestmark = pytest.mark.engine


def restored(pools: Pools, setup: Setup, saved: Saved) -> StateComparison:
    """Load on a world, and give the judgement of its rank 0."""
    verdict = pools.run(setup.world, partial(load, setup, saved, late=True))[0]
    assert verdict is not None
    return verdict


def count(kind: str, verdict: StateComparison) -> None:
    """Add a case to the table that a run ends with."""
    MATRIX.count(kind, "cases")
    MATRIX.count(kind, "tensors compared", verdict.tensors)
    MATRIX.count(kind, "differing", len(verdict.differing) + len(verdict.unrounded))
    differing_bits = sum(max(bits, 1) for bits in verdict.differing.values())
    MATRIX.count(kind, "differing bits", differing_bits)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(pytest.param(*case, marks=pytest.mark.essential) for case in EACH_STAGE),
        *small_matrix(),
        *SECONDARY,
    ],
    ids=str,
)
def test_state_survives(
    source: Setup,
    target: Setup,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """Masters, states, steps, groups, buffers, frozen and rounded weights are those saved."""
    verdict = restored(pools, target, saved_by(source, late=True))
    count("pairwise", verdict)
    verdict.assert_same()


@pytest.mark.parametrize("zero", ["2", "3"])
def test_what_is_read_into_narrower_masters_is_looked_at_in_time(
    zero: str, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """A load looks there for numbers that became infinite: not before they are copied."""
    target = Setup(2, zero, "bf16", bf16_masters=True)
    restored(pools, target, saved_by(Setup(2, "2"), late=True)).assert_same()


@pytest.mark.long
@pytest.mark.parametrize("source", full_sources(), ids=str)
def test_state_survives_everywhere(
    source: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """As above, from each run of the full matrix to all others."""
    saved = saved_by(source, late=True)
    for target in full_targets(source):
        verdict = restored(pools, target, saved)
        count(f"from ZeRO-{source.zero}", verdict)
        verdict.assert_same()


@pytest.mark.long
def test_eight_ranks_to_four_and_back(pools: Pools, saved_by: Callable[..., Saved]) -> None:
    """Two resizes lose nothing: what comes back to 8 ranks is what they had saved first."""
    eight, four = Setup(8, "2", "bf16"), Setup(4, "2", "bf16")
    first = saved_by(eight, late=True)
    second = Saved(four, f"{first.path}.4")
    verdicts = pools.run(4, partial(load, four, first, copy_to=second, late=True))
    assert not differences(expected_in(first.dump(), eight, four), second.dump())
    for verdict in (verdicts[0], restored(pools, eight, second)):
        assert verdict is not None
        count("8 to 4 to 8", verdict)
        verdict.assert_same()
