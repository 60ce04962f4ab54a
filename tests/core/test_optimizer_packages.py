"""Which package an optimizer is of, where users derive from it."""

from __future__ import annotations

from typing import Any

import torch

from lightning_elastic_zero.engine.optimizer import package_of


def instance_of(name: str, module: str, base: type) -> Any:
    """Return an optimizer of a class that seems to stand in a module, without having made it."""
    kind: Any = type(name, (base,), {"__module__": module})
    return kind.__new__(kind)


def test_a_users_subclass_is_of_the_package_that_it_derives_from() -> None:
    """Its states are that one's; torch's base class alone says nothing of them."""
    theirs = instance_of("AdamW", "bitsandbytes.optim.adamw", torch.optim.Optimizer)
    assert package_of(theirs) == "bitsandbytes"
    assert package_of(instance_of("AdamW", "project.optim", type(theirs))) == "bitsandbytes"
    assert package_of(instance_of("AdamW", "project.optim", torch.optim.AdamW)) == "torch"
    assert package_of(instance_of("Muon", "project.optim", torch.optim.Optimizer)) == "project"
    assert package_of(torch.optim.SGD([torch.zeros(1)])) == "torch"
