"""The Lightning strategy: DeepSpeed's, with checkpoints that resume on any number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from typing import Any

import lightning.pytorch as pl
import torch
from fsspec import register_implementation
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.strategies.deepspeed import remove_module_hooks
from typing_extensions import override

from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.checkpoint.types import CheckpointStats
from lightning_elastic_zero.coordination.ranks import Ranks, is_of_all_ranks
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.options import check_flag, take, takes
from lightning_elastic_zero.engine.deepspeed import remove_gradient_hooks
from lightning_elastic_zero.engine.installation import report_abandoned_builds, use_accelerator
from lightning_elastic_zero.engine.support import (
    check_config,
    check_creation,
    check_optimizer,
    check_supported,
    check_uncut,
)
from lightning_elastic_zero.engine.tensor_parallel import (
    evaluation_engine,
    grid_in,
    remove_input_check,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.registry import register_names
from lightning_elastic_zero.trainer.accumulation import GradientAccumulation
from lightning_elastic_zero.trainer.batches import BatchController
from lightning_elastic_zero.trainer.checkpoint_io import RunCheckpoints
from lightning_elastic_zero.trainer.data_position import UnresumableDataPolicy
from lightning_elastic_zero.trainer.fit_warnings import RequiresGradCheck, hide_known_warnings
from lightning_elastic_zero.trainer.launch import (
    SigtermAgreement,
    devices_of_node,
    nodes_of_job,
    prepare_to_meet,
    set_exit_code,
    with_default_timeout,
)
from lightning_elastic_zero.trainer.lightning import (
    RESUME_END,
    check_lightning_release,
    is_fitting,
    paths_of_failures,
    split_parent_options,
)
from lightning_elastic_zero.trainer.loaders import SampleOrderCheck, keep_workers_from_signals
from lightning_elastic_zero.trainer.node_file_system import NodeFileSystem
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.tensor_parallel import (
    SameBatchCheck,
    check_divisible,
    count_data_ranks,
    seed_workers,
    with_tensor_ranks,
)


class ElasticDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeed strategy whose checkpoints resume on any number of devices, at any ZeRO stage.

    Use ``ModelCheckpoint`` and ``ckpt_path`` as with Lightning's own strategy. A checkpoint is a
    directory. Tested on CPU with gloo and on one GPU; not yet tested on several GPUs.

    Args:
        *args: Passed to ``DeepSpeedStrategy``.
        global_batch_size (int | None): Samples per optimizer step over all devices. The strategy
            computes ``accumulate_grad_batches`` from it and the loader's ``batch_size``, and the
            integers ``limit_train_batches`` and ``val_check_interval`` count global batches.
            None: as configured in the Trainer.
        allow_uneven_batches (bool): Permit micro-batches that differ by one sample if
            ``global_batch_size`` cannot be divided into equal ones. Each is weighted by its size,
            so the loss must be a mean over samples. False: refuse, and list the device counts
            that fit.
        tensor_parallel_size (int): Tensor ranks of DeepSpeed's AutoTP: neighbouring devices that
            share the layers and the samples of a data rank. The number of devices is a multiple of
            it. Presets and layer specs go into ``config``, section ``tensor_parallel``.
        on_unresumable_data (str): What to do if training data cannot resume in the middle of an
            epoch. ``"refuse"`` raises an error; ``"restart_epoch"`` starts that epoch again.
        load_optimizer_state (bool): False: create a fresh optimizer on the saved weights. With a
            checkpoint of weights alone, this starts a new run.
        load_hyperparameters (bool): False: keep the configured learning rate, weight decay and
            other hyperparameters, together with the restored optimizer state.
        **kwargs: Options of ``ElasticOptions`` and of ``DeepSpeedStrategy``.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option has an invalid value.
    """

    _accumulation: GradientAccumulation  # set in setup() of each fit, as _checks
    _checks: tuple[RequiresGradCheck, SampleOrderCheck]

    @takes(ElasticOptions)
    def __init__(
        self,
        *args: Any,
        global_batch_size: int | None = None,
        allow_uneven_batches: bool = False,
        tensor_parallel_size: int = 1,
        on_unresumable_data: UnresumableDataPolicy = "refuse",
        load_optimizer_state: bool = True,
        load_hyperparameters: bool = True,
        **kwargs: Any,
    ) -> None:
        options = take(ElasticOptions, kwargs)
        later = split_parent_options(type(self), with_default_timeout(kwargs))
        super().__init__(*args, **kwargs)
        vars(self).update(later)
        self.config = with_tensor_ranks(self.config or {}, tensor_parallel_size)
        self.load_full_weights = False  # ``load_checkpoint`` recognises complete files.
        self._batches = BatchController(
            global_batch_size, allow_uneven_batches=allow_uneven_batches
        )
        self._resumer = RunResumer(self._batches, on_unresumable_data)
        self.checkpoint_manager = options.manager()
        self._sigterm = SigtermAgreement()
        self._checkpoints = RunCheckpoints(
            self.checkpoint_manager,
            self._get_ranks,
            self._batches.settings,
            self._resumer,
            options.load_options(
                optimizer_state=check_flag("load_optimizer_state", load_optimizer_state),
                hyperparameters=check_flag("load_hyperparameters", load_hyperparameters),
            ),
            options.save_options(),
        )
        self._ranks: Ranks | None = None
        self._prepared: pl.LightningModule | None = None
        self._same_batches = SameBatchCheck(self._get_ranks)
        self._is_connected = False
        """Whether the ranks are connected for a run whose environment is not set up yet."""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this library's names only, not those of the parent."""
        register_names(strategy_registry, cls)

    def __repr__(self) -> str:
        """Name the required Trainer; ``pytorch_lightning`` shows this text in its refusal."""
        return f"<{type(self).__name__}, for lightning.pytorch.Trainer, not pytorch_lightning's>"

    @property
    @override
    def lightning_module(self) -> pl.LightningModule | None:
        """The module. ``fit`` asks for it right before it looks for ``ckpt_path="last"``."""
        module = super().lightning_module
        if module is not None and module is not self._prepared:
            trainer = None
            with suppress(RuntimeError):  # It has no trainer yet.
                trainer = module.trainer
            if trainer is not None and trainer.strategy is self:
                self._checkpoints.prepare(trainer, self._connect_early)
                self._prepared = module
        return module

    @DeepSpeedStrategy.num_nodes.getter  # type: ignore[attr-defined]  # a property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return nodes_of_job(self, super().num_nodes)

    @DeepSpeedStrategy.parallel_devices.getter  # type: ignore[attr-defined]  # a property
    def parallel_devices(self) -> list[torch.device] | None:
        """Devices of this node, each with an index."""
        return devices_of_node(self, super().parallel_devices)

    @property
    def _grid(self) -> RankGrid:
        """The data ranks and tensor ranks."""
        return grid_in(self.config, self.world_size)

    @property
    def _trainer(self) -> pl.Trainer:
        """The trainer that runs, or ran last; Lightning has set the module before any hook."""
        module: Any = self.lightning_module
        trainer: pl.Trainer = module.trainer
        return trainer

    def _get_ranks(self) -> Ranks:
        """Return the connection of the training threads' ranks, opened when first needed."""
        if self._ranks is None:
            self._ranks = self.checkpoint_manager.training_ranks()
        return self._ranks

    def _leave_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _connect_early(self) -> Ranks:
        """Connect the ranks before ``setup_environment``, and return them; collective."""
        if not self._is_connected:
            self._connect()
        return self._get_ranks()

    def _connect(self) -> None:
        """Connect the ranks for one run; collective."""
        self._leave_ranks()  # left by a save after the last run, whose process group may be closed
        hide_known_warnings()
        check_config(self.config or {}, trains=is_fitting(self._trainer))
        check_divisible(self._trainer)
        prepare_to_meet(self, self._timeout)
        report_abandoned_builds(self.config or {})
        if isinstance(self.accelerator, CPUAccelerator):
            use_accelerator("cpu")
            # DeepSpeedStrategy only adds a check for CUDA here.
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()
        self._is_connected = True

    @override
    def setup_environment(self) -> None:
        self._prepared = None  # the next fit may have other callbacks
        if not self._is_connected:
            self._connect()
        self._is_connected = False  # the next run may have another process group
        if is_fitting(self._trainer):
            self._resumer.begin()
        self._batches.begin(self._trainer, self.config, is_users=not self._config_initialized)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._init_config_if_needed()
        config: Any = self.config
        if fitting := is_fitting(trainer):
            self._checkpoints.last_fit.forget()
            remove_gradient_hooks(trainer.lightning_module)
        check_lightning_release(trainer)
        check_uncut(trainer.lightning_module, config)
        # Lightning reads this key in a ZeRO-3 evaluation, even if the config does not have it.
        config.setdefault("zero_allow_untested_optimizer", False)
        if self._batches.reset(trainer, config):
            self._format_batch_size_and_grad_accum_config()
        super().setup(trainer)
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                # Lightning compares it with the number of micro-batches.
                config.frequency *= trainer.accumulate_grad_batches
        check_supported(engine := self.deepspeed_engine)
        remove_input_check(engine)  # replaced by this one
        self._same_batches = SameBatchCheck(self._get_ranks)
        count_data_ranks(trainer.lightning_module, self._grid)
        self._sigterm.begin(trainer)
        if fitting:
            self._accumulation = GradientAccumulation(engine)
            self._checks = (RequiresGradCheck(engine), SampleOrderCheck(self._get_ranks))
        self._checkpoints.start(trainer, engine, partitioned=self.zero_stage_3)

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Create a model in ``configure_model``, whose weights ZeRO-3 partitions at once."""
        if self.zero_stage_3:
            check_creation(self.config or {})
        with super().model_sharded_context():
            yield

    @override
    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        if self._grid.tensor == 1:
            super()._initialize_deepspeed_inference(model)
            return
        remove_module_hooks(model)
        self.model = evaluation_engine(model, self.config or {}, self.root_device.index)

    @override
    def _init_optimizers(self) -> Any:
        optimizer, schedule = super()._init_optimizers()
        if (module := self.lightning_module) is not None:
            scheduled = schedule is not None
            check_optimizer(optimizer, self.config or {}, module, is_scheduled=scheduled)
        return optimizer, schedule

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        """Resolve the batch settings before the engine is built with them."""
        self._batches.configure(self._trainer, self.config, is_users=not self._config_initialized)
        super()._format_batch_size_and_grad_accum_config()

    @override
    def _auto_select_batch_size(self) -> int:
        return self._batches.loader_batch_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of data ranks, and the data rank of this process, for samplers."""
        return {"num_replicas": self._grid.data, "rank": self._grid.data_rank(self.global_rank)}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if is_fitting(trainer := self._trainer):
            if trainer.training:
                self._batches.resolve_for(dataloader, trainer)
            dataloader = self._resumer.loaders.process(dataloader, trainer)
        seed_workers(dataloader, trainer)
        keep_workers_from_signals(dataloader)
        return dataloader

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over all ranks; a ``"sum"``, as of logged values, over the data ranks.

        Tensor ranks have equal values, so their means, minima and maxima are those of data ranks.
        """
        reduced = super().reduce(tensor, group, reduce_op)
        copies = self._grid.tensor
        is_sum = reduce_op == "sum" and group is None and isinstance(reduced, torch.Tensor)
        if copies == 1 or not is_sum:
            return reduced
        if reduced.is_floating_point():
            return reduced / copies
        return -(-reduced // copies)  # Rounded up: a flag of one tensor rank counts.

    @override
    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor of each data rank.

        Raises UnsupportedError for ``sync_grads`` with tensor parallelism: only the first tensor
        rank of each data rank would get gradients.
        """
        copies = self._grid.tensor
        copied = copies > 1 and is_of_all_ranks(group)
        if copied and sync_grads:
            msg = (
                "all_gather(sync_grads=True) with tensor parallelism: only one tensor rank of each "
                "data rank would get gradients. Gather without gradients, or use "
                "tensor_parallel_size=1"
            )
            raise UnsupportedError(msg)
        gathered = super().all_gather(tensor, group, sync_grads)
        return gathered[::copies] if copied else gathered

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False at the end of an epoch: a short window must not continue in the next one."""
        if not is_fitting(trainer := self._trainer):
            return True
        return not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients of the mean over the global batch."""
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            with self._accumulation.manual(closure_loss):
                return super().backward(closure_loss, *args, **kwargs)
        weight = self._resumer.weight(trainer)
        with self._accumulation.scaled(closure_loss, weight, trainer) as loss:
            return super().backward(loss, *args, **{"scale_wrt_gas": False} | kwargs)

    @override
    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take an optimizer step only at the end of Lightning's accumulation window."""
        ends_window = self._accumulation.begin_step(self._trainer)
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if ends_window:
            self._resumer.recorder.after_optimizer_step(self._trainer)
        return result

    @override
    def on_train_start(self) -> None:
        self._checkpoints.check_room(self._trainer, self.deepspeed_engine)
        self._resumer.on_train_start(self._trainer, self.root_device)
        self._checkpoints.resume_saves(self._trainer)
        super().on_train_start()

    @override
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare for the hooks of a batch, then move it."""
        if is_fitting(trainer := self._trainer) and trainer.training:
            self._resumer.before_batch_transfer(trainer)
        self._same_batches.before_batch(trainer, self.deepspeed_engine, batch)
        return super().batch_to_device(batch, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.checkpoint_manager.collect()
        trainer = self._trainer
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
        if is_fitting(self._trainer):
            self._resumer.recorder.on_validation_end(self.root_device)
        super().on_validation_end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for hooks. They are saved from the fp32 masters, not from here."""
        return self._checkpoints.track(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return nothing: the state is saved from the optimizer's buffers."""
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint directory; collective. ``last_save`` is its ``CheckpointStats``.

        ``filepath`` is equal on all ranks; ``storage_options`` must be None.

        Raises:
            SaveError: It could not be written. The last published checkpoint is intact.
            UnsupportedError: A part of the state cannot be saved.
            RanksError: A rank failed, died or did not call this function.
        """
        if storage_options is not None:
            msg = (
                f"{type(self).__name__} writes directories and object-store URLs itself: "
                "storage_options must be None"
            )
            raise TypeError(msg)
        engine, exclude = self.deepspeed_engine, self.exclude_frozen_parameters
        trainer = self._trainer
        if is_fitting(trainer) and self._resumer.has_begun:
            self._accumulation.warn_of_lost_gradients(trainer)
        self._checkpoints.save(checkpoint, filepath, engine, trainer, exclude_frozen=exclude)

    @property
    def last_save(self) -> CheckpointStats | None:
        """Cost of the last published save; None before the first."""
        return self.checkpoint_manager.last_save

    def wait_for_save(self) -> None:
        """Wait until the last save is published; collective.

        Raises:
            ElasticZeroError: It failed. The checkpoint before it is intact.
        """
        self._checkpoints.wait()

    @override
    def remove_checkpoint(self, filepath: str | PathLike[str]) -> None:
        """Delete a checkpoint as soon as no link or newer save depends on it."""
        trainer = self._trainer
        if not is_fitting(trainer) and fspath(filepath) in paths_of_failures(trainer):
            # After any run, its callback requests this. The next fit may resume from it.
            return
        if self.is_global_zero:
            self.checkpoint_manager.remove(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore a checkpoint that was saved on any number of devices; collective.

        All ranks use rank 0's ``checkpoint_path``. ``weights_only`` is not used, because Lightning
        does not pass the Trainer's to strategies that load after setup: objects are unpickled only
        with ``allow_pickle``.

        Returns:
            The trainer's state, from which Lightning restores loops, callbacks and schedulers.
            ``last_load`` has the cost.

        Raises:
            ElasticZeroError: See ``lightning_elastic_zero.load_checkpoint``.
        """
        self.wait_for_save()
        return self._checkpoints.load(checkpoint_path, self.deepspeed_engine, self._trainer)

    @property
    def last_load(self) -> CheckpointStats | None:
        """Cost of the last load; None before the first."""
        return self._checkpoints.last_load

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: the engine already has its weights."""

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. At the end of a resume, check first that all ranks resumed."""
        if RESUME_END in (*args, kwargs.get("name")):
            self._checkpoints.check_all_ranks_resumed(self._trainer)
        super().barrier(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Wait for the save in the background; raise its failure or a SIGTERM on all ranks."""
        self.wait_for_save()
        super().on_train_end()
        self._sigterm.stop_together(self._trainer)
        self.checkpoint_manager.on_completed()

    @override
    def on_exception(self, exception: BaseException) -> None:
        set_exit_code(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """End saving before tensors move. Not collective, since ranks may have died."""
        trainer = self._trainer
        failure = self._checkpoints.stop(trainer)
        self._leave_ranks()
        self._batches.end(trainer)
        super().teardown()
        if failure is not None:
            raise failure


ElasticDeepSpeedStrategy.register_strategies(StrategyRegistry)
register_implementation(NodeFileSystem.protocol, NodeFileSystem)
