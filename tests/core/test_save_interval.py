"""The interval between saves costs least, compared with a numerical search."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.save_interval import optimal_save_interval

stalls = st.floats(1e-3, 1e4)
times_between_failures = st.floats(1.0, 1e9)


def time_per_useful_second(period_s: float, stall_s: float, mtbf_s: float) -> float:
    """Return Daly's expected time, without factors that do not depend on the period.

    With failures at a constant rate, the expected time until P seconds pass without a failure is
    (exp(P/M) - 1) M, excluding restarts. Of these P seconds, all but the stall are useful.
    """
    return math.expm1(period_s / mtbf_s) * mtbf_s / (period_s - stall_s)


def least_time(stall_s: float, mtbf_s: float) -> float:
    low, high = 0.0, mtbf_s
    for _ in range(200):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        if one > 0 and time_per_useful_second(
            stall_s + one, stall_s, mtbf_s
        ) < time_per_useful_second(stall_s + other, stall_s, mtbf_s):
            high = other
        else:
            low = one
    return time_per_useful_second(stall_s + low, stall_s, mtbf_s)


@given(stall_s=stalls, ratio=st.floats(1e-8, 100))
def test_no_other_interval_costs_noticeably_less(stall_s: float, ratio: float) -> None:
    mtbf_s = stall_s / ratio
    period_s = optimal_save_interval(stall_s, mtbf_s)
    assert period_s > stall_s
    found = time_per_useful_second(period_s, stall_s, mtbf_s)
    assert found <= 1.002 * least_time(stall_s, mtbf_s)


@given(mtbf_s=times_between_failures, ratio=st.floats(1e-6, 1e-2), wrong=st.floats(0.25, 4))
def test_a_guess_of_the_failure_rate_is_enough(mtbf_s: float, ratio: float, wrong: float) -> None:
    """A mean time that is wrong by a factor of four costs at most a third more (docs/saving.md)."""
    stall_s = mtbf_s * ratio
    period_s = optimal_save_interval(stall_s, wrong * mtbf_s)
    lost = time_per_useful_second(period_s, stall_s, mtbf_s) - 1
    assert lost <= 1.34 * (least_time(stall_s, mtbf_s) - 1)


@pytest.mark.parametrize(
    ("mtbf_min", "published_min"), [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")]
)
def test_intervals_equal_those_of_dalys_paper(mtbf_min: float, published_min: str) -> None:
    """Figures 3 to 5, for a stall of five minutes, which the paper's intervals exclude."""
    found_min = optimal_save_interval(300.0, mtbf_min * 60) / 60 - 5
    digits = len(published_min.partition(".")[2])
    assert f"{found_min:.{digits}f}" == published_min


@given(stall_s=stalls, mtbf_s=times_between_failures)
def test_units_do_not_matter(stall_s: float, mtbf_s: float) -> None:
    in_minutes = optimal_save_interval(stall_s / 60, mtbf_s / 60)
    assert in_minutes * 60 == pytest.approx(optimal_save_interval(stall_s, mtbf_s))


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_invalid_times_are_refused_by_name(seconds: float) -> None:
    wanted = f"={seconds!r}: expected a finite number of seconds greater than 0"
    with pytest.raises(ValueError, match=f"^save_stall_s{wanted}$"):
        optimal_save_interval(seconds, 1.0)
    with pytest.raises(ValueError, match=f"^mean_time_between_failures_s{wanted}$"):
        optimal_save_interval(1.0, seconds)
