"""Hypothesis strategies: parameter tables, flat buffers, layouts, manifests, client states."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from lightning_elastic_zero.core.layout import Fragment, Layout
from lightning_elastic_zero.core.manifest import (
    FileEntry,
    Group,
    Manifest,
    Parameter,
    Plain,
    StateKey,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.partition import (
    ContiguousPartition,
    FlatBuffer,
    PerParameterPartition,
)

MAX_RANKS = 64

world_sizes = st.integers(1, MAX_RANKS)


@dataclass(frozen=True, slots=True)
class Cut:
    stage: int
    buffers: tuple[FlatBuffer, ...]
    world_size: int

    def layout(self) -> Layout:
        rule = PerParameterPartition if self.stage == 3 else ContiguousPartition
        return rule(self.buffers, self.world_size)


def cut_to(whole: Fragment, start: int, stop: int) -> Fragment:
    first = max(whole.start, start)
    offset = whole.offset + first - whole.start
    return replace(whole, start=first, stop=min(whole.stop, stop), offset=offset)


def tables(min_numel: int = 1) -> st.SearchStrategy[dict[str, int]]:
    names = st.sampled_from(["a", "b", "a.b", "layers.0.weight", "layers.10.weight", "bias", "g"])
    # Few elements, so that there are often more ranks than elements.
    return st.dictionaries(names, st.integers(min_numel, 90), min_size=1)


@st.composite
def _parted(draw: st.DrawFn, names: Sequence[str]) -> list[tuple[str, ...]]:
    order = draw(st.permutations(names))
    borders = draw(st.sets(st.integers(1, len(order) - 1))) if len(order) > 1 else set()
    ends = [*sorted(borders), len(order)]
    return [tuple(order[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


@st.composite
def contiguous_cuts(draw: st.DrawFn, table: dict[str, int]) -> Cut:
    """ZeRO-1/2: any order, any padding after each parameter and at the end."""
    world_size = draw(world_sizes)
    buffers = []
    for group, names in enumerate(draw(_parted(list(table)))):
        numels = tuple(table[name] for name in names)
        padding = st.lists(st.integers(0, 9), min_size=len(names), max_size=len(names))
        paddings = tuple(draw(st.one_of(st.just([]), padding)))
        size = -(-sum(numels + paddings) // world_size) + draw(st.integers(0, 5))
        buffers.append(FlatBuffer(group, names, numels, paddings, size))
    return Cut(draw(st.sampled_from([1, 2])), tuple(buffers), world_size)


@st.composite
def per_parameter_cuts(draw: st.DrawFn, table: dict[str, int]) -> Cut:
    """ZeRO-3: any order, any sub-groups."""
    buffers = tuple(
        FlatBuffer(0, names, tuple(table[name] for name in names))
        for names in draw(_parted(list(table)))
    )
    return Cut(3, buffers, draw(world_sizes))


def cuts(table: dict[str, int]) -> st.SearchStrategy[Cut]:
    return st.one_of(contiguous_cuts(table), per_parameter_cuts(table))


@st.composite
def pairs_of_cuts(draw: st.DrawFn) -> tuple[dict[str, int], Cut, Cut]:
    table = draw(tables())
    return table, draw(cuts(table)), draw(cuts(table))


# -- manifests --------------------------------------------------------------------------------

_texts = st.text(max_size=8)
_integers = st.integers(-(2**70), 2**70)
_numbers = st.one_of(st.booleans(), _integers, st.none())
# JSON has only one NaN.
_json_numbers = st.one_of(_numbers, st.floats(allow_nan=False), st.just(math.nan))
_keys = st.one_of(st.sampled_from(["tuple", "dict", "lr"]), _texts)

plain_values: st.SearchStrategy[Plain] = st.recursive(
    st.one_of(_json_numbers, _texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=3),
    ),
    max_leaves=6,
)
"""Values of hyperparameters, including tuples and dicts that look like encoded ones."""

_state_keys = st.builds(
    StateKey, name=_texts, kind=st.sampled_from(["elementwise", "scalar"]), dtype=_texts
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    table = draw(tables())
    cut = draw(cuts(table))
    group_of = {name: buffer.group for buffer in cut.buffers for name in buffer.names}
    parameters = [Parameter(n, (table[n],), "float32", group_of[n]) for n in table]
    frozen = [Parameter(f"frozen.{i}", (i, 2), draw(_texts), None, ("alias",)) for i in range(2)]
    groups = tuple(
        Group(
            names=tuple(n for n in table if group_of[n] == index),
            hyperparameters=draw(st.dictionaries(_keys, plain_values, max_size=3)),
            state=tuple(draw(st.lists(_state_keys, max_size=2))),
        )
        for index in range(max(group_of.values()) + 1)
    )
    names = _texts.filter(lambda text: not set(text) & set("/\\\0") and text not in {"", ".", ".."})
    files = draw(st.lists(names, unique=True, max_size=3))
    return Manifest(
        save_id=draw(_texts),
        stage=cut.stage,
        world_size=cut.world_size,
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        master_dtype="float32",
        parameters=tuple(draw(st.permutations(parameters + frozen))),
        groups=groups,
        buffers=cut.buffers,
        module_buffers=tuple(draw(st.lists(_texts, max_size=2))),
        files=tuple(FileEntry(name, draw(st.integers(0)), "0" * 32) for name in files),
        progress=TrainingProgress(
            global_steps=draw(st.integers(0)),
            global_batch_size=draw(st.none() | st.integers(1)),
            sampler=draw(st.dictionaries(_keys, plain_values, max_size=2)),
        ),
        writer=Writer(library=draw(_texts)),
        weights_only=draw(st.booleans()),
        excluded=tuple(draw(st.sampled_from([[], ["frozen.0"]]))),
        rank_state=tuple(draw(st.sampled_from([[], ["buffers"]]))),
        client_objects=tuple(draw(st.lists(_texts, max_size=2))),
    )


# -- client states ----------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Small tensors with any bits, such as NaN payloads and -0.0; scalars, empty tensors, views."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = math.prod(shape)
    size = (count + 1) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    # The storage has one element more, so that all tensors are views.
    return torch.frombuffer(data, dtype=dtype)[:count].view(shape)


_scalars = st.one_of(
    _numbers,
    st.floats(),
    st.sampled_from([2**2039 - 1, 1 - 2**2039]),
    _texts,
    st.binary(min_size=1, max_size=4),
    st.complex_numbers(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")]),
)
_hashables = st.one_of(_numbers, _texts)
_hashables = st.one_of(_hashables, st.tuples(_hashables, _hashables))

tree_keys = st.one_of(st.sampled_from(["a", "b", "a.b", "0", "1", "[", '["a"]']), st.integers(0, 2))
"""Keys that are ambiguous when they are joined by dots."""


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    nested: st.SearchStrategy[Any] = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(tree_keys, inner, max_size=3),
            st.dictionaries(tree_keys, inner, max_size=2).map(OrderedDict),
        ),
        max_leaves=8,
    )
    return st.dictionaries(st.sampled_from(["a", "b", "a.b", "[", '["a", "b"]']), nested)


plain_leaves: st.SearchStrategy[Any] = st.one_of(
    _scalars,
    tensors(),
    st.sets(_hashables, max_size=3),
    st.lists(_scalars | tensors(), max_size=2).map(tuple),
    st.dictionaries(_hashables, _scalars, max_size=2),
)
"""Plain data except dicts and lists, which are traversed."""
