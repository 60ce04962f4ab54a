"""Whose optimizer state is this? Other software's files do not name the optimizer's class.

The names of the states and of the hyperparameters tell optimizers apart instead: those that are
alike in both compute the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.engine.optimizer_state import (
    ADAM_FAMILY,
    EXECUTION_KEYS,
    SCHEDULER_KEYS,
)
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.manifest import Group, Plain

log = logging.getLogger(__name__)

NEWER_KEYS = frozenset({"maximize", "decoupled_weight_decay"})
"""What releases of torch have added to the hyperparameters of optimizers that were there."""

ADAM_KEYS = ({"betas", "eps", "amsgrad"}, {"betas", "eps", "bias_correction"})
"""What every kind of Adam has of its own, torch's and DeepSpeed's."""


def check_unnamed_optimizer(saved: Sequence[Group], live: Sequence[Group], inner: Any) -> None:  # noqa: ANN401
    """Refuse another optimizer's state where the checkpoint does not name the class that saved it.

    Args:
        saved: the checkpoint's parameter groups.
        live: the run's.
        inner: the run's optimizer.

    Raises:
        CheckpointMismatchError: names of states or hyperparameters are not those of the live one.
    """
    name = type(inner).__name__
    for index, (held, here) in enumerate(zip(saved, live, strict=False)):
        states = {key.name for key in held.state}
        if not states:
            continue
        kept = _kept_states(inner, index, held.hyperparameters)
        theirs, ours = _own_keys(held), _own_keys(here)
        if kept is not None and kept != states:
            _refuse(index, f"kept the states {sorted(states)}", f"{name} keeps {sorted(kept)}")
        if held.hyperparameters and not _alike(theirs, ours, name):
            _refuse(index, f"had {sorted(theirs)}", f"{name} has {sorted(ours)}")


def _alike(theirs: set[str], ours: set[str], name: str) -> bool:
    """Tell whether hyperparameters are those of one kind of optimizer."""
    if name in ADAM_FAMILY:
        return any(keys <= theirs for keys in ADAM_KEYS) and "momentum_decay" not in theirs
    return theirs ^ ours <= NEWER_KEYS


def _own_keys(group: Group) -> set[str]:
    """Give the hyperparameters that say what an optimizer computes."""
    return set(group.hyperparameters) - EXECUTION_KEYS - SCHEDULER_KEYS


def _refuse(index: int, saved: str, live: str) -> None:
    msg = (
        f"the optimizer that saved parameter group {index} {saved}, this run's {live}: configure "
        "the optimizer that was saved, or pass load_optimizer_state=False to start with a fresh "
        "one on the saved weights"
    )
    raise CheckpointMismatchError(msg)


def _kept_states(inner: Any, index: int, saved: Mapping[str, Plain]) -> set[str] | None:  # noqa: ANN401
    """Give the names of the states that an optimizer keeps, found out by a step of a twin.

    Args:
        inner: the live optimizer.
        index: of the parameter group.
        saved: hyperparameters that were saved, some of which (amsgrad) decide what is kept.

    Returns:
        None where a twin cannot be made, so that nothing can be said.
    """
    group = inner.param_groups[index]
    settings = {k: saved.get(k, v) for k, v in group.items() if k != "params"}
    settings.update({k: group[k] for k in EXECUTION_KEYS & group.keys()})
    flats = [*group["params"], *inner.state]
    device = flats[0].device if flats else "cpu"
    parameter = torch.nn.Parameter(torch.zeros(2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        twin = type(inner)([{**settings, "params": [parameter]}])
        twin.step()
    except Exception as error:  # noqa: BLE001 (any optimizer, anybody's)
        log.debug("cannot tell which states %s keeps: %r", type(inner).__name__, error)
        return None
    return set(twin.state[parameter])
