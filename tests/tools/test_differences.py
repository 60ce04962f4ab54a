"""``diff``: differences between checkpoints, and between values of all dtypes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero import cli
from lightning_elastic_zero.core.manifest import SCALARS
from lightning_elastic_zero.formats.reader import EXTRA_STATES, OPTIMIZER_STATE
from lightning_elastic_zero.tools.conversion import convert_checkpoint
from lightning_elastic_zero.tools.differences import compare_values, diff_checkpoints
from lightning_elastic_zero.tools.selection import ConvertOptions
from lightning_elastic_zero.tools.view import number_text
from tests.support.foreign_checkpoints import unpack
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


SCALER = {"class": "DynamicLossScaler", "dynamic": True, "cur_scale": 256.0}


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (
            {"engine": {"loss_scaler": {**SCALER, "cur_scale": 128.0}}},
            ("loss scale: cur_scale", "256.0", "128.0"),
        ),
        (
            {"engine": {"lr_scheduler": {"last_epoch": 3, "rates": [0.5, 0.1]}}},
            ("scheduler: rates: 1", "0.25", "0.1"),
        ),
        (
            {"client": {OPTIMIZER_STATE: {"global": {"k": torch.tensor(2)}}}},
            ("optimizer state: global: k", "1.0", "2.0"),
        ),
        (
            {"client": {EXTRA_STATES: {"a._extra_state": {"scale": 0.25}}}},
            ("extra state: a._extra_state: scale", "0.5", "0.25"),
        ),
        (
            {"engine": {"lr_scheduler": {"last_epoch": 3, "rates": [0.5, 0.25], "seed": 2**63}}},
            ("scheduler: seed", "absent", "9223372036854775808"),
        ),
        ({"own": ({"d": 0.5}, {"d": 0.125})}, ("scale: d", "0.5, 0.25", "0.5, 0.125")),
    ],
    ids=["loss scale", "scheduler", "optimizer", "extra state", "number", "state of a rank"],
)
def test_state_that_belongs_to_no_parameter_is_compared(
    change: dict[str, Any], differing: tuple[str, str, str], tmp_path: Path
) -> None:
    state = replace(make_state({"scale": (8,)}), scalars={"d": 0.5})
    state.own = {"d": 0.5}, {"d": 0.25}
    state.engine = {
        "loss_scaler": SCALER,
        "lr_scheduler": {"last_epoch": 3, "rates": [0.5, 0.25]},
    }
    state.client |= {
        OPTIMIZER_STATE: {"global": {"k": torch.tensor(1)}},
        EXTRA_STATES: {"a._extra_state": {"scale": 0.5}},
    }
    one = write_elastic(tmp_path / "one", state, rank_state=(SCALARS,))
    same = write_elastic(tmp_path / "same", state, rank_state=(SCALARS,))
    for field, changes in change.items():
        found = getattr(state, field)
        setattr(state, field, found | changes if isinstance(found, dict) else changes)
    other = write_elastic(tmp_path / "other", state, rank_state=(SCALARS,))
    assert diff_checkpoints(one, same).is_same
    found = diff_checkpoints(one, other)
    assert (found.values, found.tensors) == ((differing,), ())
    is_of_weights = differing[0].startswith("extra state")
    assert diff_checkpoints(one, other, weights_only=True).is_same is not is_of_weights


def test_numbers_are_equal_only_if_all_digits_are() -> None:
    assert number_text(2**63) != number_text(2**63 + 1)
    assert number_text(torch.tensor(3)) == number_text(3.0) == number_text(3)
    assert number_text(-0.0) == number_text(torch.tensor(0.0))
    assert number_text(10**400) == str(10**400)


def test_objects_and_what_a_kind_cannot_record_are_no_difference(tmp_path: Path) -> None:
    state = make_state()
    state.client[EXTRA_STATES] = {
        "a._extra_state": {"seen": Counter("ab")},
        "b._extra_state": torch.tensor([0.0, 1.0]),
    }
    source = write_elastic(tmp_path / "a", state)
    for to in ("lightning", "fp32"):
        convert_checkpoint(source, tmp_path / to, to, ConvertOptions(allow_pickle=True))
    whole = tmp_path / "lightning"
    tree = torch.load(whole, weights_only=False)
    weights = tree["state_dict"]
    weights["b._extra_state"] = torch.nn.Parameter(-weights["b._extra_state"])
    weights["b._extra_state"].data[1] = 1.0
    torch.save(tree, tmp_path / "minus zero")
    for other in (whole, tmp_path / "fp32", tmp_path / "minus zero"):
        for first in (source, whole):
            found = diff_checkpoints(first, other, weights_only=True, allow_pickle=True)
            assert found.values == (), (first, other)
    weights["b._extra_state"].data[1] = 2.0
    torch.save(tree, tmp_path / "other")
    found = diff_checkpoints(whole, tmp_path / "other", allow_pickle=True)
    assert [what for what, *_ in found.values] == ["extra state: b._extra_state"]


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
    assert out.startswith(f"2 of 21 tensors differ; only in {other}: 1; other values that differ: ")
    assert "\nlargest difference: 2.23 (head.weight: exp_avg); relative: 1.13 (scale)\n" in out
    assert "scale: 1 of 1 elements differ, by at most 0.5" in out
    assert run("diff", one, tmp_path / "none")[0] == 2


def test_checkpoints_of_two_formats_are_compared(tmp_path: Path) -> None:
    folder = unpack("universal-beside", tmp_path).checkpoint
    stock = next(p for p in folder.iterdir() if p.is_dir() and "universal" not in p.name)
    universal = next(p for p in folder.iterdir() if p.is_dir() and "universal" in p.name)
    found = diff_checkpoints(stock, universal)
    assert not found.tensors
    assert not [what for what, *_ in found.values if "step" in what]


def test_the_largest_differences_are_listed_first(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    one = write_elastic(tmp_path / "one", state)
    for number, tensor in enumerate(state.states.values(), start=1):
        tensor["exp_avg"] *= 1 + number / 8
    other = write_elastic(tmp_path / "other", state)
    *_, largest = state.states
    monkeypatch.setattr(cli, "_LISTED", 2)
    out = run("diff", one, other)[1].splitlines()
    assert out[0] == "6 of 21 tensors differ"
    assert out[2].startswith(f"{largest}: exp_avg: ")
    assert out[4:] == ["and 4 more: --all prints them"]
    assert len(run("diff", one, other, "--all")[1].splitlines()) == 8


def test_tolerances_accept_small_differences_and_other_types(tmp_path: Path, run: Run) -> None:
    source = write_elastic(tmp_path / "source", make_state())
    for dtype in ("fp32", "bf16"):
        assert run("convert", source, tmp_path / dtype, "--to", dtype)[0] == 0
    one, other = tmp_path / "fp32", tmp_path / "bf16"
    assert run("diff", one, other)[0] == 1
    assert run("diff", one, other, "--rtol", "0.01", "--atol", "1e-30")[0] == 0
    code, out, _ = run("diff", one, other, "--rtol", "1e-4")
    assert code == 1
    assert "types" not in out
    for wrong in ("-1", "nan", "x"):
        assert "invalid number value" in run("diff", one, other, "--rtol", wrong)[2]


def test_no_tolerance_covers_nan_and_infinity() -> None:
    one = torch.tensor([1.0, 2.0, 0.0, -3.0])
    other = torch.tensor([1.125, 2.0, 1e-9, -3.5])
    assert compare_values(one, other, 0.2, 1e-8) == (0, 0.0, 0.0)
    assert compare_values(one, other, 0.125, 1e-8)[:2] == (1, 0.5)
    assert compare_values(one, other, 0.0, 0.25)[:2] == (1, 0.5)
    for value in (math.nan, math.inf, -math.inf):
        changed = torch.tensor([1.0, 2.0, 0.0, value])
        assert compare_values(one, changed, 1.0, 100.0)[0] == 1
        assert compare_values(changed, changed.clone(), 0.1)[0] == 0
    large = torch.tensor([2**53])
    assert compare_values(large, large + 1, 1e-9)[0] == 0


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
    for dtype in (torch.int64, torch.uint64):
        large = torch.tensor([2**53, 5], dtype=dtype)
        assert compare_values(large, torch.tensor([2**53 + 1, 5], dtype=dtype))[0] == 1
    flags = torch.tensor([True, False])
    assert compare_values(flags, ~flags)[:2] == (2, 1.0)
    assert compare_values(flags, torch.tensor([1.0, 0.0])) == (0, 0.0, 0.0)


def test_integers_of_two_types_are_compared() -> None:
    small, wide = (torch.tensor([0, 1, 127], dtype=t) for t in (torch.int8, torch.uint64))
    assert compare_values(small, wide) == (0, 0.0, 0.0)
    assert compare_values(small + torch.tensor([0, 1, 0], dtype=torch.int8), wide) == (1, 1.0, 0.5)


def test_nan_in_complex_numbers() -> None:
    one = torch.tensor([complex(math.nan, 1)])
    assert compare_values(one, one.clone().to(torch.complex128)) == (0, 0.0, 0.0)
    count, distance, _ = compare_values(one, torch.tensor([1 + 1j]))
    assert count == 1
    assert math.isnan(distance)
    assert compare_values(torch.tensor([3 + 4j]), torch.tensor([3.0]))[:2] == (1, 4.0)
