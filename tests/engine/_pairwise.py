"""Few cases in which every two values of any two factors meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

Case: TypeAlias = "dict[str, str | int]"
Pair: TypeAlias = "tuple[tuple[str, str | int], tuple[str, str | int]]"

CANDIDATES = 40
"""Drawn for each case; the one with the most new pairs is taken."""


def pairwise(
    factors: Mapping[str, Sequence[str | int]], allowed: Callable[[Case], bool]
) -> list[Case]:
    """Return cases that cover every pair of values which some allowed case has; always the same."""
    draw = random.Random(0)
    missing = dict.fromkeys(_all_pairs(factors))
    cases: list[Case] = []
    while missing:
        pair = next(iter(missing))
        found = list(_candidates(pair, factors, allowed, draw))
        if not found:
            del missing[pair]
            continue
        best = max(found, key=lambda case: sum(p in missing for p in _pairs_of(case)))
        cases.append(best)
        for covered in _pairs_of(best):
            missing.pop(covered, None)
    return cases


def _all_pairs(factors: Mapping[str, Sequence[str | int]]) -> Iterator[Pair]:
    for one, other in combinations(factors, 2):
        for value in factors[one]:
            yield from (((one, value), (other, v)) for v in factors[other])


def _pairs_of(case: Case) -> Iterator[Pair]:
    return combinations(case.items(), 2)


def _candidates(
    pair: Pair,
    factors: Mapping[str, Sequence[str | int]],
    allowed: Callable[[Case], bool],
    draw: random.Random,
) -> Iterator[Case]:
    found = 0
    for _ in range(CANDIDATES * 10):
        drawn = {name: draw.choice(values) for name, values in factors.items()}
        case = {**drawn, **dict(pair)}
        if allowed(case):
            found += 1
            yield case
        if found == CANDIDATES:
            return
