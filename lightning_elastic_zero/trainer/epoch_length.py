"""How many micro-batches an epoch has, so that it ends with an optimizer step."""

from __future__ import annotations

from collections.abc import Sized

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.trainer.batch_settings import UserSettings
from lightning_elastic_zero.trainer.dataloaders import elastic_sampler_of
from lightning_elastic_zero.trainer.step_intervals import optimizer_steps_in


class EpochLength:
    """The lengths of a fit's training loaders, and the trainer's settings that follow from them."""

    def __init__(self, given: UserSettings) -> None:
        self._user_settings = given
        self._limit: int | float = 1.0
        self._is_planned = False
        self._known: list[int] = []

    def begin(self, trainer: pl.Trainer, accumulate: int, *, is_planned: bool) -> None:
        """Begin a fit; with a global batch, an integer limit counts such batches."""
        self._is_planned = is_planned
        limit = self._user_settings.get(trainer, "limit_train_batches")
        self._limit = limit * (accumulate if type(limit) is int and is_planned else 1)
        self._user_settings.make(trainer, "limit_train_batches", self._limit)
        self.forget()

    def forget(self) -> None:
        """Forget the loaders: they are made anew."""
        self._known = []

    def round_to_whole_steps(self, loader: object, trainer: pl.Trainer, accumulate: int) -> None:
        """Set ``limit_train_batches`` so that an epoch ends between two optimizer steps.

        Lightning begins a new window with each epoch and DeepSpeed does not: gradients of a window
        that an epoch cuts off would flow into the next one's.
        """
        given, length = self._limit, length_of(loader)
        if given == 0 or length is None:
            return
        self._known.append(length)
        # Of several loaders the longest one ends the epoch; shorter ones begin again.
        longest = max(self._known)
        batches = min(longest, given) if isinstance(given, int) else int(longest * given)
        limit = max(1, batches // accumulate) * accumulate
        if limit == batches or limit > longest:
            self._user_settings.make(trainer, "limit_train_batches", given)
            self._round_validation_interval(trainer, batches, accumulate)
            return
        if elastic_sampler_of(loader) is None or isinstance(given, int):
            rank_zero_warn(
                f"{batches} batches per epoch are no multiple of the accumulation ({accumulate}): "
                f"an epoch has {limit}, so that it ends with an optimizer step"
            )
        self._user_settings.make(trainer, "limit_train_batches", limit)
        self._round_validation_interval(trainer, limit, accumulate)

    def _round_validation_interval(
        self, trainer: pl.Trainer, batches: int, accumulate: int
    ) -> None:
        """Set ``val_check_interval`` for an epoch whose last window is short.

        Lightning refuses an interval of more micro-batches than an epoch has.
        """
        interval = self._user_settings.get(trainer, "val_check_interval")
        if not self._is_planned or type(interval) is not int:
            return
        whole = interval * accumulate
        if trainer.check_val_every_n_epoch is not None and interval == optimizer_steps_in(
            batches, accumulate
        ):
            whole = min(whole, batches)
        self._user_settings.make(trainer, "val_check_interval", whole)


def length_of(loader: object) -> int | None:
    """Return a loader's batches; those of iterable data sets raise when they are asked."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
