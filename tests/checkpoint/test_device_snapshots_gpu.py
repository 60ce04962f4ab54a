"""Contexts, threads and copies on CUDA; engines on GPUs are in ``tests/engine/test_devices.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.checkpoint import streams as device_streams
from lightning_elastic_zero.formats.client_state import host_pickle, split_objects
from tests.support.ranks import ROOT, environment

pytestmark = pytest.mark.gpu

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA devices")


def run_case(case: str, device: str, folder: Path) -> None:
    """Run a case in its own process, which has no other context."""
    program = "tests.checkpoint._device_snapshot_programs"
    done = subprocess.run(
        [sys.executable, "-m", program, case, device, str(folder)],
        cwd=ROOT,
        env=environment("cuda"),
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("case", ["copies", "offload"])
def test_a_snapshot_is_unaffected_by_later_training_and_frees(case: str, tmp_path: Path) -> None:
    run_case(case, "cuda:0", tmp_path)


@two_devices
@pytest.mark.parametrize("case", ["write", "scalars"])
def test_device_0_gets_no_context(case: str, tmp_path: Path) -> None:
    run_case(case, "cuda:1", tmp_path)


def test_on_stream_restores_device_and_stream() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    before = torch.accelerator.current_stream()
    stream = device_streams.side_stream(last)
    with device_streams.on_stream(stream):
        assert device_streams.current_device() == last
        assert torch.accelerator.current_stream() == stream
        ones = torch.ones(1000, device=last)
        event = device_streams.record_event(last)
    event.synchronize()
    assert torch.accelerator.current_stream() == before
    assert torch.accelerator.current_stream(last) != stream
    assert float(ones.sum()) == 1000


def test_client_state_on_a_device_is_written_as_on_the_host() -> None:
    held = torch.ones(3, device="cuda")
    parameter = torch.nn.Parameter(held.clone())
    plain = split_objects({"a": held, "b": [parameter]}).plain
    assert plain["a"].device.type == plain["b"][0].device.type == "cpu"
    assert type(plain["b"][0]) is torch.nn.Parameter
    assert b"cuda" not in host_pickle([held, parameter])
