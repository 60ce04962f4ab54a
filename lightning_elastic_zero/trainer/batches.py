"""The batch settings of a run, and the trainer settings that depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.options import check_count, check_flag
from lightning_elastic_zero.data_progress.batches import BatchPlan, ceil_div, plan_batches
from lightning_elastic_zero.data_progress.position import RunSettings
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.lightning import callbacks_of, is_fitting
from lightning_elastic_zero.trainer.tensor_parallel import grid_of

_MICRO_BATCH_KEY = "train_micro_batch_size_per_gpu"


class UserSettings:
    """Changes trainer settings for one fit, and remembers the user's values."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        self._past: dict[str, tuple[Any, Any]] = {}

    def get(self, trainer: pl.Trainer, name: str) -> Any:
        """Return the user's value. A value changed by others since ``make`` is the user's."""
        value = getattr(trainer, name, None)
        given, made = self._made.get(name, (value, value))
        return given if value == made else value

    def make(self, trainer: pl.Trainer, name: str, value: object) -> None:
        """Set a value for this fit."""
        self._made[name] = (self.get(trainer, name), value)
        self._past = {}
        setattr(trainer, name, value)

    def restore(self, trainer: pl.Trainer) -> None:
        """Restore the user's values when the fit is over."""
        if self._made:
            for name in self._made:
                setattr(trainer, name, self.get(trainer, name))
            self._past, self._made = self._made, {}

    @contextmanager
    def reapplied(self, trainer: pl.Trainer) -> Iterator[None]:
        """Apply the values of the last fit again, for a save of its loop counters."""
        before = {name: getattr(trainer, name, None) for name in self._past}
        for name, (_, made) in self._past.items():
            setattr(trainer, name, made)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Batch size of the loader, and how an optimizer step is made of its batches."""

    loader_batch_size: int | None
    """``batch_size`` of the first training loader; None: unknown."""
    plan: BatchPlan | None
    """How the global batch is divided; None without ``global_batch_size``."""
    grid: RankGrid
    accumulate: int

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None: unknown."""
        if self.plan is not None:
            return self.plan.global_batch_size
        if self.loader_batch_size is None:
            return None
        return self.loader_batch_size * self.grid.data * self.accumulate

    def check_fixed_batches(self, loader: object) -> None:
        """Refuse a loader whose batches cannot be changed and do not add up to the global batch."""
        # A loader without a batch size has the one that the user has declared.
        plan, size = self.plan, batch_size_of(loader) or self.loader_batch_size
        if plan is None or (plan.is_even and plan.largest_micro_batch == size):
            return
        even = "" if plan.is_even else "up to "
        msg = (
            f"global_batch_size={plan.global_batch_size} on {self.grid.shares} needs "
            f"micro-batches of {even}{plan.largest_micro_batch} samples, and the "
            f"{type(loader).__name__} makes batches of {size} itself. Set its batch_size so that "
            f"devices x batch_size divides {plan.global_batch_size}"
        )
        raise UnsupportedError(msg)

    def check_accumulation(self, trainer: pl.Trainer) -> None:
        """Refuse an accumulation that changed during the fit, as Lightning's strategy does."""
        if (now := trainer.accumulate_grad_batches) == self.accumulate:
            return
        msg = (
            f"trainer.accumulate_grad_batches was changed from {self.accumulate} to {now} during "
            f"the fit (before a step of epoch {trainer.current_epoch}), but DeepSpeed has one "
            "value per fit. Pass it to Trainer(accumulate_grad_batches=...) and use a separate fit "
            "for each value"
        )
        raise UnsupportedError(msg)

    def plan_for(self, batch_size: int | None) -> BatchPlan:
        """Return the plan for one of several loaders. None: its items are batches."""
        plan, first = self.plan, self.loader_batch_size
        if plan is not None and batch_size == first:
            return plan
        if plan is None or (plan.is_even and plan.largest_micro_batch == first):
            samples = (batch_size or 1) * self.grid.data * self.accumulate
            return BatchPlan(samples, self.grid.data, self.accumulate)
        msg = (
            f"global_batch_size={plan.global_batch_size} is divided into micro-batches of "
            f"{plan.largest_micro_batch} samples for the loader with batch_size={first}, which "
            f"does not fit the loader with batch_size={batch_size}. Give all training loaders the "
            "same batch_size, or make global_batch_size / devices a multiple of the first one"
        )
        raise UnsupportedError(msg)


