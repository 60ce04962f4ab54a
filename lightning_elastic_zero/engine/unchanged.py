"""Whether a module still has the weights that its engine trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_elastic_zero.engine.support import optimizer_wrapper
from lightning_elastic_zero.engine.wrappers import live_buffers

COMPARE_ELEMENTS = 1 << 20
"""Elements that are compared at once: bounds the memory of a comparison."""


def holds_trained_weights(engine: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether this rank's part of the module's trained weights is its masters, rounded.

    After a fit, ``module.load_state_dict`` or an edit in place changes the module and not the
    masters. True for an engine without an optimizer, which has no masters.
    """
    wrapper = optimizer_wrapper(engine)
    if not wrapper:
        return True
    return all(
        torch.equal(weights, master.to(weights))
        for weights, master in _pieces(engine.optimizer, wrapper)
    )


def _pieces(optimizer: Any, wrapper: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # noqa: ANN401
    """Yield this rank's pieces of the module's weights, each beside its masters."""
    for buffer in live_buffers(optimizer, wrapper):
        for index, start, stop, offset in buffer.places:
            weights = _piece(buffer.parameters[index], start, stop)
            for at in range(0, stop - start, COMPARE_ELEMENTS):
                part = weights[at : at + COMPARE_ELEMENTS]
                yield part, buffer.master.data[offset + at : offset + at + part.numel()]


def _piece(parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
    """Return elements of a parameter as the module has it: whole, or ZeRO-3's part here."""
    whole = getattr(parameter, "ds_numel", parameter.numel())
    if parameter.numel() == whole:
        return parameter.data.reshape(-1)[start:stop]
    piece: torch.Tensor = parameter.ds_tensor.data[: stop - start]  # type: ignore[attr-defined]
    return piece
