"""The Lightning strategy: DeepSpeed's, with checkpoints that fit any device count."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from lightning_elastic_zero.api import load_options
from lightning_elastic_zero.checkpoint import CheckpointStats
from lightning_elastic_zero.coordination import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, Ranks, Timeouts
from lightning_elastic_zero.engine import (
    check_config,
    check_optimizer,
    check_supported,
    report_abandoned_builds,
    use_accelerator,
)
from lightning_elastic_zero.strategy_registry import register_names
from lightning_elastic_zero.trainer.batch_controller import BatchController
from lightning_elastic_zero.trainer.batch_settings import scale_scheduler_frequency
from lightning_elastic_zero.trainer.checkpoint_events import CheckpointEvents
from lightning_elastic_zero.trainer.checkpoint_loader import CheckpointLoader
from lightning_elastic_zero.trainer.checkpoint_saver import CheckpointSaver, make_manager
from lightning_elastic_zero.trainer.dataloader_resume import UnresumableDataPolicy
from lightning_elastic_zero.trainer.gradient_accumulation import GradientAccumulation
from lightning_elastic_zero.trainer.last_fit import LastFit
from lightning_elastic_zero.trainer.launched_world import (
    DevicesOfNode,
    NodesOfJob,
    limit_waiting,
    prepare_to_meet,
)
from lightning_elastic_zero.trainer.lightning_internals import (
    RESUME_END,
    check_lightning_release,
    is_evaluating,
    is_fitting,
    split_parent_options,
)
from lightning_elastic_zero.trainer.requires_grad_check import RequiresGradCheck
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.sample_order_check import SampleOrderCheck
from lightning_elastic_zero.trainer.sigterm import SigtermAgreement, set_exit_code
from lightning_elastic_zero.trainer.warning_filters import WarningFilters
from lightning_elastic_zero.trainer.weight_averaging import check_averaging


class ElasticDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed strategy whose checkpoints resume on any number of devices, at any ZeRO stage.

    Use ``ModelCheckpoint`` and ``ckpt_path`` as with Lightning's own strategy. A checkpoint is a
    directory. Tested on CPU with gloo; not yet tested on GPUs.

    Args:
        *args: Passed to ``DeepSpeedStrategy``, as are the other keyword arguments.
        global_batch_size (int | None): Samples per optimizer step over all devices. The strategy
            computes ``accumulate_grad_batches`` from it and the loader's ``batch_size``, and the
            integers ``limit_train_batches`` and ``val_check_interval`` count global batches.
            None: as configured in the Trainer.
        allow_uneven_batches (bool): Permit micro-batches that differ by one sample if
            ``global_batch_size`` cannot be divided into equal ones. Each is weighted by its size,
            so the loss must be a mean over samples. False: refuse, and list the device counts
            that fit.
        on_unresumable_data (str): What to do if training data cannot resume in the middle of an
            epoch. ``"refuse"`` raises an error; ``"restart_epoch"`` starts that epoch again.
        load_optimizer_state (bool): False: create a fresh optimizer on the saved weights. With a
            checkpoint of weights alone, this starts a new run.
        load_hyperparameters (bool): False: keep the configured learning rate, weight decay and
            other hyperparameters, together with the restored optimizer state.
        strict_optimizer (bool): False: accept other trained parameters or other parameter groups
            than in the checkpoint. Known parameters are restored, new ones keep the state that
            they have, and a warning names them.
        save_module_weights (bool): Also write the low-precision weights, which can be computed
            from the fp32 masters. DeepSpeed's own loaders need them.
        allow_pickle (bool): Build Python objects of any class from hyperparameters and callback
            states. This can run code: use it only with checkpoints that you trust.
        fallback (bool): If the checkpoint of ``fit(ckpt_path=...)`` is damaged, resume from the
            newest older one in its folder that is intact and has the same parameters, with a
            warning. False: the error names that checkpoint. Only checkpoints of this library are
            considered.
        fingerprint (bool): Each save stores a checksum of the training state. Each load compares
            it with the live state and fails on all ranks before training if they differ.
        rename (Mapping[str, str] | None): Layers that have another name now, such as
            ``{"encoder": "backbone.encoder"}``: prefixes of names in the checkpoint and in the
            model, or patterns with ``*``.
        async_save (bool): Continue training while the checkpoint is written. The call waits only
            for a copy of the state in host memory, for which each host needs room.
            ``wait_for_save`` waits for publication.
        max_snapshot_bytes (int | None): Limit of the host memory of one rank's copy. State that
            does not fit is written before the next optimizer step, which waits for it.
        stall_timeout_s (float): Seconds that a rank may work on a save or load without progress
            before the call fails on all ranks. Increase it if one call to the file system can
            take longer.
        absent_timeout_s (float): Seconds to wait for ranks that have not entered a save or load.
            A warning names them after 30 s.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option has an invalid value.
    """

    _accumulation: GradientAccumulation  # of one fit, as the next ones
    _checks: tuple[RequiresGradCheck, SampleOrderCheck]
    num_nodes = NodesOfJob()  # as torchrun has started them
    parallel_devices: Any = DevicesOfNode()  # likewise

    def __init__(
        self,
        *args: Any,
        global_batch_size: int | None = None,
        allow_uneven_batches: bool = False,
        on_unresumable_data: UnresumableDataPolicy = "refuse",
        load_optimizer_state: bool = True,
        load_hyperparameters: bool = True,
        strict_optimizer: bool = True,
        save_module_weights: bool = False,
        allow_pickle: bool = False,
        fallback: bool = False,
        fingerprint: bool = False,
        rename: Mapping[str, str] | None = None,
        async_save: bool = False,
        max_snapshot_bytes: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        absent_timeout_s: float = ABSENT_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        later = split_parent_options(type(self), limit_waiting(kwargs))
        super().__init__(*args, **kwargs)
        vars(self).update(later)
        self._resumer = RunResumer(on_unresumable_data)
        self._batches = BatchController(
            self._resumer, global_batch_size, allow_uneven_batches=allow_uneven_batches
        )
        options = load_options(
            load_optimizer_state=load_optimizer_state,
            load_hyperparameters=load_hyperparameters,
            strict_optimizer=strict_optimizer,
            allow_pickle=allow_pickle,
            fallback=fallback,
            fingerprint=fingerprint,
            rename=rename,
        )
        self.checkpoint_events = CheckpointEvents()  # for CheckpointMonitor
        limits = (Timeouts.of(stall_timeout_s, absent_timeout_s), max_snapshot_bytes)
        self._manager = make_manager(self.checkpoint_events, *limits, async_save=async_save)
        self._last_fit = LastFit()
        self._sigterm = SigtermAgreement()
        of_both = (self._manager, self._get_ranks, self._resumer, self._last_fit)
        self._loader = CheckpointLoader(*of_both, self.checkpoint_events, options)
        self._saver = CheckpointSaver(*of_both, options, save_module_weights=save_module_weights)
        self._warning_filters = WarningFilters()
        self._ranks: Ranks | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this library's names for the class, and none of DeepSpeed's."""
        register_names(strategy_registry, cls)

    def __repr__(self) -> str:
        """Name the Trainer that this is for: ``pytorch_lightning``'s refuses it by its repr."""
        return f"<{type(self).__name__}, for lightning.pytorch.Trainer, not pytorch_lightning's>"

    @property
    def _trainer(self) -> pl.Trainer | None:
        """The trainer that runs, or ran last."""
        module = self.lightning_module
        return module.trainer if module is not None else None

    def _get_ranks(self) -> Ranks:
        """Return the ranks of training's threads, connected when first needed."""
        if self._ranks is None:
            self._ranks = self._manager.training_ranks()
        return self._ranks

    def _leave_ranks(self) -> None:
        """Close the ranks' connection, if it is open: the next call makes another."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    @override
    def setup_environment(self) -> None:
        self._leave_ranks()  # of a save after the last run, whose process group may be gone
        self._warning_filters.begin()
        check_config(self.config or {}, trains=not is_evaluating(self._trainer))
        prepare_to_meet(self, self._timeout)
        report_abandoned_builds(self.config or {})
        if isinstance(self.accelerator, CPUAccelerator):
            use_accelerator("cpu")
            # The parent refuses all but CUDA here, and else does what its own parent does.
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()
        self._batches.begin(self._trainer, self.config, is_users=not self._config_initialized)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._init_config_if_needed()
        config: Any = self.config
        if fitting := is_fitting(trainer):
            self._last_fit.forget()
        check_lightning_release(trainer)
        # Lightning reads it of a ZeRO-3 evaluation, where a user's config need not have it.
        config.setdefault("zero_allow_untested_optimizer", False)
        if self._batches.reset(trainer, config):
            self._format_batch_size_and_grad_accum_config()
        super().setup(trainer)
        scale_scheduler_frequency(self.lr_scheduler_configs, trainer.accumulate_grad_batches)
        check_supported(engine := self.deepspeed_engine)
        check_averaging(trainer, cut_up=self.zero_stage_3)
        self._sigterm.begin(trainer)
        if fitting:
            self._last_fit.begin(engine)
            self._accumulation = GradientAccumulation(engine)
            self._checks = (RequiresGradCheck(engine), SampleOrderCheck(self._get_ranks))
        self._loader.start()
        self._saver.start(trainer, engine, self.global_rank)

    @override
    def _init_optimizers(self) -> Any:
        """Return the module's optimizer and schedule; refuse one before DeepSpeed does."""
        optimizer, schedule = super()._init_optimizers()
        if (module := self.lightning_module) is not None:
            check_optimizer(optimizer, self.config or {}, module)
        return optimizer, schedule

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        """Resolve what a step is made of, before the engine is built with it."""
        self._batches.configure(self._trainer, self.config, is_users=not self._config_initialized)
        super()._format_batch_size_and_grad_accum_config()

    @override
    def _auto_select_batch_size(self) -> int:
        return self._batches.loader_batch_size

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader by which training can resume an epoch at any sample."""
        return self._batches.process_loader(dataloader, self._trainer, self.global_rank)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Whether DeepSpeed is to accumulate on: not into the next epoch, from a short window."""
        if not is_fitting(trainer := self._trainer):
            return True
        return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the mean over the global batch: Lightning has divided by the accumulation."""
        trainer = self._trainer
        if trainer is None or not trainer.lightning_module.automatic_optimization:
            self._accumulation.before_manual_backward()
            with self._accumulation.ensure_scaled(closure_loss):
                return super().backward(closure_loss, *args, **kwargs)
        weight = self._resumer.weight(trainer, self.global_rank)
        with self._accumulation.scaled(closure_loss, weight, trainer) as loss:
            return super().backward(loss, *args, **{"scale_wrt_gas": False} | kwargs)

    @override
    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step where Lightning's window of micro-batches ends, and only there."""
        if (trainer := self._trainer) is None or trainer.accumulate_grad_batches == 1:
            self._accumulation.after_manual_step()
            return super().optimizer_step(optimizer, *args, **kwargs)
        steps = self._accumulation.set_boundary(trainer)
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._accumulation.after_micro_batch(trainer.current_epoch, steps=steps)
        if steps:
            self._resumer.recorder.after_optimizer_step(trainer, self.root_device)
        return result

    @override
    def on_train_start(self) -> None:
        """Restore data, counters and random numbers, where a run is resumed."""
        if (trainer := self._trainer) is not None:
            self._resumer.on_train_start(trainer, self.root_device)
        super().on_train_start()

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Note what belongs to the batches before, while this one is on its way."""
        if is_fitting(trainer := self._trainer) and trainer.training:
            self._resumer.before_batch_transfer(trainer)
        return super().batch_to_device(batch, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (trainer := self._trainer) is not None:
            self._resumer.before_batch(trainer, batch_idx)
            self._accumulation.before_batch(trainer.current_epoch)
            for check in self._checks:
                check.before_batch(trainer, batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    @override
    def on_validation_start(self) -> None:
        if is_fitting(self._trainer):
            self._resumer.recorder.on_validation_start(self.root_device)
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        if is_fitting(trainer := self._trainer):
            self._resumer.recorder.on_validation_end(trainer, self.root_device)
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for hooks to see; they are saved from the masters, not from here."""
        return self._saver.track(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return nothing: the state is saved from the optimizer's buffers, not from here."""
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint directory; collective. ``last_save`` is its ``CheckpointStats``.

        Args:
            checkpoint: what Lightning's trainer passes.
            filepath: the directory, the same on all ranks.
            storage_options: not supported.

        Raises:
            TypeError: ``storage_options`` were given.
            SaveError: it could not be written; the last published checkpoint is intact.
            UnsupportedError: something in the run cannot be saved.
            RanksError: a rank failed, died, or did not call this.
        """
        if storage_options is not None:
            msg = f"{type(self).__name__} writes local directories; storage_options do not apply"
            raise TypeError(msg)
        engine, exclude = self.deepspeed_engine, self.exclude_frozen_parameters
        self._saver.save(checkpoint, filepath, engine, self._trainer, exclude_frozen=exclude)

    @property
    def last_save(self) -> CheckpointStats | None:
        """Path, seconds and bytes of the last save that was published; None before."""
        return self._manager.last_save

    def wait_for_save(self) -> None:
        """Wait until what was saved last is published; collective.

        Raises:
            ElasticZeroError: it could not be; the checkpoint published before is intact.
        """
        self._saver.wait()

    @override
    def remove_checkpoint(self, filepath: str | PathLike[str]) -> None:
        """Delete a checkpoint as soon as nothing needs it."""
        if self.is_global_zero:
            self._manager.remove(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore a checkpoint directory that any number of devices wrote; collective.

        Args:
            checkpoint_path: the directory; all ranks take rank 0's.
            weights_only: not used: nothing is unpickled unless ``allow_pickle`` was given.

        Returns:
            The trainer's part, from which Lightning restores loops, callbacks and schedulers;
            ``last_load`` is the ``CheckpointStats``.

        Raises:
            ElasticZeroError: see ``lightning_elastic_zero.load_checkpoint``.
        """
        if self.load_full_weights and self.zero_stage_3:
            self._last_fit.forget()
            given = () if weights_only is None else (weights_only,)  # The argument came with 2.6.
            return super().load_checkpoint(fspath(checkpoint_path), *given)
        self.wait_for_save()
        return self._loader.load(checkpoint_path, self.deepspeed_engine, self._trainer)

    @property
    def last_load(self) -> CheckpointStats | None:
        """Path, seconds and bytes of the last load; None before."""
        return self._loader.last_load

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing for directories: the engine has its weights already."""
        if self.load_full_weights and self.zero_stage_3:
            super().load_model_state_dict(checkpoint, strict)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; at the end of a resume, agree first on what was resumed."""
        if RESUME_END in (*args, kwargs.get("name")):
            self._loader.check_all_ranks_resumed(self._trainer)
        super().barrier(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Wait for the save in flight; raise on all ranks what it failed by, or a SIGTERM."""
        self.wait_for_save()
        super().on_train_end()
        if (trainer := self._trainer) is not None:
            self._sigterm.stop_together(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Set the exit code of a process that SIGTERM ends, for torchrun's agent."""
        set_exit_code(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """End saving and agreeing, before tensors move; no collective, since ranks may be gone."""
        trainer = self._trainer
        failure = self._saver.stop(trainer)
        self._leave_ranks()
        self._warning_filters.end()
        self._batches.end(trainer)
        super().teardown()
        if failure is not None:
            raise failure
