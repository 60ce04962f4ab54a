"""What a card may do otherwise than processors; the same tests run on both (``--device``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.devices.conftest import OnDevice
from tests.engine._oracle import differences, expected_in
from tests.engine._save_load_programs import Saved, StateComparison, load, train_and_save
from tests.engine._setup import DEEPSPEEDS, Setup
from tests.engine._skips import skip_without
from tests.engine._uninterrupted import Continued, same_world
from tests.engine._worker_pool import Pools

pytestmark = [pytest.mark.engine, pytest.mark.device, pytest.mark.rotating_tests(1)]

PRECISIONS = [
    *(Setup(1, zero, precision) for zero in "0123" for precision in ("bf16", "fp16")),
    Setup(1, "B", "bf16"),
]
FUSED = [Setup(1, "0", "fp16", optimizer="FusedAdam")]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("setup", [*PRECISIONS, *FUSED], ids=str)
def test_a_run_goes_on_bit_for_bit(
    setup: Setup,
    world: int,
    device_pools: Pools,
    on_device: OnDevice[Continued],
    tmp_path: Path,
) -> None:
    """Losses and state after a resume on the device are those of the uninterrupted run."""
    if setup.optimizer in DEEPSPEEDS:
        skip_without(DEEPSPEEDS[setup.optimizer][2], device_pools)
    setup = replace(setup, world=world)
    saved = Saved(setup, str(tmp_path / "half.ckpt"))
    for continued in on_device(world, partial(same_world, setup, saved)):
        uninterrupted, resumed = continued.losses
        assert resumed == uninterrupted
        assert not continued.differing


@pytest.mark.parametrize(
    ("on_processors", "there"),
    [
        (Setup(2, "0"), Setup(1, "0")),
        (Setup(2, "1", "fp16"), Setup(1, "1", "fp16")),
    ],
    ids=str,
)
def test_two_cpu_ranks_to_one_device_and_back(
    on_processors: Setup,
    there: Setup,
    pools: Pools,
    on_device: OnDevice[StateComparison | None],
    tmp_path: Path,
) -> None:
    """What comes back to 2 CPU ranks is what they had saved; on the way it was on a device."""
    first = Saved(on_processors, str(tmp_path / "first.ckpt"))
    second = Saved(there, str(tmp_path / "second.ckpt"))
    pools.run(2, partial(train_and_save, first))
    verdicts = on_device(1, partial(load, there, first, steps_before=1, copy_to=second))
    assert not differences(expected_in(first.dump(), on_processors, there), second.dump())
    assert_same(verdicts)
    assert_same(pools.run(2, partial(load, on_processors, second, steps_before=1)))


def assert_same(verdicts: Sequence[object]) -> None:
    """Fail unless the oracle, on rank 0, has found everything the same."""
    assert isinstance(verdicts[0], StateComparison)
    verdicts[0].assert_same()
