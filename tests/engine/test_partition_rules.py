"""``partition.py``, which is arithmetic, says what live engines hold, which the oracle looks up."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import distributed

from lightning_elastic_zero.partition import (
    FlatBuffer,
    alignment_paddings,
    partition_numel,
    round_robin_order,
    sub_groups,
    zero_layout,
)
from tests.engine._model import group_members, trained
from tests.engine._oracle import PADDING, positions
from tests.engine._setup import Setup
from tests.engine._worker_pool import Pools

pytestmark = pytest.mark.engine


def observed(setup: Setup) -> list[list[list[int]]]:
    """Give the numbers of the elements in each flat buffer, by rank."""
    of_ranks: list[list[list[int]]] = [[] for _ in range(setup.world)]
    mine = [places.tolist() for places in positions(setup)]
    distributed.all_gather_object(of_ranks, mine)
    return of_ranks


def predicted(setup: Setup) -> list[list[list[int]]]:
    """Say the same by the rules, from nothing but names, sizes and the configuration."""
    model = setup.model(0)
    parameters = trained(model)
    names = {p: name for name, p in parameters.items()}
    numels = torch.tensor([p.numel() for p in parameters.values()])
    starts = dict(zip(parameters, (numels.cumsum(0) - numels).tolist(), strict=True))
    tables = [
        [(names[p], p.numel()) for p in members if p.numel()]
        for members in group_members(model, setup.grouping)
    ]
    rule = _sub_grouped if setup.stage == 3 else _contiguous
    buffers = [buffer for g, table in enumerate(tables) for buffer in rule(setup, g, table)]
    layout = zero_layout(setup.stage, buffers, setup.world)
    of_ranks = []
    for rank in range(setup.world):
        flats = [[PADDING] * _numel_on_rank(setup, buffer) for buffer in buffers]
        for fragment in layout.on_rank(rank):
            assert fragment.rank == rank
            for i in range(fragment.stop - fragment.start):
                element = starts[fragment.name] + fragment.start + i
                flats[fragment.buffer][fragment.offset + i] = element
        of_ranks.append(flats)
    return of_ranks


def _contiguous(setup: Setup, group: int, table: list[tuple[str, int]]) -> list[FlatBuffer]:
    order = round_robin_order(len(table), setup.world) if setup.round_robin else range(len(table))
    names, numels = zip(*[table[i] for i in order], strict=True)
    itemsize = setup.dtype.itemsize
    paddings = alignment_paddings(numels, itemsize) if setup.alignment else (0,) * len(names)
    partition = partition_numel(numels, paddings, setup.world)
    return [FlatBuffer(group, names, numels, paddings, partition)]


def _sub_grouped(setup: Setup, group: int, table: list[tuple[str, int]]) -> list[FlatBuffer]:
    cuts = sub_groups([n for _, n in table], setup.world, setup.sub_group)
    return [
        FlatBuffer(group, tuple(table[i][0] for i in cut), tuple(table[i][1] for i in cut))
        for cut in cuts
    ]


def _numel_on_rank(setup: Setup, buffer: FlatBuffer) -> int:
    if setup.stage == 3:
        return sum(-(-numel // setup.world) for numel in buffer.numels)
    return buffer.partition_numel


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "setup",
    [
        Setup(1, "1"),
        Setup(1, "2", round_robin=True, alignment=True, empty=True),
        Setup(1, "2", "bf16", round_robin=True, alignment=True),
        Setup(1, "1", "bf16", offload=True, grouping="three"),
        Setup(1, "B", "bf16"),
        Setup(1, "3"),
        Setup(1, "3", "bf16", sub_group=700),
        Setup(1, "3", sub_group=1, grouping="one"),
    ],
    ids=str,
)
def test_rules_say_what_engines_hold(setup: Setup, world: int, pools: Pools) -> None:
    """Each place of each flat buffer of each rank holds the element that the rules say."""
    setup = Setup(**{**vars(setup), "world": world})
    assert pools.run(world, partial(observed, setup))[0] == predicted(setup)
