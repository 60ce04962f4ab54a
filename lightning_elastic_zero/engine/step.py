"""Hooks before an optimizer step, and gradients of an interrupted accumulation window."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lightning_elastic_zero.engine.buffers import inner_optimizer, live_flat_buffers
from lightning_elastic_zero.engine.deepspeed import (
    discard_accumulated_ids,
    discard_boundary_ids,
    initial_micro_step,
    release_gradient_buckets,
    reset_backward_count,
    zero_grad,
)
from lightning_elastic_zero.engine.support import optimizer_wrapper
from lightning_elastic_zero.errors import UnsupportedError


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


_waiting: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
"""Callbacks to run before the state of an engine changes."""


def before_change(engine: Any) -> None:
    """Run an engine's registered callbacks before its state is changed outside a step."""
    for call in tuple(_waiting.get(engine, ())):
        call()


def add_step_pre_hook(engine: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Run a callback right before the optimizer changes its state.

    DeepSpeed's wrappers call ``step`` of the wrapped optimizer, ZeRO-3 once per sub-group, only at
    the end of a window of micro-batches and without a gradient overflow. Returns a function that
    removes the hook. Raises UnsupportedError if the wrapped optimizer is not a
    ``torch.optim.Optimizer``.
    """
    if not optimizer_wrapper(engine):  # nothing steps
        return lambda: None
    inner = inner_optimizer(engine.optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        msg = f"{type(inner).__name__} is not a torch.optim.Optimizer: save without async_save"
        raise UnsupportedError(msg)
    # With partial offload, a second optimizer steps the first sub-groups before the wrapped one.
    stepping = [inner, *filter(None, [getattr(engine.optimizer, "backup_optimizer", None)])]
    handles = [each.register_step_pre_hook(lambda *_: call()) for each in stepping]
    waiting = _waiting.setdefault(engine, [])
    waiting.append(call)

    def remove() -> None:
        waiting.remove(call)
        for handle in handles:
            handle.remove()

    return remove


def updates_state_before_step(engine: Any) -> bool:
    """Whether DeepSpeed changes optimizer state before it calls the optimizer's step.

    It does with Muon: it updates the momentum when gradients are complete and passes the result to
    the optimizer as the gradient. Since 0.19.8 this happens in ``step``, in ZeRO-3 and
    BF16_Optimizer; otherwise it happens in backward. Other wrappers that change state themselves
    (SuperOffload, ZenFlow, 1-bit optimizers) are not supported.
    """
    if not optimizer_wrapper(engine):
        return False
    return any(group.get("use_muon") for group in inner_optimizer(engine.optimizer).param_groups)
