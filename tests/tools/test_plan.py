"""What a resume would read and take, computed from small files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.tools.inspection import BatchChoice, plan_resume
from tests.engine._setup import Setup, engine_of, inner_of, train
from tests.engine._worker_pool import Pools
from tests.tools._checkpoints import make_state, manifest_of, rank_state, write_elastic

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_a_ranks_part(stage: int, devices: int, tmp_path: Path) -> None:
    """It is what a rank of that layout holds; frozen weights are whole on each below ZeRO-3."""
    state = make_state()
    plan = plan_resume(write_elastic(tmp_path / "a.ckpt", state, 2, 2), devices, stage)
    manifest = manifest_of(state, stage, devices)
    held = [sum(f.stop - f.start for f in manifest.layout().on_rank(r)) for r in range(devices)]
    largest = max(held)
    # A rank may have padding besides, of an element for each parameter or group at most.
    assert 0 <= plan.state_bytes_per_rank - largest * 12 < 12 * len(state.masters)
    frozen = 12 * 2
    whole = sum(held) * 12 + frozen * (1 if stage == 3 else devices)
    assert plan.read_bytes == whole
    mine = rank_state(state, manifest, 0).frozen["frozen.weight"].nbytes
    assert plan.read_bytes_per_rank - plan.state_bytes_per_rank == mine
    assert plan.is_possible


def test_batches_and_obstacles(tmp_path: Path, run: Run) -> None:
    """The same global batch is taken in each way that is even; where there is none, it is said."""
    path = write_elastic(tmp_path / "a.ckpt", make_state())
    assert plan_resume(path, 2, 2).batches == (
        BatchChoice(6, 1),
        BatchChoice(3, 2),
        BatchChoice(2, 3),
        BatchChoice(1, 6),
    )
    plan = plan_resume(path, 5, 3)
    assert plan.batches == ()
    assert "1, 2, 3, 4, 6 can" in plan.obstacles[0]
    code, out, _ = run("plan", path, "--devices", "5", "--stage", "3")
    assert code == 1
    assert "5 devices cannot share a global batch of 12" in out
    code, out, _ = run("plan", path, "--devices", "4", "--stage", "3")
    assert code == 0
    assert "1 x 3, 3 x 1" in out
    with pytest.raises(UnsupportedError):
        plan_resume(path, 0, 3)
    assert run("plan", path, "--devices", "4", "--stage", "4")[0] == 2


PADDING_BYTES = 512
"""The most that DeepSpeed's buffers have besides here: a few elements for each of them."""

FLAT_BUFFERS = (
    "bit16_groups_flat",
    "single_partition_of_fp32_groups",
    "fp16_partitioned_groups_flat",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat",
    "fp16_groups_flat",
    "fp32_groups",
    "fp16_groups",
)
"""Where DeepSpeed's wrappers keep weights and masters."""


def saved_and_held(setup: Setup, path: str) -> int:
    """Train a step and save; return the bytes of weights, masters and states in the engine."""
    from lightning_elastic_zero.api import save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 1)
        save_checkpoint(engine, path, {})
        kept = [getattr(engine.optimizer, name, []) for name in FLAT_BUFFERS]
        states = inner_of(engine).state.values()
        moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
        weights = [getattr(p, "ds_tensor", p.data) for p in engine.module.parameters()]
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tree_leaves([kept, moments, weights])
            if torch.is_tensor(tensor) and tensor.dim() and hasattr(tensor, "untyped_storage")
            if not hasattr(tensor, "ds_tensor")
        }
        return sum(storages.values())


@pytest.mark.engine
@pytest.mark.cases(2)
@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_is_what_an_engine_takes(
    zero: str, precision: str, pools: Pools, tmp_path: Path
) -> None:
    """Masters that are the weights themselves count once, copies of them twice, as in memory."""
    setup = Setup(1, zero, precision)
    (held,) = pools.run(1, partial(saved_and_held, setup, str(tmp_path / "a.ckpt")))
    plan = plan_resume(tmp_path / "a.ckpt", 1, setup.stage)
    beyond = held - plan.state_bytes_per_rank - plan.weight_bytes_per_rank
    assert 0 <= beyond < PADDING_BYTES


@pytest.mark.parametrize("devices", [1, 3])
def test_in_stage_0_each_rank_reads_all(devices: int, tmp_path: Path) -> None:
    """Nothing is cut there: a rank takes what one device alone takes in ZeRO-1."""
    path = write_elastic(tmp_path / "a.ckpt", make_state(), 2, 2)
    plan, alone = plan_resume(path, devices, 0), plan_resume(path, 1, 1)
    assert plan.read_bytes_per_rank == alone.read_bytes_per_rank
    assert plan.state_bytes_per_rank == alone.state_bytes_per_rank
    assert plan.read_bytes == devices * alone.read_bytes


def test_a_cut_file_stands_in_the_way(tmp_path: Path) -> None:
    """Sizes are as cheap to look at as names."""
    path = write_elastic(tmp_path / "a.ckpt", make_state(), 2, 2)
    assert plan_resume(path, 1, 3).is_possible
    shard = next(path.rglob("*_optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-100])
    (said,) = plan_resume(path, 1, 3).obstacles
    assert shard.name in said
    shard.unlink()
    (said,) = plan_resume(path, 1, 3).obstacles
    assert shard.name in said
