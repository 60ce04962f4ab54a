"""What engines need whose optimizer, or weights, are not on the device, and those of Muon's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.engine._precision import wrapper_of_0_18_4

if TYPE_CHECKING:
    from tests.engine._setup import Setup

SMALLEST_BYTES = 1024
"""The smallest tensor that DeepSpeed swaps here; usually it is a MiB."""

AIO = {"block_size": SMALLEST_BYTES}
"""How DeepSpeed reads and writes what it swaps."""


def swap_folder() -> Path:
    """Return where this process swaps to: a folder of its own."""
    return Path(tempfile.gettempdir()) / f"elastic-zero-swap-{os.getpid()}"


def offload_options(setup: Setup) -> dict[str, Any]:
    """Return what of a DeepSpeed config says where optimizer and weights are."""
    options: dict[str, Any] = {}
    if setup.offload:
        options["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": setup.pinned,
            "ratio": setup.ratio,
        }
    if setup.nvme:
        pipelined = setup.nvme == "pipelined"
        options["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(swap_folder()),
            "pin_memory": False,
            "buffer_count": 16 if pipelined else 5,
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
        }
    if setup.offloaded_weights:
        options["offload_param"] = {"device": "cpu", "pin_memory": setup.pinned}
    return options


@contextmanager
def surroundings(setup: Setup) -> Iterator[None]:
    """What a setup needs around its engine."""
    with ExitStack() as stack:
        if setup.nvme:
            stack.enter_context(_small_tensors_swapped())
        if setup.unpartitioned:
            stack.enter_context(wrapper_of_0_18_4())
        if setup.optimizer == "Muon":  # It is compiled else, which takes each process a minute.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _small_tensors_swapped() -> Iterator[None]:
    """Make DeepSpeed swap what is smaller than a MiB, and clear up what it leaves."""
    from deepspeed.runtime.swap_tensor import optimizer_utils

    least, optimizer_utils.MIN_AIO_BYTES = optimizer_utils.MIN_AIO_BYTES, SMALLEST_BYTES
    try:
        yield
    finally:
        optimizer_utils.MIN_AIO_BYTES = least
        shutil.rmtree(swap_folder(), ignore_errors=True)


def step_some_on_device(engine: Any, setup: Setup) -> None:
    """Make partial offload's second optimizer step what it would step on a device.

    On a CPU DeepSpeed cannot tell its devices apart: this is the same one by another name. On a
    card it does so by itself.
    """
    if setup.ratio < 1 and engine.device.type == "cpu":
        devices = engine.optimizer.subgroup_to_device
        devices.update(dict.fromkeys(range(int((1 - setup.ratio) * len(devices))), "cpu:0"))
