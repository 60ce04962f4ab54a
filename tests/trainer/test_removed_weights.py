"""Weights that a hook has removed from a state dict, or has renamed."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch

from lightning_elastic_zero.trainer.module_weights import without_weights
from tests.support.outcome import captured_warnings

Weights = dict[str, Any]


def without(weights: Weights, *names: str) -> Weights:
    return {name: value for name, value in weights.items() if name not in names}


CASES: dict[str, tuple[Callable[[Weights], Weights], set[str], set[str]]] = {
    "nothing": (lambda w: w, set(), set()),
    "taken out": (lambda w: without(w, "teacher"), {"teacher"}, set()),
    "taken out, another put in": (
        lambda w: without(w, "teacher") | {"own": torch.ones(3)},
        {"teacher"},
        set(),
    ),
    "another that is no tensor": (
        lambda w: without(w, "teacher", "bias") | {"own": 3},
        {"teacher", "bias"},
        set(),
    ),
    "no tensor taken out, a scalar put in": (
        lambda w: without(w, "extra") | {"own": torch.tensor(1.0)},
        {"extra"},
        set(),
    ),
    "renamed": (lambda w: without(w, "teacher") | {"new": w["teacher"]}, set(), set()),
    "one renamed, one taken out": (
        lambda w: without(w, "teacher", "bias") | {"new": w["teacher"]},
        {"bias"},
        set(),
    ),
    "a copy under a new name": (
        lambda w: without(w, "teacher", "bias") | {"new": w["teacher"].clone()},
        {"bias"},
        {"teacher"},
    ),
    "all renamed": (lambda w: {f"x.{k}": copy(v) for k, v in w.items()}, set(), set()),
    "all taken out": (lambda _: {}, set(), set()),
}


@pytest.mark.parametrize("case", CASES)
def test_removed_weights_are_excluded_and_renamed_ones_are_not(case: str) -> None:
    """If these cannot be distinguished, the weight is saved, with a warning."""
    change, gone, unclear = CASES[case]
    given: Weights = {"student": torch.ones(4), "teacher": torch.ones(2, 2), "bias": torch.ones(5)}
    given["extra"] = {"calls": 3}  # as of a module's ``get_extra_state``
    with captured_warnings() as warned:
        _, excluded = without_weights({"state_dict": change(given)}, given)
    assert excluded == gone
    assert len(warned) == bool(unclear)
    assert all(name in text for name in unclear for text in warned)
