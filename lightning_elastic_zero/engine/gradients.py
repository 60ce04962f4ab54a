"""Gradients of an accumulation window that a load interrupts: those of a run that is replaced."""

from __future__ import annotations

from typing import Any

from lightning_elastic_zero.engine.deepspeed_internals import (
    discard_accumulated_ids,
    discard_boundary_ids,
    initial_micro_step,
    release_gradient_buckets,
    reset_backward_count,
)
from lightning_elastic_zero.engine.flat_buffers import live_flat_buffers
from lightning_elastic_zero.engine.releases import zero_grad
from lightning_elastic_zero.engine.support import optimizer_wrapper


def drop_gradients(engine: Any) -> None:  # noqa: ANN401 (untyped library)
    """Make the next micro-batch the first of its window, as in an engine just made."""
    optimizer, wrapper = engine.optimizer, optimizer_wrapper(engine)
    # Of the parameters, of BF16_Optimizer's fp32 copies, and ZeRO-3's count of micro-batches.
    zero_grad(optimizer)
    for parameter in engine.module.parameters():
        parameter.grad = None
    if wrapper == "DeepSpeedZeroOptimizer":
        _drop_zero_1_2(optimizer)
    elif wrapper == "DeepSpeedZeroOptimizer_Stage3":
        _drop_zero_3(optimizer)
    # With offload, gradients lie beside the masters, in memory that is kept.
    for buffer in live_flat_buffers(optimizer, wrapper):
        if buffer.master.grad is not None:
            buffer.master.grad.zero_()
    # What the engine itself counts and adds up until the next step, where its release does.
    reset_backward_count(engine)
    if hasattr(engine, "losses"):
        engine.losses = None


def drop_accumulation_window(engine: Any) -> None:  # noqa: ANN401 (untyped library)
    """Drop the gradients of a window that no step ended, and count it as one that did."""
    drop_gradients(engine)
    accumulate = engine.gradient_accumulation_steps()
    engine.micro_steps -= engine.micro_steps % accumulate


def _drop_zero_1_2(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Drop what ZeRO-1/2 has accumulated: lists of gradients by group, and offloaded ones."""
    release_gradient_buckets(optimizer)
    optimizer.micro_step_id = initial_micro_step(optimizer)
    for gradients in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
        for group in gradients:
            gradients[group] = None
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        for gradient in optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()
        discard_accumulated_ids(optimizer)


def _drop_zero_3(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Drop what ZeRO-3 has accumulated: this rank's pieces, of which a step is handed views."""
    optimizer.averaged_gradients = {}
    if optimizer.grad_partitions_flat_buffer is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
    discard_boundary_ids(optimizer)
