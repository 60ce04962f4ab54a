"""The time at which the batches of a fit are resolved: once, before anything needs them.

``batch_settings`` computes them. The first of these moments does it: before the ``setup`` hooks, as
the first of them, when a hook asks for the training loaders, when DeepSpeed's config is completed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_elastic_zero.option_checks import check_count, check_flag
from lightning_elastic_zero.trainer.batch_settings import (
    batch_size_of,
    has_batches_for_items,
    resolve_batch_settings,
)
from lightning_elastic_zero.trainer.lightning_internals import callbacks_of, data_source, is_fitting
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.start_warnings import overruled_orders

_MICRO_BATCH_KEY = "train_micro_batch_size_per_gpu"

log = logging.getLogger(__name__)


class ResolveBatchesFirst(Callback):
    """The first callback of a fit's ``setup``, which comes after a data module's and before others.

    It is removed when the engine is set up.
    """

    def __init__(self, resolve: Callable[[pl.Trainer], None]) -> None:
        self._resolve_batches = resolve

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._resolve_batches(trainer)


class BatchController:
    """Resolves how a step is made of micro-batches, for each fit anew."""

    def __init__(
        self,
        resumer: RunResumer,
        global_batch_size: int | None,
        *,
        allow_uneven_batches: bool,
    ) -> None:
        """Begin without a fit; the resumer receives the batches, the options are the strategy's.

        Raises:
            ValueError: an option has a value that it cannot have.
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
        Loaders that ``fit`` was given are there by now; those of a data module are after its own
        ``setup``; those of the module after its own, which may define what they are made of.
        DeepSpeed's config is as the user's until Lightning has completed it.
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
        """Return a loader by which training can resume an epoch at any sample."""
        if not is_fitting(trainer):
            return loader
        if trainer.training:  # a hook asked for it, before the batches were resolved
            self._resolve(trainer, self._batch_size_in(loader))
        return self._resumer.process_loader(loader, trainer, rank)

    @property
    def loader_batch_size(self) -> int:
        """The loader's batch size, for DeepSpeed's log; 1 where it is not known."""
        batches = self._resumer.batches
        return (batches.loader_batch_size if batches is not None else None) or 1

    def reset(self, trainer: pl.Trainer, config: Any) -> bool:
        """Restore the user's batch size in a config of an evaluation, or of an earlier fit.

        Returns:
            Whether the config has to be completed again, for a fit that is to begin.
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
        """Resolve the batches, and set the micro-batch in DeepSpeed's config; as ``begin``."""
        if is_users:
            self._read_batch_size(config)
        self._is_configured = is_fitting(trainer)
        if not is_fitting(trainer):
            return
        if not self._is_resolved:
            self._resolve(trainer, self._batch_size_of_loader(trainer))
        elif self._resumer.overruled_orders is None:
            self._batch_size_of_loader(trainer)  # a hook asked for them, and they are shuffled now
        batches = self._resumer.batches
        if batches is not None and batches.plan is not None:
            config[_MICRO_BATCH_KEY] = batches.plan.largest_micro_batch

    def end(self, trainer: pl.Trainer | None) -> None:
        """End a run: the user's settings apply again."""
        self._is_resolved = self._is_configured = False
        if trainer is not None:
            self._resumer.settings.restore(trainer)
            _remove_hook(trainer)

    def _resolve_in_hook(self, trainer: pl.Trainer) -> None:
        """Resolve the batches if the hook that makes the loaders can be called already."""
        if not is_fitting(trainer):
            return  # left by a fit that failed before its engine was set up
        try:
            size = self._batch_size_of_loader(trainer)
        except Exception as error:  # noqa: BLE001 - users' code, before their own setup
            log.debug("The batch is resolved later: train_dataloader raised %r", error)
        else:
            if size is not None:  # a loader that has none yet may have one later
                self._resolve(trainer, size)

    def _resolve(self, trainer: pl.Trainer, batch_size: int | None) -> None:
        """Resolve what a step is made of, once per fit."""
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
        """Keep the user's batch size; a config that was completed has one of this library's."""
        size = user_config.get(_MICRO_BATCH_KEY)
        self._user_batch_size = size if type(size) is int else None

    def _batch_size_of_loader(self, trainer: pl.Trainer) -> int | None:
        """Return the training loader's batch size: its own, else the user's."""
        source = data_source(trainer)
        if not source.is_defined():
            return self._user_batch_size
        loaders = source.dataloader()
        self._resumer.overruled_orders = overruled_orders(loaders)
        return self._batch_size_in(loaders)

    def _batch_size_in(self, loaders: Any) -> int | None:
        """Return the batch size that loaders tell, or the user; 1 where items are batches.

        With a global batch, which counts samples, those of an item have to be known.
        """
        size = batch_size_of(loaders) or self._user_batch_size
        is_free = size is None and self._global_batch_size is None
        return 1 if is_free and has_batches_for_items(loaders) else size


def _remove_hook(trainer: pl.Trainer) -> None:
    """Remove the first callback, also where a fit ended before the engine was set up."""
    callbacks = callbacks_of(trainer)
    callbacks[:] = [c for c in callbacks if not isinstance(c, ResolveBatchesFirst)]
