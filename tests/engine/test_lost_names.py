"""A release of DeepSpeed that lacks a name is refused by it, and by what it is needed for."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engine._lost_name_programs import refusals
from tests.engine._setup import Setup
from tests.engine._worker_pool import Pools

pytestmark = [pytest.mark.engine, pytest.mark.rotating_tests(1)]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(1, "0"),
        Setup(1, "0", "bf16"),
        Setup(1, "1"),
        Setup(1, "2", offload=True),
        Setup(1, "B", "bf16"),
        Setup(1, "3"),
        Setup(1, "3", "bf16", offload=True),
    ],
    ids=str,
)
def test_each_lost_name_is_refused_with_its_purpose(setup: Setup, pools: Pools) -> None:
    """None is missed of the installed release; each that is lost, of each owner, is."""
    missed, lost = pools.run(1, partial(refusals, setup))[0]
    assert not missed
    assert len(lost) >= 20
    assert not {name: said for name, said in lost.items() if said}
