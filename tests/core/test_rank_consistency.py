"""Ranks compare their values before they write one checkpoint, whatever device holds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.checkpoint.consistency import (
    RankZeroTables,
    check_consistent,
    table_digests,
    write_tables,
)
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.types import SaveOptions, manifest_to_save
from lightning_elastic_zero.core.manifest import Group, Manifest, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import FlatState, RankState, Scalar, canonical_repr
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.folders import folder_at


class OnDevice(torch.Tensor):
    """A scalar whose repr names a device, as torch prints those of a GPU."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"tensor({self.item():.4f}, device='{self.at}')"

    at: str


def on(device: str, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.tensor(value, dtype=dtype).as_subclass(OnDevice)
    tensor.at = device
    return tensor


def contents(scalars: dict[str, Scalar], **hyperparameters: Any) -> ShardContents:
    keys = (StateKey("RMS", "scalar", "float32"), StateKey("step", "scalar", "float32"))
    buffers = (FlatBuffer(0, (), ()),)
    group = Group((), hyperparameters, keys)
    manifest = Manifest("", 1, 2, "fp32", "float32", (), (group,), buffers, (), ())
    flat = FlatState((), torch.zeros(3), {}, scalars)
    return ShardContents(Path(), manifest, RankState((flat,), {}, {}, {}, {}), {})


def compare(first: ShardContents, other: ShardContents, path: Path) -> bool:
    write_tables(folder_at(path), first.tables())
    tables = RankZeroTables(table_digests(first.tables()), other.tables(), folder_at(path))
    return check_consistent(tables, other.manifest)


@pytest.mark.parametrize("value", [3.0, math.nan, 0.1])
def test_equal_scalars_on_two_devices_do_not_differ(value: float, tmp_path: Path) -> None:
    first, other = (contents({"step": on(f"cuda:{rank}", value)}) for rank in range(2))
    compare(first, other, tmp_path)


@pytest.mark.parametrize(
    ("mine", "theirs", "named"),
    [
        (on("cuda:1", 4.0), on("cuda:0", 3.0), ("'step'", "4.0", "3.0", "flat buffer 0")),
        (on("cuda:1", 3.00001), on("cuda:0", 3.0), ("'step'", "3.0000100135803223", "3.0")),
        (on("cuda:1", 3.0, torch.float64), on("cuda:0", 3.0), ("float64", "float32")),
        (3.0, on("cuda:0", 3.0), ("'step'", "float32")),
    ],
    ids=["value", "a digit that is not printed", "dtype", "number and tensor"],
)
def test_scalars_that_differ_are_named(
    mine: Scalar, theirs: Scalar, named: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError) as raised:
        compare(contents({"step": theirs}), contents({"step": mine}), tmp_path)
    assert all(name in str(raised.value) for name in named), raised.value


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("theirs", "differs"), [(0.1, False), (0.2, True)])
def test_measurements_of_a_ranks_part_may_differ(
    theirs: float, differs: bool, weights_only: bool, tmp_path: Path
) -> None:
    """The Adafactor of transformers keeps the norm of its weights."""
    first, other = (contents({"RMS": torch.tensor(rms), "step": 3}) for rms in (0.1, theirs))
    if weights_only:
        first, other = (
            replace(each, manifest=manifest_to_save(each.manifest, SaveOptions(weights_only=True)))
            for each in (first, other)
        )
    assert compare(first, other, tmp_path) is differs


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, stage=2),
        lambda m: replace(m, module_buffers=("mean",)),
        lambda m: replace(m, progress=replace(m.progress, global_steps=7)),
        lambda m: replace(m, groups=(replace(m.groups[0], hyperparameters={"momentum": 0.1}),)),
        lambda m: replace(m, groups=()),
    ],
    ids=["stage", "buffers", "steps", "another hyperparameter", "groups"],
)
def test_ranks_of_different_runs_are_refused(
    change: Callable[[Manifest], Manifest], tmp_path: Path
) -> None:
    first = contents({}, lr=0.1)
    other = replace(first, manifest=change(first.manifest))
    with pytest.raises(UnsupportedError, match="the ranks differ in their"):
        compare(first, other, tmp_path)


def test_different_learning_rates_do_not_fail_a_save(tmp_path: Path) -> None:
    compare(contents({}, lr=0.1), contents({}, lr=0.01), tmp_path)


numbers = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none())


@given(numbers, numbers)
def test_values_are_compared_exactly(a: object, b: object) -> None:
    both_nan = a != a and b != b
    assert (canonical_repr(a) == canonical_repr(b)) == (type(a) is type(b) and (a == b or both_nan))
    if type(a) is float and type(b) is float:
        tensors = (torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        assert (canonical_repr(tensors[0]) == canonical_repr(tensors[1])) == (a == b or both_nan)
    assert canonical_repr({"x": a, "y": (b,)}) == canonical_repr({"y": (b,), "x": a})
