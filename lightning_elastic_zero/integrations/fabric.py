"""The strategy for Lightning Fabric: DeepSpeed, with checkpoints for any device count."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.core.options import take, takes
from lightning_elastic_zero.engine.deepspeed import (
    counts_micro_batches,
    has_cleared_window,
    holds_gradients,
)
from lightning_elastic_zero.engine.installation import use_accelerator
from lightning_elastic_zero.engine.support import check_no_shards
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.integrations.engines import (
    EngineCheckpoints,
    Loop,
    LoopOptions,
    is_a,
    is_engine,
)
from lightning_elastic_zero.registry import register_names

log = logging.getLogger(__name__)


class ElasticDeepSpeedFabricStrategy(DeepSpeedStrategy):
    """DeepSpeed in ZeRO stages 0 to 3 under Fabric, with checkpoints for any number of devices.

    Use ``fabric.save(path, state)`` and ``fabric.load(path, state)`` as usual, with one engine in
    ``state``. Fabric has no training loop: keep counters and the position in the data in ``state``.
    The number of samples per step is not compared. CPU ranks (gloo) work too.

    To accumulate ``A`` micro-batches, set ``strategy.config["gradient_accumulation_steps"] = A``
    before ``fabric.setup``, and call ``fabric.backward`` and ``optimizer.step`` for each
    micro-batch. DeepSpeed divides the loss by ``A``, and each ``A``-th step changes the weights.
    Checkpoints record the global batch only if ``config["train_micro_batch_size_per_gpu"]`` is set.

    Args:
        *args: Passed to ``lightning.fabric.strategies.DeepSpeedStrategy``.
        **kwargs: Options of ``ElasticOptions`` and of Fabric's ``DeepSpeedStrategy``.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option has an invalid value.
    """

    @takes(ElasticOptions)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Fabric's engine does not know the batch size.
        self._options = replace(take(LoopOptions, kwargs), allow_global_batch_change=True)
        self._unfinished: dict[int, Any] = {}
        """By ``id``, engines whose last save may run in the background."""
        self._windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()
        super().__init__(*args, **kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this library's names for the class, and none of DeepSpeed's."""
        register_names(strategy_registry, cls)

    @override
    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        use_accelerator("cpu")
        devices = range(len(self.parallel_devices or ()))
        # DeepSpeed wants each device's index.
        self.parallel_devices = [torch.device("cpu", index) for index in devices]
        # The parent only adds a refusal of devices other than CUDA: skip it.
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_module_and_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        made = super().setup_module_and_optimizers(*args, **kwargs)
        engine, _, *schedulers = made
        if any(schedulers):  # Fabric returns it to the loop, which steps it.
            engine.lr_scheduler = None
        self._bind(engine)
        return made

    @override
    def setup_module(self, module: Any) -> Any:
        engine = super().setup_module(module)
        self._bind(engine)
        return engine

    def _bind(self, engine: Any) -> None:
        check_no_shards(engine)
        loop = Loop(
            whole_folder=True,
            prepare=self._open_window,
            record=partial(self._record, engine),
            on_load=lambda _: self._open_window(engine),
        )
        EngineCheckpoints(engine, self._options, loop).bind()

    def _open_window(self, engine: Any) -> None:
        self._windows[engine] = _Window()

    def _record(self, engine: Any) -> dict[str, Any]:
        if self._options.async_save:
            self._unfinished[id(engine)] = engine
        return {}

    @override
    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, unless DeepSpeed would drop gradients of an earlier one.

        Raises:
            UnsupportedError: The earlier pass was not followed by ``optimizer.step()``, or was
                followed by ``optimizer.zero_grad()``.
        """
        window = self._windows[module]
        window.check(module)
        super().backward(tensor, module, *args, **kwargs)
        window.add(module)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Call the step of the optimizer's engine, which counts micro-batches.

        Fabric calls that of DeepSpeed's optimizer, which changes the weights in each call.
        """
        engine = next(e for e in self._windows if optimizer is e or optimizer is e.optimizer)
        return super().optimizer_step(engine, **kwargs)

    def wait_for_save(self) -> None:
        """Wait until the last save of each engine is published; collective.

        Raises:
            ElasticZeroError: It failed. The checkpoint before it is intact.
        """
        for engine in self._unfinished.values():
            engine.wait_for_save()
        self._unfinished.clear()

    @override
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Save a dictionary with one engine; warn of metrics whose values are not saved."""
        # The parent compares entries with the engine, and a metric's comparison is a metric.
        kept = {k: v.state_dict() if _is_metric(v) else v for k, v in state.items()}
        lost = [
            repr(key)
            for key, value in state.items()
            if isinstance(value, torch.nn.Module) and not is_engine(value)
            if any(_is_metric(m) and m.metric_state and not m.state_dict() for m in value.modules())
        ]
        if lost and self.is_global_zero:
            log.warning(
                "%s does not contain the values of the metrics in state[%s]: call "
                "metric.persistent(True) before fabric.save and fabric.load",
                path,
                "], state[".join(lost),
            )
        super().save_checkpoint(path, kept, *args, **kwargs)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Load a checkpoint of any kind that this library reads.

        Args:
            path: the checkpoint.
            state: a dictionary with the model, and with the optimizer if its state is wanted; other
                entries are updated in place.
            strict: False: frozen parameters and buffers may be missing, or too many.
            *args: as the parent's, for a model without an engine.
            **kwargs: likewise.

        Returns:
            The entries of the saved state that ``state`` does not name.

        Raises:
            ValueError: ``state`` has no engine, or several.
            ElasticZeroError: see ``load_checkpoint`` of this package.
        """
        if not isinstance(state, dict) or not state:
            return super().load_checkpoint(path, state, strict, *args, **kwargs)
        engines = [value for value in state.values() if is_engine(value)]
        if len(engines) != 1:
            msg = (
                f"state has {len(engines)} models that were set up by Fabric with DeepSpeed; it "
                'needs one: fabric.load(path, {"model": model, "optimizer": optimizer, ...})'
            )
            raise ValueError(msg)
        (engine,) = engines
        optimizers = [v for v in state.values() if v is engine.optimizer or _is_optimizer(v)]
        _, saved = engine.load_checkpoint(
            self.broadcast(path),
            load_optimizer_states=bool(optimizers),
            # Else the scheduler is an entry of the state.
            load_lr_scheduler_states=engine.lr_scheduler is not None,
            load_module_strict=strict,
        )
        known = {id(engine), *map(id, optimizers)}
        missing = [repr(k) for k, v in state.items() if id(v) not in known and k not in saved]
        if missing and self.is_global_zero:
            log.warning("%s has no entry %s: state keeps its value", path, ", ".join(missing))
        rest = {}
        for key, value in saved.items():
            if key not in state:
                rest[key] = value
            elif hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return rest


