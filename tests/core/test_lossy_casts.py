"""A weight is told to become infinite when this load makes it so, and not otherwise."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_elastic_zero.checkpoint.load import infinite_weights
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import Group, Manifest, Parameter
from lightning_elastic_zero.core.tensors import RestoreTargets

NUMEL = (1 << 20) + 3
"""More elements than are looked at at a time."""


def manifest(dtype: str, *names: str, frozen: tuple[str, ...] = ()) -> Manifest:
    """Describe a run of these parameters."""
    parameters = [Parameter(n, (NUMEL,), dtype, None if n in frozen else 0) for n in names]
    return Manifest(
        "", 0, 1, "any", "float32", tuple(parameters), (Group(names, {}, ()),), (), (), ()
    )


def targets(*held: tuple[str, torch.Tensor]) -> RestoreTargets:
    """Return what a rank received: each tensor between two elements that are no parameter's."""
    huge = torch.full((1,), 3e38)
    return RestoreTargets(
        tuple(Fragment(n, 0, v.numel(), 0, i, 1) for i, (n, v) in enumerate(held)),
        tuple(torch.cat([huge, v, huge]) for _, v in held),
        tuple({} for _ in held),
        lambda _: None,
        lambda: None,
    )


def with_last(number: float) -> torch.Tensor:
    """Return masters whose last one is a number."""
    values = torch.zeros(NUMEL)
    values[-1] = number
    return values


@pytest.mark.parametrize(
    ("saved", "here", "number", "named"),
    [
        ("float32", "float16", 65504.0, False),
        ("float32", "float16", -65520.0, True),
        ("bfloat16", "float16", 7e4, True),
        ("float64", "float16", 7e4, True),
        ("float16", "float16", 7e4, False),
        ("float32", "bfloat16", 7e4, False),
        ("float32", "bfloat16", 3.4e38, True),
        ("bfloat16", "bfloat16", 3.4e38, False),
        ("float16", "bfloat16", 3.4e38, False),
        ("float32", "float32", 3.4e38, False),
        ("float32", "float16", math.inf, False),
        ("float32", "float16", math.nan, False),
    ],
)
def test_a_weight_is_named_if_this_load_makes_it_infinite(
    saved: str, here: str, number: float, named: bool
) -> None:
    """Its own elements are looked at, all of them; what was infinite stays so without a word."""
    held = targets(("a", with_last(0.0)), ("b", with_last(number)), ("b", with_last(number)))
    found = infinite_weights(held, manifest(saved, "a", "b", "gone"), manifest(here, "a", "b"))
    assert found == (["b"] if named else [])


def test_other_parameters_are_not_looked_at() -> None:
    """Frozen ones have no masters; one that is not in the checkpoint was never cast."""
    held = targets(("frozen", with_last(7e4)), ("new", with_last(7e4)))
    here = manifest("float16", "frozen", "new", frozen=("frozen",))
    assert infinite_weights(held, manifest("float32", "frozen"), here) == []


@pytest.mark.parametrize(
    ("saved", "here", "number", "named"),
    [
        ("float16", "float16", 7e4, True),
        ("bfloat16", "bfloat16", 3.4e38, True),
        ("float16", "bfloat16", 3.4e38, True),
        ("float16", "float16", 65504.0, False),
        ("float32", "float32", 3.4e38, False),
        ("float16", "float16", math.inf, False),
    ],
)
def test_masters_that_will_be_rounded_are_looked_at_whatever_was_saved(
    saved: str, here: str, number: float, named: bool
) -> None:
    """They were finite in a run that did not round them."""
    held = targets(("a", with_last(number)))
    wanted = manifest(saved, "a"), manifest(here, "a")
    assert infinite_weights(held, *wanted, rounds_masters=True) == (["a"] if named else [])
