"""Tensors are compared by their bits, not by the numbers that these stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.tensors import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(numel=st.integers(0, 40), changed=st.integers(0, 39), seed=st.integers(0, 9))
def test_one_element_makes_a_difference(
    dtype: torch.dtype, numel: int, changed: int, seed: int
) -> None:
    """Wherever it is, and of any type; what is the same in another place is the same."""
    torch.manual_seed(seed)
    one = torch.randint(0, 2, (numel,)).to(dtype)
    other = one.clone()
    assert same_bits(one, other)
    if numel:
        other[changed % numel] = 1 - other[changed % numel].to(torch.uint8)
        assert not same_bits(one, other)


def test_bits_are_compared_and_not_numbers() -> None:
    """Zeros of two signs differ, NaN is itself: weights that diverged are no other weights."""
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert same_bits(weight[1:], torch.ones(2, 2))
