"""Cuts of parameters into shards of tensor ranks: each element moves once, to its place."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.cuts import Cut, Rows
from lightning_elastic_zero.core.layout import (
    Fragment,
    Layout,
    Resharding,
    ShardedLayout,
    Sharding,
    Transfer,
    TransferPlan,
)
from lightning_elastic_zero.core.partition import FlatBuffer, zero_layout
from lightning_elastic_zero.errors import CheckpointFormatError

MAX_RANKS = 4


def pairs(rows: Rows) -> list[tuple[int, int]]:
    """Enumerate the elements of rows: their indices in source and target."""
    return [
        (rows.source + i * rows.source_step + k, rows.target + i * rows.target_step + k)
        for i in range(rows.count)
        for k in range(rows.length)
    ]


@st.composite
def row_lists(draw: st.DrawFn) -> Rows:
    count, length = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    source, target = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    if count == 1:
        return Rows(1, length, source, target)
    steps = (draw(st.integers(length, 9)) for _ in range(2))
    return Rows(count, length, source, target, *steps)


class TestRows:
    @given(row_lists(), st.integers(0, 60), st.integers(0, 60))
    def test_a_clip_has_the_elements_of_the_interval(
        self, rows: Rows, start: int, stop: int
    ) -> None:
        parts = list(rows.clip(start, stop))
        assert len(parts) <= 3
        found = [pair for part in parts for pair in pairs(part)]
        assert found == [pair for pair in pairs(rows) if start <= pair[0] < stop]

    @given(row_lists(), row_lists())
    def test_rows_through_others_have_the_elements_in_between(self, one: Rows, other: Rows) -> None:
        onward = dict(pairs(other))
        expected = [(here, onward[at]) for here, at in pairs(one) if at in onward]
        assert sorted(pair for rows in one.through(other) for pair in pairs(rows)) == expected

    def test_cuts_of_one_dimension_match_without_enumeration(self) -> None:
        whole = (1_000_000, 12)
        eight = Cut("w", 1, (4, 4, 4)).rows(1, 3, whole)[0]
        four = Cut("w", 1, (6, 6)).rows(0, 2, whole)[0]
        assert list(eight.through(four.swapped())) == [Rows(1_000_000, 2, 0, 4, 4, 6)]


# -- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Tensor ranks times data ranks, the cuts of the parameters, and ZeRO's stage."""

    size: int
    world: int
    cuts: dict[str, Cut]
    stage: int


@st.composite
def runs(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> Run:
    size = draw(st.integers(1, MAX_RANKS))
    cuts = {}
    for name, shape in shapes.items():
        if size == 1 or draw(st.booleans()):
            continue
        dimension = draw(st.integers(0, len(shape) - 1))
        # Borders of fused parameters and of ranks in them: uneven, and possibly empty.
        count = size * draw(st.integers(1, 2)) - 1
        inside = st.lists(st.integers(0, shape[dimension]), min_size=count, max_size=count)
        borders = [0, *sorted(draw(inside)), shape[dimension]]
        cuts[name] = Cut(name, dimension, tuple(b - a for a, b in itertools.pairwise(borders)))
    return Run(size, draw(st.integers(1, MAX_RANKS)), cuts, draw(st.sampled_from([1, 3])))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], Run, Run]:
    sides = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
    shapes = draw(st.dictionaries(st.sampled_from("abc"), sides, min_size=1))
    return shapes, draw(runs(shapes)), draw(runs(shapes))


def shard_of(run: Run, name: str, whole: np.ndarray, rank: int) -> np.ndarray:
    """Cut by slicing: a rank's part of each fused parameter, one after the other."""
    if name not in run.cuts:
        return whole
    cut = run.cuts[name]
    borders = np.cumsum(cut.widths)[:-1]
    return np.concatenate(np.split(whole, borders, cut.dimension)[rank :: run.size], cut.dimension)


