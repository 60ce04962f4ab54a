"""How an optimizer step is made of micro-batches during a fit.

``BatchController`` resolves the batch settings of each fit. ``GradientAccumulation`` marks the end
of each window of micro-batches for DeepSpeed, which would otherwise count across epochs, and drops
a window that an epoch leaves open.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_elastic_zero.core.options import check_count, check_flag
from lightning_elastic_zero.core.requirements import DEEPSPEED
from lightning_elastic_zero.engine.loss_scale import ensure_scaled, loss_scale
from lightning_elastic_zero.engine.step import drop_accumulation_window
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.batches import (
    batch_size_of,
    has_batches_for_items,
    resolve_batch_settings,
)
from lightning_elastic_zero.trainer.checks import overruled_orders
from lightning_elastic_zero.trainer.lightning import (
    callbacks_of,
    data_source,
    is_fitting,
    should_accumulate,
)
from lightning_elastic_zero.trainer.resume import RunResumer

log = logging.getLogger(__name__)

TOLERANCE = 0.02
"""Relative. A bf16 gradient has 8 bits; the smallest error to detect is a factor of 2."""


class LossScalingCheck:
    """Checks the gradient of the loss once, in the first backward pass with accumulation.

    Lightning divides the loss by the accumulation ``A``, so DeepSpeed is called with
    ``scale_wrt_gas=False``. Release 0.18.3 ignored that and divided again, so each step silently
    had 1/A of its correct size. Future releases may do the same.
    """

    def __init__(self) -> None:
        self.is_done = False

    @contextmanager
    def watch(self, loss: torch.Tensor, factor: float, accumulate: int) -> Iterator[None]:
        """Check the first backward pass that runs inside this context.

        ``loss`` is the module's loss divided by the accumulation; ``factor`` is the product of this
        library's weight and DeepSpeed's fp16 loss scale.

        Raises:
            UnsupportedError: The gradient of the module's loss is wrong.
        """
        # The graph node of the module's own loss, before Lightning's division.
        division: Any = loss.grad_fn
        returned = division.next_functions[0][0] if division and division.next_functions else None
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
        if not seen:
            return
        self.is_done = True
        found = float(seen[0]) * accumulate / factor
        if math.isfinite(found) and abs(found - 1.0) > TOLERANCE:  # fp16 may overflow
            msg = (
                f"accumulate_grad_batches={accumulate}: gradients are {found:g} times their "
                "correct value, because the installed DeepSpeed scales the loss in spite of "
                f"scale_wrt_gas=False (as 0.18.3 does). Install {DEEPSPEED} (newest tested: "
                f"{DEEPSPEED.newest_tested})"
            )
            raise UnsupportedError(msg)


class GradientAccumulation:
    """Counts the micro-batches since the last step, and drops those of an ended epoch.

    If ``on_train_batch_start`` returns -1, the epoch ends at once. DeepSpeed would keep the
    gradients of the open window and add them to the first step of the next epoch.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._pending, self._epoch = 0, 0
        self._loss_scaling_check = LossScalingCheck()
        self._manual_backwards = 0
        self._is_warned = False

    @contextmanager
    def scaled(
        self, loss: torch.Tensor, weight: float, trainer: pl.Trainer
    ) -> Iterator[torch.Tensor]:
        """Yield the weighted loss for a backward pass inside this context.

        ``weight``: that of the micro-batch, in addition to the division by the accumulation.

        Raises:
            UnsupportedError: The gradient of the module's loss is wrong (first call only).
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
        """Return a context in which DeepSpeed's ``backward`` scales the loss in stage 0 as well."""
        return ensure_scaled(self._engine, loss)

    def before_manual_backward(self) -> None:
        """Warn if a module with manual optimization accumulates: ZeRO drops earlier gradients."""
        self._manual_backwards += 1
        stage = self._engine.zero_optimization_stage()
        if self._manual_backwards > 1 and stage and not self._is_warned:
            self._is_warned = True
            rank_zero_warn(
                "manual_backward was called more than once before optimizer.step(). DeepSpeed's "
                f"ZeRO-{stage} does not add up the gradients of these calls. Add up the losses "
                "and call manual_backward once, or use automatic optimization with "
                "global_batch_size or accumulate_grad_batches."
            )

    def after_manual_step(self) -> None:
        """Count the backward passes of the next step."""
        self._manual_backwards = 0

    def set_boundary(self, trainer: pl.Trainer) -> bool:
        """Set whether the next micro-batch ends a window, and return it."""
        steps = not should_accumulate(trainer)
        self._engine.set_gradient_accumulation_boundary(steps)
        return steps

    def after_micro_batch(self, epoch: int, *, steps: bool) -> None:
        """Count a micro-batch; ``steps``: an optimizer step was taken with it."""
        self._pending = 0 if steps else self._pending + 1
        self._epoch = epoch

    def before_batch(self, epoch: int) -> None:
        """Drop the open window of an earlier epoch."""
        if not self._pending or epoch == self._epoch:
            return
        drop_accumulation_window(self._engine)
        rank_zero_warn(
            f"Epoch {self._epoch} ended within an accumulation window, because "
            "on_train_batch_start returned -1: the gradients of its last "
            f"{self._pending} micro-batches are dropped, without an optimizer step."
        )
        self._pending = 0


