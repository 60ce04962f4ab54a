from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.partition import (
    ContiguousPartition,
    FlatBuffer,
    PerParameterPartition,
    frozen_partition,
    piece_numel,
    piece_start,
    round_robin_order,
    zero_layout,
)
from lightning_elastic_zero.errors import CheckpointFormatError
from tests.support.strategies import Cut, contiguous_cuts, cut_to, cuts, per_parameter_cuts, tables

Element = tuple[str, int]
PADDING: Element = ("", -1)


def elements(name: str, numel: int) -> list[Element]:
    """Return a parameter whose elements say what they are."""
    return [(name, i) for i in range(numel)]


def zero_1_2(cut: Cut, rank: int) -> list[list[Element]]:
    """Do what ZeRO-1/2 does: concatenate a group, pad it, and give each rank its share."""
    held = []
    for buffer in cut.buffers:
        flat: list[Element] = []
        for i, name in enumerate(buffer.names):
            flat += elements(name, buffer.numels[i])
            flat += [PADDING] * (buffer.paddings[i] if buffer.paddings else 0)
        whole = buffer.partition_numel * cut.world_size
        # Padding after the last parameter may reach beyond what the ranks share.
        flat = (flat + [PADDING] * whole)[:whole]
        held.append(flat[rank * buffer.partition_numel :][: buffer.partition_numel])
    return held


def zero_3(cut: Cut, rank: int) -> list[list[Element]]:
    """Do what ZeRO-3 does: pad each parameter, cut it, and concatenate a rank's pieces."""
    held = []
    for buffer in cut.buffers:
        flat: list[Element] = []
        for name, numel in zip(buffer.names, buffer.numels, strict=True):
            padded = elements(name, numel)
            while len(padded) % cut.world_size:
                padded.append(PADDING)
            piece = len(padded) // cut.world_size
            flat += padded[rank * piece : (rank + 1) * piece]
        held.append(flat)
    return held


def expanded(fragments: list[Fragment], held: list[list[Element]]) -> list[list[Element]]:
    """Write fragments into empty buffers of the reference's sizes."""
    buffers = [[PADDING] * len(buffer) for buffer in held]
    for f in fragments:
        for i in range(f.start, f.stop):
            assert buffers[f.buffer][f.offset + i - f.start] == PADDING
            buffers[f.buffer][f.offset + i - f.start] = (f.name, i)
    return buffers


class TestAgainstBruteForce:
    @given(st.data())
    def test_zero_1_2_concatenates_and_cuts(self, data: st.DataObject) -> None:
        """Each rank holds what it gets when the buffer is really built and really cut."""
        cut = data.draw(contiguous_cuts(data.draw(tables(min_numel=0))))
        layout = zero_layout(cut.stage, cut.buffers, cut.world_size)
        assert isinstance(layout, ContiguousPartition)
        for rank in range(cut.world_size):
            expected = zero_1_2(cut, rank)
            assert expanded(list(layout.on_rank(rank)), expected) == expected

    @given(st.data())
    def test_zero_3_cuts_each_parameter(self, data: st.DataObject) -> None:
        """Each rank holds what it gets when each parameter is really padded and really cut."""
        cut = data.draw(per_parameter_cuts(data.draw(tables(min_numel=0))))
        layout = zero_layout(cut.stage, cut.buffers, cut.world_size)
        assert isinstance(layout, PerParameterPartition)
        for rank in range(cut.world_size):
            expected = zero_3(cut, rank)
            assert expanded(list(layout.on_rank(rank)), expected) == expected


class TestLayouts:
    @given(st.data())
    def test_both_questions_have_one_answer(self, data: st.DataObject) -> None:
        """What covers a whole parameter is exactly what all ranks hold of it, in order."""
        table = data.draw(tables(min_numel=0))
        cut = data.draw(cuts(table))
        layout = cut.layout()
        on_ranks = [f for rank in range(cut.world_size) for f in layout.on_rank(rank)]
        assert all(f.rank < cut.world_size for f in on_ranks)
        for name, numel in table.items():
            held = sorted((f for f in on_ranks if f.name == name), key=lambda f: f.start)
            assert list(layout.covering(name, 0, numel)) == held
            assert [i for f in held for i in range(f.start, f.stop)] == list(range(numel))

    @given(st.data())
    def test_a_part_is_covered_by_parts(self, data: st.DataObject) -> None:
        """What covers a run is what covers the whole, cut to the run."""
        table = data.draw(tables())
        layout = data.draw(cuts(table)).layout()
        name = data.draw(st.sampled_from(sorted(table)))
        start = data.draw(st.integers(0, table[name] - 1))
        stop = data.draw(st.integers(start + 1, table[name]))
        whole = layout.covering(name, 0, table[name])
        parts = [cut_to(f, start, stop) for f in whole if f.start < stop and start < f.stop]
        assert list(layout.covering(name, start, stop)) == parts

    @given(st.data())
    def test_a_rank_holds_in_order(self, data: st.DataObject) -> None:
        """A rank's fragments come by buffer and offset, and none overlaps the next."""
        cut = data.draw(cuts(data.draw(tables())))
        for rank in range(cut.world_size):
            fragments = cut.layout().on_rank(rank)
            for one, other in pairwise(fragments):
                if one.buffer == other.buffer:
                    assert one.offset + one.stop - one.start <= other.offset
                else:
                    assert one.buffer < other.buffer

    def test_more_ranks_than_elements(self) -> None:
        """Ranks without an element hold nothing, at either kind of stage."""
        buffer = FlatBuffer(0, ("one", "three"), (1, 3), (), 2)
        per_parameter = PerParameterPartition([buffer], 4)
        assert [list(per_parameter.on_rank(rank)) for rank in range(4)] == [
            [Fragment("one", 0, 1, 0, 0, 0), Fragment("three", 0, 1, 0, 0, 1)],
            [Fragment("three", 1, 2, 1, 0, 1)],
            [Fragment("three", 2, 3, 2, 0, 1)],
            [],
        ]
        contiguous = ContiguousPartition([buffer], 4)
        assert [list(contiguous.on_rank(rank)) for rank in range(4)] == [
            [Fragment("one", 0, 1, 0, 0, 0), Fragment("three", 0, 1, 0, 0, 1)],
            [Fragment("three", 1, 3, 1, 0, 0)],
            [],
            [],
        ]

    def test_frozen_weights_are_cut_by_themselves(self) -> None:
        """ZeRO-3 cuts frozen weights as it cuts all; ZeRO-1/2 keeps them whole, on one rank."""
        shapes = [("a", 3), ("b", 1)]
        assert frozen_partition(shapes, 1).on_rank(0) == [
            Fragment("a", 0, 3, 0, 0, 0),
            Fragment("b", 0, 1, 0, 0, 3),
        ]
        assert frozen_partition(iter(shapes), 2).on_rank(1) == [Fragment("a", 2, 3, 1, 0, 0)]
        assert frozen_partition([], 2).on_rank(1) == []


