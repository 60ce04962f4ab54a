"""DeepSpeed's Muon and torch's: momentum and steps at every stage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Saved, assert_continues, assert_restored
from tests.support.engines import (
    QUICK_SCALER,
    EngineCase,
    Net,
    engine_of,
    inner_of,
    surroundings,
    train,
)
from tests.support.outcome import captured_log
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine


def muon(world: int, zero: str, precision: str = "fp32", **options: object) -> EngineCase:
    return EngineCase(world, zero, precision, optimizer="Muon", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (muon(2, "2"), muon(3, "1")),
        (muon(4, "1", round_robin=True), muon(2, "3", sub_group=700)),
        (muon(2, "3"), muon(3, "2", alignment=True)),
        (muon(3, "3", offload=True), muon(1, "2", round_robin=True)),
        (muon(2, "2", offload=True), muon(4, "2", alignment=True)),
        (muon(2, "1"), muon(1, "1", offload=True)),
        (muon(1, "2"), muon(2, "3", muon_in_memory=True)),
        (muon(2, "B", "bf16"), muon(3, "B", "bf16")),
        (muon(2, "3", "bf16"), muon(3, "0")),
        (muon(3, "2", "bf16"), muon(2, "0", "bf16")),
        (muon(2, "0", "bf16"), muon(3, "2", "bf16")),
        (muon(2, "0"), muon(3, "3", "bf16")),
        (muon(2, "1", "bf16"), muon(3, "B", "bf16")),
        (muon(3, "B", "bf16"), muon(2, "3", "bf16", offload=True)),
        (muon(3, "3", "bf16"), muon(2, "1", "bf16", offload=True)),
        (muon(1, "2", "bf16"), muon(1, "0")),
        (muon(2, "B", "bf16"), muon(3, "3", "bf16", nvme="plain")),
        (muon(2, "3", "bf16", nvme="plain", fp32_gradients=True), muon(1, "1", "bf16")),
    ],
    ids=str,
)
def test_momentum_is_restored_in_every_stage_in_the_type_of_that_stage(
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """The oracle also compares the copies of one parameter on several ranks in ZeRO-1/2."""
    if source.nvme or target.nvme:
        skip_without("AsyncIOBuilder", pools)
    saved = saved_by(source)
    momenta = [value for key, value in saved.dump().items() if key.startswith("momentum_buffer/")]
    assert {momentum.dtype for momentum in momenta} == {source.momentum_dtype}
    for steps in (0, 1):
        assert_restored(pools.run, target, saved, steps_before=steps)


@pytest.mark.parametrize(
    "setup",
    [
        muon(2, "0"),
        muon(2, "0", "bf16"),
        muon(2, "1", round_robin=True),
        muon(2, "2", "bf16"),
        muon(3, "2", alignment=True),
        muon(2, "1", offload=True),
        muon(2, "B", "bf16"),
        muon(2, "3"),
        muon(2, "3", muon_in_memory=True),
        muon(2, "3", "bf16", offload=True),
        muon(2, "3", "bf16", offload=True, fp32_gradients=True),
        muon(2, "3", "bf16", nvme="plain", fp32_gradients=True),
    ],
    ids=str,
)
def test_a_muon_run_continues_bit_for_bit(setup: EngineCase, pools: Pools, tmp_path: Path) -> None:
    if setup.nvme:
        skip_without("AsyncIOBuilder", pools)
    assert_continues(pools.run, setup, tmp_path)


def configured(world: int, stage: int, path: str, *, saves: bool, **params: Any) -> set[str]:
    """Train with the Muon of a config, save or load and train on; return Adam's step counts."""
    import deepspeed

    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    setup = muon(world, str(stage))
    optimizer = {"type": "Muon", "params": {"lr": 0.01, **params}}
    with surroundings(setup):
        engine, *_ = deepspeed.initialize(
            model=setup.model(0 if saves else 7), config={**setup.config(), "optimizer": optimizer}
        )
        train(engine, setup, *((0, 3) if saves else (100, 101)))
        if saves:
            save_checkpoint(engine, path)
        else:
            load_checkpoint(engine, path)
            train(engine, setup, 3, 4)
    counts = {repr(state["step"]) for state in inner_of(engine).state.values() if "step" in state}
    engine.destroy()
    return counts


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ((2, 0, {}), (3, 2, {}), "4"),
        ((2, 2, {}), (2, 3, {"torch_adam": True}), "tensor(4.)"),
        ((2, 3, {"torch_adam": True}), (3, 1, {}), "4"),
    ],
)
def test_the_adam_inside_muon_continues_its_count(
    source: tuple[int, int, dict[str, Any]],
    target: tuple[int, int, dict[str, Any]],
    wanted: str,
    pools: Pools,
    tmp_path: Path,
) -> None:
    """A config's Muon steps other parameters with FusedAdam or torch's AdamW."""
    skip_without("FusedAdamBuilder", pools)
    path = str(tmp_path / "a.ckpt")
    for (world, stage, params), saves in ((source, True), (target, False)):
        call = partial(configured, world, stage, path, saves=saves, **params)
        counts = pools.run(world, call)
    assert counts == [{wanted}] * target[0]


