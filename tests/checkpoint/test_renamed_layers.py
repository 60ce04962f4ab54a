"""Layers with other names, and new layers: the options and the errors of a load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tests.support.checkpoints import (
    Loading,
    Saved,
    assert_refused,
    compare_states,
    found_after_load,
)
from tests.support.engines import EngineCase
from tests.support.oracle import Dump, differences, expected_in
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

RUNS = [
    (EngineCase(2, "2"), EngineCase(3, "3", sub_group=700)),
    (EngineCase(3, "3", "bf16", sub_group=700), EngineCase(2, "1", "bf16")),
    (EngineCase(2, "B", "bf16"), EngineCase(2, "B", "bf16")),
]
NEW = ("c.weight", "c.bias")
"""Layers of the model that is called ``renamed``; the other model has ``b`` instead."""


def found_after(
    pools: Pools, target: EngineCase, saved: Saved, steps_before: int = 0, **options: object
) -> tuple[Dump, Dump]:
    """Return rank 0's state before and after a load."""
    program = partial(found_after_load, target, saved, options, steps_before=steps_before)
    found = pools.run(target.world, program)[0]
    assert found is not None
    return found


@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_renamed_layers_are_restored_bit_for_bit(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved, here = saved_by(source), replace(target, renamed=True)
    _, found = found_after(pools, here, saved, rename={"b": "c"})
    wanted = {
        k.replace("/b.", "/c."): v for k, v in expected_in(saved.dump(), source, target).items()
    }
    compare_states(wanted, found).assert_same()
    _, plainly = found_after(pools, target, saved)
    assert any("/b." in key for key in plainly)


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_new_layers_start_from_their_own_values(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Including bf16, where masters are more precise than weights."""
    saved, here = saved_by(source), replace(target, renamed=True)
    options = {"load_optimizer_state": False, "strict": False}
    before, after = found_after(pools, here, saved, steps_before=1, **options)
    wanted = {
        **{k: v for k, v in expected_in(saved.dump(), source, target).items() if "/b." not in k},
        **{k: v for k, v in before.items() if "/c." in k},
    }
    kinds = ("master", "weight", "frozen", "buffer")
    assert not differences(
        *({k: v for k, v in of.items() if k.split("/")[0] in kinds} for of in (wanted, after))
    )
    assert {k for k in after if "/c." in k}


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), RUNS[:1], ids=str)
def test_errors_propose_a_rename_and_refuse_wrong_ones(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved, here = saved_by(source), replace(target, renamed=True)
    for options, names in (
        ({}, ("c.weight", "rename={'b': 'c'}")),
        ({"strict": False}, ("c.weight", "rename={'b': 'c'}")),
        ({"rename": {"x": "c"}}, ("rename='x' matches no name",)),
        ({"rename": {"b": "a"}}, ("maps both 'a.weight' and 'b.weight' to 'a.weight'",)),
    ):
        assert_refused(pools.run, here, Loading(saved.path, options), *names)
