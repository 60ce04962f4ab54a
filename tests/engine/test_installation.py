"""Stale locks of killed builds of DeepSpeed's operators are reported, and not waited for.

Since torch 2.14 a killed build leaves no lock that blocks, but each build leaves a file.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from lightning_elastic_zero.engine import installation
from lightning_elastic_zero.errors import UnsupportedError
from tests.support.launch import Job, run_ranks
from tests.support.ranks import ForkServer

SHARED_MEMORY, FILES = "deepspeed_shm_comm", "async_io"
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}


leaves_locks = pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="the system releases the lock of a killed build"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return torch's folder of operators, with the locks of two killed builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in (SHARED_MEMORY, FILES):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    return tmp_path


def start_deepspeed(folder: Path | None, job: Job) -> None:
    """Run the strategy's setup, DeepSpeed's initialization, and a collective."""
    job.set_environment()
    if folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    import deepspeed

    installation.report_abandoned_builds({})
    installation.use_accelerator("cpu")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    number = torch.ones(1)
    deepspeed.comm.all_reduce(number)
    job.note("sum", number.item())


@pytest.mark.long
@pytest.mark.engine
def test_a_compiled_operator_is_not_reported(fork_server: ForkServer) -> None:
    """Not even at the second start, when the operator is there."""
    for _ in range(2):
        (rank,) = run_ranks(partial(start_deepspeed, None), 1, fork_server, timeout_s=60)
        assert (rank.returncode, rank.notes) == (0, {"sum": 1.0})
        assert "a lock, probably of a killed build" not in rank.stderr
        if os.environ.get("CXX") != "false":  # Most cells of the release matrix compile nothing.
            assert "continuing without" not in rank.stderr


def test_the_file_that_newer_builds_leave_is_not_a_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(folder / FILES / "lock", (0, 0))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert not installation.abandoned_builds()
    installation.report_abandoned_builds(NVME)


@leaves_locks
@pytest.mark.engine
def test_stale_locks_of_builds_are_reported_and_not_waited_for(
    folder: Path, fork_server: ForkServer
) -> None:
    ranks = run_ranks(partial(start_deepspeed, folder), 2, fork_server, timeout_s=60)
    assert [(rank.returncode, rank.notes) for rank in ranks] == [(0, {"sum": 2.0})] * 2
    for name in (SHARED_MEMORY, FILES):
        lock = folder / name / "lock"
        assert [rank.stderr.count(f"delete {lock}") for rank in ranks] == [1, 0]
        assert lock.exists()
    for rank in ranks:
        assert "continuing without DeepSpeed's shared-memory collectives" in rank.stderr


@leaves_locks
def test_a_running_build_is_waited_for(folder: Path) -> None:
    """Its lock is open in a process, or so new that a build on another machine may hold it."""
    with (folder / FILES / "lock").open():
        assert [*installation.abandoned_builds()] == [SHARED_MEMORY]
        installation.report_abandoned_builds(NVME)
    (folder / SHARED_MEMORY / "lock").unlink()
    assert [*installation.abandoned_builds()] == [FILES]
    installation.report_abandoned_builds(NVME)


@leaves_locks
def test_a_stale_lock_of_a_required_operator_is_refused(folder: Path) -> None:
    os.utime(folder / FILES / "lock", (0, 0))
    installation.report_abandoned_builds({})
    with pytest.raises(UnsupportedError, match=f"delete {folder}/{FILES}/lock"):
        installation.report_abandoned_builds(NVME)