class TestRefusals:
    @pytest.mark.parametrize("rule", [ContiguousPartition, PerParameterPartition])
    def test_a_parameter_in_two_buffers(
        self, rule: type[ContiguousPartition | PerParameterPartition]
    ) -> None:
        """A parameter lies in one place: a second one is refused by its name."""
        buffers = [FlatBuffer(0, ("w",), (3,), (), 4), FlatBuffer(1, ("v", "w"), (3, 3), (), 8)]
        with pytest.raises(CheckpointFormatError, match="in two flat buffers: w"):
            rule(buffers, 2)

    @pytest.mark.parametrize("rule", [ContiguousPartition, PerParameterPartition])
    def test_no_ranks(self, rule: type[ContiguousPartition | PerParameterPartition]) -> None:
        """A layout is over at least one rank."""
        with pytest.raises(CheckpointFormatError, match="over 0 ranks"):
            rule([FlatBuffer(0, ("w",), (3,), (), 4)], 0)

    def test_a_group_without_parameters_is_none(self) -> None:
        """It holds nothing, and needs no room."""
        assert zero_layout(1, [FlatBuffer(0, (), ())], 2).on_rank(0) == []

    def test_partitions_of_no_size(self) -> None:
        """Where nothing says how large the partitions are, there is no guess."""
        with pytest.raises(CheckpointFormatError, match="1 partitions of 0"):
            zero_layout(1, [FlatBuffer(0, ("w",), (1,))], 1)

    def test_partitions_that_are_too_small(self) -> None:
        """Parameters that reach beyond all ranks' partitions are refused, with the numbers."""
        with pytest.raises(
            CheckpointFormatError, match="group 3: 9 elements do not fit into 2 partitions of 4"
        ):
            ContiguousPartition([FlatBuffer(3, ("w",), (9,), (), 4)], 2)

    @pytest.mark.parametrize(
        ("names", "sizes", "paddings", "partition"),
        [
            (("w", "w"), (1, 2), (), 0),
            (("w", "v"), (1,), (), 0),
            (("w", "v"), (1, 2), (3,), 0),
            (("w",), (-1,), (), 0),
            (("w", "v"), (4, 4), (-2, 0), 8),
            (("w",), (1,), (), -1),
        ],
        ids=["twice", "no size", "paddings", "negative", "overlap", "negative partition"],
    )
    def test_tables_that_do_not_fit(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        paddings: tuple[int, ...],
        partition: int,
    ) -> None:
        """A flat buffer's columns fit together, or there is no such buffer."""
        with pytest.raises(CheckpointFormatError):
            FlatBuffer(0, names, sizes, paddings, partition)


class TestRules:
    @given(st.integers(0, 200), st.integers(1, 64))
    def test_round_robin_deals_parameters_like_cards(self, count: int, world_size: int) -> None:
        """Rank 0's come first, then rank 1's; within a rank they keep their order."""
        dealt: list[list[int]] = [[] for _ in range(world_size)]
        for index in range(count):
            dealt[index % world_size].append(index)
        assert list(round_robin_order(count, world_size)) == [i for hand in dealt for i in hand]

    @given(st.integers(0, 10**15), st.integers(1, 10**6))
    def test_pieces_are_the_smallest_that_suffice(self, numel: int, world_size: int) -> None:
        """A piece is ``ceil(numel / world_size)``, exact for numbers that a float cannot hold."""
        piece = piece_numel(numel, world_size)
        assert (piece - 1) * world_size < numel <= piece * world_size or numel == piece == 0


@given(
    st.integers(min_value=0, max_value=99),
    st.integers(min_value=1, max_value=9),
    st.integers(min_value=0, max_value=20),
)
def test_where_pieces_and_partitions_begin(numel: int, world_size: int, part: int) -> None:
    """Those of all ranks follow one another, without a gap, from the first element on."""
    starts = [piece_start(numel, world_size, rank) for rank in range(world_size + 1)]
    assert starts[0] == 0
    assert {stop - start for start, stop in pairwise(starts)} == {piece_numel(numel, world_size)}
    buffer = FlatBuffer(0, ("a",), (numel,), partition_numel=part)
    ranges = [buffer.partition_range(rank) for rank in range(world_size)]
    assert ranges[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert {stop - start for start, stop in ranges} == {part}
