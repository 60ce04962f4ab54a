"""A value that overflows the engine's type is refused on all ranks, in every format.

Only one rank's part contains the value. Infinite values in a file are loaded unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.formats import _torch_writers as writers
from tests.formats._load_assertions import TARGETS, around_load, refused, warnings_of_load
from tests.formats._torch_writers import Run
from tests.support.checkpoints import Loading, Saved, evaluated_weights, refusal
from tests.support.engines import Engine, EngineCase, Net, engine_of, inner_of, train
from tests.support.ranks import Pools, skip_without

pytestmark = pytest.mark.engine

HUGE = 1e300
"""A value that float64 can represent and float32 cannot."""

LARGE = 3.4e38
"""A value that float32 can represent and bfloat16 cannot."""

TARGET = TARGETS[1]


def with_weight(number: float, tree: dict[str, Any], _: nn.Module | None = None) -> None:
    """Set the last element of a weight, in float64."""
    tree["state_dict"]["a.weight"] = tree["state_dict"]["a.weight"].double()
    tree["state_dict"]["a.weight"][-1, -1] = number


def with_moment(number: float, tree: dict[str, Any], _: nn.Module) -> None:
    """Set an element of a moment; all moments are in float64."""
    states = tree["optimizer_states"][0]["state"]
    for state in states.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()
    states[0]["exp_avg_sq"].view(-1)[-1] = number


def chunks(number: float, model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tree = {"state_dict": model.state_dict(), "adam": optimizer.state_dict()}
    with_weight(number, tree)
    return tree


WEIGHT, MOMENT = "a.weight has the float64 value", "the optimizer state exp_avg_sq of "

WRITERS: dict[str, tuple[Callable[[Run], None], str]] = {
    "weight": (partial(writers.save_alone, change=partial(with_weight, HUGE)), WEIGHT),
    "moment": (partial(writers.save_alone, change=partial(with_moment, HUGE)), MOMENT),
    "directory": (partial(writers.save_tree, make_tree=partial(chunks, HUGE)), WEIGHT),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_value_that_overflows_is_refused_by_parameter_and_type(
    name: str, pools: Pools, tmp_path: Path
) -> None:
    run, (write, message) = Run(str(tmp_path / "huge")), WRITERS[name]
    pools.run(1, partial(write, run))
    found = refused(pools, TARGET, run.path)
    assert found.error == "CheckpointMismatchError", found.message
    assert message in found.message
    assert "the float64 value 1e+300, which overflows float32" in found.message
    assert "failed on rank" in found.message
    assert ("load_optimizer_state=False" in found.message) == (name == "moment")


@pytest.mark.parametrize("write", [writers.save_alone, writers.save_tree])
def test_infinite_values_of_a_file_are_loaded(
    write: Callable[..., None], pools: Pools, tmp_path: Path
) -> None:
    run = Run(str(tmp_path / "infinite"))
    if write is writers.save_alone:
        pools.run(1, partial(write, run, change=partial(with_weight, math.inf)))
    else:
        pools.run(1, partial(write, run, make_tree=partial(chunks, math.inf)))
    _, after = around_load(pools, TARGET, run.path)
    wanted = torch.load(run.truth_path, weights_only=True)["master/a.weight"]
    wanted[-1, -1] = math.inf
    found = torch.as_tensor(after["master/a.weight"])
    assert torch.equal(found.view_as(wanted), wanted)


def save_large(setup: EngineCase, path: str, large: float = LARGE, state: str = "") -> None:
    """Save a ZeRO-2 run whose first master, or state, on each rank is large. Collective."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        masters = engine.optimizer.single_partition_of_fp32_groups
        states = (inner_of(engine).state[master] for master in masters)
        values = next(s[state] for s in states if state in s) if state else masters[0].data
        values[0] = large
        save_checkpoint(engine, path)


def test_narrower_masters_refuse_values_that_overflow(pools: Pools, tmp_path: Path) -> None:
    """An evaluation, which has no masters, refuses weights that become infinite."""
    source, path = EngineCase(2, "2"), str(tmp_path / "large.ckpt")
    pools.run(2, partial(save_large, source, path))
    narrow = EngineCase(2, "3", "bf16", bf16_masters=True)
    found = refused(pools, narrow, path)
    assert found.error == "CheckpointMismatchError", found.message
    message = "has the float32 value 3.39999995e+38, which overflows bfloat16"
    assert message in found.message
    assert "use a precision" in found.message
    with pytest.raises(AssertionError, match=re.escape(message)):
        pools.run(2, partial(evaluated_weights, EngineCase(2, "3", "bf16"), Saved(source, path)))
    _, after = around_load(pools, EngineCase(2, "3", "bf16"), path)
    held = [torch.as_tensor(v) for k, v in after.items() if k.startswith("master/")]
    assert sum(int((v == torch.tensor(LARGE)).sum()) for v in held) == source.world


