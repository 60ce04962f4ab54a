"""Each of DeepSpeed's optimizer wrappers, in each precision, as source and as target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Saved, assert_continues, assert_restored
from tests.support.engines import EngineCase
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine

FUSED: dict[str, Any] = {"optimizer": "FusedAdam"}
OFFLOADED: dict[str, Any] = {"offload": True, "optimizer": "CPUAdam"}

PAIRS = {
    "fp16": [
        (EngineCase(2, "1", "fp16"), EngineCase(3, "3", "fp16")),
        (EngineCase(3, "2", "fp16"), EngineCase(2, "0", "fp16")),
        (EngineCase(2, "3", "fp16"), EngineCase(2, "1", "fp16", offload=True)),
        (EngineCase(3, "0", "fp16"), EngineCase(2, "0", "fp16")),
        (EngineCase(2, "0", "fp16"), EngineCase(3, "2", "fp16")),
        (EngineCase(2, "0", "fp16"), EngineCase(3, "0", "bf16")),
        (EngineCase(2, "1", "bf16"), EngineCase(3, "2", "fp16")),
    ],
    "FP16_Optimizer": [
        (EngineCase(2, "0", "bf16", **FUSED), EngineCase(3, "0", "bf16", **FUSED)),
        (EngineCase(3, "0", "fp16", **FUSED), EngineCase(2, "0", "fp16")),
        (EngineCase(2, "0", "fp16"), EngineCase(3, "0", "fp16", **FUSED)),
        (EngineCase(3, "0", "bf16", **FUSED), EngineCase(2, "3", "bf16")),
        (EngineCase(2, "B", "bf16"), EngineCase(3, "0", "bf16", **FUSED)),
        (EngineCase(2, "1", "fp16"), EngineCase(3, "0", "fp16", **FUSED)),
    ],
    "unpartitioned ZeRO-1": [
        (
            EngineCase(2, "B", "bf16", unpartitioned=True),
            EngineCase(3, "B", "bf16", unpartitioned=True),
        ),
        (EngineCase(3, "B", "bf16", unpartitioned=True), EngineCase(2, "B", "bf16")),
        (EngineCase(2, "B", "bf16"), EngineCase(4, "B", "bf16", unpartitioned=True)),
        (EngineCase(2, "3", "bf16"), EngineCase(3, "B", "bf16", unpartitioned=True)),
    ],
    "bf16 masters": [
        (
            EngineCase(2, "1", "bf16", bf16_masters=True),
            EngineCase(3, "3", "bf16", bf16_masters=True),
        ),
        (EngineCase(3, "3", "bf16", bf16_masters=True), EngineCase(2, "2", "bf16")),
        (EngineCase(2, "2", "bf16"), EngineCase(3, "1", "bf16", bf16_masters=True)),
        (EngineCase(2, "0", "bf16"), EngineCase(3, "3", "bf16", bf16_masters=True)),
        (EngineCase(3, "2", "bf16", bf16_masters=True), EngineCase(2, "0", "fp32")),
        (
            EngineCase(2, "2", "bf16", bf16_masters=True, **OFFLOADED),
            EngineCase(3, "1", "bf16", bf16_masters=True),
        ),
        (
            EngineCase(2, "1", "bf16", bf16_masters=True),
            EngineCase(3, "3", "bf16", bf16_masters=True, **OFFLOADED),
        ),
        (EngineCase(2, "2", "bf16"), EngineCase(2, "2", "bf16", bf16_masters=True, **OFFLOADED)),
    ],
    "fp16 masters": [
        (
            EngineCase(2, "2", "fp16", bf16_masters=True, **OFFLOADED),
            EngineCase(3, "3", "fp16", bf16_masters=True, **OFFLOADED),
        ),
        (EngineCase(3, "1", "fp16", bf16_masters=True, **OFFLOADED), EngineCase(2, "3", "fp16")),
        (EngineCase(2, "3", "fp16", bf16_masters=True, **OFFLOADED), EngineCase(2, "0", "fp32")),
        (EngineCase(2, "0", "fp16"), EngineCase(3, "2", "fp16", bf16_masters=True, **OFFLOADED)),
    ],
    "GradScaler": [
        (EngineCase(2, "0", autocast=True), EngineCase(3, "0", autocast=True)),
        (EngineCase(3, "1", autocast=True), EngineCase(2, "2", autocast=True)),
        (EngineCase(2, "3", autocast=True), EngineCase(3, "0", autocast=True)),
        (EngineCase(3, "0", autocast=True), EngineCase(2, "3", autocast=True)),
        (EngineCase(2, "2", autocast=True), EngineCase(2, "1")),
    ],
}

CONTINUED = [
    EngineCase(2, "1", "fp16"),
    EngineCase(3, "2", "fp16", offload=True),
    EngineCase(2, "3", "fp16"),
    EngineCase(2, "0", "fp16"),
    EngineCase(2, "0", "fp16", **FUSED),
    EngineCase(2, "B", "bf16", unpartitioned=True),
    EngineCase(2, "2", "bf16", bf16_masters=True),
    EngineCase(2, "3", "bf16", bf16_masters=True),
    EngineCase(2, "2", "fp16", bf16_masters=True, **OFFLOADED),
    EngineCase(2, "3", "fp16", bf16_masters=True, **OFFLOADED),
    EngineCase(2, "0", autocast=True),
    EngineCase(2, "2", autocast=True),
    EngineCase(2, "3", autocast=True),
]


def need_ops(pools: Pools, *setups: EngineCase) -> None:
    for builder in {"FusedAdam", "CPUAdam"} & {setup.optimizer for setup in setups}:
        skip_without(f"{builder}Builder", pools)


@pytest.mark.parametrize(
    ("source", "target"), [pair for pairs in PAIRS.values() for pair in pairs], ids=str
)
def test_state_is_restored_between_wrappers(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    need_ops(pools, source, target)
    saved = saved_by(source)
    held = saved.dump()
    if source.precision == "fp16":  # One of the three steps has overflowed.
        assert held["counter/skipped_steps"] == "1"
        assert held["scaler/last_overflow_iter"] == "1"
    if source.autocast:
        assert "'scale': 256.0" not in held["scaler/grad_scaler"]
    assert_restored(pools.run, target, saved, steps_before=1)


@pytest.mark.long
@pytest.mark.parametrize("setup", CONTINUED, ids=str)
def test_a_resumed_run_continues_bit_for_bit(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Including steps that overflow, and changes of the scale."""
    need_ops(pools, setup)
    assert_continues(pools.run, setup, tmp_path)
