"""How far apart two values are, told as it is: integers of all sizes, and parts of complex ones."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_elastic_zero.tools.differences import compare_values

_LEAST, _TYPES = -(2**63), {"signed": torch.int64, "unsigned": torch.uint64}


def _integer(value: int, kind: str) -> torch.Tensor:
    return torch.tensor([value], dtype=_TYPES[kind])


_INTEGERS = [
    (2**62 + 511, "signed", 2**62 + 513, "signed"),
    (2**53 + 1, "signed", 2**53 + 2, "signed"),
    (0, "signed", _LEAST, "signed"),
    (2**63 - 1, "signed", _LEAST, "signed"),
    (_LEAST, "signed", _LEAST + 1, "signed"),
    (-5, "signed", 5, "signed"),
    (2**64 - 1, "unsigned", 0, "unsigned"),
    (2**63, "unsigned", 2**63 - 1, "unsigned"),
    (2**64 - 1, "unsigned", 2**64 - 2, "unsigned"),
    (1, "unsigned", 3, "unsigned"),
    (2**64 - 1, "unsigned", -1, "signed"),
    (2**63, "unsigned", _LEAST, "signed"),
    (2**63, "unsigned", 2**63 - 1, "signed"),
    (0, "unsigned", -3, "signed"),
    (7, "unsigned", 4, "signed"),
]


@pytest.mark.parametrize(("one", "kind", "other", "other_kind"), _INTEGERS)
def test_integers(one: int, kind: str, other: int, other_kind: str) -> None:
    """The distance is Python's own, as far as float64 holds it; both ways round."""
    distance = abs(one - other)
    relative = distance / max(abs(one), abs(other))
    a, b = _integer(one, kind), _integer(other, other_kind)
    for found in (compare_values(a, b), compare_values(b, a)):
        assert found[0] == 1
        assert found[1] == pytest.approx(distance, rel=1e-14)
        assert found[2] == pytest.approx(relative, rel=1e-14)


@pytest.mark.parametrize("kind", _TYPES)
def test_integers_beside_smaller_types(kind: str) -> None:
    """One value in two types is no difference, and others are told as they are."""
    small = torch.tensor([0, 1, 127], dtype=torch.int8)
    wide = torch.tensor([0, 1, 127], dtype=_TYPES[kind])
    assert compare_values(small, wide) == (0, 0.0, 0.0)
    assert compare_values(small + torch.tensor([0, 1, 0], dtype=torch.int8), wide) == (1, 1.0, 0.5)


def test_the_largest_of_many() -> None:
    """Of several differences the largest one is told, and only what differs is counted."""
    one = torch.tensor([0, 2**63, 2**64 - 1, 5], dtype=torch.uint64)
    other = torch.tensor([0, 2**63 + 1, 2**64 - 4, 5], dtype=torch.uint64)
    assert compare_values(one, other)[:2] == (2, 3.0)


def test_parts_of_complex_numbers() -> None:
    """NaN in one part hides no difference of the other, and is like NaN; so is infinity."""
    nan, inf = math.nan, math.inf
    for same in (nan, inf, -inf):
        one, other = torch.tensor([complex(same, 1)]), torch.tensor([complex(same, 3)])
        assert compare_values(one, other)[:2] == (1, 2.0)
        assert compare_values(one, one.clone().to(torch.complex128)) == (0, 0.0, 0.0)
        turned = torch.tensor([complex(1, same)]), torch.tensor([complex(3, same)])
        assert compare_values(*turned)[:2] == (1, 2.0)
    count, distance, _ = compare_values(torch.tensor([complex(nan, 1)]), torch.tensor([1 + 1j]))
    assert count == 1
    assert math.isnan(distance)
    assert compare_values(torch.tensor([3 + 4j]), torch.tensor([0j]))[:2] == (1, 5.0)
    assert compare_values(torch.tensor([3 + 4j]), torch.tensor([3.0]))[:2] == (1, 4.0)
