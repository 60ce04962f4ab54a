"""The model of the benchmarks, its engines, and the processes of its ranks."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

BYTES_PER_PARAMETER = 12  # fp32 master and Adam's two moments
LAYERS = 8

NO_ROOM = "no background save: this machine lacks memory for a copy; choose a smaller model"


class Mlp(nn.Module):
    """Square layers: all state is in matrices, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


def width_of(parameters: float) -> int:
    """Return the width with which ``Mlp`` has about this many parameters."""
    return int((parameters / LAYERS) ** 0.5)


def state_bytes(width: int) -> int:
    """Return the size in bytes of the masters and moments of all ranks."""
    return LAYERS * (width**2 + width) * BYTES_PER_PARAMETER


def make_engine(stage: int, width: int, precision: str = "fp32", *, universal: bool = False) -> Any:
    """Return an engine with Adam; ``universal``: one that loads Universal Checkpoints."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "checkpoint": {"load_universal": universal},
    }
    module = Mlp(width)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def train_step(engine: Any, width: int) -> None:
    """Take one step, which creates the state of the optimizer."""
    dtype = next(engine.module.parameters()).dtype
    batch = torch.randn(1, width).to(engine.device, dtype)
    engine.backward(engine(batch))
    engine.step()


def rank_tensors(engine: Any) -> list[torch.Tensor]:
    """Return this rank's masters and moments."""
    from lightning_elastic_zero.engine.live import LiveEngine

    state = LiveEngine(engine).rank_state(exclude_frozen=False, keep_module_weights=False)
    return [t for f in state.flats for t in (f.master, *f.elementwise.values())]


def make_fsdp(width: int, device: str, *, trained: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model under FSDP2; ``trained``: with the optimizer state of one step."""
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    model = Mlp(width).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if trained:
        model(torch.randn(1, width, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def sync_tree(folder: Path) -> None:
    """Sync this rank's share of the files of other software to the disk."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for file in sorted(p for p in folder.rglob("*") if p.is_file())[rank::ranks]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _be_rank(
    rank: int, ranks: int, port: int, device: str, out: Path, work: Callable[[], object]
) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr  # DeepSpeed prints on every rank
    from lightning_elastic_zero.engine.installation import use_accelerator

    # Without DeepSpeed's collectives in shared memory: no save or load uses them, and with them a
    # run on a busy machine did not end within minutes (for an unknown cause).
    use_accelerator(device, compiles=False)
    import deepspeed

    if device == "cuda":
        torch.cuda.set_device(rank)
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl")
    found = work()
    if rank == 0:
        out.write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def run_ranks(
    ranks: int, work: Callable[[], object], folder: Path, *, device: str, timeout_s: float
) -> Any:
    """Call ``work``, which must be picklable, on new ranks; return the result of rank 0.

    Raises:
        SystemExit: they took longer than ``timeout_s``; they are ended.
    """
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = folder / "rank-0.json"
    # Forked from one process that has imported all modules, which saves the time of imports.
    multiprocessing.set_forkserver_preload(["deepspeed", "lightning_elastic_zero.api"])
    context: Any = start_processes(
        _be_rank,
        (ranks, port, device, out, work),
        nprocs=ranks,
        join=False,
        start_method="forkserver" if device == "cpu" else "spawn",
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0)):
            if time.monotonic() > deadline:
                sys.exit(f"{ranks} ranks took more than {timeout_s:.0f} s")
    finally:
        for process in context.processes:
            process.kill()
    return json.loads(out.read_text())
