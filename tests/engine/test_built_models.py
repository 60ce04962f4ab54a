"""Models as people build them are restored on another number of devices, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine._built_models import ModelSetup, in_channels_last, train_model
from tests.support.checkpoints import compare_states
from tests.support.engines import engine_of
from tests.support.oracle import Dump, differences, dump, expected_in
from tests.support.ranks import Pools

pytestmark = pytest.mark.engine

NEEDS = {
    **dict.fromkeys(("gpt2", "llama", "mixtral", "transformers' checkpointing"), "transformers"),
    "lora": "peft",
}
WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")


def saved_dump(setup: ModelSetup, path: str, options: Mapping[str, Any]) -> Dump | None:
    """Train and save; return what was held."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        in_channels_last(engine, setup)
        train_model(engine, setup, 0, 2)
        held = dump(engine, setup)
        save_checkpoint(engine, path, **options)
    return held


def loaded_dumps(setup: ModelSetup, path: str) -> tuple[Dump, Dump, list[float]] | None:
    """Load into a run of another seed, and go on; return what was held before and after."""
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        in_channels_last(engine, setup)
        train_model(engine, setup, 100, 101)
        before = dump(engine, setup)
        load_checkpoint(engine, path)
        after = dump(engine, setup)
        losses = train_model(engine, setup, 2, 3)
    return None if before is None or after is None else (before, after, losses)


def unwrapped(held: Dump) -> Dump:
    """Return a dump under the names that layers have without wrappers."""
    return {WRAPPERS.sub("", key): value for key, value in held.items()}


def resumed(
    pools: Pools, source: ModelSetup, target: ModelSetup, path: Path, **options: Any
) -> tuple[Dump, Dump, Dump]:
    """Return what must be held, and what was held before and after a load."""
    for setup in (source, target):
        if module := NEEDS.get(setup.kind):
            pytest.importorskip(module)
    held = pools.run(source.world, partial(saved_dump, source, str(path / "a.ckpt"), options))[0]
    found = pools.run(target.world, partial(loaded_dumps, target, str(path / "a.ckpt")))[0]
    assert held is not None
    assert found is not None
    before, after, losses = found
    assert all(torch.isfinite(torch.tensor(losses)))
    wanted = unwrapped(expected_in(held, source, replace(target, kind=source.kind)))
    return wanted, unwrapped(before), unwrapped(after)


KINDS = (
    "gpt2",
    "llama",
    "mixtral",
    "lora",
    "images",
    "weight norm",
    "weight norm by hooks",
    "spectral norm",
    "spectral norm by hooks",
    "transformers' checkpointing",
    "DeepSpeed's checkpointing",
)
STAGES = [("2", 2, "3", 3, "fp32"), ("3", 3, "2", 2, "bf16")]


@pytest.mark.parametrize(("zero", "world", "then", "on", "precision"), STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_restored(
    kind: str,
    zero: str,
    world: int,
    then: str,
    on: int,
    precision: str,
    pools: Pools,
    tmp_path: Path,
) -> None:
    """On another number of devices, in another stage: masters, states, buffers, frozen weights."""
    if kind == "DeepSpeed's checkpointing":  # Its recomputation does not gather ZeRO-3's weights.
        zero, then = zero.replace("3", "1"), then.replace("3", "1")
    # Their buffers stay fp32 in a bf16 engine, which torch's own kernels do not take.
    precision = "fp32" if kind == "images" or kind.startswith("spectral") else precision
    source = ModelSetup(world, zero, precision, kind=kind)
    target = ModelSetup(on, then, precision, kind=kind)
    wanted, before, after = resumed(pools, source, target, tmp_path)
    compare_states(wanted, after).assert_same()
    assert differences(wanted, before)


@pytest.mark.long
@pytest.mark.parametrize("other", ["compiled layer", "compiled", "torch's checkpointing"])
@pytest.mark.parametrize("back", [False, True])
def test_wrapped_layers_are_the_same_layers(
    other: str, back: bool, pools: Pools, tmp_path: Path
) -> None:
    """Saved with or without a wrapper around them, they are restored without or with it.

    What is compiled runs in ZeRO-1/2: DeepSpeed's hooks of ZeRO-3 fail on it by themselves.
    """
    plain, wrapped = ModelSetup(3, "3", kind="plain"), ModelSetup(2, "2", kind=other)
    source, target = (wrapped, plain) if back else (plain, wrapped)
    wanted, _, after = resumed(pools, source, target, tmp_path)
    compare_states(wanted, after).assert_same()
    assert any("inner.0.weight" in key for key in after)


@pytest.mark.long
@pytest.mark.parametrize(("zero", "world", "then", "on", "precision"), STAGES)
def test_adapters_alone(
    zero: str, world: int, then: str, on: int, precision: str, pools: Pools, tmp_path: Path
) -> None:
    """Without the frozen base in the checkpoint they are restored on the model's own base."""
    source = ModelSetup(world, zero, precision, kind="lora")
    target = ModelSetup(on, then, precision, kind="lora")
    wanted, before, after = resumed(pools, source, target, tmp_path, exclude_frozen_parameters=True)
    own = {key: value for key, value in before.items() if key.startswith("frozen/")}
    assert own
    compare_states({**wanted, **own}, after).assert_same()
    written = sum(path.stat().st_size for path in (tmp_path / "a.ckpt").rglob("*model_states.pt"))
    base = sum(value.nbytes for value in own.values())
    assert written < base * (2 if zero == "2" else 1) + 100_000
