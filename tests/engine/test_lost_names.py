"""A release of DeepSpeed that lacks a name is refused by it, and by what it is needed for."""

from __future__ import annotations

from functools import partial

import pytest

from tests.engine._lost_name_programs import refusals
from tests.engine._setup import Setup
from tests.engine._skips import skip_without
from tests.engine._worker_pool import Pools

SWAPPED_HIDDEN = 4000
"""So wide a layer that its sub-group goes to files: DeepSpeed swaps nothing below 1 MiB."""

OWN_OF_PARTIAL_OFFLOAD = "DeepSpeedZeroOptimizer_Stage3: backup_optimizer"

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
        Setup(1, "2", "fp16"),
        Setup(1, "0", "fp16"),
        Setup(1, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700),
        Setup(1, "3", nvme="plain", hidden=SWAPPED_HIDDEN),
    ],
    ids=str,
)
def test_each_lost_name_is_refused_with_its_purpose(setup: Setup, pools: Pools) -> None:
    """None is missed of the installed release; each that is lost, of each owner, is."""
    if setup.optimizer == "CPUAdam":
        skip_without("CPUAdamBuilder", pools)
    if setup.nvme:
        skip_without("AsyncIOBuilder", pools)
    missed, lost = pools.run(1, partial(refusals, setup))[0]
    assert not missed
    assert len(lost) >= 20
    # What each configuration has of its own is among them.
    wanted = {"nvme": "a file of a sub-group: swap_path", "ratio": OWN_OF_PARTIAL_OFFLOAD}
    for option, name in wanted.items():
        assert (name in lost) == (option in str(setup)), name
    assert not {name: said for name, said in lost.items() if said}
