"""What a resume would read and take, computed from small files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_elastic_zero import UnsupportedError
from lightning_elastic_zero.tools.resume_plan import BatchChoice, plan_resume
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
