"""The Lightning strategy: DeepSpeed's, with checkpoints that fit any device count.

Parameters that are frozen or unfrozen during a fit: DeepSpeed does not follow, so this warns.

Filters of warnings between libraries that users cannot change, during a run.

Of the 78 lines of a first run on two ranks, 54 said that two libraries are of different ages.

Check that DeepSpeed leaves the scale of a loss alone, as it is asked to.

A window of micro-batches: the scale of its losses, the step at its end, and what an epoch cuts.

Lightning begins a window with each epoch. DeepSpeed counts micro-batches by itself and would drift:
it is told where a window ends.

The time at which the batches of a fit are resolved: once, before anything needs them.

``batch_settings`` computes them. The first of these moments does it: before the ``setup`` hooks, as
the first of them, when a hook asks for the training loaders, when DeepSpeed's config is completed.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from os import PathLike, fspath
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from lightning_elastic_zero.api import load_options
from lightning_elastic_zero.checkpoint.types import CheckpointStats
from lightning_elastic_zero.coordination.liveness import ABSENT_TIMEOUT_S, STALL_TIMEOUT_S, Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.options import check_count, check_flag
from lightning_elastic_zero.core.requirements import DEEPSPEED
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.live import follows_requires_grad, trained_parameters
from lightning_elastic_zero.engine.loss_scale import ensure_scaled, loss_scale
from lightning_elastic_zero.engine.step import drop_accumulation_window
from lightning_elastic_zero.engine.support import (
    check_config,
    check_optimizer,
    check_supported,
    report_abandoned_builds,
    use_accelerator,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.registry import register_names
from lightning_elastic_zero.trainer.batches import (
    batch_size_of,
    has_batches_for_items,
    resolve_batch_settings,
    scale_scheduler_frequency,
)
from lightning_elastic_zero.trainer.checkpoint_io import (
    CheckpointEvents,
    CheckpointLoader,
    CheckpointSaver,
    LastFit,
    check_averaging,
    make_manager,
)
from lightning_elastic_zero.trainer.checks import overruled_orders
from lightning_elastic_zero.trainer.data_resume import UnresumableDataPolicy
from lightning_elastic_zero.trainer.launch import (
    DevicesOfNode,
    NodesOfJob,
    SigtermAgreement,
    limit_waiting,
    prepare_to_meet,
    set_exit_code,
)
from lightning_elastic_zero.trainer.lightning import (
    RESUME_END,
    callbacks_of,
    check_lightning_release,
    data_source,
    is_evaluating,
    is_fitting,
    should_accumulate,
    split_parent_options,
)
from lightning_elastic_zero.trainer.loaders import SampleOrderCheck
from lightning_elastic_zero.trainer.resume import RunResumer

_LISTED = 10
"""Names in a warning; the rest is counted."""

_HELPS = (
    "To train a part of a model later, let it require a gradient before fit, in a parameter group "
    "of its own with lr=0, and raise that group's lr when its turn has come (lr=0 keeps it as it "
    "is). Or end the fit and begin another one from its checkpoint, load_optimizer_state=False: "
    "DeepSpeed asks what requires a gradient when a fit begins"
)


class RequiresGradCheck:
    """Compares what requires a gradient with what the optimizer was built of."""

    def __init__(self, engine: Any) -> None:
        """Begin a fit with DeepSpeed's engine, whose optimizer owns what is trained."""
        owned = set(trained_parameters(engine))
        parameters = [] if follows_requires_grad(engine) else list(engine.module.parameters())
        self._trained = tuple(p for p in parameters if p in owned and p.requires_grad)
        self._others = tuple(p for p in parameters if p not in owned and not p.requires_grad)
        self._told_epoch = -1

    def before_batch(self, trainer: pl.Trainer, _batch_idx: int) -> None:
        """Warn of what is not as it was when the fit began; once in an epoch."""
        module, epoch = trainer.lightning_module, trainer.current_epoch
        if self._told_epoch == epoch:
            return
        thawed = {p for p in self._others if p.requires_grad}
        frozen = {p for p in self._trained if not p.requires_grad}
        if not (thawed or frozen):
            return
        self._told_epoch = epoch
        said = []
        if thawed:
            said.append(
                f"unfrozen since the fit began, and not trained: {_names(module, thawed)}. "
                "DeepSpeed builds its optimizer once, of what requires a gradient then"
            )
        if frozen:
            said.append(
                f"frozen since the fit began, and still changed by weight decay and the "
                f"optimizer's moments: {_names(module, frozen)}"
            )
        rank_zero_warn(f"Epoch {epoch}: parameters {'; '.join(said)}. {_HELPS}.")


def _names(module: nn.Module, parameters: Collection[nn.Parameter]) -> str:
    """List names, the first of them where there are many."""
    return format_names((n for n, p in module.named_parameters() if p in parameters), _LISTED)