@pytest.mark.long
def test_a_momentum_that_overflows_in_the_gradients_type_is_refused(
    pools: Pools, tmp_path: Path
) -> None:
    source, path = EngineCase(2, "2", optimizer="Muon"), str(tmp_path / "large.ckpt")
    pools.run(2, partial(save_large, source, path, state="momentum_buffer"))
    for target in (
        EngineCase(3, "3", "bf16", optimizer="Muon"),
        EngineCase(1, "1", "bf16", optimizer="Muon"),
    ):
        found = refused(pools, target, path)
        assert found.error == "CheckpointMismatchError", found.message
        assert "the optimizer state momentum_buffer of " in found.message
        assert "has the float32 value 3.39999995e+38, which overflows bf" in found.message
    assert_momentum_kept(pools, EngineCase(2, "B", "bf16", optimizer="Muon"), path)


@pytest.mark.long
def test_a_momentum_in_swap_files_is_kept_in_the_masters_type(pools: Pools, tmp_path: Path) -> None:
    skip_without("AsyncIOBuilder", pools)
    source, path = EngineCase(2, "2", optimizer="Muon"), str(tmp_path / "large.ckpt")
    pools.run(2, partial(save_large, source, path, state="momentum_buffer"))
    target = EngineCase(2, "3", "bf16", optimizer="Muon", nvme="plain")
    assert_momentum_kept(pools, target, path)


def assert_momentum_kept(pools: Pools, target: EngineCase, path: str) -> None:
    """Assert that a run continues with the large value of a momentum."""
    _, after = around_load(pools, target, path)
    held = [torch.as_tensor(v) for k, v in after.items() if k.startswith("momentum_buffer/")]
    assert any((v == torch.tensor(LARGE)).any() for v in held)


@pytest.mark.parametrize(
    ("source", "target", "large"),
    [
        (EngineCase(2, "2"), EngineCase(3, "3", "fp16"), 7e4),
        (EngineCase(2, "2", "bf16"), EngineCase(1, "2", "fp16"), -7e4),
        (EngineCase(2, "2"), EngineCase(2, "1", "bf16"), LARGE),
    ],
    ids=str,
)
def test_weights_that_become_infinite_are_named_and_masters_are_kept(
    source: EngineCase, target: EngineCase, large: float, pools: Pools, tmp_path: Path
) -> None:
    path, again = str(tmp_path / "large.ckpt"), str(tmp_path / "again.ckpt")
    pools.run(source.world, partial(save_large, source, path, large))
    of_ranks = pools.run(target.world, partial(warnings_of_load, target, path, again))
    warning = f"values too large for {target.precision}. These weights become infinite"
    named = [
        re.findall(rf"{warning} .*?: ([\w., ]+)\. Train", text)
        for texts in of_ranks
        for text in texts
    ]
    names = {name for found in named for each in found for name in each.split(", ")}
    assert names == {"embedding.weight", "a.weight"}  # The second rank's part begins in a.weight.
    same = pools.run(target.world, partial(warnings_of_load, target, again))
    assert not any(warning in text for texts in same for text in texts), same


def round_masters(engine: Engine) -> None:
    """Set DeepSpeed's option that rounds masters in a load."""
    engine._config.zero_config.load_from_fp32_weights = False


@pytest.mark.parametrize(
    "target", [EngineCase(2, "2", "fp16"), EngineCase(1, "3", "fp16")], ids=str
)
def test_masters_rounded_to_infinity_are_refused(
    target: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    path = str(tmp_path / "large.ckpt")
    pools.run(2, partial(save_large, EngineCase(2, "2"), path, 7e4))
    load = partial(refusal, target, Loading(path), prepare=round_masters)
    for found in pools.run(target.world, load):
        assert found.error == "CheckpointMismatchError", found.message
        assert "zero_optimization.load_from_fp32_weights=false" in found.message
        assert "become infinite: embedding.weight" in found.message
        assert found.unchanged
