"""Fabric saves and loads elastic checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_elastic_zero.formats.open import open_checkpoint
from tests.support.nodes import Nodes, needs_mounts
from tests.support.ranks import ForkServer, Pools

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations._fabric_programs import (
    FabricCase,
    accumulated,
    accumulation_failure,
    are_freed,
    cut_failure,
    failure_of,
    run_fabric,
    save_two_engines,
    whole_batches,
)
from tests.integrations._hf_programs import GLOBAL_BATCH

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("stage", "world"),
    [(3, 3), (1, 3), (2, 1), (2, 3), (3, 1)],
)
def test_a_loop_continues_on_other_counts(
    stage: int, world: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """State is equal bit for bit; entries are restored in place, others are returned."""
    path = str(tmp_path / "saved")
    saved, *_ = hf_ranks.run(2, partial(run_fabric, FabricCase(stage, save=path, steps=5)))[0]
    assert open_checkpoint(Path(path)).manifest.progress.global_batch_size == GLOBAL_BATCH
    longer, *_ = hf_ranks.run(2, partial(run_fabric, FabricCase(stage, steps=9)))[0]
    case = FabricCase(stage, by_name=world == 1, load=path, steps=9)
    run, kept, unused = hf_ranks.run(world, partial(run_fabric, case))[0]
    for name, tensor in saved.states[-1].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert kept == {"step": 9, "last_epoch": 9, "mean": 5.0}
    assert ["metrics in state['lost']: call" in each["warning"] for each in saved.log] == [True]
    assert unused == {"extra": {"note": "mine"}}
    assert " at step 5: " in run.shown  # Fabric's engine does not know the samples of a step
    assert ["no entry 'unsaved'" in warning for warning in run.warnings] == [True]
    for step in (6, 9):  # of the second epoch and of the third
        assert run.samples[step] == longer.samples[step]
        assert abs(run.losses[step] - longer.losses[step]) < 2e-6


@pytest.mark.long
def test_a_loop_continues_after_a_node_is_lost(
    hf_ranks: Pools, fork_server: ForkServer, tmp_path: Path
) -> None:
    needs_mounts()
    nodes, options = Nodes(tmp_path, fork_server), {"node_copies": 2, "async_save": True}
    case = FabricCase(3, save=f"{nodes.url}/step-5", steps=5, options=options)
    with nodes.world(0, 1) as run:
        saved, *_ = run(partial(run_fabric, case))[0]
    nodes.lose(0)
    with nodes.world(2, 1, 3) as run:
        of_url = FabricCase(3, load=case.save, steps=6)
        resumed, kept, _ = run(partial(run_fabric, of_url))[0]
    for name, tensor in saved.states[-1].items():
        assert torch.equal(resumed.first_state[name], tensor), name
    assert kept["step"] == 6


@pytest.mark.long
def test_a_loop_saves_into_a_store(hf_ranks: Pools) -> None:
    case = FabricCase(3, save="memory://bucket/step-5", steps=5)
    saved, *_ = hf_ranks.run(1, partial(run_fabric, case))[0]
    resumed, *_ = hf_ranks.run(1, partial(run_fabric, FabricCase(3, load=case.save, steps=6)))[0]
    for name, tensor in saved.states[-1].items():
        assert torch.equal(resumed.first_state[name], tensor), name


@pytest.mark.parametrize("accumulate", range(1, 7))
@pytest.mark.parametrize("stage", [1, 2, 3, 0])
def test_accumulated_gradients_are_the_mean(stage: int, accumulate: int, hf_ranks: Pools) -> None:
    """Of all samples of a step, before they are clipped."""
    found = hf_ranks.run(2, partial(accumulated, stage, accumulate))[0]
    for name, weight in whole_batches().items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(
    ("stage", "more", "words"),
    [
        (1, {"counted": 1, "steps_each": False}, "called twice without optimizer.step()"),
        (2, {"counted": 1, "steps_each": False}, "called twice without optimizer.step()"),
        (0, {"steps_each": False}, "called twice without optimizer.step()"),
        (3, {"steps_each": False}, "called twice without optimizer.step()"),
        (0, {"clears": True}, "zero_grad() was called after micro-batch 1 of 3"),
        (1, {"clears": True}, "zero_grad() was called after micro-batch 1 of 3"),
        (3, {"clears": True}, "zero_grad() was called after micro-batch 1 of 3"),
    ],
)
def test_a_loop_that_would_lose_gradients_is_refused(
    stage: int, more: dict[str, Any], words: str, hf_ranks: Pools
) -> None:
    """On all ranks, before the backward pass."""
    for failure in hf_ranks.run(2, partial(accumulation_failure, stage, **more)):
        assert failure.startswith("UnsupportedError")
        assert words in failure


@pytest.mark.long
def test_tensor_parallelism_is_refused(hf_ranks: Pools) -> None:
    for failure in hf_ranks.run(2, cut_failure):
        assert "tensor_parallel.autotp_size = 2: tensor parallelism, which" in failure


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"clears": True}),
        (3, {"counted": 1, "steps_each": False, "divided": True}),
        (2, {"steps_each": False, "marked": True}),
    ],
)
def test_a_loop_that_loses_nothing_is_accepted(
    stage: int, more: dict[str, Any], hf_ranks: Pools
) -> None:
    """ZeRO-2 has moved the gradients when they are cleared; ZeRO-3 adds up those of two passes.

    A loop may mark the last micro-batch itself.
    """
    found = hf_ranks.run(2, partial(accumulated, stage, 3, **more))[0]
    for name, weight in whole_batches().items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


@pytest.mark.long
def test_a_background_save_and_an_older_checkpoint_are_loaded(
    hf_ranks: Pools, tmp_path: Path
) -> None:
    """``async_save`` and ``fallback`` are options like under Lightning."""
    paths = [str(tmp_path / f"step_{steps}.ckpt") for steps in (2, 3)]
    for steps, path in zip((2, 3), paths, strict=True):
        case = FabricCase(2, save=path, steps=steps, options={"async_save": True})
        hf_ranks.run(2, partial(run_fabric, case))
    shard = next(Path(paths[1]).rglob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-1])
    case = FabricCase(2, load=paths[1], steps=3, options={"fallback": True})
    run, kept, _ = hf_ranks.run(3, partial(run_fabric, case))[0]
    assert kept["step"] == 3
    assert sorted(run.losses) == [3]
    assert f"{paths[0]} (step 2) is loaded instead" in run.warnings[0]


@pytest.mark.long
@pytest.mark.parametrize("bound", [False, True])
def test_an_engine_that_is_not_used_is_freed(bound: bool, hf_ranks: Pools) -> None:
    """As with Fabric's own strategy, which keeps the last engine."""
    assert hf_ranks.run(2, partial(are_freed, bound=bound))[0] == [True, False]


