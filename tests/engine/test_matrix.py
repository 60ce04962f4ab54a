"""State saved by N ranks and loaded by M: a covering set of configurations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import pytest

from tests.support.checkpoints import Saved, StateComparison, load
from tests.support.engines import EngineCase
from tests.support.oracle import differences, expected_in
from tests.support.ranks import Pools
from tests.support.tables import MATRIX

Case: TypeAlias = "dict[str, str | int]"
Pair: TypeAlias = "tuple[tuple[str, str | int], tuple[str, str | int]]"

CANDIDATES = 40
"""Random candidates for each case; the one with the most new pairs is chosen."""


def pairwise(
    factors: Mapping[str, Sequence[str | int]], allowed: Callable[[Case], bool]
) -> list[Case]:
    """Return cases that cover all pairs of values that an allowed case can have; deterministic."""
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


ZEROS = ("0", "1", "2", "3", "B")
WORLDS = (1, 2, 3, 4)
PRECISIONS = ("fp32", "bf16", "fp32 to bf16", "bf16 to fp32")

KNOBS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "order": {
        "1": {"round_robin": True},
        "2": {"round_robin": True},
        "3": {"sub_group": 700},
    },
    "aligned": {
        "1": {"alignment": True},
        "2": {"alignment": True},
        "3": {"persistence": 100},
    },
    "buckets": {
        "1": {"bucket": 500},
        "2": {"bucket": 500},
        "3": {"bucket": 500, "sub_group": 2500},
        "B": {"bucket": 500},
    },
    "offload": {
        "1": {"offload": True, "round_robin": True},
        "2": {"offload": True, "alignment": True},
        "3": {"offload": True, "sub_group": 1500},
    },
    "tiny": {
        "1": {"bucket": 2, "contiguous": False},
        "2": {"bucket": 2, "contiguous": False, "round_robin": True},
        "3": {"bucket": 2, "contiguous": False, "sub_group": 1, "persistence": 0},
        "B": {"bucket": 2},
    },
    "huge": {
        "1": {"bucket": 10**6, "alignment": True, "round_robin": True},
        "2": {"bucket": 10**6, "offload": True, "pinned": False},
        "3": {"bucket": 10**6, "persistence": 10**9},
        "B": {"bucket": 10**6},
    },
    "weights": {
        "3": {"offload": True, "offloaded_weights": True, "pinned": False, "sub_group": 900},
    },
}
"""The options of each knob at each stage."""


def setup_of(zero: str, world: int, precision: str, knob: str) -> EngineCase:
    return EngineCase(world, zero, precision, **KNOBS[knob].get(zero, {}))


EACH_STAGE = [
    (setup_of("0", 2, "fp32", "plain"), setup_of("3", 3, "bf16", "order")),
    (setup_of("3", 3, "bf16", "tiny"), setup_of("2", 2, "fp32", "aligned")),
    (setup_of("2", 1, "fp32", "offload"), setup_of("B", 3, "bf16", "buckets")),
    (setup_of("B", 3, "bf16", "plain"), setup_of("1", 1, "bf16", "order")),
    (setup_of("1", 2, "bf16", "huge"), setup_of("0", 3, "bf16", "plain")),
]
"""Each stage saves and loads once, on more and on fewer ranks. ``make test`` runs these cases."""

SECONDARY = [
    (EngineCase(2, "3", "bf16", hpz=2), EngineCase(3, "3", sub_group=700)),
    (EngineCase(3, "3"), EngineCase(4, "3", "bf16", hpz=2, persistence=0)),
    (EngineCase(4, "3", hpz=2, offload=True), EngineCase(2, "2", alignment=True)),
]
"""With and without hpZ, which not every number of ranks supports."""


def small_matrix() -> list[tuple[EngineCase, EngineCase]]:
    """Return saving and loading runs in which all pairs of values occur."""
    factors: dict[str, Sequence[str | int]] = {
        "from": ZEROS,
        "onto": ZEROS,
        "n": WORLDS,
        "m": WORLDS,
        "precision": PRECISIONS,
        "saving": tuple(KNOBS),
        "loading": tuple(KNOBS),
    }
    return [
        (
            setup_of(str(c["from"]), int(c["n"]), precisions(c)[0], str(c["saving"])),
            setup_of(str(c["onto"]), int(c["m"]), precisions(c)[1], str(c["loading"])),
        )
        for c in pairwise(factors, _allowed)
    ]


def full_sources() -> list[EngineCase]:
    knobs = list(KNOBS)
    return [
        setup_of(zero, n, precision, _fitting(zero, knobs[(i + n) % len(knobs)]))
        for i, zero in enumerate(ZEROS)
        for n in WORLDS
        for precision in ("fp32", "bf16")
        if zero != "B" or precision == "bf16"
    ]


def full_targets(source: EngineCase) -> Iterator[EngineCase]:
    """Yield every loading run of the full matrix in its precision, and a few in the other."""
    knobs = list(KNOBS)
    for i, zero in enumerate(ZEROS):
        for m in WORLDS:
            knob = _fitting(zero, knobs[(i + m + source.world) % len(knobs)])
            if zero != "B" or source.precision == "bf16":
                yield setup_of(zero, m, source.precision, knob)
            if m == 1 + (source.world + i) % len(WORLDS):
                other = "bf16" if source.precision == "fp32" else "fp32"
                if zero != "B" or other == "bf16":
                    yield setup_of(zero, m, other, knob)


def precisions(case: Case) -> tuple[str, str]:
    first, _, second = str(case["precision"]).partition(" to ")
    return first, second or first


def _allowed(case: Case) -> bool:
    """Return whether DeepSpeed has such runs: BF16_Optimizer needs bf16 and has few knobs."""
    first, second = precisions(case)
    return (
        (case["from"] != "B" or first == "bf16")
        and (case["onto"] != "B" or second == "bf16")
        and _fitting(str(case["from"]), str(case["saving"])) == case["saving"]
        and _fitting(str(case["onto"]), str(case["loading"])) == case["loading"]
    )


def _fitting(zero: str, knob: str) -> str:
    return knob if knob == "plain" or zero in KNOBS[knob] else "plain"


pytestmark = pytest.mark.engine


def restored(pools: Pools, setup: EngineCase, saved: Saved) -> StateComparison:
    """Load on a world; return rank 0's comparison."""
    verdict = pools.run(setup.world, partial(load, setup, saved, late=True))[0]
    assert verdict is not None
    return verdict


