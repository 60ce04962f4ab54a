"""What needs real GPUs: contexts, threads and copies on CUDA, and saves on two of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_elastic_zero.checkpoint import device_streams
from lightning_elastic_zero.formats.elastic.client_state import host_pickle, split_objects
from tests.core.test_device_snapshots import run_case
from tests.engine._worker_pool import ROOT
from tests.ports import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA devices")
TIMEOUT_S = 250


@pytest.mark.parametrize("case", ["copies", "offload"])
def test_copies_behind_training(case: str, tmp_path: Path) -> None:
    """What a snapshot holds is what was there, also where memory is given back meanwhile."""
    run_case(case, "cuda:0", tmp_path)


@two_devices
@pytest.mark.parametrize("case", ["write", "scalars"])
def test_a_rank_of_the_second_device(case: str, tmp_path: Path) -> None:
    """Nothing makes a context on device 0, and scalars of two devices are alike."""
    run_case(case, "cuda:1", tmp_path)


def test_work_goes_to_a_stream_of_its_device_and_back() -> None:
    """Device and stream are those from before, whatever was done in between."""
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


def test_no_device_goes_into_a_file() -> None:
    """Client state is written as on the host, objects too."""
    held = torch.ones(3, device="cuda")
    parameter = torch.nn.Parameter(held.clone())
    plain = split_objects({"a": held, "b": [parameter]}).plain
    assert plain["a"].device.type == plain["b"][0].device.type == "cpu"
    assert type(plain["b"][0]) is torch.nn.Parameter
    assert b"cuda" not in host_pickle([held, parameter])


PROGRAM = """
import os, sys, deepspeed, torch
from lightning_elastic_zero import load_checkpoint, save_checkpoint
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
deepspeed.init_distributed("nccl")
kinds = {
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "capturable": lambda ps: torch.optim.AdamW(ps, capturable=True),
    "ASGD": lambda ps: torch.optim.ASGD(ps),
}

def engine_of(kind, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 4)
    zero = {"stage": int(sys.argv[2])}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero,
              "zero_allow_untested_optimizer": True}
    optimizer = kinds[kind](model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

def step(engine):
    loss = engine(torch.ones(2, 8, device=engine.device)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return float(loss)

for kind in kinds:
    path = f"{sys.argv[1]}/{kind}.ckpt"
    engine = engine_of(kind, 1)
    step(engine)
    step(engine)
    save_checkpoint(engine, path)
    wanted = [step(engine) for _ in range(2)]
    engine.destroy()
    engine = engine_of(kind, 2)
    load_checkpoint(engine, path)
    found = [step(engine) for _ in range(2)]
    engine.destroy()
    assert found == wanted, (kind, wanted, found)
torch.distributed.barrier()
print("went on")
"""


@two_devices
@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_with_scalars_on_the_device(stage: int, tmp_path: Path) -> None:
    """Fused, capturable and averaged optimizers are saved on two GPUs, and go on bit for bit."""
    common = {
        **os.environ,
        "DS_ACCELERATOR": "cuda",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(stage)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ["went on" in text for text in said] == [True, True], "\n".join(said)