ElasticDeepSpeedFabricStrategy.register_strategies(STRATEGY_REGISTRY)


@dataclass(slots=True)
class _Window:
    """The last backward pass of an engine."""

    micro_steps: int | None = None
    """The engine's counter at that pass, which each step increments."""
    holder: weakref.ref[torch.nn.Parameter] | None = None
    """A parameter that holds gradients until the next micro-batch."""

    def check(self, engine: Any) -> None:
        """Refuse a backward pass after which a step would lack gradients.

        Raises:
            UnsupportedError: it would.
        """
        if not counts_micro_batches(engine):
            return
        accumulate, stage = engine.gradient_accumulation_steps(), engine.zero_optimization_stage()
        done = engine.micro_steps % accumulate
        if engine.micro_steps == self.micro_steps and (accumulate > 1 or stage in (1, 2)):
            msg = (
                "fabric.backward() was called twice without optimizer.step() in between: DeepSpeed "
                f"counts micro-batches by steps, and ZeRO-{stage} would not add up their gradients."
                " To accumulate A micro-batches, set "
                'strategy.config["gradient_accumulation_steps"] = A before fabric.setup() '
                f"(it is {accumulate}), do not divide the loss by A, and call optimizer.step() "
                "after each micro-batch. To train on several losses, add them up"
            )
            raise UnsupportedError(msg)
        holder = None if self.holder is None else self.holder()
        if done and has_cleared_window(engine, holder):
            msg = (
                f"optimizer.zero_grad() was called after micro-batch {done} of {accumulate}, and "
                f"ZeRO-{stage} has lost its gradients. Remove the call: DeepSpeed clears gradients "
                "after each optimizer step"
            )
            raise UnsupportedError(msg)

    def add(self, engine: Any) -> None:
        """Count a backward pass."""
        if not counts_micro_batches(engine):
            return
        self.micro_steps = engine.micro_steps
        holders = (weakref.ref(p) for p in engine.module.parameters() if holds_gradients(p))
        accumulates = engine.gradient_accumulation_steps() > 1
        self.holder = next(holders, None) if accumulates else None


def _is_metric(value: object) -> bool:
    return is_a(value, "torchmetrics", "Metric")


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)
