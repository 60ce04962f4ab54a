"""Lightning's DeepSpeed strategy, with the same optimizer steps on any number of devices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any, get_args

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_elastic_zero.coordination import Ranks, connect_ranks
from lightning_elastic_zero.option_checks import (
    check_choice,
    check_count,
    check_flag,
    check_known_options,
)
from lightning_elastic_zero.trainer.batch_settings import (
    UserSettings,
    batch_size_of,
    resolve_batch_settings,
    scale_scheduler_frequency,
)
from lightning_elastic_zero.trainer.dataloader_resume import (
    UnresumableDataPolicy,
    check_same_order_on_ranks,
)
from lightning_elastic_zero.trainer.dataloader_warnings import orders_as_made
from lightning_elastic_zero.trainer.lightning_internals import (
    check_lightning_release,
    pop_options_unknown_to_parent,
)
from lightning_elastic_zero.trainer.loss_scaling_check import LossScalingCheck
from lightning_elastic_zero.trainer.partial_accumulation import PartialAccumulation
from lightning_elastic_zero.trainer.requires_grad_check import RequiresGradCheck
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.warning_filters import WarningFilters

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.optim import Optimizer

log = logging.getLogger(__name__)


class ResolveBatchesFirst(Callback):
    """The first callback of a fit's ``setup``, which comes after a data module's and before others.

    It is gone when the engine is set up.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._resolve_batches = settle

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._resolve_batches()


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    """Return the trainer's callbacks, which Lightning does not declare."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _forget_first(trainer: pl.Trainer) -> None:
    """Remove the first callback, also where a fit ended before the engine was set up."""
    callbacks = _callbacks(trainer)
    callbacks[:] = [c for c in callbacks if not isinstance(c, ResolveBatchesFirst)]


class BaseElasticStrategy(DeepSpeedStrategy):
    """The training half of ``ElasticDeepSpeedStrategy``: batches, gradients, data.

    A step's gradient is the mean over the global batch, whatever the accumulation, and its samples
    are the same on any number of devices.
    """

    def __init__(
        self,
        *args: Any,
        global_batch_size: int | None = None,
        allow_uneven_batches: bool = False,
        on_unresumable_data: UnresumableDataPolicy = "refuse",
        **kwargs: Any,
    ) -> None:
        """Take the parent's arguments, and what a step is made of.

        Args:
            *args: as ``DeepSpeedStrategy``.
            global_batch_size: samples per optimizer step over all devices. The accumulation
                follows from it, from the loader's ``batch_size`` (the most that fits into memory)
                and from the number of devices; the integers ``limit_train_batches`` and
                ``val_check_interval`` then count global batches. None: as the Trainer has it.
            allow_uneven_batches: where ``global_batch_size`` cannot be cut into equal
                micro-batches, let them differ by a sample, each weighted by its size (the loss
                must be a mean over samples). False: refuse, and name the device counts that fit.
            on_unresumable_data: what to do where training data cannot be taken up in the middle of
                an epoch: ``"refuse"``, or ``"restart_epoch"``: that epoch's samples come once more.
            **kwargs: as ``DeepSpeedStrategy``.

        Raises:
            ValueError: an option has a value that it cannot have.
        """
        own = pop_options_unknown_to_parent(kwargs)
        check_known_options(type(self), kwargs, signature(DeepSpeedStrategy.__init__).parameters)
        super().__init__(*args, **kwargs)
        vars(self).update(own)
        self._global_batch_size = check_count(
            "global_batch_size", global_batch_size, least=1, unit="samples"
        )
        self._allow_uneven_batches = check_flag("allow_uneven_batches", allow_uneven_batches)
        self._user_settings = UserSettings()
        on_unresumable_data = check_choice(
            "on_unresumable_data", on_unresumable_data, get_args(UnresumableDataPolicy)
        )
        self._resumer = RunResumer(on_unresumable_data, self._user_settings)
        self._is_settled = False  # the batches of this fit
        self._is_configured = False  # DeepSpeed's config, for this fit
        self._user_batch_size: int | None = None
        self._loss_scaling_check = LossScalingCheck()
        self._requires_grad_check = RequiresGradCheck()
        self._partial_accumulation = PartialAccumulation()
        self._are_orders_checked = False  # those of the epoch
        self._ranks: Ranks | None = None
        self._warning_filters = WarningFilters()

    def _agree(self) -> Ranks:
        """Return the means of agreement between ranks, made when first needed."""
        if self._ranks is None:
            self._ranks = self._make_ranks()
        return self._ranks

    def _make_ranks(self) -> Ranks:
        return connect_ranks()

    def __repr__(self) -> str:
        """Name the Trainer that this is for: ``pytorch_lightning``'s refuses it by its repr."""
        return f"<{type(self).__name__}, for lightning.pytorch.Trainer, not pytorch_lightning's>"

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node. CPUs are numbered too: DeepSpeed wants each device's index."""
        devices = self._parallel_devices
        if devices and devices[0].type == "cpu":
            return [torch.device("cpu", index) for index in range(len(devices))]
        return devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    def _is_interrupted(self) -> bool:
        """Tell whether the trainer is handling an exception (``save_on_exception``)."""
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED

    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    def _resolve_batches_before_hooks(self) -> None:
        """Settle the batches before the first ``setup`` hook that can ask for them.

        Hooks compute schedules from ``accumulate_grad_batches`` or ``estimated_stepping_batches``.
        Loaders that ``fit`` was given are there by now; those of a data module are after its own
        ``setup``; those of the module after its own, which may say what they are made of.
        """
        module = self.lightning_module
        if module is None or not self._is_fitting():
            return
        if not self._is_configured:
            self._note_told_batch_size()
        source = module.trainer.fit_loop._data_source  # noqa: SLF001
        if not source.is_module():
            self._resolve_batches(self._batch_size_of_loader())
        elif source.instance is not module or not is_overridden("setup", module):
            _callbacks(module.trainer).insert(0, ResolveBatchesFirst(self._resolve_batches_in_hook))

    def _resolve_batches_in_hook(self) -> None:
        """Settle the batches if the hook that makes the loaders can be called already."""
        if not self._is_fitting():
            return  # left by a fit that failed before its engine was set up
        try:
            size = self._batch_size_of_loader()
        except Exception as error:  # noqa: BLE001 - users' code, before their own setup
            log.debug("The batch is settled later: train_dataloader raised %r", error)
        else:
            if size is not None:  # a loader that tells none yet may do so later
                self._resolve_batches(size)

    def _resolve_batches(self, batch_size: int | None) -> None:
        """Settle what a step is made of, once per fit."""
        module = self.lightning_module
        if module is None or self._is_settled:
            return
        batches = resolve_batch_settings(
            module.trainer,
            self._user_settings,
            self.world_size,
            batch_size,
            self._global_batch_size,
            allow_uneven=self._allow_uneven_batches,
        )
        self._resumer.set_batches(batches, module.trainer)
        self._is_settled = True

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        _forget_first(trainer)
        check_lightning_release(trainer)
        self._init_config_if_needed()
        # Lightning reads it of a ZeRO-3 evaluation, where a user's config need not have it.
        self._config().setdefault("zero_allow_untested_optimizer", False)
        if self._is_fitting() and not self._is_configured:
            # The config is of an evaluation, or of a fit before, which had other batches perhaps.
            config = self._config()
            del config["gradient_accumulation_steps"]
            del config["train_micro_batch_size_per_gpu"]
            if self._user_batch_size is not None:
                config["train_micro_batch_size_per_gpu"] = self._user_batch_size
            self._format_batch_size_and_grad_accum_config()
        super().setup(trainer)
        scale_scheduler_frequency(self.lr_scheduler_configs, trainer.accumulate_grad_batches)

    @override
    def teardown(self) -> None:
        self._warning_filters.end()
        self._is_settled = self._is_configured = False
        if (module := self.lightning_module) is not None:
            self._user_settings.restore(module.trainer)
            _forget_first(module.trainer)
        super().teardown()

    def _config(self) -> dict[str, Any]:
        """Give DeepSpeed's config, which Lightning has loaded by now."""
        config: dict[str, Any] = self.config  # type: ignore[assignment]
        return config

    def _note_told_batch_size(self) -> None:
        """Keep the batch size that the user told, before this library puts its own into its place.

        The config of a fit before holds one of this library's making.
        """
        if not self._config_initialized:
            told = self._config().get("train_micro_batch_size_per_gpu")
            self._user_batch_size = told if type(told) is int else None

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        """Settle what a step is made of, before the engine is built with it."""
        self._note_told_batch_size()
        self._is_configured = self._is_fitting()
        if self.lightning_module is not None and self._is_configured:
            if not self._is_settled:
                self._resolve_batches(self._batch_size_of_loader())
            elif self._resumer.orders_as_made is None:
                self._batch_size_of_loader()  # a hook asked for them, and they are shuffled by now
            batches = self._resumer.batches
            if batches is not None and batches.plan is not None:
                size = batches.plan.largest_micro_batch
                self._config()["train_micro_batch_size_per_gpu"] = size
        super()._format_batch_size_and_grad_accum_config()

    def _batch_size_of_loader(self) -> int | None:
        """Give the training loader's batch size: what it says, else what the user told."""
        module = self.lightning_module
        source = module.trainer.fit_loop._data_source if module is not None else None  # noqa: SLF001
        if source is None or not source.is_defined():
            return self._user_batch_size
        loaders = source.dataloader()
        self._resumer.orders_as_made = orders_as_made(loaders)
        return batch_size_of(loaders) or self._user_batch_size

    @override
    def _auto_select_batch_size(self) -> int:
        batches = self._resumer.batches
        return (batches.loader_batch_size if batches is not None else None) or 1

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let training take up an epoch at any sample."""
        module = self.lightning_module
        if module is None or not self._is_fitting():
            return dataloader
        if module.trainer.training:  # asked for in a hook, before they were settled
            self._resolve_batches(batch_size_of(dataloader) or self._user_batch_size)
        return self._resumer.process_loader(dataloader, module.trainer, self.global_rank)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Tell Lightning that DeepSpeed gathers gradients; but an epoch ends with a step.

        Of data without a length the last window may be short. Lightning steps there with other
        strategies; DeepSpeed would carry its gradients into the next epoch.
        """
        if (module := self.lightning_module) is None:
            return True
        progress = module.trainer.fit_loop.epoch_loop.batch_progress
        return not (self._is_fitting() and progress.is_last_batch)

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Let gradients be the mean over the global batch.

        Lightning has divided the loss by the accumulation already; DeepSpeed would do it again.
        """
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            kwargs.setdefault("scale_wrt_gas", False)
            weight = self._resumer.weight(module.trainer, self.global_rank)
            of_this = (closure_loss, weight, module.trainer.accumulate_grad_batches)
            if weight != 1.0:
                closure_loss = closure_loss * weight
            with self._loss_scaling_check.watch(*of_this, _loss_scale(self.deepspeed_engine)):
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step where Lightning's window of micro-batches ends, and only there.

        Lightning begins a window with each epoch; DeepSpeed, which counts by itself, would drift.
        """
        module = self.lightning_module
        if module is None or module.trainer.accumulate_grad_batches == 1:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        trainer = module.trainer
        steps = not trainer.fit_loop._should_accumulate()  # noqa: SLF001
        self.deepspeed_engine.set_gradient_accumulation_boundary(steps)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._partial_accumulation.after_micro_batch(trainer.current_epoch, steps=steps)
        if steps:
            self._resumer.after_optimizer_step(module, trainer, self.root_device)
        return result

    @override
    def on_train_start(self) -> None:
        """Put data, counters and random numbers in place, where a run is taken up."""
        module = self.lightning_module
        if module is not None:
            of_this = (self.global_rank, self.world_size, self.root_device)
            self._resumer.start(module.trainer, *of_this)
        self._are_orders_checked = False
        super().on_train_start()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Note what belongs to the batches before, while this one is on its way."""
        module = self.lightning_module
        if module is not None and self._is_fitting() and module.trainer.training:
            self._resumer.before_batch_transfer(module.trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (module := self.lightning_module) is not None:
            self._resumer.before_batch(module.trainer, batch_idx)
            self._partial_accumulation.before_batch(module.trainer.current_epoch)
            self._requires_grad_check.before_batch(module, module.trainer.current_epoch)
            if batch_idx == 0 or not self._are_orders_checked:
                # Not before: hooks of the epoch's start may change what a sampler draws. In each
                # epoch: a sampler may differ between ranks from the second one on.
                check_same_order_on_ranks(module.trainer, self._agree())
                self._are_orders_checked = True
        super().on_train_batch_start(batch, batch_idx)

    @override
    def on_validation_start(self) -> None:
        if self._is_fitting():
            self._resumer.validating(self.root_device)
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        if self._is_fitting() and (module := self.lightning_module) is not None:
            self._resumer.validated(module.trainer, self.root_device)
        super().on_validation_end()


def _loss_scale(engine: Any) -> float:
    """Return the factor by which DeepSpeed multiplies a loss: other than 1 in fp16."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0))