def _s(count: int, ending: str = "s") -> str:
    return "" if count == 1 else ending


class StepFraction(float):
    """A fraction of an epoch that yields whole optimizer steps.

    Lightning multiplies ``limit_train_batches`` by the length of each training loader, in
    micro-batches, and rounds down. This product is rounded down to whole steps instead.
    """

    accumulate: int

    @classmethod
    def make(cls, fraction: float, accumulate: int) -> StepFraction:
        """Return the fraction for steps of a number of micro-batches."""
        made = cls(fraction)
        made.accumulate = accumulate
        return made

    @override
    def __rmul__(self, batches: float) -> float:
        steps = ceil_div(int(batches), self.accumulate)
        if not (limit := int(steps * float(self))):
            msg = (
                f"limit_train_batches={self} of an epoch of {steps} optimizer steps is less than "
                f"one step. Use at least {1 / steps:.3g}, or limit_train_batches=1"
            )
            raise UnsupportedError(msg)
        return min(batches, limit * self.accumulate)


def _flattened(loaders: Any) -> list[Any]:
    """Return the loaders in a return value of a ``train_dataloader`` hook."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)


def batch_size_of(loaders: Any) -> int | None:
    """Return the batch size of the first loader that has one; of one or several loaders."""
    for loader in _flattened(loaders):
        # The last is for a batch sampler passed as sampler, with batch_size=None.
        batch_sampler, sampler = (
            getattr(loader, name, None) for name in ("batch_sampler", "sampler")
        )
        for source in (batch_sampler, loader, sampler):
            size = getattr(source, "batch_size", None)
            if type(size) is int and size > 0:
                return size
    return None


def has_batches_for_items(loaders: Any) -> bool:
    """Whether a map-style loader yields the data set's items as batches (``batch_size=None``)."""
    return any(
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and not isinstance(loader.dataset, IterableDataset)
        for loader in _flattened(loaders)
    )


def loader_sampler(loader: object) -> Any:
    """Return the sampler of a loader's batches; None if it has none."""
    of_loader = getattr(loader, "sampler", None)
    return getattr(getattr(loader, "batch_sampler", None), "sampler", of_loader)


def overruled_orders(loaders: Any) -> list[str]:
    """Return for each loader the part of its order that Lightning will replace; empty: none."""
    parts = []
    for sampler in map(loader_sampler, _flattened(loaders)):
        part = ""
        if isinstance(sampler, SequentialSampler):
            part = "the order of its data set"
        elif type(sampler) is RandomSampler:  # a subclass need not have these attributes
            if sampler.replacement or sampler.num_samples != len(sampler.data_source):
                part = "replacement or num_samples of its RandomSampler"
            elif sampler.generator is not None:
                part = "the generator of its RandomSampler"
        parts.append(part)
    return parts


