"""Buffers of other shapes, or of types that cannot represent the saved values, are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.foreign._fixtures import unpack
from tests.foreign._load_assertions import refused_all
from tests.support.checkpoints import Loading, Saved, assert_refused, save_different_buffers
from tests.support.engines import Net, Setup, engine_of
from tests.support.outcome import captured_log, error_text
from tests.support.plain_checkpoints import write_dcp
from tests.support.ranks import Pools


def write_full_weights(setup: Setup) -> tuple[str, list[str], list[str]]:
    """Write a weight that fails on rank 1, then one that matches and others that do not."""
    from lightning_elastic_zero.coordination.ranks import connect_ranks
    from lightning_elastic_zero.engine.live import LiveEngine

    with engine_of(setup, 7) as engine, closing(connect_ranks()) as ranks:
        live = LiveEngine(engine)
        ones = torch.ones(setup.hidden, setup.hidden)
        unwritable = {"frozen.weight": ones.to("meta") if ranks.rank else ones}
        step = "write a weight"
        error = error_text(lambda: ranks.run_all(step, lambda: live.copy_full_weights(unwritable)))
        others = {"average": torch.ones(2, 2), "lost": ones, "frozen.bias": ones}
        with captured_log("lightning_elastic_zero") as messages:
            taken = live.copy_full_weights({"frozen.weight": ones, **others})
        return error, taken, messages


pytestmark = pytest.mark.engine

RUNS = [
    (Setup(2, "2"), Setup(3, "3", "bf16", sub_group=700)),
    (Setup(3, "3", sub_group=700), Setup(2, "1")),
    (Setup(2, "B", "bf16"), Setup(2, "B", "bf16")),
]
RESHAPED = ("average (saved (65,), here (1,))", "seen (saved (), here (2, 2))")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("reshaped", RESHAPED),
        ("narrow", ("average (saved float32, here float16)",)),
        ("integer", ("average (saved float32, here int64)", "seen (saved int64, here bool)")),
    ],
)
@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_different_buffers_are_listed_and_nothing_changes(
    source: Setup,
    target: Setup,
    change: str,
    names: tuple[str, ...],
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    loading, other = Loading(saved_by(source).path), replace(target, buffers=change)
    errors = assert_refused(pools.run, other, loading, *names)
    assert not any("a.weight" in message for message in errors)
    assert_refused(pools.run, replace(other, hidden=64), loading, *names, "a.weight")


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), RUNS[:2], ids=str)
def test_a_saved_scalar_does_not_fill_a_larger_buffer(
    source: Setup, target: Setup, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(replace(source, buffers="reshaped"))
    names = ("average (saved (1,), here (65,))", "seen (saved (2, 2), here ())")
    assert_refused(pools.run, target, Loading(saved.path), *names)


@pytest.mark.parametrize("setup", [Setup(2, "2"), Setup(2, "3")], ids=str)
def test_all_ranks_refuse_different_buffers_of_one_rank(
    setup: Setup, pools: Pools, tmp_path: Path
) -> None:
    path = str(tmp_path / "unlike.ckpt")
    pools.run(setup.world, partial(save_different_buffers, setup, path))
    assert_refused(pools.run, setup, Loading(path), "rank 1", "average (saved (1,), here (65,))")


@pytest.mark.long
def test_every_format_refuses_different_buffers(pools: Pools, tmp_path: Path) -> None:
    recorded = ("zero2-ds0.19", "zero3-ds0.19", "universal2", "lightning1-fp32")
    paths = [str(unpack(name, tmp_path / name).checkpoint) for name in recorded]
    weights = Net(0, hidden=5).state_dict()
    torch.save({"state_dict": weights}, tmp_path / "single.ckpt")
    write_dcp(tmp_path / "sharded", weights)
    paths += [str(tmp_path / "single.ckpt"), str(tmp_path / "sharded")]
    target = Setup(2, "2", hidden=5, buffers="reshaped")
    for path, refused in zip(paths, refused_all(pools, target, paths), strict=True):
        assert refused.error == "CheckpointMismatchError", (path, refused)
        listed = (
            "buffers of different shapes: average (saved (5,), here (1,)), "
            "seen (saved (), here (2, 2))"
        )
        assert listed in refused.message, refused.message


@pytest.mark.essential
def test_full_weights_that_cannot_be_written(pools: Pools) -> None:
    """A failed write is raised on all ranks. Weights that the model lacks are named."""
    setup = Setup(2, "3")
    for rank, (error, taken, messages) in enumerate(
        pools.run(2, partial(write_full_weights, setup))
    ):
        assert "RanksError: step 'write a weight' failed on rank 1 of 2" in error
        assert taken == ["frozen.weight"]
        found = [line for line in messages if "other shapes: average, lost, frozen.bias" in line]
        assert len(found) == (rank == 0), messages
