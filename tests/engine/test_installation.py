"""The locks that killed builds of DeepSpeed's operators leave are told of, and not waited for."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from lightning_elastic_zero.engine import support as installation
from lightning_elastic_zero.errors import UnsupportedError
from tests.support.launch import Job, run_ranks
from tests.support.ranks import ForkServer

SHARED_MEMORY, FILES = "deepspeed_shm_comm", "async_io"
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where torch builds operators, with the locks of two that were killed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in (SHARED_MEMORY, FILES):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    return tmp_path


def start_deepspeed(folder: Path, job: Job) -> None:
    """Do what a strategy does at setup, then DeepSpeed's part, and a collective."""
    rank, world = str(job.rank), str(job.world_size)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update(here, TORCH_EXTENSIONS_DIR=str(folder))
    import deepspeed
    import torch

    installation.report_abandoned_builds({})
    installation.use_accelerator("cpu")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    number = torch.ones(1)
    deepspeed.comm.all_reduce(number)
    job.note("sum", number.item())


@pytest.mark.engine
def test_ranks_start_beside_the_lock_of_a_killed_build(
    folder: Path, fork_server: ForkServer
) -> None:
    """They do without what gloo does as well, and one of them names each lock, and what helps."""
    ranks = run_ranks(partial(start_deepspeed, folder), 2, fork_server, timeout_s=60)
    assert [(rank.returncode, rank.notes) for rank in ranks] == [(0, {"sum": 2.0})] * 2
    for name in (SHARED_MEMORY, FILES):
        lock = folder / name / "lock"
        assert [rank.stderr.count(f"delete {lock}") for rank in ranks] == [1, 0]
        assert lock.exists()
    for rank in ranks:
        assert "continuing without DeepSpeed's shared-memory collectives" in rank.stderr


def test_a_build_that_goes_on_is_waited_for(folder: Path) -> None:
    """Its lock is open in a process; so may one be that was just made elsewhere."""
    with (folder / FILES / "lock").open():
        assert [*installation.abandoned_builds()] == [SHARED_MEMORY]
        installation.report_abandoned_builds(NVME)
    (folder / SHARED_MEMORY / "lock").unlink()
    assert [*installation.abandoned_builds()] == [FILES]
    installation.report_abandoned_builds(NVME)


def test_an_old_lock_of_what_is_needed_is_refused(folder: Path) -> None:
    """Nothing else takes the operator's place: a run would wait for it without end."""
    os.utime(folder / FILES / "lock", (0, 0))
    installation.report_abandoned_builds({})
    with pytest.raises(UnsupportedError, match=f"delete {folder}/{FILES}/lock"):
        installation.report_abandoned_builds(NVME)
