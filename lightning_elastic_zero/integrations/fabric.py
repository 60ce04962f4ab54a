"""The strategy for Lightning Fabric: DeepSpeed, with checkpoints for any device count."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.core.options import take, takes
from lightning_elastic_zero.engine.support import use_accelerator
from lightning_elastic_zero.integrations.engines import (
    EngineCheckpoints,
    Loop,
    LoopOptions,
    is_engine,
)
from lightning_elastic_zero.registry import register_names

log = logging.getLogger(__name__)


class ElasticDeepSpeedFabricStrategy(DeepSpeedStrategy):
    """DeepSpeed in ZeRO stages 0 to 3 under Fabric, with checkpoints for any number of devices.

    Use ``fabric.save(path, state)`` and ``fabric.load(path, state)`` as usual, with one engine in
    ``state``. Fabric has no training loop: keep counters and the position in the data in ``state``.
    The number of samples per step is not compared. CPU ranks (gloo) work too.

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
        self._bind(made[0])
        return made

    @override
    def setup_module(self, module: Any) -> Any:
        engine = super().setup_module(module)
        self._bind(engine)
        return engine

    def _bind(self, engine: Any) -> None:
        def on_save() -> dict[str, Any]:
            if self._options.async_save:
                self._unfinished[id(engine)] = engine
            return {}

        EngineCheckpoints(engine, self._options, Loop(whole_folder=True, record=on_save)).bind()

    def wait_for_save(self) -> None:
        """Wait until the last save of each engine is published; collective.

        Raises:
            ElasticZeroError: It failed. The checkpoint before it is intact.
        """
        for engine in self._unfinished.values():
            engine.wait_for_save()
        self._unfinished.clear()

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
            load_lr_scheduler_states=False,  # the scheduler is an entry of the state
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


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)
