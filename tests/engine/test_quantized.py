"""``zero_quantized_weights`` and ``zero_quantized_gradients``, as far as a CPU supports them.

DeepSpeed has no quantizing operator for CPUs. It quantizes gradients between nodes only, and each
rank without a device counts as a node: one rank can train, and several can be made and loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.checkpoints import Saved, assert_restored
from tests.support.engines import EngineCase, engine_of, train
from tests.support.ranks import Pools


def refused_by_deepspeed(setup: EngineCase) -> tuple[bool, str]:
    """Make an engine and train a step; return whether it was made, and the error."""
    made = False
    try:
        with engine_of(setup, 0) as engine:
            made = True
            train(engine, setup, 0, 1)
    except ValueError as error:
        return made, str(error)
    return made, ""


pytestmark = pytest.mark.engine

ALONE = EngineCase(1, "3", quantized="gradients")


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        (EngineCase(3, "2"), ALONE, 1),
        (ALONE, EngineCase(2, "3", sub_group=700), 1),
        (EngineCase(3, "1"), EngineCase(2, "3", quantized="gradients"), 0),
    ],
    ids=str,
)
def test_quantized_gradients_do_not_change_a_checkpoint(
    source: EngineCase, target: EngineCase, steps: int, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    assert_restored(pools.run, target, saved_by(source), steps_before=steps)


@pytest.mark.long
@pytest.mark.parametrize(("what", "made"), [("weights", False), ("gradients", True)])
def test_deepspeed_refuses_quantized_weights_on_a_cpu(what: str, made: bool, pools: Pools) -> None:
    refused = pools.run(2, partial(refused_by_deepspeed, EngineCase(2, "3", quantized=what)))
    assert all(found == made and "not been implemented on CPU" in error for found, error in refused)
