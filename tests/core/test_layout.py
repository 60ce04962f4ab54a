from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer, TransferPlan, spans
from lightning_elastic_zero.core.partition import FlatBuffer, PerParameterPartition
from lightning_elastic_zero.errors import CheckpointFormatError
from tests.support.strategies import Cut, cut_to, pairs_of_cuts

EMPTY = ("", -1)
"""What is in a buffer where nothing was written."""

Buffers = dict[tuple[int, int], list[tuple[str, int]]]


def sizes(cut: Cut) -> dict[int, int]:
    """Return the elements of each of a rank's flat buffers, padding included."""
    if cut.stage != 3:
        return {i: buffer.partition_numel for i, buffer in enumerate(cut.buffers)}
    return {
        i: sum((numel + cut.world_size - 1) // cut.world_size for numel in buffer.numels)
        for i, buffer in enumerate(cut.buffers)
    }


def empty_buffers(cut: Cut) -> Buffers:
    """Make every rank's buffers, with nothing in them."""
    return {
        (rank, index): [EMPTY] * size
        for rank in range(cut.world_size)
        for index, size in sizes(cut).items()
    }


def held_by(cut: Cut) -> Buffers:
    """Make a checkpoint whose every element says what it is: its parameter and its index."""
    buffers = empty_buffers(cut)
    for rank in range(cut.world_size):
        for fragment in cut.layout().on_rank(rank):
            for index in range(fragment.start, fragment.stop):
                at = fragment.offset + index - fragment.start
                assert buffers[rank, fragment.buffer][at] == EMPTY
                buffers[rank, fragment.buffer][at] = (fragment.name, index)
    return buffers


def planned(wanted: Sequence[Fragment], held: Layout) -> list[Transfer]:
    """Return all transfers at once, in the order of the source ranks."""
    return [t for _, transfers in TransferPlan(wanted, held).by_rank() for t in transfers]


class Scripted:
    """A layout that holds what it is told to, sound or not."""

    def __init__(self, *runs: tuple[int, int]) -> None:
        self._runs = runs

    def on_rank(self, rank: int) -> list[Fragment]:
        return [Fragment("w", start, stop, rank, 0, start) for start, stop in self._runs]

    def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
        if name != "w":
            raise KeyError(name)
        yield from self.on_rank(0)


class TestPlan:
    @given(pairs_of_cuts())
    def test_each_wanted_element_is_filled_once_with_itself(
        self, case: tuple[dict[str, int], Cut, Cut]
    ) -> None:
        """From any layout to any other, every rank gets each of its elements, exactly once."""
        table, held, wanted = case
        source, target = held_by(held), empty_buffers(wanted)
        for rank in range(wanted.world_size):
            for t in planned(wanted.layout().on_rank(rank), held.layout()):
                for i in range(t.stop - t.start):
                    element = source[t.source_rank, t.source_buffer][t.source_offset + i]
                    assert element == (t.name, t.start + i)
                    assert target[rank, t.target_buffer][t.target_offset + i] == EMPTY
                    target[rank, t.target_buffer][t.target_offset + i] = element
        assert target == held_by(wanted)
        filled = [e for buffer in target.values() for e in buffer if e != EMPTY]
        assert sorted(filled) == sorted((name, i) for name in table for i in range(table[name]))

    @given(pairs_of_cuts())
    def test_source_ranks_are_known_before_their_transfers(
        self, case: tuple[dict[str, int], Cut, Cut]
    ) -> None:
        """The ranks are those that something comes from, ascending; each gives what is its own."""
        _, held, wanted = case
        for rank in range(wanted.world_size):
            plan = TransferPlan(wanted.layout().on_rank(rank), held.layout())
            by_rank = list(plan.by_rank())
            assert [source for source, _ in by_rank] == plan.ranks == sorted({*plan.ranks})
            for source, transfers in by_rank:
                assert {t.source_rank for t in transfers} == {source}

    @given(pairs_of_cuts())
    def test_a_rank_is_asked_only_for_what_it_holds(
        self, case: tuple[dict[str, int], Cut, Cut]
    ) -> None:
        """No transfer is larger than the fragment it comes from, or the one that it goes to."""
        _, held, wanted = case
        layout = held.layout()
        on_rank = [layout.on_rank(rank) for rank in range(held.world_size)]
        for rank in range(wanted.world_size):
            fragments = wanted.layout().on_rank(rank)
            for t in planned(fragments, layout):
                assert any(
                    f.name == t.name and f.start <= t.start < t.stop <= f.stop
                    for f in on_rank[t.source_rank]
                )
                assert any(
                    f.name == t.name and f.start <= t.start < t.stop <= f.stop for f in fragments
                )

    def test_a_plan_is_known_to_the_last_number(self) -> None:
        """Three elements over two ranks, wanted by one: two runs, at their offsets."""
        held = PerParameterPartition([FlatBuffer(0, ("a", "w"), (4, 3))], 2)
        assert planned([Fragment("w", 0, 3, 0, 5, 7)], held) == [
            Transfer("w", 0, 2, 0, 0, 2, 5, 7),
            Transfer("w", 2, 3, 1, 0, 2, 5, 9),
        ]

    @pytest.mark.parametrize(
        ("runs", "reached"),
        [
            ([], 0),
            ([(1, 4)], 0),
            ([(0, 3)], 3),
            ([(0, 1), (2, 4)], 1),
            ([(0, 3), (2, 4)], 3),
            ([(0, 4), (0, 4)], 4),
            ([(0, 4), (3, 4)], 4),
            ([(0, 2), (2, 5)], 2),
        ],
        ids=[
            "nothing",
            "hole at the start",
            "hole at the end",
            "hole inside",
            "overlap inside",
            "all twice",
            "the end twice",
            "more than was asked for",
        ],
    )
    def test_a_layout_that_does_not_tile_is_refused(
        self, runs: list[tuple[int, int]], reached: int
    ) -> None:
        """What is held nowhere, or twice, is an error that says where: nothing is guessed."""
        held: Layout = Scripted(*runs)
        with pytest.raises(CheckpointFormatError) as caught:
            planned([Fragment("w", 0, 4, 0, 0, 0)], held)
        assert str(caught.value) == (
            "the checkpoint's layout does not hold w[0:4] exactly once: "
            f"what covers it breaks off, or overlaps, at element {reached}"
        )

    @pytest.mark.parametrize("runs", [[], [(0, 3)], [(1, 4)]])
    def test_an_end_that_nobody_holds_is_refused_before_anything_is_read(
        self, runs: list[tuple[int, int]]
    ) -> None:
        """The first and last element of each fragment are looked up when the plan is made."""

        class Exact(Scripted):
            def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
                for run in super().covering(name, start, stop):
                    if run.start < stop and start < run.stop:
                        yield cut_to(run, start, stop)

        with pytest.raises(CheckpointFormatError, match=r"w\[0:4\] exactly once"):
            TransferPlan([Fragment("w", 0, 4, 0, 0, 0)], Exact(*runs))

    @pytest.mark.parametrize(
        ("ranks", "last", "what"),
        [((1, 0, 2), 2, "on ranks in order"), ((0, 1, 2), 1, "on too many ranks")],
    )
    def test_a_layout_that_contradicts_itself_is_refused(
        self, ranks: tuple[int, ...], last: int, what: str
    ) -> None:
        """A plan looks at the first and the last rank; what lies between has to agree with them."""

        class OnRanks(Scripted):
            def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
                if start == 0:
                    for i, rank in enumerate(ranks):
                        yield Fragment(name, 2 * i, 2 * i + 2, rank, 0, 0)
                else:
                    yield Fragment(name, start, stop, last, 0, 0)

        plan = TransferPlan([Fragment("w", 0, 6, 0, 0, 0)], OnRanks())
        with pytest.raises(CheckpointFormatError, match=what):
            list(plan.by_rank())

    @pytest.mark.parametrize(("walked", "end_is_held"), [(4, True), (6, False)])
    def test_a_walk_that_contradicts_the_end_is_refused(
        self, walked: int, end_is_held: bool
    ) -> None:
        """What is held of a fragment, run by run, reaches its end, which is held by itself too."""

        class Torn(Scripted):
            def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
                if start == 0:
                    for first, end in spans(0, walked, 2):
                        yield Fragment(name, first, end, first // 2, 0, 0)
                elif end_is_held:
                    yield Fragment(name, start, stop, 2, 0, 0)

        with pytest.raises(CheckpointFormatError, match=f"overlaps, at element {walked}$"):
            planned([Fragment("w", 0, 6, 0, 0, 0)], Torn())

    def test_a_parameter_that_nobody_holds_is_refused(self) -> None:
        """An unknown name is an error of the format, with the name."""
        with pytest.raises(CheckpointFormatError, match=r"holds no parameter named v\.weight"):
            TransferPlan([Fragment("v.weight", 0, 4, 0, 0, 0)], Scripted((0, 4)))

    def test_more_than_the_whole_parameter_is_refused(self) -> None:
        """A model whose parameter is larger than the saved one does not get a part of it."""
        held = PerParameterPartition([FlatBuffer(0, ("w",), (3,))], 2)
        with pytest.raises(CheckpointFormatError, match="at element 3"):
            TransferPlan([Fragment("w", 0, 4, 0, 0, 0)], held)


class TestFragment:
    @pytest.mark.parametrize(
        ("start", "stop", "offset"), [(2, 2, 0), (3, 2, 0), (-1, 2, 0), (0, 1, -1)]
    )
    def test_what_is_no_run_of_elements_is_refused(
        self, start: int, stop: int, offset: int
    ) -> None:
        """A fragment has at least one element, at places that exist."""
        with pytest.raises(ValueError, match="no run of elements"):
            Fragment("w", start, stop, 0, 0, offset)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 20))
def test_spans_are_whole_but_for_the_last(start: int, numel: int, size: int) -> None:
    """Together they are the run, in order; none is empty or longer than allowed."""
    parts = list(spans(start, start + numel, size))
    assert [i for first, stop in parts for i in range(first, stop)] == [
        *range(start, start + numel)
    ]
    assert all(stop - first == size for first, stop in parts[:-1])
    assert all(0 < stop - first <= size for first, stop in parts)
