"""Whose is what in flat buffers without names: every element fits, or nothing is accepted.

The buffers are made here by slicing whole vectors, without the library's partition rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.dumps_describe import FlatGroup, Order, OrderSearch, find_order

Values = tuple[int, ...]


@dataclass(frozen=True)
class Dumped:
    """Parameters, and what the ranks hold of them."""

    stage: int
    world: int
    values: dict[str, Values]
    """In the model's order."""
    buffers: tuple[tuple[tuple[str, ...], ...], ...]
    """The truth: the names in each flat buffer of each group."""
    paddings: tuple[tuple[int, ...], ...] = ()

    def order(self) -> Order:
        """Return the names of each group."""
        return tuple(tuple(itertools.chain(*group)) for group in self.buffers)

    def flats(self) -> list[list[list[int]]]:
        """Return each rank's flat buffers; padding is -1."""
        made = [
            self._cut(index, names) for index, names in enumerate(itertools.chain(*self.buffers))
        ]
        return [[flat[rank] for flat in made] for rank in range(self.world)]

    def _cut(self, index: int, names: Sequence[str]) -> list[list[int]]:
        if self.stage == 3:
            ranks: list[list[int]] = [[] for _ in range(self.world)]
            for name in names:
                whole = list(self.values[name])
                whole += [-1] * (-len(whole) % self.world)
                size = len(whole) // self.world
                for rank in range(self.world):
                    ranks[rank] += whole[rank * size : (rank + 1) * size]
            return ranks
        pads = self.paddings[index] if self.paddings else (0,) * len(names)
        pairs = zip(names, pads, strict=True)
        flat = [v for name, pad in pairs for v in [*self.values[name], *[-1] * pad]]
        flat += [-1] * (-len(flat) % (2 * self.world))
        size = len(flat) // self.world
        return [flat[rank * size : (rank + 1) * size] for rank in range(self.world)]

    def flat_groups(self) -> list[FlatGroup]:
        """Return what the dumps say of themselves."""
        found, first = [], 0
        for index, group in enumerate(self.buffers):
            sizes = tuple(len(self.flats()[0][first + i]) for i in range(len(group)))
            pads = self.paddings[index] if self.paddings else ()
            total = sum(len(self.values[n]) for names in group for n in names) + sum(pads)
            total = sum(sizes) if self.stage == 3 else total
            pads = pads if any(pads) else ()
            found.append(FlatGroup(self.stage, self.world, first, sizes, total, pads))
            first += len(group)
        return found

    def search(self) -> OrderSearch:
        """Return what is to be found out."""
        numels = {name: len(values) for name, values in self.values.items()}
        return OrderSearch(
            self.flat_groups(), numels, _of(self, self), self.values.__getitem__, "here"
        )

    def find(self, *candidates: Sequence[Sequence[str]], only: bool = False) -> Order:
        """Find the order; a single group is looked for in the model's order first."""
        own = [[list(self.values)]] if len(self.buffers) == 1 and not only else []
        return find_order(self.search(), [*candidates, *own], only=only)


@st.composite
def dumped(draw: st.DrawFn, *, distinct: bool = False, in_model_order: bool = False) -> Dumped:
    """Any groups, in any order, of any sizes; unless distinct, many hold the same values."""
    most = 9 if distinct else 3
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=6))
    numbers = itertools.count()
    values = {
        f"p{i}": tuple(next(numbers) if distinct else draw(st.integers(0, 1)) for _ in range(size))
        for i, size in enumerate(sizes)
    }
    count = draw(st.integers(1, 3))
    group_of = {name: draw(st.integers(0, count - 1)) for name in values}
    names = list(values) if in_model_order else draw(st.permutations(list(values)))
    members = [[n for n in names if group_of[n] == g] for g in range(count)]
    members = [group for group in members if group]
    stage = draw(st.sampled_from([1, 2, 3]))
    cut = [_sub_groups(draw, group) if stage == 3 else (tuple(group),) for group in members]
    aligned = stage != 3 and draw(st.booleans())
    pads = tuple(
        tuple(0 if i == len(g) - 1 else draw(st.integers(0, 3)) for i in range(len(g)))
        for g in members
    )
    return Dumped(stage, draw(st.integers(1, 5)), values, tuple(cut), pads if aligned else ())


