"""Whether a module still has the weights that its engine trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import live_flat_buffers
from lightning_elastic_zero.engine.module import weight_piece
from lightning_elastic_zero.engine.restore import COMPARE_ELEMENTS
from lightning_elastic_zero.engine.support import optimizer_wrapper


def weights_match_masters(engine: Any) -> bool:  # noqa: ANN401 (untyped library)
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
    for buffer in live_flat_buffers(optimizer, wrapper):
        for index, start, stop, offset in buffer.places:
            first, piece = weight_piece(buffer.parameters[index])
            weights = piece[start - first : stop - first]
            for at in range(0, stop - start, COMPARE_ELEMENTS):
                part = weights[at : at + COMPARE_ELEMENTS]
                yield part, buffer.master.data[offset + at : offset + at + part.numel()]
