"""Ranks compare their values before they write one checkpoint, whatever device holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.checkpoint.consistency import (
    Differences,
    check_consistent,
    differing_items,
    warn_of_differences,
)
from lightning_elastic_zero.checkpoint.save import ShardContents, manifest_to_save
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.core.manifest import Group, Manifest, StateKey
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.tensors import FlatState, RankState, Scalar, canonical_repr
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.client_state import SplitState, split_objects


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
    return ShardContents(Path(), manifest, RankState((flat,), {}, {}, {}, {}), SplitState())


def compare(first: ShardContents, other: ShardContents) -> bool:
    """Compare rank 1 with rank 0; return whether states that may differ do so."""
    own = first.compared()
    of_ranks = [reported(rank, first) for rank in (first, other)]
    return check_consistent(own, first.manifest, of_ranks)


def reported(rank: ShardContents, first: ShardContents) -> Differences:
    """Return a rank's report, as the ranks exchange it."""
    digests = json.loads(json.dumps(first.compared().digests()))
    found = Differences.between(rank.compared(), digests)
    return Differences(**json.loads(json.dumps(asdict(found))))


@pytest.mark.parametrize("value", [3.0, math.nan, 0.1])
def test_equal_scalars_on_two_devices_do_not_differ(value: float) -> None:
    first, other = (contents({"step": on(f"cuda:{rank}", value)}) for rank in range(2))
    compare(first, other)


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
        compare(contents({"step": theirs}), contents({"step": mine}))
    assert all(name in str(raised.value) for name in named), raised.value


def test_replicas_of_a_shard_are_compared() -> None:
    def with_sum(value: int, tensor_rank: int = 0) -> ShardContents:
        state = replace(contents({}).state, replica_sums=(value,), tensor_rank=tensor_rank)
        return replace(contents({}), state=state)

    assert reported(with_sum(6), with_sum(5)).replicas == {"0": "6"}
    assert not reported(with_sum(7, tensor_rank=1), with_sum(5)).replicas


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
    assert compare(first, other) is differs


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
        compare(first, other)


def test_different_learning_rates_do_not_fail_a_save() -> None:
    compare(contents({}, lr=0.1), contents({}, lr=0.01))


def with_client(state: dict[str, Any], **own: Any) -> ShardContents:
    return replace(contents({}), client=split_objects(state), rank_state=split_objects(own))


@pytest.mark.parametrize("count", [1, 40, 1000])
def test_an_entry_that_differs_is_named_once(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Among few and many others, and also if one rank lacks it."""
    state = {f"entry {index}": index for index in range(count)}
    first = with_client({**state, "callbacks": {"A": 1, "B": 2}})
    warned: set[str] = set()
    for inner, named in (({"A": 1, "B": 3}, "callbacks.B"), ({"B": 2}, "callbacks.A")):
        other = with_client({**state, "callbacks": inner})
        for logged in (1, 0):
            caplog.clear()
            reports = [reported(rank, first) for rank in (first, other)]
            warn_of_differences(first.compared(), first.manifest, reports, warned)
            assert caplog.text.count(f"differs between ranks: {named} on rank 1.") == logged
            assert len(caplog.messages) == logged


def test_a_difference_among_thousands_of_entries_is_not_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = {f"entry {index}": index for index in range(5000)}
    first, other = with_client(state), with_client({**state, "entry 4999": -1})
    warn_of_differences(first.compared(), first.manifest, [reported(other, first)], set())
    assert "differs between ranks: one of 5000 entries on rank 0." in caplog.text


@pytest.mark.parametrize("count", [40, 5000])
def test_a_frozen_weight_or_replica_that_differs_is_never_silent(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a rank cannot report every one that may differ."""
    base = contents({})
    buffers = tuple(FlatBuffer(0, (f"w{i}",), (1,)) for i in range(count))
    manifest = replace(base.manifest, buffers=buffers)

    def with_sums(last: int) -> ShardContents:
        sums = (*range(count - 1), last)
        frozen = {f"f{i}": value for i, value in enumerate(sums)}
        state = replace(base.state, replica_sums=sums, frozen_sums=frozen)
        return replace(base, manifest=manifest, state=state)

    first, other = with_sums(count - 1), with_sums(-1)
    reports = [reported(rank, first) for rank in (first, other)]
    warn_of_differences(first.compared(), manifest, reports, set())
    replica, weight = "w39", "f39"
    if count > 40:
        replica, weight = f"one of {count} flat buffers", f"one of {count} weights"
    assert f"those of rank 1 differ from rank 0's ({replica})." in caplog.text
    assert f"Frozen weights differ between ranks: {weight} on rank 1." in caplog.text


def test_declared_state_may_differ(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [
        with_client({"seen": rank, "loops": {"a": 1, "b": rank}}, seen=rank, loops={"b": rank})
        for rank in range(2)
    ]
    reports = [reported(rank, ranks[0]) for rank in ranks]
    assert not any(report.entries for report in reports)
    warn_of_differences(ranks[0].compared(), ranks[0].manifest, reports, set())
    assert not caplog.messages


@pytest.mark.parametrize("count", [3, 3000])
def test_every_buffer_that_differs_is_found(count: int) -> None:
    first = contents({})
    buffers = {f"layer.{index}.mean": torch.tensor(float(index)) for index in range(count)}
    changed = {**buffers, "layer.1.mean": torch.tensor(-1.0)}
    first, other = (
        replace(first, state=replace(first.state, module_buffers=each))
        for each in (buffers, changed)
    )
    digests = first.compared().digests()
    assert differing_items(first.compared(), digests, "buffers") == []
    found = differing_items(other.compared(), digests, "buffers")
    assert "layer.1.mean" in found
    assert len(found) <= max(1, count // 16)


numbers = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none())


@given(numbers, numbers)
def test_values_are_compared_exactly(a: object, b: object) -> None:
    both_nan = a != a and b != b
    assert (canonical_repr(a) == canonical_repr(b)) == (type(a) is type(b) and (a == b or both_nan))
    if type(a) is float and type(b) is float:
        tensors = (torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        assert (canonical_repr(tensors[0]) == canonical_repr(tensors[1])) == (a == b or both_nan)
    assert canonical_repr({"x": a, "y": (b,)}) == canonical_repr({"y": (b,), "x": a})