def warned_of_momentum(setup: EngineCase, path: str, **options: Any) -> list[str]:
    """Load; return this rank's warnings about momentum."""
    from lightning_elastic_zero.api import load_checkpoint

    with (
        engine_of(setup, 7) as engine,
        captured_log("lightning_elastic_zero", logging.WARNING) as texts,
    ):
        load_checkpoint(engine, path, **options)
    return [text for text in texts if "momentum" in text]


CONFIGURED = float(2 ** QUICK_SCALER["initial_scale_power"])
REACHED = CONFIGURED / 2
"""The scale after three steps, two of which overflow."""


@pytest.mark.parametrize(
    ("source", "target", "scales"),
    [
        (muon(2, "2", "fp16"), muon(2, "2", "bf16"), (REACHED, 1.0)),
        (muon(2, "2", "fp16"), muon(1, "3", "fp16", offload=True), (REACHED, 1.0)),
        (muon(2, "2", "fp16"), muon(1, "0", "fp16"), (REACHED, 1.0)),
        (muon(2, "2", "fp16"), muon(1, "3", "fp16"), None),
        (muon(2, "2", "bf16"), muon(2, "1", "fp16"), (1.0, CONFIGURED)),
        (muon(2, "2", "bf16"), muon(2, "0", "fp16"), None),
    ],
    ids=str,
)
def test_momentum_from_gradients_of_another_scale_causes_a_warning(
    source: EngineCase,
    target: EngineCase,
    scales: tuple[float, float] | None,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """Momentum has the scale of its gradients, so it is too large or too small by that factor."""
    path = saved_by(source).path
    first, *others = pools.run(target.world, partial(warned_of_momentum, target, path))
    assert not any(others)
    if scales is None:
        assert not first
        return
    (text,) = first
    assert "gradients with loss scale {}, this run's have loss scale {}".format(*scales) in text
    fresh = partial(warned_of_momentum, target, path, load_optimizer_state=False)
    assert not any(
        "loss scale" in text for texts in pools.run(target.world, fresh) for text in texts
    )


def test_deepspeeds_momentum_has_the_scale_of_the_gradients(saved_by: Callable[..., Saved]) -> None:
    """In ZeRO without offload. The warning relies on this."""
    scaled, divided = (
        saved_by(setup).dump()
        for setup in (muon(2, "2", "fp16"), muon(2, "2", "fp16", offload=True))
    )
    for held in (scaled, divided):
        assert float(held["scaler/cur_scale"]) == REACHED
        assert held["counter/skipped_steps"] == "2"
    names = [key for key in scaled if key.startswith("momentum_buffer/")]
    assert names
    for name in names:
        ratio = scaled[name].float().norm() / divided[name].float().norm()
        assert torch.isclose(ratio, torch.tensor(REACHED), rtol=0.05)


NEEDS_TORCHS_MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch's Muon came with 2.9"
)


def only_matrices(_: EngineCase, seed: int) -> Net:
    """Make a model that trains only its matrices, as torch's Muon requires."""
    model = Net(seed)
    for parameter in model.parameters():
        if parameter.ndim != 2:
            parameter.requires_grad = False
    return model


def torchs_muon(world: int, precision: str = "fp32") -> EngineCase:
    name = "torch.optim.Muon"
    return EngineCase(world, "0", precision, optimizer=name, grouping="one", net=only_matrices)


@pytest.mark.long
@NEEDS_TORCHS_MUON
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torchs_muon(2), torchs_muon(3)),
        (torchs_muon(3, "bf16"), torchs_muon(2)),
        (torchs_muon(1), torchs_muon(2, "bf16")),
    ],
    ids=str,
)
def test_the_momentum_of_torchs_muon_is_restored(
    source: EngineCase,
    target: EngineCase,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    saved = saved_by(source)
    assert any(key.startswith("momentum_buffer/") for key in saved.dump())
    assert_restored(pools.run, target, saved, steps_before=1)


@NEEDS_TORCHS_MUON
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_muon_continues_bit_for_bit(precision: str, pools: Pools, tmp_path: Path) -> None:
    setup = torchs_muon(2, precision)
    assert_continues(pools.run, setup, tmp_path)
