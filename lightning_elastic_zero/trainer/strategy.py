"""The Lightning strategy: what its parent does, with checkpoints that fit any device count."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_elastic_zero.api import check_timeouts, engine_handle, load_options
from lightning_elastic_zero.checkpoint import (
    CheckpointManager,
    CheckpointStats,
    EngineHandle,
    LoadResult,
    SaveOptions,
    load_engine,
)
from lightning_elastic_zero.coordination import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, Ranks
from lightning_elastic_zero.data_progress import with_loader_states
from lightning_elastic_zero.engine import (
    check_config,
    check_supported,
    copy_full_weights,
    drop_accumulation_window,
    trained_parameters,
    use_accelerator,
    version_of,
    weights_match_masters,
)
from lightning_elastic_zero.option_checks import check_count, check_flag
from lightning_elastic_zero.strategy_names import STRATEGY_ARGUMENTS
from lightning_elastic_zero.trainer import weight_averaging
from lightning_elastic_zero.trainer.base_strategy import BaseElasticStrategy
from lightning_elastic_zero.trainer.configured_rates import configured_rates, warn_replaced_rates
from lightning_elastic_zero.trainer.epoch_metrics import RESULTS, RESULTS_BY_RANK
from lightning_elastic_zero.trainer.last_fit import LastFit
from lightning_elastic_zero.trainer.lightning_internals import RESUME_END
from lightning_elastic_zero.trainer.lr_schedulers import resume_as_configured, resume_as_saved
from lightning_elastic_zero.trainer.model_checkpoint_hooks import ModelCheckpointHooks
from lightning_elastic_zero.trainer.resume import STATE_KEY
from lightning_elastic_zero.trainer.trainer_state import (
    format_loaded,
    format_not_resumed,
    is_slurm_requeue,
    without_progress,
)
from lightning_elastic_zero.trainer.weight_averaging import StateDictTracker

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.optim import Optimizer

VERSION_KEY = "pytorch-lightning_version"
"""The entry by which Lightning knows its own checkpoints, and demands of every one."""


class ElasticDeepSpeedStrategy(BaseElasticStrategy):
    """DeepSpeed ZeRO-1, 2 and 3 whose checkpoints resume on any number of devices.

    Takes all that Lightning's ``DeepSpeedStrategy`` takes; ``ModelCheckpoint`` and ``ckpt_path``
    are used as ever. A checkpoint is a directory. Runs on the CPU (gloo) as well as on CUDA.
    """

    def __init__(
        self,
        *args: Any,
        load_optimizer_state: bool = True,
        load_hyperparameters: bool = True,
        save_module_weights: bool = False,
        allow_pickle: bool = False,
        fallback: bool = False,
        rename: Mapping[str, str] | None = None,
        async_save: bool = False,
        max_snapshot_bytes: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        absent_timeout_s: float = ABSENT_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        """Take the parents' arguments, and those for saving and loading.

        Args:
            *args: as ``BaseElasticStrategy`` and ``DeepSpeedStrategy``.
            load_optimizer_state: False: ``fit(ckpt_path=...)`` goes on from the saved weights with
                a fresh optimizer; with a weights-only checkpoint it starts a new run on them.
            load_hyperparameters: False: learning rate, weight decay, betas, ... stay as this run
                configures them; moments are restored all the same. A scheduler keeps its place,
                with the rates that it has there as configured now (see docs/continuation.md).
            save_module_weights: write the low-precision weights too, for tools that insist on them.
            allow_pickle: build Python objects of any class from the trainer's state, where it is no
                plain data. That can run code: only for checkpoints that you trust.
            fallback: where ``fit(ckpt_path=...)`` is given a damaged checkpoint of this library, go
                on from the newest sound one before it, with a warning; else the error names it.
            rename: layers that had other names: see ``load_checkpoint``.
            async_save: let training wait for a copy of the state in host memory only, and write
                and publish it in the background. A checkpoint is then there some time after
                ``save_checkpoint`` has returned (``wait_for_save``), and hosts need room for their
                ranks' state once more. Hence off by default.
            max_snapshot_bytes: with ``async_save``, the most host memory of a rank's copy; None: no
                limit. What does not fit is written before the next step.
            stall_timeout_s: how long a rank may work on a save or load without progress before that
                fails on all ranks: raise it where one call to the disk may take longer.
            absent_timeout_s: how long ranks wait for one that does not come; a warning names it.
            **kwargs: as ``BaseElasticStrategy`` and ``DeepSpeedStrategy``.
        """
        super().__init__(*args, **kwargs)
        self._load_options = load_options(
            load_optimizer_state=load_optimizer_state,
            load_hyperparameters=load_hyperparameters,
            allow_pickle=allow_pickle,
            fallback=fallback,
            rename=rename,
        )
        self._save_module_weights = check_flag("save_module_weights", save_module_weights)
        self._manager = saves = CheckpointManager(
            check_timeouts(stall_timeout_s, absent_timeout_s),
            background=check_flag("async_save", async_save),
            max_snapshot_bytes=check_count(
                "max_snapshot_bytes", max_snapshot_bytes, least=0, unit="bytes"
            ),
        )
        self._checkpoint_hooks = ModelCheckpointHooks(
            self._link, saves.is_being_written, saves.refusal_reason
        )
        self._resumed = False
        self._state_dict_tracker = StateDictTracker()
        self._warned_objects: set[str] = set()  # those that a load refuses
        self._last_fit = LastFit(weights_match_masters)
        self.last_load: CheckpointStats | None = None
        """Path, seconds and bytes of the last load."""

    # -- setting up --------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._warning_filters.begin()
        if isinstance(self.accelerator, CPUAccelerator):
            use_accelerator("cpu")
            # The parent refuses all but CUDA here, and else does what its own parent does.
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()
        self._resolve_batches_before_hooks()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._init_config_if_needed()
        check_config(self.config or {})
        if self._is_fitting():
            self._last_fit.forget()
        super().setup(trainer)
        check_supported(self.deepspeed_engine)
        if self._is_fitting():
            engine = self.deepspeed_engine
            self._last_fit.begin(engine)
            self._requires_grad_check.begin(engine.module, trained_parameters(engine))
            self._partial_accumulation.begin(engine, drop_accumulation_window)
        weight_averaging.check_averaging(trainer, cut_up=self.zero_stage_3)
        self._resumed = False
        self._agree()
        callbacks = trainer.checkpoint_callbacks if self._is_fitting() else []
        dirpaths = [getattr(callback, "dirpath", None) for callback in callbacks]
        self._manager.start(engine_handle(self.deepspeed_engine), self.global_rank, dirpaths)
        self._checkpoint_hooks.begin(trainer)

    @override
    def _make_ranks(self) -> Ranks:
        return self._manager.training_ranks()

    # -- saving ------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Give hooks the weights to see; they are saved from the masters, not through this dict."""
        return self._state_dict_tracker.track(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Give nothing: the state is saved from the optimizer's buffers, not through this dict."""
        return {}

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint directory; collective.

        Args:
            checkpoint: what Lightning's trainer hands over.
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
        trained = self._last_fit.engine(self.deepspeed_engine, filepath, self._agree)
        engine = engine_handle(trained)
        weights_only = "optimizer_states" not in checkpoint or not self._last_fit.is_whole
        if weights_only and (module := self.lightning_module) is not None:
            weight_averaging.add_averages(module.trainer, checkpoint)
        client_state, left_out = self._state_dict_tracker.remove_tracked(checkpoint)
        options = SaveOptions(
            weights_only=weights_only,
            exclude_frozen=self.exclude_frozen_parameters,
            left_out=left_out,
            told=None if self._load_options.allow_pickle else self._warned_objects,
            module_weights=self._save_module_weights,
        )
        with self._checkpoint_hooks.saving():
            self._save(engine, filepath, client_state, self._with_progress(options, client_state))

    def _save(
        self,
        engine: EngineHandle,
        filepath: str | os.PathLike[str],
        client_state: dict[str, Any],
        options: SaveOptions,
    ) -> None:
        """Save at once or in the background, as this moment allows."""
        if self._is_interrupted() or is_slurm_requeue(filepath):
            # A rank that failed alone saves alone: the others will not come. SLURM's signal may
            # come in the midst of another save, and the job ends as soon as this returns.
            self._manager.drain_local()
            with self._manager.exit_ranks(filepath, interrupted=self._is_interrupted()) as ranks:
                self._manager.save(engine, filepath, ranks, client_state, options)
            return
        saved, saves = (engine, filepath, self._agree(), client_state, options), self._manager
        if not saves.save_async(*saved):
            saves.wait_until_finished(self._agree())
            saves.save(*saved)

    def _link(self, path: str, link: str) -> None:
        """Let a link such as ``last.ckpt`` name a checkpoint when it is published; collective."""
        end = self._manager.exit_ranks(link, interrupted=True) if self._is_interrupted() else None
        with end or nullcontext(self._agree()) as ranks:
            self._manager.link(path, link, ranks)

    @property
    def last_save(self) -> CheckpointStats | None:
        """Path, seconds and bytes of the last save that was published."""
        return self._manager.last_save

    def wait_for_save(self) -> None:
        """Wait until what was saved last is published; collective.

        Raises:
            ElasticZeroError: it could not be; the checkpoint published before is intact.
        """
        with self._checkpoint_hooks.saving():
            self._manager.wait_until_finished(self._agree())

    def _with_progress(self, options: SaveOptions, client_state: dict[str, Any]) -> SaveOptions:
        """Add where the run stands, in samples, and what of this moment only the trainer has."""
        module, loops = self.lightning_module, client_state.get("loops", {}).get("fit_loop")
        if module is None or loops is None or options.weights_only:
            return options
        trainer, of = module.trainer, self._resumer
        with self._user_settings.reapplied(trainer):
            record = of.record(trainer, loops, self.world_size)
            client_state[STATE_KEY] = own = of.state(trainer, record, self.root_device)
            if not self._is_fitting():
                self._last_fit.put_back(own)
            states, buffers = of.loader_states(trainer), of.buffers(trainer)
        client_state["loops"] = with_loader_states(client_state["loops"], states)
        return replace(options, sampler=record.to_plain(), module_buffers=buffers)

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint as soon as nothing needs it any more."""
        if self.is_global_zero:
            self._manager.remove(filepath)

    # -- loading -----------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore a checkpoint directory that any number of devices wrote; collective.

        Args:
            checkpoint_path: the directory; all ranks take rank 0's.
            weights_only: not used: nothing is unpickled unless ``allow_pickle`` was given.

        Returns:
            The trainer's part, from which Lightning restores loops, callbacks and schedulers.

        Raises:
            ElasticZeroError: see ``lightning_elastic_zero.load_checkpoint``.
        """
        if self.load_full_weights and self.zero_stage_3:
            self._last_fit.forget()
            given = () if weights_only is None else (weights_only,)  # The argument came with 2.6.
            return super().load_checkpoint(os.fspath(checkpoint_path), *given)
        module = self.lightning_module
        options = replace(
            self._load_options,
            strict=module is None or module.strict_loading,
            # An evaluation of another checkpoint than the one that was named is no use to anybody.
            fallback=self._load_options.fallback and self._is_fitting(),
            of_ranks=(STATE_KEY, RESULTS) if self._is_fitting() else (),
        )
        self.wait_for_save()
        configured = configured_rates(self.optimizers) if self._is_fitting() else []
        engine = engine_handle(self.deepspeed_engine)
        loaded = load_engine(engine, checkpoint_path, self._agree(), options)
        self._resumed = True
        if not self._is_fitting():
            self._last_fit.forget()
        self.last_load = loaded.stats
        self._manager.protect(loaded.stats.path)
        return self._trainer_state(loaded, configured)

    def _trainer_state(
        self, loaded: LoadResult, configured: list[dict[str, float]]
    ) -> dict[str, Any]:
        """Give what Lightning's loops, callbacks and schedulers restore themselves from."""
        state, manifest = loaded.client_state, loaded.manifest
        fitting = self._is_fitting()
        rank_zero_info(format_loaded(loaded, self.world_size))
        if (module := self.lightning_module) is not None:
            if not fitting:
                taken = copy_full_weights(
                    self.deepspeed_engine, weight_averaging.extra_weights(state)
                )
                weight_averaging.log_evaluated_averages(taken, loaded.stats.path)
            state = weight_averaging.with_module_weights(state, module, fitting=fitting)
        if VERSION_KEY not in state:
            rank_zero_info("It is not of Lightning: loops, callbacks and schedulers start anew")
            state = {**state, VERSION_KEY: version_of("lightning"), "lr_schedulers": []}
        if fitting and manifest.weights_only:
            rank_zero_info("It holds weights only: a new run starts on them, at step 0")
            return without_progress(state, module)
        if fitting and module is not None:
            state.setdefault(STATE_KEY, {})[RESULTS_BY_RANK] = loaded.of_ranks
            where = loaded.stats.path
            self._resumer.resume_from(state, manifest, module.trainer, where, self.world_size)
        if fitting:
            live = [config.scheduler for config in self.lr_scheduler_configs]
            as_saved, states = self._load_options.hyperparameters, state.get("lr_schedulers", [])
            go_on = resume_as_saved if as_saved else resume_as_configured
            if as_saved:
                warn_replaced_rates(configured, manifest.groups, scheduled=bool(live or states))
            state["lr_schedulers"] = go_on(live, states, manifest.groups)
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing for directories: the engine has its weights already."""
        if self.load_full_weights and self.zero_stage_3:
            super().load_model_state_dict(checkpoint, strict)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; at the end of a resume, agree first on what was resumed."""
        if RESUME_END in (*args, kwargs.get("name")):
            self._check_all_ranks_resumed()
        super().barrier(*args, **kwargs)

    def _check_all_ranks_resumed(self) -> None:
        """Fail at once where one rank found a checkpoint and another did not.

        Each rank resolves ``ckpt_path="last"`` by itself, before any hook of a strategy. A rank
        that found nothing comes here while the others are still loading: their steps differ.
        """
        self._agree().run_all("go on without loading a checkpoint (any more)", lambda: None)
        if self._is_fitting() and not self._resumed:
            # Training starts at step 0: loudly where there is something to resume.
            text, loud = format_not_resumed(self._manager.dirpaths)
            (rank_zero_warn if loud else rank_zero_info)(text)

    # -- the end -----------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Wait for the save in flight; raise on all ranks what it failed by."""
        self.wait_for_save()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        """End saving and agreeing, before tensors move; no collective, since ranks may be gone."""
        self._checkpoint_hooks.end()
        if self._is_fitting() and (module := self.lightning_module) is not None:
            self._last_fit.end(module.trainer)
        failure = self._manager.stop(interrupted=self._is_interrupted())
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        super().teardown()
        if failure is not None:
            raise failure

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names ``elastic_deepspeed...``."""
        for name, arguments in STRATEGY_ARGUMENTS.items():
            description = f"Elastic DeepSpeed: {arguments or 'defaults'}"
            strategy_registry.register(name, cls, description, override=True, **arguments)


ElasticDeepSpeedStrategy.register_strategies(StrategyRegistry)
