"""A global batch is cut without a sample lost, and weighted so that the gradient is its mean."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_elastic_zero.data_progress.batches import BatchPlan, plan_batches
from lightning_elastic_zero.errors import UnsupportedError

WORLDS = st.integers(1, 12)


def plan_or_none(size: int, most: int, world: int, *, uneven: bool) -> BatchPlan | None:
    """Return the plan, or None where it is refused."""
    try:
        return plan_batches(size, most, world, allow_uneven=uneven)
    except UnsupportedError:
        return None


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    """Any plan in which no micro-batch is empty."""
    world, accumulate = draw(WORLDS), draw(st.integers(1, 5))
    least = world * accumulate
    return BatchPlan(draw(st.integers(least, 4 * least)), world, accumulate)


@given(plans())
def test_micro_batches_make_up_the_global_batch(plan: BatchPlan) -> None:
    """All ranks' micro-batches together are the global batch; none is empty, or larger by two."""
    cut = [plan.micro_batches_of(rank) for rank in range(plan.world_size)]
    sizes = {size for of_rank in cut for size in of_rank}
    assert [sum(of_rank) for of_rank in cut] == [plan.samples_of(r) for r in range(plan.world_size)]
    assert sum(map(sum, cut)) == plan.global_batch_size
    assert {len(of_rank) for of_rank in cut} == {plan.accumulate}
    assert all(list(of_rank) == sorted(of_rank, reverse=True) for of_rank in cut)
    assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in cut)
    assert max(sizes) == plan.largest_micro_batch
    assert min(sizes) >= 1
    assert plan.is_even == (len(sizes) == 1)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 8))
@example(25, 13, 1)  # a divisor beyond twice the fewest
@example(3, 1, 2)  # a rank with fewer samples than micro-batches
def test_there_is_a_plan_wherever_there_can_be_one(size: int, most: int, world: int) -> None:
    """Equal micro-batches if they are half of what fits or more; where they may differ, the fewest.

    Every rank has a sample in each of its micro-batches, and none has more than fit.
    """
    smallest, largest = size // world, -(-size // world)
    fitting = [a for a in range(1, smallest + 1) if -(-largest // a) <= most]
    equal = [a for a in fitting if size % (world * a) == 0 and a <= 2 * fitting[0]]
    for uneven, possible in ((False, equal), (True, equal or fitting)):
        found = plan_or_none(size, most, world, uneven=uneven)
        assert (found.accumulate if found else 0) == (possible[0] if possible else 0)


@given(plans())
def test_every_sample_counts_alike(plan: BatchPlan) -> None:
    """Lightning's 1 / A, DeepSpeed's 1 / W and the weight give each sample the share 1 / G."""
    for rank in range(plan.world_size):
        for index, samples in enumerate(plan.micro_batches_of(rank)):
            weight = Fraction(plan.loss_weight(rank, index)).limit_denominator(10**6)
            share = weight / samples / plan.accumulate / plan.world_size
            assert share == Fraction(1, plan.global_batch_size)
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


def test_the_refusal_names_the_nearest_counts_alone() -> None:
    """A number with many divisors is no page of them."""
    with pytest.raises(UnsupportedError, match=r"fit: 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24\."):
        plan_batches(720, 720, 17)


def test_fewer_samples_than_devices_are_refused_in_any_case() -> None:
    """A rank without a sample has no gradient."""
    with pytest.raises(UnsupportedError, match="Device counts that fit: 1, 3"):
        plan_batches(3, 8, 4, allow_uneven=True)
