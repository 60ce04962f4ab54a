"""The moment at which masters and optimizer states change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import inner_optimizer
from lightning_elastic_zero.engine.support import optimizer_wrapper
from lightning_elastic_zero.errors import UnsupportedError

_waiting: weakref.WeakKeyDictionary[Any, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
"""Callbacks to run before the state of an engine changes."""


def before_change(engine: Any) -> None:  # noqa: ANN401 (untyped library)
    """Call what waits for an optimizer step of an engine, before its state is changed otherwise."""
    for call in tuple(_waiting.get(engine, ())):
        call()


def add_step_pre_hook(engine: Any, call: Callable[[], None]) -> Callable[[], None]:  # noqa: ANN401
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


def updates_state_before_step(engine: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether DeepSpeed changes what the optimizer owns before it lets the optimizer step.

    With Muon it does: it brings the momentum forward by itself, when gradients are whole, and hands
    the result to the optimizer as the gradient. That is in ``step`` since 0.19.8, in ZeRO-3 as well
    as in BF16_Optimizer, and while gradients arrive in backward before. The other wrappers that
    change states by themselves are not supported: SuperOffload, ZenFlow, those of 1-bit optimizers.
    """
    if not optimizer_wrapper(engine):
        return False
    return any(group.get("use_muon") for group in inner_optimizer(engine.optimizer).param_groups)