def count(kind: str, verdict: StateComparison) -> None:
    MATRIX.count(kind, "cases")
    MATRIX.count(kind, "tensors compared", verdict.tensors)
    MATRIX.count(kind, "differing", len(verdict.differing) + len(verdict.unrounded))
    differing_bits = sum(max(bits, 1) for bits in verdict.differing.values())
    MATRIX.count(kind, "differing bits", differing_bits)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(pytest.param(*case, marks=pytest.mark.essential) for case in EACH_STAGE),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (*small_matrix(), *SECONDARY)),
    ],
    ids=str,
)
def test_each_pair_of_settings_restores_the_state(
    source: EngineCase,
    target: EngineCase,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    verdict = restored(pools, target, saved_by(source, late=True))
    count("pairwise", verdict)
    verdict.assert_same()


@pytest.mark.parametrize("zero", ["2", "3"])
def test_overflow_in_narrower_masters_is_found_after_the_copies(
    zero: str, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    target = EngineCase(2, zero, "bf16", bf16_masters=True)
    restored(pools, target, saved_by(EngineCase(2, "2"), late=True)).assert_same()


@pytest.mark.long
@pytest.mark.parametrize("source", full_sources(), ids=str)
def test_each_run_of_the_full_matrix_restores_in_all_others(
    source: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(source, late=True)
    for target in full_targets(source):
        verdict = restored(pools, target, saved)
        count(f"from ZeRO-{source.zero}", verdict)
        verdict.assert_same()


@pytest.mark.long
def test_eight_ranks_to_four_and_back_lose_nothing(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    eight, four = EngineCase(8, "2", "bf16"), EngineCase(4, "2", "bf16")
    first = saved_by(eight, late=True)
    second = Saved(four, f"{first.path}.4")
    verdicts = pools.run(4, partial(load, four, first, copy_to=second, late=True))
    assert not differences(expected_in(first.dump(), eight, four), second.dump())
    for verdict in (verdicts[0], restored(pools, eight, second)):
        assert verdict is not None
        count("8 to 4 to 8", verdict)
        verdict.assert_same()
