"""A global batch is cut without a sample lost, and weighted so that the gradient is its mean."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.data_progress import BatchPlan, plan_batches
from lightning_elastic_zero.errors import UnsupportedError

SIZES = st.integers(1, 200)
WORLDS = st.integers(1, 12)


def plan_or_none(size: int, most: int, world: int, *, uneven: bool) -> BatchPlan | None:
    """Return the plan, or None where it is refused."""
    try:
        return plan_batches(size, most, world, allow_uneven=uneven)
    except UnsupportedError:
        return None


@given(SIZES, SIZES, WORLDS, st.booleans())
def test_micro_batches_make_up_the_global_batch(
    size: int, most: int, world: int, uneven: bool
) -> None:
    """All ranks' micro-batches together are the global batch; none is empty or too large."""
    plan = plan_or_none(size, most, world, uneven=uneven)
    if plan is None:
        return
    cut = [plan.micro_batches_of(rank) for rank in range(world)]
    assert sum(map(sum, cut)) == size
    assert {len(sizes) for sizes in cut} == {plan.accumulate}
    assert max(map(max, cut)) == plan.largest_micro_batch <= most
    assert min(map(min, cut)) >= 1
    assert plan.is_even == (len({n for sizes in cut for n in sizes}) == 1)
    assert uneven or plan.is_even


@given(SIZES, SIZES, WORLDS)
def test_every_sample_counts_alike(size: int, most: int, world: int) -> None:
    """Lightning's 1 / A, DeepSpeed's 1 / W and the weight give each sample the share 1 / G."""
    plan = plan_or_none(size, most, world, uneven=True)
    if plan is None:
        return
    for rank in range(world):
        for index, samples in enumerate(plan.micro_batches_of(rank)):
            weight = Fraction(plan.loss_weight(rank, index)).limit_denominator(10**6)
            share = weight / samples / plan.accumulate / world
            assert abs(share - Fraction(1, size)) < Fraction(1, 10**8)
            assert not plan.is_even or plan.loss_weight(rank, index) == 1.0


@given(st.integers(1, 100), st.integers(1, 32), WORLDS)
def test_equal_micro_batches_are_found_where_they_fill_the_memory(
    factor: int, most: int, world: int
) -> None:
    """A global batch that is whole micro-batches of what fits is cut into just those."""
    plan = plan_batches(factor * most * world, most, world)
    assert (plan.accumulate, plan.largest_micro_batch) == (factor, most)


def test_the_refusal_names_what_fits() -> None:
    """Nearest device counts, and the option that would take it."""
    with pytest.raises(UnsupportedError) as caught:
        plan_batches(48, 8, 5)
    message = str(caught.value)
    assert "global_batch_size=48 cannot be shared by 5 devices" in message
    assert "1, 2, 3, 4, 6, 8, 12, 16, 24, 48" in message
    assert "allow_uneven_batches=True" in message
    assert plan_batches(48, 8, 5, allow_uneven=True).accumulate == 2


def test_fewer_samples_than_devices_are_refused_in_any_case() -> None:
    """A rank without a sample has no gradient."""
    with pytest.raises(UnsupportedError, match="Device counts that fit: 1, 3"):
        plan_batches(3, 8, 4, allow_uneven=True)
