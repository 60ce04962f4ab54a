"""The cases of the matrix: which run saves, and which one loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.engine._pairwise import Case, pairwise
from tests.support.engines import Setup

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
"""How each of them is turned at each stage."""


def setup_of(zero: str, world: int, precision: str, knob: str) -> Setup:
    """Make a setup."""
    return Setup(world, zero, precision, **KNOBS[knob].get(zero, {}))


EACH_STAGE = [
    (setup_of("0", 2, "fp32", "plain"), setup_of("3", 3, "bf16", "order")),
    (setup_of("3", 4, "bf16", "tiny"), setup_of("2", 2, "fp32", "aligned")),
    (setup_of("2", 1, "fp32", "offload"), setup_of("B", 4, "bf16", "buckets")),
    (setup_of("B", 3, "bf16", "plain"), setup_of("1", 1, "bf16", "order")),
    (setup_of("1", 2, "bf16", "huge"), setup_of("0", 3, "bf16", "plain")),
]
"""Each stage saves and loads once, on more and on fewer ranks: the cases of ``make test``."""

SECONDARY = [
    (Setup(2, "3", "bf16", hpz=2), Setup(3, "3", sub_group=700)),
    (Setup(3, "3"), Setup(4, "3", "bf16", hpz=2, persistence=0)),
    (Setup(4, "3", hpz=2, offload=True), Setup(2, "2", alignment=True)),
]
"""With and without hpZ, which not every number of ranks can have."""


def small_matrix() -> list[tuple[Setup, Setup]]:
    """Return the runs that save and those that load, so that all pairs of values meet."""
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


def full_sources() -> list[Setup]:
    """Return every run that saves in the full matrix."""
    knobs = list(KNOBS)
    return [
        setup_of(zero, n, precision, _fitting(zero, knobs[(i + n) % len(knobs)]))
        for i, zero in enumerate(ZEROS)
        for n in WORLDS
        for precision in ("fp32", "bf16")
        if zero != "B" or precision == "bf16"
    ]


def full_targets(source: Setup) -> Iterator[Setup]:
    """Yield every run that loads what one has saved, in its precision, and a few in the other."""
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
    """Return the precisions of the run that saves and of the one that loads."""
    first, _, second = str(case["precision"]).partition(" to ")
    return first, second or first


def _allowed(case: Case) -> bool:
    """Return whether DeepSpeed has such runs: BF16_Optimizer is bf16, and has few knobs."""
    first, second = precisions(case)
    return (
        (case["from"] != "B" or first == "bf16")
        and (case["onto"] != "B" or second == "bf16")
        and _fitting(str(case["from"]), str(case["saving"])) == case["saving"]
        and _fitting(str(case["onto"]), str(case["loading"])) == case["loading"]
    )


def _fitting(zero: str, knob: str) -> str:
    return knob if knob == "plain" or zero in KNOBS[knob] else "plain"