FILTERED_WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    # DeepSpeed (to 0.19) calls collectives by names that torch has newer ones for since 2.13.
    (
        FutureWarning,
        r"`torch\.distributed\.\w+` is deprecated",
        r"torch\.distributed\.c10d_logger",
    ),
    # Lightning (to 2.6) walks trees of loaders by an older name of torch's.
    (
        FutureWarning,
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        r"lightning\.pytorch\.utilities\._pytree",
    ),
    # Lightning knows loaders with a ``state_dict`` only. What cannot be resumed in the middle of
    # an epoch, this library refuses, or it says itself that the epoch starts over.
    (
        UserWarning,
        r"You're resuming from a checkpoint that ended before the epoch ended",
        r"lightning\.pytorch\.loops\.training_epoch_loop",
    ),
)
"""Class, text and module of each."""


class WarningFilters:
    """The known warnings, left out from ``begin`` to ``end`` where no filter says otherwise.

    They come last of all filters: who wants to see them (``python -W default``), does.
    """

    def __init__(self) -> None:
        self._added: list[Any] = []

    def begin(self) -> None:
        """Leave them out, in a run's every process."""
        before = [*warnings.filters]
        for category, message, module in FILTERED_WARNINGS:
            warnings.filterwarnings("ignore", message, category, module, append=True)
        self._added += [added for added in warnings.filters if added not in before]

    def end(self) -> None:
        """Leave the filters as they were."""
        filters = vars(warnings)["filters"]
        while self._added:
            with suppress(ValueError):  # gone with the filters of somebody's catch_warnings
                del filters[filters.index(self._added.pop())]


TOLERANCE = 0.02
"""Relative; the gradient of a bf16 loss has 8 bits. The smallest error to be found is a half."""


class LossScalingCheck:
    """Looks once, in the first backward pass with accumulation, at the gradient of the loss.

    Lightning divides the loss by the accumulation, so that DeepSpeed must not (``scale_wrt_gas``).
    Its release 0.18.3 did all the same, and each step was 1/A of what it should have been, without
    a sign of it. A release that is not known yet may do so again.
    """

    def __init__(self) -> None:
        self.is_done = False
        """Whether it has looked."""

    @contextmanager
    def watch(self, loss: torch.Tensor, factor: float, accumulate: int) -> Iterator[None]:
        """Check the backward pass inside the context, the first time.

        Args:
            loss: as Lightning hands it over: what the module returned, divided.
            factor: what this library, and DeepSpeed in fp16, multiply it by.
            accumulate: micro-batches of a step.

        Raises:
            UnsupportedError: the module's loss received another gradient than it should have.
        """
        returned = _before_division(loss)
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
        if seen:
            self.is_done = True
            _check(float(seen[0]) * accumulate / factor, accumulate)


def _before_division(loss: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the node of the loss that the module returned, at which DeepSpeed's hooks hang."""
    division = loss.grad_fn
    if division is None or not division.next_functions:
        return None
    return division.next_functions[0][0]


def _check(factor: float, accumulate: int) -> None:
    """Refuse a factor other than one; an overflow in fp16 says nothing.

    Raises:
        UnsupportedError: each step would be that much larger or smaller.
    """
    if not math.isfinite(factor) or abs(factor - 1.0) <= TOLERANCE:
        return
    msg = (
        f"with accumulate_grad_batches={accumulate}, gradients are {factor:g} times what they "
        "should be: the installed release of DeepSpeed scales the loss although it is called with "
        f"scale_wrt_gas=False, as 0.18.3 did. Install {DEEPSPEED}; {DEEPSPEED.newest_tested} is "
        "the newest that this library was tested with"
    )
    raise UnsupportedError(msg)


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
            checkpoint: State from Lightning's trainer.
            filepath: Directory of the checkpoint, equal on all ranks.
            storage_options: Not supported.

        Raises:
            TypeError: ``storage_options`` were given.
            SaveError: It could not be written. The last published checkpoint is intact.
            UnsupportedError: A part of the state cannot be saved.
            RanksError: A rank failed, died or did not call this function.
        """
        if storage_options is not None:
            msg = f"{type(self).__name__} writes local directories; storage_options do not apply"
            raise TypeError(msg)
        engine, exclude = self.deepspeed_engine, self.exclude_frozen_parameters
        self._saver.save(checkpoint, filepath, engine, self._trainer, exclude_frozen=exclude)

    @property
    def last_save(self) -> CheckpointStats | None:
        """Cost of the last published save; None before the first."""
        return self._manager.last_save

    def wait_for_save(self) -> None:
        """Wait until the last save is published; collective.

        Raises:
            ElasticZeroError: It failed. The checkpoint before it is intact.
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
        """Restore a checkpoint that was saved on any number of devices; collective.

        Args:
            checkpoint_path: Directory or file of the checkpoint. All ranks use rank 0's value.
            weights_only: Unused: objects are unpickled only with ``allow_pickle``.

        Returns:
            The trainer's state, from which Lightning restores loops, callbacks and schedulers.
            ``last_load`` has the cost.

        Raises:
            ElasticZeroError: See ``lightning_elastic_zero.load_checkpoint``.
        """
        if self.load_full_weights and self.zero_stage_3:
            self._last_fit.forget()
            given = () if weights_only is None else (weights_only,)  # The argument came with 2.6.
            return super().load_checkpoint(fspath(checkpoint_path), *given)
        self.wait_for_save()
        return self._loader.load(checkpoint_path, self.deepspeed_engine, self._trainer)

    @property
    def last_load(self) -> CheckpointStats | None:
        """Cost of the last load; None before the first."""
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
