from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from benchmarks.plan import (
    CASES,
    FEW,
    GROWTH,
    RESUMED_ON,
    SAVED_ON,
    WIDE,
    Plan,
    flat_buffers,
    manifest_text,
    measured,
    parameters,
    wide_parameters,
)

from lightning_elastic_zero.core.layout import Fragment, Layout, TransferPlan
from lightning_elastic_zero.core.manifest import Parameter, manifest_from_json
from lightning_elastic_zero.core.partition import zero_layout

RANKS = [0, 1, RESUMED_ON // 2, RESUMED_ON - 1]

PEAK_BYTES = 200_000_000
WIDE_PEAK_BYTES = 500_000_000


@cache
def planned(saved_stage: int, stage: int, rank: int) -> Plan:
    """Plan what the benchmark plans, once."""
    return measured(manifest_text(saved_stage, SAVED_ON, parameters()), stage, RESUMED_ON, rank)


def test_the_table_is_that_of_a_70_billion_parameter_model() -> None:
    """What is planned below has the size that is claimed: tensors, elements, ranks, files."""
    table = parameters()
    assert len(table) == 723
    assert 70e9 < sum(p.numel for p in table) < 71e9
    manifest = manifest_from_json(manifest_text(3, SAVED_ON, table), "manifest.json")
    assert manifest.parameters == table
    assert (manifest.world_size, len(manifest.files)) == (1024, 3072)
    assert len(manifest.buffers) > 2


@pytest.mark.cases(2)
@pytest.mark.parametrize(("ranks", "layers", "hidden"), GROWTH)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_plan_does_not_grow_with_the_cluster(
    stage: int, ranks: int, layers: int, hidden: int
) -> None:
    """Up to a trillion parameters on 4,096 ranks: files of three source ranks, few transfers."""
    table = parameters(layers, hidden)
    assert 0.9 < sum(p.numel for p in table) / ranks / 250e6 < 1.2
    text, to = manifest_text(stage, ranks, table), ranks * 3 // 4
    plan = measured(text, stage, to, to // 2)
    assert plan.peak_bytes < PEAK_BYTES
    assert len(plan.files) <= 3
    assert len(plan.transfers) <= (2 * len(table) if stage == 3 else 60)


@pytest.mark.cases(1)
@pytest.mark.cases(2)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("saved_stage", "stage"), CASES)
def test_one_rank_plans_within_200_mb(saved_stage: int, stage: int, rank: int) -> None:
    """Parsing, laying out and planning stay below 200 MB at their peak, and tile what is wanted.

    Seconds depend on the machine: ``examples/benchmarks/plan.py`` prints them.
    """
    plan = planned(saved_stage, stage, rank)
    assert plan.peak_bytes < PEAK_BYTES
    wanted = zero_layout(stage, flat_buffers(parameters(), stage, RESUMED_ON), RESUMED_ON)
    numel = sum(f.stop - f.start for f in wanted.on_rank(rank))
    assert sum(t.stop - t.start for t in plan.transfers) == numel


@pytest.mark.cases(1)
@pytest.mark.parametrize("rank", RANKS)
def test_zero_2_touches_the_few_ranks_that_its_partitions_overlap(rank: int) -> None:
    """A partition of 1/768 overlaps at most three of 1/1024, in each of the two groups."""
    plan = planned(2, 2, rank)
    assert len(plan.files) <= 6
    # One run for each parameter in the partition, and one more at each border of ranks.
    assert len(plan.transfers) <= 8


@pytest.mark.cases(1)
@pytest.mark.parametrize("rank", RANKS)
def test_zero_3_touches_the_few_ranks_that_hold_the_same_part(rank: int) -> None:
    """A rank's pieces of all 723 parameters lie in the shards of the same few ranks."""
    plan = planned(3, 3, rank)
    assert len(plan.transfers) <= 3 * 723
    # Matrices are cut at r / N of themselves; norms of 8192 elements a little beside that.
    assert len(plan.files) <= 6


@pytest.mark.cases(1)
@pytest.mark.cases(1)
@pytest.mark.parametrize("rank", RANKS)
def test_across_stages_a_plan_is_no_longer_than_it_must_be(rank: int) -> None:
    """From ZeRO-2 to 3 a piece is one run, or two; from 3 to 2 a parameter one per saved rank."""
    to_3 = planned(2, 3, rank)
    assert len(to_3.transfers) <= 2 * 723
    to_2 = planned(3, 2, rank)
    parts = {t.name: 0 for t in to_2.transfers}
    for transfer in to_2.transfers:
        parts[transfer.name] += 1
    assert max(parts.values()) <= SAVED_ON


class Counted:
    """A layout that counts what it is asked for."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.runs = 0

    def on_rank(self, rank: int) -> Sequence[Fragment]:
        return self._layout.on_rank(rank)

    def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
        for fragment in self._layout.covering(name, start, stop):
            self.runs += 1
            yield fragment


def laid_out(stage: int, ranks: int, table: tuple[Parameter, ...]) -> Layout:
    """Partition a model over ranks."""
    return zero_layout(stage, flat_buffers(table, stage, ranks), ranks)


class TestManyParameters:
    """50,000 parameters from 1,024 ranks to 8: up to 6.4 million transfers for one rank."""

    @pytest.mark.parametrize(("saved_stage", "stage"), CASES)
    def test_planning_costs_what_is_wanted_not_what_will_be_moved(
        self, saved_stage: int, stage: int
    ) -> None:
        """A fragment costs at most two runs to plan, however many ranks it lies on.

        Rank by rank, all parts of it are computed once, and only those of one or two ranks exist.
        """
        table = wide_parameters(WIDE // 250)
        layout = laid_out(saved_stage, SAVED_ON, table)
        held = Counted(layout)
        wanted = laid_out(stage, FEW, table).on_rank(FEW // 2)
        plan = TransferPlan(wanted, held)
        assert held.runs <= 2 * len(wanted)
        ranks, held.runs, moved = [], 0, 0
        for rank, transfers in plan.by_rank():
            moved += len(transfers)
            assert held.runs <= moved + len(wanted)
            ranks.append(rank)
        runs = sum(len([*layout.covering(f.name, f.start, f.stop)]) for f in wanted)
        assert held.runs == moved == runs
        assert ranks == plan.ranks

    @pytest.mark.cases(1)
    @pytest.mark.parametrize("count", [WIDE // 10, pytest.param(WIDE, marks=pytest.mark.long)])
    @pytest.mark.parametrize(("saved_stage", "stage"), CASES)
    def test_one_rank_plans_within_500_mb(self, saved_stage: int, stage: int, count: int) -> None:
        """So do both layouts, the plan, and the runs from two source ranks; a tenth takes a tenth.

        Seconds depend on the machine: ``examples/benchmarks/plan.py`` prints them.
        """
        table = wide_parameters(count)
        gc.collect()
        tracemalloc.start()
        try:
            held = Counted(laid_out(saved_stage, SAVED_ON, table))
            wanted = laid_out(stage, FEW, table).on_rank(FEW // 2)
            plan = TransferPlan(wanted, held)
            planned = held.runs
            moved = [len(runs) for _, runs in itertools.islice(plan.by_rank(), 2)]
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert planned <= 2 * len(wanted)
        assert 0 < max(moved) <= count
        assert peak_bytes < WIDE_PEAK_BYTES * count // WIDE
