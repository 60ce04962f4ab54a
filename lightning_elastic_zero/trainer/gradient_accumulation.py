"""A window of micro-batches: the scale of its losses, the step at its end, and what an epoch cuts.

Lightning begins a window with each epoch. DeepSpeed counts micro-batches by itself and would drift:
it is told where a window ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.engine import drop_accumulation_window, ensure_scaled, loss_scale
from lightning_elastic_zero.trainer.lightning_internals import should_accumulate
from lightning_elastic_zero.trainer.loss_scaling_check import LossScalingCheck


class GradientAccumulation:
    """Counts the micro-batches since the last step, and drops those of an epoch that has ended.

    ``on_train_batch_start`` that returns -1 ends an epoch at once. DeepSpeed would keep the
    gradients of the open window and add them to the next epoch's first step.
    """

    def __init__(self, engine: Any) -> None:
        """Begin a fit with DeepSpeed's engine."""
        self._engine = engine
        self._pending, self._epoch = 0, 0
        self._loss_scaling_check = LossScalingCheck()
        self._manual_backwards = 0
        self._is_warned = False

    @contextmanager
    def scaled(
        self, loss: torch.Tensor, weight: float, trainer: pl.Trainer
    ) -> Iterator[torch.Tensor]:
        """Yield the loss for a backward pass inside the context, which is checked the first time.

        Args:
            loss: as Lightning passes it: what the module returned, divided by the accumulation.
            weight: of the micro-batch, beside 1 / accumulation.
            trainer: for the accumulation.

        Raises:
            UnsupportedError: the module's loss received another gradient than it should have.
        """
        check = self._loss_scaling_check
        scale = 1.0 if check.is_done else loss_scale(self._engine)  # other than 1 in fp16
        weighted = loss * weight if weight != 1.0 else loss
        with (
            check.watch(loss, weight * scale, trainer.accumulate_grad_batches),
            self.ensure_scaled(weighted),
        ):
            yield weighted

    def ensure_scaled(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed's ``backward`` scales a loss in stage 0, too."""
        return ensure_scaled(self._engine, loss)

    def before_manual_backward(self) -> None:
        """Warn where a module that optimizes by itself accumulates: ZeRO drops what was before."""
        self._manual_backwards += 1
        stage = self._engine.zero_optimization_stage()
        if self._manual_backwards > 1 and stage and not self._is_warned:
            self._is_warned = True
            rank_zero_warn(
                "manual_backward was called more than once before optimizer.step(). DeepSpeed's "
                f"ZeRO-{stage} does not add up the gradients of these calls. Add up the losses "
                "and call manual_backward once, or use automatic optimization, whose accumulation "
                "is exact (global_batch_size or accumulate_grad_batches)"
            )

    def after_manual_step(self) -> None:
        """Begin to count the backward passes of the next step."""
        self._manual_backwards = 0

    def set_boundary(self, trainer: pl.Trainer) -> bool:
        """Set and return whether the next micro-batch ends Lightning's window."""
        steps = not should_accumulate(trainer)
        self._engine.set_gradient_accumulation_boundary(steps)
        return steps

    def after_micro_batch(self, epoch: int, *, steps: bool) -> None:
        """Count a micro-batch of an epoch, with which the window ends or does not."""
        self._pending = 0 if steps else self._pending + 1
        self._epoch = epoch

    def before_batch(self, epoch: int) -> None:
        """Drop what an earlier epoch left, before a batch of this one is trained on."""
        if not self._pending or epoch == self._epoch:
            return
        drop_accumulation_window(self._engine)
        rank_zero_warn(
            f"Epoch {self._epoch} ended within a window of micro-batches, by on_train_batch_start "
            f"returning -1: no step was taken with its last {self._pending}, and their gradients "
            "are dropped"
        )
        self._pending = 0
