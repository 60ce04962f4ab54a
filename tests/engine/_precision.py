"""fp16 on CPU ranks, another release's wrapper, and what DeepSpeed keeps for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Make DeepSpeed build engines in fp16 on processors that have no instructions for it.

    It asks whether oneDNN has some, and refuses; torch computes in fp16 all the same.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    before = get_accelerator()
    if before.device_name() != "cpu" or before.is_fp16_supported():
        yield
        return
    half_on_cpu = CPU_Accelerator()
    half_on_cpu.is_fp16_supported = lambda: True
    set_accelerator(half_on_cpu)
    try:
        yield
    finally:
        set_accelerator(before)


def forget_autocast() -> None:
    """Undo ``torch_autocast``, which DeepSpeed keeps for the process, for all later engines."""
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None


@contextmanager
def wrapper_of_0_18_4() -> Iterator[None]:
    """Make DeepSpeed take stage 0's wrapper for ZeRO-1 in bf16 with fp32 gradients, as 0.18.4 does.

    It has one name for two kinds, by which it chooses: nothing is partitioned then.
    """
    from deepspeed.runtime import engine

    if engine.DDP_BFLOAT16 == engine.BFLOAT16:  # So it is, or another such engine is alive.
        yield
        return
    before, kind = engine.DDP_BFLOAT16, engine.FP16_UnfusedOptimizer
    engine.DDP_BFLOAT16 = engine.BFLOAT16
    # Later releases call it where windows end.
    kind.set_gradient_accumulation_boundary = lambda _, __: None
    try:
        yield
    finally:
        engine.DDP_BFLOAT16 = before
        del kind.set_gradient_accumulation_boundary