def shards_of(run: Run, wholes: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    return {name: shard_of(run, name, whole, rank).ravel() for name, whole in wholes.items()}


def buffers_of(run: Run, shards: dict[str, np.ndarray]) -> list[FlatBuffer]:
    held = {name: shard.size for name, shard in shards.items() if shard.size}
    numels = tuple(held.values())
    part = 0 if run.stage == 3 else -(-sum(numels) // run.world)
    return [FlatBuffer(0, tuple(held), numels, (), part)]


def layout_of(run: Run, wholes: dict[str, np.ndarray]) -> Layout:
    return ShardedLayout(
        [
            zero_layout(run.stage, buffers_of(run, shards_of(run, wholes, rank)), run.world)
            for rank in range(run.size)
        ]
    )


def memory(run: Run, wholes: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Return each rank's flat buffer; -1 is padding."""
    layout, found = layout_of(run, wholes), {}
    for rank in range(run.size * run.world):
        shards = shards_of(run, wholes, rank % run.size)
        fragments = layout.on_rank(rank)
        buffer = np.full(max((f.offset + f.stop - f.start for f in fragments), default=0), -1)
        for f in fragments:
            buffer[f.offset : f.offset + f.stop - f.start] = shards[f.name][f.start : f.stop]
        found[rank] = buffer
    return found


def copy(transfer: Transfer, source: np.ndarray, target: np.ndarray) -> None:
    numel = transfer.stop - transfer.start
    rows = transfer.rows or Rows(1, numel, 0, 0)
    assert rows.source_stop == numel
    for here, there in pairs(rows):
        assert target[transfer.target_offset + there] == -1
        target[transfer.target_offset + there] = source[transfer.source_offset + here]


class TestPlans:
    @given(cases(), st.integers(1, 9))
    def test_shards_of_another_size_get_their_elements(
        self, case: tuple[dict[str, tuple[int, ...]], Run, Run], size: int
    ) -> None:
        shapes, saved, live = case
        # Element i of the j-th parameter is 1000 j + i.
        wholes = {
            name: 1000 * i + np.arange(math.prod(shape)).reshape(shape)
            for i, (name, shape) in enumerate(shapes.items())
        }
        files, wanted = memory(saved, wholes), memory(live, wholes)
        held, layout = layout_of(saved, wholes), layout_of(live, wholes)
        shardings = (Sharding(saved.size, saved.cuts), Sharding(live.size, live.cuts))
        for rank in range(live.size * live.world):
            resharding = Resharding(*shardings, rank % live.size, shapes)
            plan = TransferPlan(layout.on_rank(rank), held, resharding)
            filled = np.full_like(wanted[rank], -1)
            for source, transfers in plan.by_rank():
                assert source in plan.ranks
                for transfer in transfers:
                    assert transfer.source_rank == source
                    if len(transfers) % 2:
                        copy(transfer, files[source], filled)
                        continue
                    for part in transfer.parts(size):
                        assert part.rows is None or part.stop - part.start <= size
                        copy(part, files[source], filled)
            assert (filled == wanted[rank]).all()

    def test_tensor_ranks_take_turns_with_saved_copies(self) -> None:
        held = ShardedLayout([zero_layout(3, [FlatBuffer(0, ("w",), (4,))], 1)] * 2)
        for rank, source in enumerate([0, 1, 0]):
            resharding = Resharding(Sharding(2), Sharding(3), rank)
            plan = TransferPlan(held.on_rank(0), held, resharding)
            assert plan.ranks == [source]

    def test_fused_parameters_are_not_a_plain_one_on_more_ranks(self) -> None:
        cuts = {"w": Cut("w", 0, (2, 2, 2, 2))}  # On two ranks, two parameters.
        resharding = Resharding(Sharding(2, cuts), Sharding(4, cuts), 3, {"w": (8,)})
        (source,) = resharding.sources([Fragment("w", 0, 2, 0, 0, 0)])
        assert (source.shard, source.at.start, source.at.stop) == (1, 2, 4)


LAYER = {
    "q": (8192, 8192),
    "k": (1024, 8192),
    "o": (8192, 8192),
    "up": (28672, 8192),
    "down": (8192, 28672),
    "norm": (8192,),
}
"""Weights of a layer of Llama 70B."""
DIMENSIONS = {"q": 0, "k": 0, "up": 0, "o": 1, "down": 1}


def layer_on(size: int, world: int, stage: int) -> tuple[Sharding, Layout]:
    """Return the cuts and the layout of a layer on tensor ranks times data ranks."""
    cuts = {
        name: Cut(name, at, tuple(LAYER[name][at] // size for _ in range(size)))
        for name, at in DIMENSIONS.items()
        if size > 1
    }
    numels = tuple(math.prod(s) // (size if n in cuts else 1) for n, s in LAYER.items())
    part = 0 if stage == 3 else -(-sum(numels) // world)
    shard = zero_layout(stage, [FlatBuffer(0, tuple(LAYER), numels, (), part)], world)
    return Sharding(size, cuts), ShardedLayout([shard] * size)


class TestCosts:
    @pytest.mark.parametrize("stages", [(1, 1), (3, 3), (1, 3), (3, 1)])
    @pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (8, 1), (1, 8), (2, 16)])
    def test_large_weights_are_planned_in_a_few_transfers(
        self, sizes: tuple[int, int], stages: tuple[int, int]
    ) -> None:
        """64 ranks read a weight that is cut by columns at most 1 + T'/T times."""
        saved, live = sizes
        (held_by, held), (wanted_by, wanted) = (
            layer_on(size, 64 // size, stage) for size, stage in zip(sizes, stages, strict=True)
        )
        read, placed = Counter[str](), Counter[str]()
        for rank in range(64):
            fragments = wanted.on_rank(rank)
            placed.update({f.name: f.stop - f.start for f in fragments})
            resharding = Resharding(held_by, wanted_by, rank % live, LAYER)
            plan = TransferPlan(fragments, held, resharding)
            transfers = [each for _, of_rank in plan.by_rank() for each in of_rank]
            for each in transfers:
                read[each.name] += each.stop - each.start
            assert len(transfers) <= 100  # of weights with up to 28,672 rows
        assert placed == {
            n: math.prod(s) * (1 if n in DIMENSIONS else live) for n, s in LAYER.items()
        }
        for name, numel in placed.items():
            by_columns = DIMENSIONS.get(name) == 1
            assert read[name] <= numel * (1 + live / saved) if by_columns else read[name] == numel


@pytest.mark.parametrize(
    ("dimension", "widths"), [(0, (2, 2)), (1, (1, 1, 2)), (2, (2, 1)), (-1, (2, 1)), (1, (4, -1))]
)
def test_a_cut_that_does_not_make_up_the_parameter_is_refused(
    dimension: int, widths: Sequence[int]
) -> None:
    Cut("w", 1, (2, 1)).check(2, (3, 3))
    with pytest.raises(CheckpointFormatError, match=r"w of the shape \(3, 3\) is not cut into 2"):
        Cut("w", dimension, tuple(widths)).check(2, (3, 3))
