"""A window of micro-batches that an epoch's end left without a step.

``on_train_batch_start`` that returns -1 ends an epoch at once. DeepSpeed would keep the gradients
of the window that is open and add them to the next epoch's first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn


class PartialAccumulation:
    """Counts the micro-batches since the last step, and drops those of an epoch that has ended."""

    def __init__(self) -> None:
        self._drop: Callable[[Any], None] | None = None
        self._engine: Any = None
        self._open, self._epoch = 0, 0

    def begin(self, engine: Any, drop: Callable[[Any], None]) -> None:
        """Begin a fit with an engine, and what makes its next micro-batch the first of a window."""
        self._engine, self._drop = engine, drop
        self._open = 0

    def after_micro_batch(self, epoch: int, *, steps: bool) -> None:
        """Count a micro-batch of an epoch, with which the window ends or does not."""
        self._open = 0 if steps else self._open + 1
        self._epoch = epoch

    def before_batch(self, epoch: int) -> None:
        """Drop what an earlier epoch left, before a batch of this one is trained on."""
        if not self._open or epoch == self._epoch or self._drop is None:
            return
        self._drop(self._engine)
        rank_zero_warn(
            f"Epoch {self._epoch} ended within a window of micro-batches, by on_train_batch_start "
            f"returning -1: no step was taken with its last {self._open}, and their gradients are "
            "dropped"
        )
        self._open = 0
