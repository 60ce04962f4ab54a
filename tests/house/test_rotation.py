"""Cases that rotate are all run, in as few turns as there can be, and the same in the same turn."""

from __future__ import annotations

from itertools import product

import pytest

from tests.rotation import Rotation, parts_of

POINTS = [f"test[{index}]" for index in range(11)]


@pytest.mark.parametrize("sweep", [0, 1, 17])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_consecutive_turns_sweep_over_all_points(count: int, sweep: int) -> None:
    """Each turn has its number of points, and a sweep leaves none out."""
    turns = -(-len(POINTS) // count)
    chosen = [Rotation(sweep * turns + turn).chosen(POINTS, count) for turn in range(turns)]
    assert {len(points) for points in chosen} == {count}
    assert {point for points in chosen for point in points} == set(POINTS)
    assert all(points == sorted(points, key=POINTS.index) for points in chosen)


def test_sweeps_differ() -> None:
    """Who commits four changes at a time sees the other turns too."""
    every_fourth = [Rotation(turn).chosen(POINTS, 3) for turn in range(0, 4 * 40, 4)]
    assert {point for points in every_fourth for point in points} == set(POINTS)


def test_few_points_are_all_chosen() -> None:
    """And equal points are as many as they were."""
    assert Rotation(5).chosen(POINTS[:3], 3) == POINTS[:3]
    assert len(Rotation(5).chosen(["a"] * 7, 3)) == 3


def test_every_case_is_in_one_part() -> None:
    """Parts differ by one case of each test at most."""
    tests = [f"test_{name}" for name, _ in product("abc", range(7))]
    dealt = parts_of(tests, 4)
    for test in set(tests):
        sizes = [dealt[tests.index(test) : tests.index(test) + 7].count(part) for part in range(4)]
        assert max(sizes) - min(sizes) <= 1


def test_a_part_is_named_or_the_turns() -> None:
    """Counted from 1 by users; one that is not there is refused."""
    assert Rotation(6).part_of("2/4") == (1, 4)
    assert [Rotation(turn).part_of("commit/4")[0] for turn in range(5)] == [0, 1, 2, 3, 0]
    with pytest.raises(ValueError, match="counted from 1 to 4"):
        Rotation(6).part_of("5/4")
