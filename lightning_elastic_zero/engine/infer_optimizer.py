"""Inference of the optimizer's class, which other software's files do not name.

The names of the states and of the hyperparameters tell optimizers apart instead: those that are
alike in both compute the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_elastic_zero.engine.muon import MOMENTUM_KEY
from lightning_elastic_zero.engine.optimizer_state import (
    ADAM_FAMILY,
    EXECUTION_KEYS,
    FRESH,
    SCHEDULER_KEYS,
)
from lightning_elastic_zero.engine.probe_optimizer import probe_after_a_step
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.group_matching import MEMBER_KEYS
from lightning_elastic_zero.manifest import Group, Plain

log = logging.getLogger(__name__)

NEWER_KEYS = frozenset({"maximize", "decoupled_weight_decay"})
"""What releases of torch have added to the hyperparameters of optimizers that were there."""

ADAM_KEYS = (
    frozenset({"lr", "weight_decay", "betas", "eps", "amsgrad"}),
    frozenset({"lr", "weight_decay", "betas", "eps", "bias_correction"}),
)
"""What every kind of Adam has, torch's and DeepSpeed's."""


def check_unnamed_state(
    saved: Sequence[Group],
    inner: Any,  # noqa: ANN401 (any optimizer)
    *,
    stepped: bool,
) -> None:
    """Refuse another optimizer's state where the checkpoint does not name the class that saved it.

    Args:
        saved: the checkpoint's parameter groups.
        inner: the run's optimizer.
        stepped: whether the saved run may have taken a step; before the first one there is no
            state.

    Raises:
        CheckpointMismatchError: names of states are not those of the live one, or a group has no
            state and would have.
    """
    name = type(inner).__name__
    others = any(group.state for group in saved)
    for index, held in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in held.state}
        if not held.names or not (states or stepped or others):
            continue
        kept = _kept_states(inner, index, held.hyperparameters)
        if states and kept is not None and kept != states:
            _refuse(index, f"kept the states {sorted(states)}", f"{name} keeps {sorted(kept)}")
        if not states and (kept or (kept is None and others)):
            _refuse_stateless(index, held, name)


def check_configured_state(
    saved: Sequence[Group],
    inner: Any,  # noqa: ANN401 (any optimizer)
    *,
    hyperparameters: bool,
) -> str:
    """Refuse saved state without which the optimizer, as it will be configured, cannot step.

    Optimizers make their states at a parameter's first step only: one with ``amsgrad=True``
    fails at the next step on states that were saved without.

    Args:
        saved: the checkpoint's parameter groups, in the order of the live ones.
        inner: the run's optimizer.
        hyperparameters: whether those that were saved are restored.

    Returns:
        Which restored states the optimizer will not use, as a warning; empty: it uses all.

    Raises:
        CheckpointMismatchError: states are missing.
    """
    unused = []
    for index, held in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in held.state}
        kept = _kept_states(inner, index, held.hyperparameters if hyperparameters else {})
        if not states or kept is None:
            continue
        # A state that the saved settings ask for too is not missing because of the settings.
        known = not hyperparameters and _own_names(inner.param_groups[index]) <= _own_keys(held)
        expected = _kept_states(inner, index, held.hyperparameters) if known else None
        if lacking := kept - states - (expected or set()):
            msg = (
                f"parameter group {index} was saved with the optimizer states {sorted(states)}, "
                f"and {type(inner).__name__} as configured here also needs {sorted(lacking)}"
                f"{_changed_numbers(held, inner.param_groups[index])}: configure what was saved, "
                "or pass load_optimizer_state=False to start with a fresh optimizer"
            )
            raise CheckpointMismatchError(msg)
        if beyond := states - kept - {"step"}:
            unused.append(f"parameter group {index}: {', '.join(sorted(beyond))}")
    if not unused:
        return ""
    return (
        f"{type(inner).__name__} as configured here does not use these restored states, which "
        f"stay as they were saved: {'; '.join(unused)}"
    )


def _changed_numbers(held: Group, here: Mapping[str, Any]) -> str:
    """Return the numbers and flags that differ from those of a saved group, in brackets."""
    changes = [
        f"{key} was {value!r} and is {here[key]!r}"
        for key, value in held.hyperparameters.items()
        if key in here and isinstance(value, (bool, int, float)) and value != here[key]
    ]
    return f" ({', '.join(changes)})" if changes else ""


def check_unnamed_hyperparameters(
    saved: Sequence[Group],
    live: Sequence[Group],
    inner: Any,  # noqa: ANN401 (any optimizer)
) -> None:
    """Refuse another optimizer's hyperparameters; see ``check_unnamed_state``.

    Raises:
        CheckpointMismatchError: their names are not those of the live one's.
    """
    name = type(inner).__name__
    for index, (held, here) in enumerate(zip(saved, live, strict=False)):
        theirs, ours = _own_keys(held), _own_keys(here)
        if held.hyperparameters and not _alike(held, theirs, ours, name):
            _refuse(index, f"had {sorted(theirs)}", f"{name} has {sorted(ours)}")


def _alike(held: Group, theirs: set[str], ours: set[str], name: str) -> bool:
    """Whether hyperparameters are those of one kind of optimizer."""
    if name not in ADAM_FAMILY:
        return theirs ^ ours <= NEWER_KEYS
    # What else is a number, and not the run's own, is of an algorithm that builds on Adam's.
    strange = theirs - ours - NEWER_KEYS - frozenset().union(*ADAM_KEYS)
    # DeepSpeed's FusedAdam once counted its steps there.
    strange -= {"step"}
    numbers = [key for key in strange if isinstance(held.hyperparameters[key], (int, float))]
    return any(keys <= theirs for keys in ADAM_KEYS) and not numbers


def _own_keys(group: Group) -> set[str]:
    """Return the hyperparameters that say what an optimizer computes."""
    return _own_names(group.hyperparameters)


def _own_names(hyperparameters: Iterable[str]) -> set[str]:
    return set(hyperparameters) - EXECUTION_KEYS - SCHEDULER_KEYS - MEMBER_KEYS


def _refuse(index: int, saved: str, live: str) -> None:
    msg = (
        f"the optimizer that saved parameter group {index} {saved}, this run's {live}: configure "
        f"the optimizer that was saved, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


def _refuse_stateless(index: int, held: Group, live: str) -> None:
    first = ", ".join(held.names[:3])
    more = f" and {len(held.names) - 3} more" if len(held.names) > 3 else ""  # noqa: PLR2004
    msg = (
        f"it holds no optimizer state for parameter group {index} ({first}{more}), and {live} "
        "keeps some: a stock checkpoint of partial offload (offload_optimizer's ratio) lacks what "
        "was on the GPU, and a group that was never trained has none. Pass "
        "load_optimizer_state=False to go on from the saved weights with a fresh optimizer"
    )
    raise CheckpointMismatchError(msg)


def _kept_states(inner: Any, index: int, saved: Mapping[str, Plain]) -> set[str] | None:  # noqa: ANN401
    """Return the names of the states that an optimizer keeps; None where they cannot be told.

    Muon's own step keeps none: DeepSpeed adds the momentum before it.
    """
    if inner.param_groups[index].get("use_muon"):
        return {MOMENTUM_KEY}
    try:
        return set(probe_after_a_step(inner, index, saved))
    except Exception as error:  # noqa: BLE001 (any optimizer, anybody's)
        log.debug("cannot tell which states %s keeps: %r", type(inner).__name__, error)
        return None