_MICRO_BATCH_KEY = "train_micro_batch_size_per_gpu"


class ResolveBatchesFirst(Callback):
    """Resolves the batches after a data module's ``setup`` and before that of other callbacks.

    Inserted as the first callback; removed when the engine is set up.
    """

    def __init__(self, resolve: Callable[[pl.Trainer], None]) -> None:
        self._resolve_batches = resolve

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._resolve_batches(trainer)


class BatchController:
    """Resolves the batch settings of each fit, once, before anything needs them.

    The first of these moments resolves them: before the ``setup`` hooks, in the first of them, when
    a hook asks for the training loaders, or when DeepSpeed's config is completed.
    """

    def __init__(
        self,
        resumer: RunResumer,
        global_batch_size: int | None,
        *,
        allow_uneven_batches: bool,
    ) -> None:
        """Check the strategy's options. The resumer receives the resolved batches.

        Raises:
            ValueError: An option has an invalid value.
        """
        self._resumer = resumer
        self._global_batch_size = check_count(
            "global_batch_size", global_batch_size, least=1, unit="samples"
        )
        self._allow_uneven = check_flag("allow_uneven_batches", allow_uneven_batches)
        self._is_resolved = False
        self._user_batch_size: int | None = None
        self._is_configured = False  # DeepSpeed's config, for this fit

    def begin(self, trainer: pl.Trainer | None, config: Any, *, is_users: bool) -> None:
        """Resolve the batches before the first ``setup`` hook that can ask for them.

        Hooks compute schedules from ``accumulate_grad_batches`` or ``estimated_stepping_batches``.
        Loaders passed to ``fit`` exist already. Those of a data module exist after its ``setup``;
        those of the module after its own, which may define its data.
        ``is_users``: Lightning has not completed DeepSpeed's config yet.
        """
        if not is_fitting(trainer):
            return
        if is_users and not self._is_configured:
            self._read_batch_size(config)
        source, module = data_source(trainer), trainer.lightning_module
        if not source.is_module():
            self._resolve(trainer, self._batch_size_of_loader(trainer))
        elif source.instance is not module or not is_overridden("setup", module):
            callbacks_of(trainer).insert(0, ResolveBatchesFirst(self._resolve_in_hook))

    def process_loader(self, loader: object, trainer: pl.Trainer | None, rank: int) -> object:
        """Return a loader that can resume an epoch at any sample."""
        if not is_fitting(trainer):
            return loader
        if trainer.training:  # a hook asked for it, before the batches were resolved
            self._resolve(trainer, self._batch_size_in(loader))
        return self._resumer.process_loader(loader, trainer, rank)

    @property
    def loader_batch_size(self) -> int:
        """Batch size of the loader, for DeepSpeed's log; 1 if unknown."""
        batches = self._resumer.batches
        return (batches.loader_batch_size if batches is not None else None) or 1

    def reset(self, trainer: pl.Trainer, config: Any) -> bool:
        """Restore the user's batch size in a config that an evaluation or earlier fit completed.

        Returns:
            Whether the config must be completed again, because a fit begins.
        """
        _remove_hook(trainer)
        if self._is_configured or not is_fitting(trainer):
            return False
        del config["gradient_accumulation_steps"]
        del config[_MICRO_BATCH_KEY]
        if self._user_batch_size is not None:
            config[_MICRO_BATCH_KEY] = self._user_batch_size
        return True

    def configure(self, trainer: pl.Trainer | None, config: Any, *, is_users: bool) -> None:
        """Resolve the batches and set the micro-batch size in DeepSpeed's config; see ``begin``."""
        if is_users:
            self._read_batch_size(config)
        self._is_configured = is_fitting(trainer)
        if not is_fitting(trainer):
            return
        if not self._is_resolved:
            self._resolve(trainer, self._batch_size_of_loader(trainer))
        elif self._resumer.overruled_orders is None:
            self._batch_size_of_loader(trainer)  # a hook has already asked for them
        batches = self._resumer.batches
        if batches is not None and batches.plan is not None:
            config[_MICRO_BATCH_KEY] = batches.plan.largest_micro_batch

    def end(self, trainer: pl.Trainer | None) -> None:
        """End a run and restore the user's settings."""
        self._is_resolved = self._is_configured = False
        if trainer is not None:
            self._resumer.settings.restore(trainer)
            _remove_hook(trainer)

    def _resolve_in_hook(self, trainer: pl.Trainer) -> None:
        """Resolve the batches if the user's loader hook can be called already."""
        if not is_fitting(trainer):
            return  # left over from a fit that failed before its engine was set up
        try:
            size = self._batch_size_of_loader(trainer)
        except Exception as error:  # noqa: BLE001 - users' code, before their own setup
            log.debug("Batch settings are resolved later: train_dataloader raised %r", error)
        else:
            if size is not None:  # unknown now, but possibly known later
                self._resolve(trainer, size)

    def _resolve(self, trainer: pl.Trainer, batch_size: int | None) -> None:
        """Resolve the batch settings, once per fit."""
        if self._is_resolved:
            return
        batches = resolve_batch_settings(
            trainer,
            self._resumer.settings,
            trainer.world_size,
            batch_size,
            self._global_batch_size,
            allow_uneven=self._allow_uneven,
        )
        self._resumer.set_batches(batches)
        self._is_resolved = True

    def _read_batch_size(self, user_config: Any) -> None:
        """Keep the user's batch size. A completed config contains one of this library's."""
        size = user_config.get(_MICRO_BATCH_KEY)
        self._user_batch_size = size if type(size) is int else None

    def _batch_size_of_loader(self, trainer: pl.Trainer) -> int | None:
        """Return the batch size of the training loader, or that of the user's config."""
        source = data_source(trainer)
        if not source.is_defined():
            return self._user_batch_size
        loaders = source.dataloader()
        self._resumer.overruled_orders = overruled_orders(loaders)
        return self._batch_size_in(loaders)

    def _batch_size_in(self, loaders: Any) -> int | None:
        """Return the batch size of loaders or of the user's config.

        1 if items are batches, unless ``global_batch_size`` requires their number of samples.
        """
        size = batch_size_of(loaders) or self._user_batch_size
        is_free = size is None and self._global_batch_size is None
        return 1 if is_free and has_batches_for_items(loaders) else size


def _remove_hook(trainer: pl.Trainer) -> None:
    callbacks = callbacks_of(trainer)
    callbacks[:] = [c for c in callbacks if not isinstance(c, ResolveBatchesFirst)]
