"""Optimizers by the full name of their class: torch's, and other packages'."""

from __future__ import annotations

import importlib
from typing import Any

OTHERS = {
    "bitsandbytes.optim.SGD": {"lr": 0.01, "momentum": 0.9},
    "bitsandbytes.optim.PytorchLARS": {"lr": 0.01, "momentum": 0.9},
}
"""What they have to be told beside the groups' own hyperparameters."""


def optimizer_of_class(name: str, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer.

    Args:
        name: its class with its module; of torch's, by itself, one that takes a single group.
        groups: the parameter groups.
    """
    if "." in name:
        return class_of(name)(groups, **OTHERS.get(name, {"lr": 1e-3}))
    return class_of(f"torch.optim.{name}")([p for group in groups for p in group["params"]])


def class_of(name: str) -> Any:
    """Import a class by its full name."""
    package, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(package), kind)
