"""Check that DeepSpeed leaves the scale of a loss alone, as it is asked to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.requirements import DEEPSPEED

TOLERANCE = 0.02
"""Relative; the gradient of a bf16 loss has 8 bits. The smallest error to be found is a half."""


class LossScalingCheck:
    """Looks once, in the first backward pass with accumulation, at the gradient of the loss.

    Lightning divides the loss by the accumulation, so that DeepSpeed must not (``scale_wrt_gas``).
    Its release 0.18.3 did all the same, and each step was 1/A of what it should have been, without
    a sign of it. A release that is not known yet may do so again.
    """

    def __init__(self) -> None:
        self.is_done = False
        """Whether it has looked."""

    @contextmanager
    def watch(self, loss: torch.Tensor, factor: float, accumulate: int) -> Iterator[None]:
        """Check the backward pass inside the context, the first time.

        Args:
            loss: as Lightning hands it over: what the module returned, divided.
            factor: what this library, and DeepSpeed in fp16, multiply it by.
            accumulate: micro-batches of a step.

        Raises:
            UnsupportedError: the module's loss received another gradient than it should have.
        """
        returned = _before_division(loss)
        if self.is_done or accumulate == 1 or factor == 0.0 or returned is None:
            yield
            return
        seen: list[torch.Tensor] = []
        handle = returned.register_hook(
            lambda _, received: seen.extend(g for g in received if g is not None)
        )
        try:
            yield
        finally:
            handle.remove()
        if seen:
            self.is_done = True
            _check(float(seen[0]) * accumulate / factor, accumulate)


def _before_division(loss: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the node of the loss that the module returned, at which DeepSpeed's hooks hang."""
    division = loss.grad_fn
    if division is None or not division.next_functions:
        return None
    return division.next_functions[0][0]


def _check(factor: float, accumulate: int) -> None:
    """Refuse a factor other than one; an overflow in fp16 says nothing.

    Raises:
        UnsupportedError: each step would be that much larger or smaller.
    """
    if not math.isfinite(factor) or abs(factor - 1.0) <= TOLERANCE:
        return
    msg = (
        f"with accumulate_grad_batches={accumulate}, gradients are {factor:g} times what they "
        "should be: the installed release of DeepSpeed scales the loss although it is called with "
        f"scale_wrt_gas=False, as 0.18.3 did. Install {DEEPSPEED}; {DEEPSPEED.newest_tested} is "
        "the newest that this library was tested with"
    )
    raise UnsupportedError(msg)