class BatchController:
    """Resolves the batch settings of each fit, once, before anything needs them.

    The first of these moments resolves them: before the ``setup`` hooks, in the first of them, when
    a hook asks for the training loaders, or when DeepSpeed's config is completed.
    """

    def __init__(self, global_batch_size: int | None, *, allow_uneven_batches: bool) -> None:
        self.settings = UserSettings()
        """The user's values of trainer settings that this library changes."""
        self.current: BatchSettings | None = None
        """How an optimizer step is made of samples; None before the first fit."""
        self.overruled_orders: list[str] | None = None
        """Result of ``overruled_orders`` for the user's loaders; None: not determined yet."""
        self._global_batch_size = check_count(
            "global_batch_size", global_batch_size, least=1, unit="samples"
        )
        self._allow_uneven = check_flag("allow_uneven_batches", allow_uneven_batches)
        self._is_resolved = False
        self._user_batch_size: int | None = None
        self._is_single_loader = False
        self._is_configured = False  # DeepSpeed's config, for this fit
        # Runs after a data module's ``setup`` and before that of other callbacks, until the engine
        # is set up.
        self._first_callback = LambdaCallback(setup=self._resolve_in_hook)

    def begin(self, trainer: pl.Trainer, config: Any, *, is_users: bool) -> None:
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
        source, module = trainer.fit_loop._data_source, trainer.lightning_module
        if not source.is_module():
            self._resolve(trainer, self._batch_size_of_loader(trainer))
        elif source.instance is not module or not is_overridden("setup", module):
            callbacks_of(trainer).insert(0, self._first_callback)

    def resolve_for(self, loader: object, trainer: pl.Trainer) -> None:
        """Resolve the batches by a training loader, if a hook asked for it early."""
        self._resolve(trainer, self._batch_size_in(loader))

    @property
    def plan(self) -> BatchPlan | None:
        """How the global batch is divided; None without ``global_batch_size``."""
        return None if self.current is None else self.current.plan

    @property
    def loader_batch_size(self) -> int:
        """Batch size of the loader, for DeepSpeed's log; 1 if unknown."""
        return (self.current.loader_batch_size if self.current is not None else None) or 1

    def samples_per_step_of(self, saved: RunSettings) -> int | None:
        """Return the samples per optimizer step of a run that another program saved.

        The batch size in DeepSpeed's config need not be the loader's, as it affects only the log:
        if it is unknown, or the user passes one, the loader is assumed to have the same as now.
        Of 1, it is known for a single loader only: Lightning's strategy uses 1 for several.
        """
        size = None if self.current is None else self.current.loader_batch_size
        is_unknown = saved.global_batch_size is None
        if size is None or not (is_unknown or self._user_batch_size):
            return saved.global_batch_size
        if is_unknown and self._is_single_loader and not self._user_batch_size:
            size = 1
        return size * saved.grid.data * saved.accumulate

    def reset(self, trainer: pl.Trainer, config: Any) -> bool:
        """Restore the user's batch size in a config that an evaluation or earlier fit completed.

        Returns:
            Whether the config must be completed again, because a fit begins.
        """
        self._remove_first_callback(trainer)
        if self._is_configured or not is_fitting(trainer):
            return False
        del config["gradient_accumulation_steps"]
        del config[_MICRO_BATCH_KEY]
        if self._user_batch_size is not None:
            config[_MICRO_BATCH_KEY] = self._user_batch_size
        return True

    def configure(self, trainer: pl.Trainer, config: Any, *, is_users: bool) -> None:
        """Resolve the batches and set the micro-batch size in DeepSpeed's config; see ``begin``."""
        if is_users:
            self._read_batch_size(config)
        self._is_configured = is_fitting(trainer)
        if not is_fitting(trainer):
            return
        if not self._is_resolved:
            self._resolve(trainer, self._batch_size_of_loader(trainer))
        elif self.overruled_orders is None:
            self._batch_size_of_loader(trainer)  # a hook has already asked for them
        if self.plan is not None:
            config[_MICRO_BATCH_KEY] = self.plan.largest_micro_batch

    def end(self, trainer: pl.Trainer) -> None:
        """End a run and restore the user's settings."""
        self._is_resolved = self._is_configured = False
        self.settings.restore(trainer)
        self._remove_first_callback(trainer)

    def _remove_first_callback(self, trainer: pl.Trainer) -> None:
        callbacks = callbacks_of(trainer)
        callbacks[:] = [c for c in callbacks if c is not self._first_callback]

    def _resolve_in_hook(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if not is_fitting(trainer):
            return  # left over from a fit that failed before its engine was set up
        size = None
        with suppress(Exception):  # of users' code, before their own setup
            size = self._batch_size_of_loader(trainer)
        if size is not None:  # unknown now, but possibly known later
            self._resolve(trainer, size)

    def _resolve(self, trainer: pl.Trainer, batch_size: int | None) -> None:
        """Set the trainer's accumulation and ``limit_train_batches`` from the global batch.

        A fractional ``limit_train_batches`` is a fraction of the optimizer steps. With a global
        batch, an integer counts global batches: the same samples on any number of devices.
        """
        if self._is_resolved:
            return
        accumulate = int(self.settings.get(trainer, "accumulate_grad_batches"))
        plan = None
        if self._global_batch_size is not None:
            plan = self._plan(trainer, self._global_batch_size, batch_size, accumulate)
            accumulate = plan.accumulate
            self.settings.make(trainer, "accumulate_grad_batches", accumulate)
        limit = self.settings.get(trainer, "limit_train_batches")
        if type(limit) is int and plan is not None:
            self.settings.make(trainer, "limit_train_batches", limit * accumulate)
        elif type(limit) is float and 0.0 < limit < 1.0:
            fraction = StepFraction.make(limit, accumulate)
            self.settings.make(trainer, "limit_train_batches", fraction)
        self.current = BatchSettings(batch_size, plan, grid_of(trainer), accumulate)
        self._is_resolved = True

    def _plan(
        self, trainer: pl.Trainer, global_batch_size: int, batch_size: int | None, accumulate: int
    ) -> BatchPlan:
        """Divide the global batch. ``accumulate``: the user's ``accumulate_grad_batches``."""
        grid = grid_of(trainer)
        if batch_size is None:
            msg = (
                f"global_batch_size={global_batch_size} needs a training loader with a batch_size. "
                "Your own batch sampler needs an attribute batch_size, a method resume_at(epoch, "
                "samples) to resume inside an epoch, and Trainer(use_distributed_sampler=False). "
                "For any other loader, or for the samples of an item with batch_size=None, pass "
                "logging_batch_size_per_gpu to the strategy"
            )
            raise UnsupportedError(msg)
        try:
            plan = plan_batches(
                global_batch_size, batch_size, grid.data, allow_uneven=self._allow_uneven
            )
        except UnsupportedError as error:
            if grid.tensor == 1:
                raise
            msg = f"{error}. Each of these is a data rank of {grid.tensor} devices"
            raise UnsupportedError(msg) from error
        is_manual = not trainer.lightning_module.automatic_optimization
        if is_manual and not (plan.accumulate == 1 and plan.is_even):
            msg = (
                f"global_batch_size={global_batch_size} with manual optimization: each batch is a "
                f"step, so {grid.shares} need a loader with "
                f"batch_size={ceil_div(global_batch_size, grid.data)} and a device count that "
                "divides global_batch_size"
            )
            raise UnsupportedError(msg)
        if accumulate not in (1, plan.accumulate):
            msg = (
                f"Trainer(accumulate_grad_batches={accumulate}) and "
                f"global_batch_size={global_batch_size} contradict each other: {grid.shares} "
                f"and micro-batches of {plan.largest_micro_batch} need {plan.accumulate}. "
                "Omit accumulate_grad_batches"
            )
            raise UnsupportedError(msg)
        even = "" if plan.is_even else "up to "
        rank_zero_info(
            f"Global batch of {global_batch_size}: {grid.shares} x "
            f"{plan.accumulate} micro-batch{_s(plan.accumulate, 'es')} of {even}"
            f"{plan.largest_micro_batch} sample{_s(plan.largest_micro_batch)}"
        )
        return plan

    def _read_batch_size(self, user_config: Any) -> None:
        """Keep the user's batch size. A completed config contains one of this library's."""
        size = user_config.get(_MICRO_BATCH_KEY)
        self._user_batch_size = size if type(size) is int else None

    def _batch_size_of_loader(self, trainer: pl.Trainer) -> int | None:
        """Return the batch size of the training loader, or that of the user's config."""
        source = trainer.fit_loop._data_source
        if not source.is_defined():
            return self._user_batch_size
        loaders = source.dataloader()
        self.overruled_orders = overruled_orders(loaders)
        self._is_single_loader = isinstance(loaders, DataLoader)
        return self._batch_size_in(loaders)

    def _batch_size_in(self, loaders: Any) -> int | None:
        """Return the batch size of loaders, or that of the user's config.

        1 if items are batches, unless ``global_batch_size`` requires their number of samples.
        """
        size = batch_size_of(loaders) or self._user_batch_size
        is_free = size is None and self._global_batch_size is None
        return 1 if is_free and has_batches_for_items(loaders) else size
