"""Buffers of other shapes, or of types that cannot represent the saved values, are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero import load_checkpoint
from lightning_elastic_zero.tools.view import open_view
from tests.formats._load_assertions import refused_all
from tests.support.checkpoints import Loading, Saved, assert_refused, save_different_buffers
from tests.support.engines import EngineCase, Net, engine_of
from tests.support.foreign_checkpoints import unpack
from tests.support.outcome import captured_log, error_text
from tests.support.plain_checkpoints import write_dcp
from tests.support.ranks import Pools


def write_full_weights(setup: EngineCase) -> tuple[str, list[str], list[str]]:
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
    (EngineCase(2, "2"), EngineCase(3, "3", "bf16", sub_group=700)),
    (EngineCase(3, "3", sub_group=700), EngineCase(2, "1")),
    (EngineCase(2, "B", "bf16"), EngineCase(2, "B", "bf16")),
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
    source: EngineCase,
    target: EngineCase,
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
    source: EngineCase, target: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    saved = saved_by(replace(source, buffers="reshaped"))
    names = ("average (saved (1,), here (65,))", "seen (saved (2, 2), here ())")
    assert_refused(pools.run, target, Loading(saved.path), *names)


@pytest.mark.parametrize("setup", [EngineCase(2, "2"), EngineCase(2, "3")], ids=str)
def test_all_ranks_refuse_different_buffers_of_one_rank(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    path = str(tmp_path / "unlike.ckpt")
    pools.run(setup.world, partial(save_different_buffers, setup, path))
    assert_refused(pools.run, setup, Loading(path), "rank 1", "average (saved (1,), here (65,))")


def load_into_adapting_module(
    setup: EngineCase, path: str, *, registered: bool
) -> tuple[str, list[torch.Tensor]]:
    """Load into a module whose hook creates its buffers in the saved shapes."""

    def adapt(module: torch.nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        assert "a.weight" not in state
        for name in ("average", "seen"):
            module.register_buffer(name, torch.empty_like(state[name]))

    with engine_of(setup, 7) as engine:
        module = engine.module
        if not registered:  # As register_buffer("average", None) does.
            module.average = module.seen = None
        module.register_load_state_dict_pre_hook(adapt)
        before = [[*b.shape] for b in module.buffers()]
        error = error_text(lambda: load_checkpoint(engine, path))
        assert not error or [[*b.shape] for b in module.buffers()] == before
        return error, [module.average, module.seen]


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(("source", "target"), RUNS, ids=str)
def test_a_hook_of_the_module_creates_buffers_in_the_saved_shapes(
    source: EngineCase,
    target: EngineCase,
    registered: bool,
    pools: Pools,
    saved_by: Callable[..., Saved],
) -> None:
    """They get the saved values; if the load is refused, nothing changes."""
    path = saved_by(source).path
    with open_view(path) as saved:
        wanted = [saved.buffers[name] for name in ("average", "seen")]
    other = replace(target, buffers="reshaped")
    load = partial(load_into_adapting_module, path=path, registered=registered)
    for rank, (error, found) in enumerate(pools.run(target.world, partial(load, other))):
        assert not error
        assert [b.shape for b in found] == [b.shape for b in wanted]
        # On the same number of devices, each rank gets its own.
        assert rank or all(map(torch.equal, found, wanted))
    for error, _ in pools.run(target.world, partial(load, replace(other, hidden=64))):
        assert "a.weight" in error
        assert "average" not in error


@pytest.mark.long
def test_every_format_refuses_different_buffers(pools: Pools, tmp_path: Path) -> None:
    recorded = ("zero2-ds0.19", "zero3-ds0.19", "universal2", "lightning1-fp32")
    paths = [str(unpack(name, tmp_path / name).checkpoint) for name in recorded]
    weights = Net(0, hidden=5).state_dict()
    torch.save({"state_dict": weights}, tmp_path / "single.ckpt")
    write_dcp(tmp_path / "sharded", weights)
    paths += [str(tmp_path / "single.ckpt"), str(tmp_path / "sharded")]
    target = EngineCase(2, "2", hidden=5, buffers="reshaped")
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
    setup = EngineCase(2, "3")
    for rank, (error, taken, messages) in enumerate(
        pools.run(2, partial(write_full_weights, setup))
    ):
        assert "RanksError: step 'write a weight' failed on rank 1 of 2" in error
        assert taken == ["frozen.weight"]
        found = [line for line in messages if "other shapes: average, lost, frozen.bias" in line]
        assert len(found) == (rank == 0), messages
