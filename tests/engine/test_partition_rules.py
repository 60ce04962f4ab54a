"""``partition.py`` computes the layout that the oracle finds in live engines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    piece_numel,
    round_robin_order,
    zero_layout,
)
from lightning_elastic_zero.errors import UnsupportedError
from tests.support.engines import Engine, EngineCase, engine_of, group_members, trained
from tests.support.oracle import PADDING, positions
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine


def observed(setup: EngineCase) -> list[list[list[int]]]:
    """Return the element numbers in each flat buffer, by rank."""
    of_ranks: list[list[list[int]]] = [[] for _ in range(setup.world)]
    mine = [places.tolist() for places in positions(setup)]
    distributed.all_gather_object(of_ranks, mine)
    return of_ranks


def predicted(setup: EngineCase) -> list[list[list[int]]]:
    """Compute the same from names, sizes and the configuration only."""
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


def _contiguous(setup: EngineCase, group: int, table: list[tuple[str, int]]) -> list[FlatBuffer]:
    order = round_robin_order(len(table), setup.world) if setup.round_robin else range(len(table))
    names, numels = zip(*[table[i] for i in order], strict=True)
    itemsize = setup.dtype.itemsize
    # With parameter_alignment, each parameter but the first begins at a multiple of 16 bytes.
    unit = max(16 // itemsize, 1) if setup.alignment else 1
    paddings = (*(-numel % unit for numel in numels[:-1]), 0)
    # A flat buffer has a multiple of two elements for each rank, for NCCL.
    partition = 2 * -(-sum(numels + paddings) // (2 * setup.world))
    return [FlatBuffer(group, names, numels, paddings, partition)]


def _sub_grouped(setup: EngineCase, group: int, table: list[tuple[str, int]]) -> list[FlatBuffer]:
    cuts: list[list[tuple[str, int]]] = [[]]
    for row in table:
        # A sub-group is closed once its pieces reach the limit.
        if sum(piece_numel(n, setup.world) for _, n in cuts[-1]) >= setup.sub_group:
            cuts.append([])
        cuts[-1].append(row)
    return [FlatBuffer(group, tuple(n for n, _ in c), tuple(n for _, n in c)) for c in cuts]


def _numel_on_rank(setup: EngineCase, buffer: FlatBuffer) -> int:
    if setup.stage == 3:
        return sum(-(-numel // setup.world) for numel in buffer.numels)
    return buffer.partition_numel


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(1, "1"),
        EngineCase(1, "2", round_robin=True, alignment=True, empty=True),
        EngineCase(1, "2", "bf16", round_robin=True, alignment=True),
        EngineCase(1, "1", "bf16", offload=True, grouping="three"),
        EngineCase(1, "B", "bf16"),
        EngineCase(1, "3"),
        EngineCase(1, "3", "bf16", sub_group=700),
        EngineCase(1, "3", sub_group=1, grouping="one"),
    ],
    ids=str,
)
def test_the_rules_predict_each_element_of_each_flat_buffer(
    setup: EngineCase, world: int, pools: Pools
) -> None:
    setup = EngineCase(**{**vars(setup), "world": world})
    assert pools.run(world, partial(observed, setup))[0] == predicted(setup)


def refusals(setup: EngineCase) -> dict[str, str]:
    """Change the engine's tables of its flat buffers; return the errors of checks."""
    from lightning_elastic_zero.engine.live import LiveEngine

    def at_setup(engine: Engine) -> None:
        LiveEngine(engine).verify_addresses(fresh=True)

    def at_save(engine: Engine) -> None:
        LiveEngine(engine).check()

    errors = {}
    with engine_of(setup, 0) as engine:
        at_setup(engine)
        for what, (holder, key, value) in _changes(engine.optimizer, setup).items():
            before, holder[key] = holder[key], value
            for when, check in (("setup", at_setup), ("save", at_save)):
                try:
                    check(engine)
                    errors[f"{what} at {when}"] = "nothing"
                except UnsupportedError as error:
                    errors[f"{what} at {when}"] = str(error)
            holder[key] = before
        at_save(engine)
    return errors


def move_weight(setup: EngineCase) -> tuple[str, str]:
    """Move a weight in memory; return the errors of a save, with and without recorded places."""
    from lightning_elastic_zero.engine.live import LiveEngine

    def save_error(*, places_checked: bool) -> str:
        try:
            LiveEngine(engine, places_checked=places_checked).check()
        except UnsupportedError as error:
            return str(error)
        return ""

    with engine_of(setup, 0) as engine:
        LiveEngine(engine).verify_addresses(fresh=True)
        weight = engine.optimizer.round_robin_bit16_groups[0][-1]
        weight.data = engine.optimizer.bit16_groups_flat[0][: weight.numel()].view_as(weight)
        return save_error(places_checked=True), save_error(places_checked=False)


@pytest.mark.parametrize("setup", [EngineCase(1, "1"), EngineCase(1, "2", "bf16")], ids=str)
def test_a_moved_weight_does_not_move_its_master(setup: EngineCase, pools: Pools) -> None:
    """A save without recorded places is refused."""
    ((after_setup, without),) = pools.run(1, partial(move_weight, setup))
    assert after_setup == ""
    assert ".data" in without


def _changes(optimizer: Engine, setup: EngineCase) -> dict[str, tuple[Any, Any, Any]]:
    """Return possible differences in other DeepSpeed releases: holder, key and other value."""
    of_stage = {"3": "fp16_groups", "B": "bf16_groups"}
    groups = getattr(optimizer, of_stage.get(setup.zero, "round_robin_bit16_groups"))
    order = list(groups[0])
    changes: dict[str, tuple[Any, Any, Any]] = {
        "order": (groups, 0, order[::-1]),
        "round robin": (groups, 0, [order[i] for i in round_robin_order(len(order), 2)]),
    }
    if hasattr(optimizer, "round_robin_bit16_padding"):
        paddings = optimizer.round_robin_bit16_padding
        masters = optimizer.single_partition_of_fp32_groups
        changes["alignment"] = (paddings, 0, [0 if any(paddings[0]) else 2] * len(order))
        changes["padding"] = (masters, 0, masters[0].detach()[:-1])
    if setup.zero == "3":
        tables = vars(order[0].ds_tensor)
        changes["cut"] = (tables, "ds_numel", order[0].ds_tensor.ds_numel + 1)
    return changes


@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "1", alignment=True),
        EngineCase(3, "2", "bf16", grouping="one"),
        EngineCase(2, "B", "bf16"),
        EngineCase(2, "3", "bf16"),
    ],
    ids=str,
)
def test_a_layout_unlike_that_of_the_live_weights_is_refused(
    setup: EngineCase, pools: Pools
) -> None:
    """The computed order, alignment, padding and cuts are compared with the live weights."""
    for errors in pools.run(setup.world, partial(refusals, setup)):
        assert errors
        unnoticed = {
            what for what, text in errors.items() if "unknown layout of parameters" not in text
        }
        assert not unnoticed, errors
