"""What ranks whose optimizer is in files (offload to NVMe) count of what a save or load costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from tests.budget._budget_ranks import PeakMemory
from tests.support.engines import swap_folder

WIDTH = 1024
SUB_GROUP_BYTES = WIDTH * WIDTH * 12
"""fp32 masters and Adam's two moments of one layer, which is a sub-group: 12.6 MB."""


def with_sub_groups(layers: int) -> nn.Module:
    """Make a model of square layers without biases, each of which fills a sub-group."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


@contextmanager
def swapped_engine(layers: int) -> Iterator[Any]:
    """Make an engine all of whose sub-groups are in files, and leave no file of them."""
    import deepspeed

    # Which fills all memory that is asked for, as if it were used: see support/fork_server.py.
    torch.use_deterministic_algorithms(mode=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": WIDTH * WIDTH // distributed.get_world_size(),
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(swap_folder()),
                "pin_memory": False,
                "buffer_count": 4,
            },
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    module = with_sub_groups(layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        yield engine
    finally:
        shutil.rmtree(swap_folder(), ignore_errors=True)


def step(engine: Any) -> None:
    """Take a step, after which all that was trained is in files."""
    engine.backward(engine(torch.randn(1, WIDTH)).pow(2).mean())
    engine.step()
    flats = engine.optimizer.fp32_partitioned_groups_flat
    assert len(flats) == len(list(engine.module.parameters()))
    assert not any(flat.numel() for flat in flats)


def resident_bytes(name: str) -> int:
    """Return a line of what the operating system says of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


def measured(work: Callable[[], object]) -> dict[str, int]:
    """Do work; return its peaks in bytes: of anonymous memory, and of all that is resident.

    The second has the pages of mapped files, too, which the system takes back when it wants to.
    """
    Path("/proc/self/clear_refs").write_text("5")  # The high-water mark begins anew.
    resident = resident_bytes("VmRSS")
    with PeakMemory() as peak:
        work()
    return {
        "anonymous": peak.highest - peak.before,
        "resident": resident_bytes("VmHWM") - resident,
    }


def save(layers: int, path: str) -> dict[str, int]:
    """Train a step and save, twice; return what the second save took of memory."""
    from lightning_elastic_zero.api import save_checkpoint

    with swapped_engine(layers) as engine:
        step(engine)
        save_checkpoint(engine, path)
        return measured(lambda: save_checkpoint(engine, path))


def load(layers: int, path: str, *, steps_before: int) -> dict[str, int]:
    """Load into a fresh engine, or one that has trained; return what that took of memory."""
    from lightning_elastic_zero.api import load_checkpoint

    with swapped_engine(layers) as engine:
        for _ in range(steps_before):
            step(engine)
        found = measured(lambda: load_checkpoint(engine, path))
        step(engine)
    return found
