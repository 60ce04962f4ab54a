"""Names the strategy to Lightning, whichever of the two is imported first.

Lightning has no entry point for strategies, and importing it takes seconds, which the command line
does not pay for. So where it is not loaded yet, its import is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from lightning_elastic_zero.errors import UnsupportedError

PYTORCH_LIGHTNING = "pytorch_lightning"
"""The package of the same content and other classes: its Trainer takes no strategy of ours."""

_OFFLOAD = {"offload_optimizer": True}
_OFFLOAD_BOTH = {**_OFFLOAD, "offload_parameters": True}
_NVME = {
    "remote_device": "nvme",
    "offload_params_device": "nvme",
    "offload_optimizer_device": "nvme",
}

STRATEGY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "elastic_deepspeed": {},
    "elastic_deepspeed_stage_1": {"stage": 1},
    "elastic_deepspeed_stage_2": {"stage": 2},
    "elastic_deepspeed_stage_2_offload": {"stage": 2, **_OFFLOAD},
    "elastic_deepspeed_stage_3": {"stage": 3},
    "elastic_deepspeed_stage_3_offload": {"stage": 3, **_OFFLOAD_BOTH},
    "elastic_deepspeed_stage_3_offload_nvme": {"stage": 3, **_OFFLOAD_BOTH, **_NVME},
}
"""``Trainer(strategy=<name>)``, and the strategy's arguments by that name."""


def register_names(registry: Any, make: Callable[..., object]) -> None:
    """Register the names with one registry: each calls ``make`` with its arguments."""
    for name, arguments in STRATEGY_ARGUMENTS.items():
        registry.register(name, make, "Elastic DeepSpeed", override=True, **arguments)


def register(make: Callable[..., object], make_for_fabric: Callable[..., object]) -> None:
    """Register the names with Lightning's packages and with Fabric, now or on their import.

    ``make`` and ``make_for_fabric`` import the strategy and return one. They do so only when a
    Trainer asks for it: Lightning may be imported by a module of this package that the strategy
    needs whole.
    """

    def name_it() -> None:
        register_names(sys.modules["lightning.pytorch"].strategies.StrategyRegistry, make)

    def name_it_in_fabric() -> None:
        fabric = sys.modules["lightning.fabric.strategies"]
        register_names(fabric.STRATEGY_REGISTRY, make_for_fabric)

    hooks = {
        "lightning.pytorch": name_it,
        "lightning.fabric": name_it_in_fabric,
        PYTORCH_LIGHTNING: _refuse_in_twin,
    }
    for package, then in hooks.items():
        if package in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, _ImportHook(package, then))


def _refuse_in_twin() -> None:
    """Register names that raise what to import, where the twin would know no such name."""
    registry = sys.modules[f"{PYTORCH_LIGHTNING}.strategies"].StrategyRegistry
    for name in STRATEGY_ARGUMENTS:
        registry.register(name, _refuse, "needs lightning.pytorch", override=True)


def _refuse(**_: Any) -> NoReturn:
    msg = (
        f"this is the Trainer of {PYTORCH_LIGHTNING}, expected that of lightning.pytorch: replace "
        "`import pytorch_lightning as pl` by `import lightning.pytorch as pl`, for modules, "
        "callbacks and loggers too"
    )
    raise UnsupportedError(msg)


class _ImportHook(MetaPathFinder):
    """Calls a function right after a package has been imported, once."""

    def __init__(self, package: str, then: Callable[[], object]) -> None:
        self._package = package
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the others look there)
        target: ModuleType | None = None,  # noqa: ARG002 (likewise)
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, self._then)
        return spec


def _run_after(loader: Loader, then: Callable[[], object]) -> None:
    """Make a loader, which is one package's, call a function after the package's code."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        then()

    vars(loader)["exec_module"] = exec_module
