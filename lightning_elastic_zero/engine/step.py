"""Gradients of an accumulation window that a load interrupts: those of a run that is replaced.

The moment at which masters and optimizer states change.
"""

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


def drop_accumulation_window(engine: Any) -> None:
    """Drop the gradients of a window that no step ended, and count it as one that did."""
    drop_gradients(engine)
    accumulate = engine.gradient_accumulation_steps()
    engine.micro_steps -= engine.micro_steps % accumulate


def _drop_zero_1_2(optimizer: Any) -> None:
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


def _drop_zero_3(optimizer: Any) -> None:
    """Drop what ZeRO-3 has accumulated: this rank's pieces, of which a step is handed views."""
    optimizer.averaged_gradients = {}
    if optimizer.grad_partitions_flat_buffer is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
    discard_boundary_ids(optimizer)


_waiting: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
"""Callbacks to run before the state of an engine changes."""


def before_change(engine: Any) -> None:
    """Call what waits for an optimizer step of an engine, before its state is changed otherwise."""
    for call in tuple(_waiting.get(engine, ())):
        call()


def add_step_pre_hook(engine: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call something right before the optimizer changes what it owns, whoever lets it step.

    DeepSpeed's wrappers do it through the ``step`` of the optimizer that they wrap, ZeRO-3 once for
    each sub-group, and only where a window of micro-batches ends and no gradient overflows.

    Returns:
        What ends it.

    Raises:
        UnsupportedError: the wrapped optimizer is none of torch's kind.
    """
    if not optimizer_wrapper(engine):  # nothing steps
        return lambda: None
    inner = inner_optimizer(engine.optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        msg = f"{type(inner).__name__} is no torch.optim.Optimizer: save without async_save"
        raise UnsupportedError(msg)
    # With partial offload a second one steps the first sub-groups, before the wrapped one begins.
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
    """Whether DeepSpeed changes what the optimizer owns before it lets the optimizer step.

    With Muon it does: it brings the momentum forward by itself, when gradients are whole, and hands
    the result to the optimizer as the gradient. That is in ``step`` since 0.19.8, in ZeRO-3 as well
    as in BF16_Optimizer, and while gradients arrive in backward before. The other wrappers that
    change states by themselves are not supported: SuperOffload, ZenFlow, those of 1-bit optimizers.
    """
    if not optimizer_wrapper(engine):
        return False
    return any(group.get("use_muon") for group in inner_optimizer(engine.optimizer).param_groups)