@pytest.mark.long
@pytest.mark.parametrize("direct", [False, True])
def test_a_wait_is_for_all_engines(direct: bool, hf_ranks: Pools, tmp_path: Path) -> None:
    """Each saves into a folder of its own."""
    save = partial(save_two_engines, str(tmp_path), direct=direct)
    assert hf_ranks.run(2, save)[0] == [True, True]


STAGES = [
    pytest.param(stage, world, id=f"{stage}-{world}") for stage in (1, 2, 3) for world in (2, 3)
]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "world"), STAGES)
def test_fabrics_own_strategy_fails_on_our_folders(
    stage: int, world: int, hf_ranks: Pools, tmp_path: Path
) -> None:
    """A script without the line never trains on fresh weights."""
    path = str(tmp_path / "saved")
    hf_ranks.run(2, partial(run_fabric, FabricCase(stage, save=path, steps=1)))
    case = FabricCase(stage, load=path, bound=False)
    assert all(hf_ranks.run(world, partial(failure_of, case)))


@pytest.mark.long
def test_a_folder_that_fabric_saved_over_is_refused(hf_ranks: Pools, tmp_path: Path) -> None:
    """Even with ``fallback``, which must not choose an older checkpoint."""
    path = str(tmp_path / "saved")
    hf_ranks.run(2, partial(run_fabric, FabricCase(2, save=str(tmp_path / "older"), steps=1)))
    hf_ranks.run(2, partial(run_fabric, FabricCase(2, save=path, steps=1)))
    hf_ranks.run(2, partial(run_fabric, FabricCase(2, save=path, steps=2, bound=False)))
    case = FabricCase(2, load=path, options={"fallback": True})
    for failure in hf_ranks.run(2, partial(failure_of, case)):
        assert "CheckpointFormatError" in failure
        assert "to load them, move manifest.json" in failure
    (tmp_path / "saved" / "manifest.json").rename(tmp_path / "manifest.json")
    run, kept, _ = hf_ranks.run(2, partial(run_fabric, FabricCase(2, load=path, steps=2)))[0]
    assert kept["step"] == 2
    assert run.losses == {}


@pytest.mark.long
def test_fallback_takes_the_intact_checkpoint_before(hf_ranks: Pools, tmp_path: Path) -> None:
    """As under Lightning, with a warning."""
    options = {"fallback": True}
    states = {}
    for steps in (1, 2):
        case = FabricCase(2, save=str(tmp_path / str(steps)), steps=steps, options=options)
        states[steps], *_ = hf_ranks.run(2, partial(run_fabric, case))[0]
    shard = next((tmp_path / "2").rglob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-1])
    case = FabricCase(2, load=str(tmp_path / "2"), options=options)
    run, *_ = hf_ranks.run(3, partial(run_fabric, case))[0]
    for name, tensor in states[1].states[-1].items():
        assert torch.equal(run.first_state[name], tensor), name
    assert any("fallback=True" in warning for warning in run.warnings)
