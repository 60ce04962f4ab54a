"""The names of the strategy for ``Trainer(strategy=<name>)`` and ``Fabric(strategy=<name>)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
"""Each name, and the strategy's arguments by that name."""


def register_names(registry: Any, make: Callable[..., object]) -> None:
    """Register the names with one registry: each calls ``make`` with its arguments."""
    for name, arguments in STRATEGY_ARGUMENTS.items():
        registry.register(name, make, "Elastic DeepSpeed", override=True, **arguments)
