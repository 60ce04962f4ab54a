"""``diff``: differences between checkpoints, and between values of all dtypes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.tools.differences import compare_values, diff_checkpoints
from tests.foreign._fixtures import unpack
from tests.support.plain_checkpoints import make_state, write_elastic

Run = Callable[..., tuple[int, str, str]]


def test_equal_states_have_no_difference(tmp_path: Path, run: Run) -> None:
    one = write_elastic(tmp_path / "one", make_state(), 3, 4)
    other = write_elastic(tmp_path / "other", make_state(), 1, 3)
    found = diff_checkpoints(one, other)
    assert found.is_same
    assert found.compared == 6 + 1 + 2 + 6 * 2
    code, out, _ = run("diff", one, other)
    assert code == 0
    assert out == "21 tensors compared: equal\n"


def test_each_kind_of_difference_is_reported(tmp_path: Path) -> None:
    one = write_elastic(tmp_path / "one", make_state(), 2, 3)
    state = make_state()
    state.masters["scale"] += 0.5
    state.states["head.weight"]["exp_avg"][0, :2] *= 2
    state.buffers["count"] += 1
    state.frozen["new.weight"] = torch.ones(2)
    state.frozen["frozen.weight"] = state.frozen["frozen.weight"].view(3, 4)
    state.step, state.rates = 4.0, (1e-3, 1e-4)
    other = write_elastic(tmp_path / "other", state, 3, 2)
    found = diff_checkpoints(one, other)
    assert found.only_in_first == ()
    assert found.only_in_second == ("new.weight",)
    differing = {(t.name, t.key): t for t in found.tensors}
    assert set(differing) == {
        ("scale", ""),
        ("head.weight", "exp_avg"),
        ("count", ""),
        ("frozen.weight", ""),
    }
    assert differing["scale", ""].largest == pytest.approx(0.5)
    states = differing["head.weight", "exp_avg"]
    assert (states.differing, states.elements) == (2, 65)
    assert states.largest_relative == pytest.approx(0.5)
    assert differing["frozen.weight", ""].change == "shapes (4, 3) and (3, 4)"
    values = {what: (a, b) for what, a, b in found.values}
    assert values["head.weight: step"] == ("3.0", "4.0")
    assert values["group 1 (layers.1.bias): lr"] == ("0.0005", "0.0001")


def test_exit_codes_of_the_command(tmp_path: Path, run: Run) -> None:
    state = make_state()
    one = write_elastic(tmp_path / "one", state)
    state.masters["scale"] += 0.5
    state.frozen["new.weight"] = torch.ones(2)
    state.states["head.weight"]["exp_avg"] *= 2
    state.rates = (1e-3, 1e-4)
    other = write_elastic(tmp_path / "other", state)
    weights = diff_checkpoints(one, other, weights_only=True)
    assert {t.key for t in weights.tensors} == {""}
    assert weights.values == ()
    code, out, _ = run("diff", one, other, "--json")
    assert code == 1
    assert json.loads(out)["only_in_second"] == ["new.weight"]
    code, out, _ = run("diff", one, other)
    assert code == 1
    assert "scale: 1 of 1 elements differ, by at most 0.5" in out
    assert run("diff", one, tmp_path / "none")[0] == 2


def test_checkpoints_of_two_formats_are_compared(tmp_path: Path) -> None:
    folder = unpack("universal-beside", tmp_path).checkpoint
    stock = next(p for p in folder.iterdir() if p.is_dir() and "universal" not in p.name)
    universal = next(p for p in folder.iterdir() if p.is_dir() and "universal" in p.name)
    found = diff_checkpoints(stock, universal)
    assert not found.tensors
    assert not [what for what, *_ in found.values if "step" in what]


def test_nan_zero_and_infinity_are_compared() -> None:
    nan, inf = math.nan, math.inf
    one = torch.tensor([nan, 0.0, 1.0, -2.0])
    assert compare_values(one, torch.tensor([nan, -0.0, 1.0, -2.0])) == (0, 0.0, 0.0)
    assert compare_values(one, torch.tensor([nan, 0.0, inf, -2.0]))[:2] == (1, inf)
    count, largest, _ = compare_values(one, torch.tensor([1.0, 0.0, 1.0, -2.5]))
    assert count == 2
    assert math.isnan(largest)
    assert compare_values(torch.tensor([1, 2]), torch.tensor([1, 4])) == (1, 2.0, 0.5)


def test_values_of_equal_magnitude_or_float64_differ() -> None:
    one = torch.tensor([1 + 1j, 2 - 3j])
    assert compare_values(one, one.conj().resolve_conj())[:2] == (2, 6.0)
    assert compare_values(one, one.to(torch.complex128)) == (0, 0.0, 0.0)
    large = torch.tensor([2**53, 5])
    assert compare_values(large, large + torch.tensor([1, 0]))[:2] == (1, 1.0)
    far = torch.tensor([-(2**63), 0]), torch.tensor([2**63 - 1, 0])
    assert compare_values(*far)[:2] == (1, 2.0**64)
    unsigned = torch.tensor([2**53, 2**63], dtype=torch.uint64)
    assert compare_values(unsigned, torch.tensor([2**53, 2**63 + 1], dtype=torch.uint64))[0] == 1
    flags = torch.tensor([True, False])
    assert compare_values(flags, ~flags)[:2] == (2, 1.0)
    assert compare_values(flags, torch.tensor([1.0, 0.0])) == (0, 0.0, 0.0)


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
def test_the_distance_of_integers_is_exact(
    one: int, kind: str, other: int, other_kind: str
) -> None:
    distance = abs(one - other)
    relative = distance / max(abs(one), abs(other))
    a, b = _integer(one, kind), _integer(other, other_kind)
    for found in (compare_values(a, b), compare_values(b, a)):
        assert found[0] == 1
        assert found[1] == pytest.approx(distance, rel=1e-14)
        assert found[2] == pytest.approx(relative, rel=1e-14)


@pytest.mark.parametrize("kind", _TYPES)
def test_integers_of_two_types_are_compared(kind: str) -> None:
    small = torch.tensor([0, 1, 127], dtype=torch.int8)
    wide = torch.tensor([0, 1, 127], dtype=_TYPES[kind])
    assert compare_values(small, wide) == (0, 0.0, 0.0)
    assert compare_values(small + torch.tensor([0, 1, 0], dtype=torch.int8), wide) == (1, 1.0, 0.5)


def test_the_largest_difference_is_reported() -> None:
    one = torch.tensor([0, 2**63, 2**64 - 1, 5], dtype=torch.uint64)
    other = torch.tensor([0, 2**63 + 1, 2**64 - 4, 5], dtype=torch.uint64)
    assert compare_values(one, other)[:2] == (2, 3.0)


def test_nan_and_infinity_in_parts_of_complex_numbers() -> None:
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
