"""Dropping the gradients of an interrupted accumulation window."""

from __future__ import annotations

from typing import Any

from lightning_elastic_zero.engine.buffers import live_flat_buffers
from lightning_elastic_zero.engine.deepspeed import (
    discard_accumulated_ids,
    discard_boundary_ids,
    initial_micro_step,
    release_gradient_buckets,
    reset_backward_count,
    zero_grad,
)
from lightning_elastic_zero.engine.support import optimizer_wrapper


def drop_gradients(engine: Any) -> None:
    """Make the next micro-batch the first of its window, as in a new engine."""
    optimizer, wrapper = engine.optimizer, optimizer_wrapper(engine)
    # Of the parameters, of BF16_Optimizer's fp32 copies, and ZeRO-3's count of micro-batches.
    zero_grad(optimizer)
    for parameter in engine.module.parameters():
        parameter.grad = None
    if wrapper == "DeepSpeedZeroOptimizer":
        _drop_zero_1_2(optimizer)
    elif wrapper == "DeepSpeedZeroOptimizer_Stage3":
        _drop_zero_3(optimizer)
    # With offload, the masters have gradients in reused memory.
    for buffer in live_flat_buffers(optimizer, wrapper):
        if buffer.master.grad is not None:
            buffer.master.grad.zero_()
    # Counters and sums of the engine until the next step, in the releases that have them.
    reset_backward_count(engine)
    if hasattr(engine, "losses"):
        engine.losses = None


def drop_accumulation_window(engine: Any) -> None:
    """Drop the gradients of an incomplete window and count it as complete."""
    drop_gradients(engine)
    accumulate = engine.gradient_accumulation_steps()
    engine.micro_steps -= engine.micro_steps % accumulate


def _drop_zero_1_2(optimizer: Any) -> None:
    """Drop ZeRO-1/2's accumulated gradients: lists by group, and offloaded ones."""
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


def _drop_zero_3(optimizer: Any) -> None:
    """Drop ZeRO-3's accumulated gradients: this rank's pieces, which a step views."""
    optimizer.averaged_gradients = {}
    if optimizer.grad_partitions_flat_buffer is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
    discard_boundary_ids(optimizer)