def _sub_groups(draw: st.DrawFn, names: list[str]) -> tuple[tuple[str, ...], ...]:
    borders = sorted(draw(st.sets(st.integers(1, len(names) - 1)))) if len(names) > 1 else []
    ends = [*borders, len(names)]
    return tuple(tuple(names[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def rebuilt(case: Dumped, order: Order) -> list[list[list[int]]]:
    """Return what ranks would hold if an order were the truth."""
    flat_groups = case.flat_groups()
    split = [
        s.split((n, len(case.values[n])) for n in names)
        for s, names in zip(flat_groups, order, strict=True)
    ]
    return replace(case, buffers=tuple(tuple(map(tuple, group)) for group in split)).flats()


@given(dumped(distinct=True))
def test_any_order_is_found_where_values_differ(case: Dumped) -> None:
    """Values that differ tell the one order, whatever it is, on any ranks, at any stage."""
    assert case.find() == case.order()


@given(dumped())
def test_what_is_accepted_fits_in_every_element(case: Dumped) -> None:
    """Where values are alike, an order is refused, or is one that the dumps cannot contradict."""
    try:
        order = case.find()
    except CheckpointMismatchError as error:
        assert "more than one place" in str(error)  # noqa: PT017 - it may also be accepted
    else:
        assert sorted(itertools.chain(*order)) == sorted(case.values)
        assert rebuilt(case, order) == case.flats()


@given(dumped())
def test_who_is_in_which_group_is_never_guessed(case: Dumped) -> None:
    """If groups that keep the model's order could be others, nothing is accepted but the names."""
    assume(len(case.buffers) > 1)
    at = list(case.values).index
    ways = {
        order
        for order in _all_dealings(case)
        if case.search().fits(order) and all(sorted(g, key=at) == list(g) for g in order)
    }
    if len(ways) > 1:
        with pytest.raises(CheckpointMismatchError, match="groups="):
            case.find()
    elif ways:
        assert {case.find()} == ways
    assert case.find(case.order()) == case.order()


def _all_dealings(case: Dumped) -> list[Order]:
    count = len(case.buffers)
    return [
        tuple(
            tuple(n for n, g in zip(case.values, dealt, strict=True) if g == index)
            for index in range(count)
        )
        for dealt in itertools.product(range(count), repeat=len(case.values))
    ]


@given(dumped(in_model_order=True))
def test_a_single_group_in_the_models_order_is_taken_as_it_is(case: Dumped) -> None:
    """The likeliest order is not refused for parameters that are alike."""
    assume(len(case.buffers) == 1)
    assert case.find() == case.order()


@given(dumped(distinct=True), st.data())
def test_other_weights_are_refused_by_name(case: Dumped, data: st.DataObject) -> None:
    """One element that is not what the masters round to is enough."""
    name = data.draw(st.sampled_from(list(case.values)))
    at = data.draw(st.integers(0, len(case.values[name]) - 1))
    wrong = list(case.values[name])
    wrong[at] = 10_000
    other = replace(case, values={**case.values, name: tuple(wrong)})
    search = replace(other.search(), compare=_of(case, other))
    for candidates, only in (([], False), ([case.order()], False), ([case.order()], True)):
        with pytest.raises(CheckpointMismatchError) as refused:
            find_order(search, candidates, only=only)
        assert name in str(refused.value)


def _of(held: Dumped, file: Dumped) -> Callable[[str, Sequence[Fragment]], bool]:
    """Compare what some dumps hold with another model file's weights."""
    flats = held.flats()

    def same(name: str, fragments: Sequence[Fragment]) -> bool:
        return all(
            tuple(flats[f.rank][f.buffer][f.offset : f.offset + f.stop - f.start])
            == file.values[name][f.start : f.stop]
            for f in fragments
        )

    return same


@given(dumped(distinct=True, in_model_order=True))
def test_round_robin_is_found_from_the_groups_alone(case: Dumped) -> None:
    """Groups dealt out over the ranks are found, though some of their parameters may be alike."""
    assume(case.stage != 3)
    dealt = tuple(
        (tuple(n for first in range(case.world) for n in group[first :: case.world]),)
        for group in case.order()
    )
    alike: dict[str, Values] = dict.fromkeys(case.values, (7, 7))
    turned = replace(case, buffers=dealt, paddings=(), values=alike)
    found = turned.find(case.order(), only=True)
    assert found in (case.order(), turned.order())
    told_apart = replace(turned, values=case.values)
    assert told_apart.find(case.order(), only=True) == told_apart.order()


def test_parameters_that_are_alike_in_two_groups_are_named() -> None:
    """Two biases of zeros, one in each group: the values cannot tell, the message does."""
    values: dict[str, Values] = {"a": (1, 2), "b": (3, 4), "zero.1": (0, 0), "zero.2": (0, 0)}
    case = Dumped(3, 1, values, ((("a", "zero.2"),), (("b", "zero.1"),)))
    with pytest.raises(CheckpointMismatchError, match=r"zero\.1, zero\.2.*groups="):
        case.find()
    assert case.find([["a", "zero.2"], ["b", "zero.1"]], only=True) == case.order()


def test_the_dump_that_is_of_another_run_is_named() -> None:
    """Where all that fits nowhere lies on one rank, the message says which."""
    values: dict[str, Values] = {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8)}
    case = Dumped(3, 2, values, ((("a", "b"),),))
    file = replace(case, values={"a": (1, 2, 30, 40), "b": (5, 6, 70, 80)})
    search = replace(case.search(), compare=_of(case, file))
    with pytest.raises(
        CheckpointMismatchError, match=r"a, b, in the dumps of no other ranks than 1"
    ):
        find_order(search, [[["a", "b"]]], only=False)


def test_other_sizes_are_refused_before_anything_is_compared() -> None:
    """Another architecture, or other frozen parameters, show in the number of elements."""
    case = Dumped(1, 2, {"a": (1, 2), "b": (3,)}, ((("a", "b"),),))
    search = replace(case.search(), numels={"a": 2, "b": 2})
    with pytest.raises(CheckpointMismatchError, match=r"hold 3 master weights, .* 4"):
        find_order(search, [[["a", "b"]]], only=False)


def test_a_search_without_end_is_refused() -> None:
    """Very many parameters of zeros in unknown groups end in a message, not in a hang."""
    values = {f"p{i}": (0,) * (1 + i % 7) for i in range(60)}
    names = tuple(values)
    case = Dumped(3, 1, values, ((names[::3],), (names[1::3],), (names[2::3],)))
    with pytest.raises(CheckpointMismatchError, match="groups="):
        case.find()
