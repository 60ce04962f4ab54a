"""The loss scale after a load: learned values continue, and replaced settings cause a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Saved
from tests.support.engines import Engine, EngineCase, engine_of, train
from tests.support.oracle import scaler_of
from tests.support.outcome import captured_log
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

SETTINGS = {"scale_window": 5, "min_scale": 4.0, "delayed_shift": 3, "cur_hysteresis": 3}
"""Settings that differ from the saved ones (``QUICK_SCALER``)."""


def numbers(engine: Engine) -> dict[str, Any]:
    fields = vars(scaler_of(engine))
    return {key: value for key, value in fields.items() if isinstance(value, bool | int | float)}


def save_with_fixed_scale(setup: EngineCase, path: str, scale: float) -> None:
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        scaler_of(engine).cur_scale = scale
        train(engine, setup, 0, 1)
        save_checkpoint(engine, path)


def after_load(
    setup: EngineCase,
    path: str,
    configured: Mapping[str, Any],
    *,
    steps: int = 0,
    **options: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Load after some steps; return the scaler's numbers, and the warnings about it."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7) as engine:
        for key, value in configured.items():
            setattr(scaler_of(engine), key, value)
        train(engine, setup, 100, 100 + steps)
        with captured_log("lightning_elastic_zero", logging.WARNING) as texts:
            load_checkpoint(engine, path, **options)
        return numbers(engine), [text for text in texts if "loss scale" in text]


@pytest.mark.long
def test_the_hysteresis_is_reset_after_stage_0(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Stage 0 counts none, so a running engine must not keep its own count."""
    saved, target = saved_by(EngineCase(2, "0", "fp16")), EngineCase(2, "2", "fp16")
    fresh, running = (
        pools.run(2, partial(after_load, target, saved.path, {}, steps=steps)) for steps in (0, 2)
    )
    assert running == fresh
    for found, warned in fresh:
        assert found["cur_hysteresis"] == found["delayed_shift"] == 2
        assert repr(found["last_overflow_iter"]) == saved.dump()["scaler/last_overflow_iter"] == "1"
        assert not warned


def test_scaler_settings_follow_load_hyperparameters(
    pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """Rank 0 warns of configured settings that are replaced; learned values always continue."""
    saved, target = saved_by(EngineCase(2, "2", "fp16")), EngineCase(2, "3", "fp16")
    load = partial(after_load, target, saved.path)
    as_saved = {
        key.removeprefix("scaler/"): value
        for key, value in saved.dump().items()
        if key.startswith("scaler/") and "dtype" not in key
    }
    assert as_saved["cur_hysteresis"] == "1"
    assert as_saved["scale_window"] == "2"
    same = pools.run(2, partial(load, {}))
    changed = pools.run(2, partial(load, SETTINGS))
    assert [{k: repr(v) for k, v in found.items()} for found, _ in (*same, *changed)] == [
        as_saved
    ] * 4
    assert [warned for _, warned in (*same, changed[1])] == [[], [], []]
    (text,) = changed[0][1]
    assert "delayed_shift 2 (here 3), min_scale 1 (here 4.0), scale_window 2 (here 5)" in text
    assert "load_hyperparameters=False" in text
    learned = ("cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter")
    for found, warned in pools.run(2, partial(load, SETTINGS, load_hyperparameters=False)):
        assert {key: repr(found[key]) for key in learned} == {key: as_saved[key] for key in learned}
        assert SETTINGS.items() - {("cur_hysteresis", 3)} <= found.items()
        assert not warned


@pytest.mark.parametrize("target", [EngineCase(1, "2"), EngineCase(1, "0", "bf16")], ids=str)
def test_a_fixed_scale_is_a_setting_in_every_stage(
    target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    path = str(tmp_path / "fixed.ckpt")
    pools.run(1, partial(save_with_fixed_scale, EngineCase(1, "1"), path, 128.0))
    load = partial(after_load, target, path, {"cur_scale": 512.0})
    ((found, (warned,)),) = pools.run(1, load)
    assert found["cur_scale"] == 128.0
    assert "cur_scale 128.0 (here 512.0)" in warned
    ((found, none),) = pools.run(1, partial(load, load_hyperparameters=False))
    assert found["cur_scale"] == 512.0
    assert not none
