"""Whether the live optimizer can continue with the state and hyperparameters of a saved one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_elastic_zero.core.group_matching import MEMBER_KEYS
from lightning_elastic_zero.core.manifest import Group, Manifest, Plain
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.muon import MOMENTUM_KEY
from lightning_elastic_zero.engine.optimizer import (
    ADAM_FAMILY,
    BITSANDBYTES,
    EXECUTION_KEYS,
    SCHEDULER_KEYS,
    converts_adam_states,
    group_counters,
    package_of,
    probe_after_a_step,
)
from lightning_elastic_zero.errors import CheckpointMismatchError

log = logging.getLogger(__name__)

FRESH = (
    "pass load_optimizer_state=False and load_hyperparameters=False to start the configured "
    "optimizer fresh on the saved weights"
)
"""The remedy if another optimizer was saved."""

NEWER_KEYS = frozenset({"maximize", "decoupled_weight_decay"})
"""Hyperparameters that newer releases of torch added to existing optimizers."""

ADAM_KEYS = (
    frozenset({"lr", "weight_decay", "betas", "eps", "amsgrad"}),
    frozenset({"lr", "weight_decay", "betas", "eps", "bias_correction"}),
)
"""Hyperparameters of every optimizer of Adam's family, torch's and DeepSpeed's."""

DECOUPLED_KEY = "decoupled_weight_decay"
"""Where newer releases of torch store the kind. DeepSpeed's optimizers have an attribute."""
BY_CLASS = {"AdamW": True, "Adam": False}
NAMED = {True: "decoupled (AdamW's)", False: "in the gradient (Adam's)"}
BY_DEFAULT = "decoupled (unless DeepSpeed's Adam had adam_w_mode=False)"
"""The saved groups of DeepSpeed's optimizers do not name the kind."""

NEUTRAL = {"bias_correction": True}
"""The values of settings without effect; of others, 0 and False."""


def check_same_optimizer(saved: str, inner: Any, states: Collection[str]) -> None:
    """Refuse to restore one optimizer's state or hyperparameters into another.

    Raises CheckpointMismatchError if the classes differ and are not both of Adam's family, or if
    only the class names are equal.
    """
    live, package = type(inner).__name__, package_of(inner)
    renamed = hasattr(torch.optim, live) and ("state1" in states) != (package == BITSANDBYTES)
    known = {saved, live} <= ADAM_FAMILY
    if states and (renamed or (known and _counts_elsewhere(inner, states))):
        msg = (
            f"the optimizer states {sorted(states)} were saved by {saved} of another package than "
            f"this run's {package}.{live}: configure the saved optimizer, or {FRESH}"
        )
        raise CheckpointMismatchError(msg)
    if saved == live or known:
        return
    msg = (
        f"the optimizer's state and hyperparameters were saved by {saved}, this run has {live}: "
        f"configure {saved}, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


def _counts_elsewhere(inner: Any, states: Collection[str]) -> bool:
    """Whether only one of two Adams counts its steps in its states.

    apex's FusedAdam counts in its groups: it would start at 0 on another one's moments.
    """
    if "step" in states and converts_adam_states(inner):
        return False
    kept = _kept_states(inner, 0, {}) or set()
    return bool(kept) and ("step" in kept) != ("step" in states)


def check_unnamed_state(saved: Sequence[Group], inner: Any, *, stepped: bool) -> None:
    """Refuse another optimizer's state if the checkpoint does not name the optimizer's class.

    ``stepped``: whether the saved run may have taken a step. Raises CheckpointMismatchError if the
    names of the states differ, or a group lacks its state.
    """
    name = type(inner).__name__
    others = any(group.state for group in saved)
    for index, saved_group in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in saved_group.state}
        if not saved_group.names or not (states or stepped or others):
            continue
        kept = _kept_states(inner, index, saved_group.hyperparameters)
        if states and kept is not None and kept != states:
            _refuse(index, f"kept the states {sorted(states)}", f"{name} keeps {sorted(kept)}")
        if not states and (kept or (kept is None and others)):
            names = format_names(saved_group.names, 3)
            msg = (
                f"no optimizer state for parameter group {index} ({names}), but {name} keeps "
                "some. A stock checkpoint of partial offload "
                "(offload_optimizer's ratio) lacks the state on the GPU, and a group that was "
                "never trained has none. Pass load_optimizer_state=False to start a fresh "
                "optimizer on the saved weights"
            )
            raise CheckpointMismatchError(msg)


def check_configured_state(saved: Sequence[Group], inner: Any, *, hyperparameters: bool) -> str:
    """Refuse saved state that the optimizer, as it will be configured, cannot step with.

    Optimizers create states only at a parameter's first step: with ``amsgrad=True``, the next step
    fails on states that were saved without it. Returns a warning that lists the restored states
    that the optimizer will not use, or "". Raises CheckpointMismatchError if states are missing.
    """
    unused = []
    for index, saved_group in enumerate(saved[: len(inner.param_groups)]):
        states = {key.name for key in saved_group.state}
        kept = _kept_states(inner, index, saved_group.hyperparameters if hyperparameters else {})
        if not states or kept is None:
            continue
        # The configuration is not the reason if the saved settings require the state too.
        live_group, saved_keys = inner.param_groups[index], _own_keys(saved_group.hyperparameters)
        known = not hyperparameters and _own_keys(live_group) <= saved_keys
        expected = _kept_states(inner, index, saved_group.hyperparameters) if known else None
        if lacking := kept - states - (expected or set()):
            msg = (
                f"parameter group {index}: saved optimizer states {sorted(states)}; "
                f"{type(inner).__name__} as configured here also needs {sorted(lacking)}"
                f"{_changed_numbers(saved_group, live_group)}. Configure the saved "
                "optimizer, or pass load_optimizer_state=False to start with a fresh one"
            )
            raise CheckpointMismatchError(msg)
        if beyond := states - kept - {"step"}:
            unused.append(f"parameter group {index}: {', '.join(sorted(beyond))}")
    if not unused:
        return ""
    return (
        f"{type(inner).__name__} as configured here does not use these restored states, which "
        f"keep their saved values: {'; '.join(unused)}"
    )


def _changed_numbers(saved: Group, live: Mapping[str, Any]) -> str:
    changes = [
        f"{key} was {value!r} and is {live[key]!r}"
        for key, value in saved.hyperparameters.items()
        if key in live and isinstance(value, (bool, int, float)) and value != live[key]
    ]
    return f" ({', '.join(changes)})" if changes else ""


def check_unnamed_hyperparameters(
    saved: Sequence[Group], live: Sequence[Group], inner: Any
) -> None:
    """Refuse another optimizer's hyperparameters; see ``check_unnamed_state``."""
    name = type(inner).__name__
    for index, (saved_group, live_group) in enumerate(zip(saved, live, strict=False)):
        theirs, ours = _own_keys(saved_group.hyperparameters), _own_keys(live_group.hyperparameters)
        if saved_group.hyperparameters and not _alike(saved_group, theirs, ours, name):
            _refuse(index, f"had {sorted(theirs)}", f"{name} has {sorted(ours)}")


def _alike(saved_group: Group, theirs: set[str], ours: set[str], name: str) -> bool:
    if name not in ADAM_FAMILY:
        return theirs ^ ours <= NEWER_KEYS
    # Any other number belongs to an algorithm that extends Adam. Older releases of DeepSpeed's
    # FusedAdam counted steps here.
    strange = theirs - ours - NEWER_KEYS - frozenset({"step"}).union(*ADAM_KEYS)
    numbers = [key for key in strange if isinstance(saved_group.hyperparameters[key], (int, float))]
    return any(keys <= theirs for keys in ADAM_KEYS) and not numbers


def _own_keys(hyperparameters: Iterable[str]) -> set[str]:
    """Return the hyperparameters that affect the result of a step."""
    return set(hyperparameters) - EXECUTION_KEYS - SCHEDULER_KEYS - MEMBER_KEYS


def _refuse(index: int, saved: str, live: str) -> None:
    msg = (
        f"the saved optimizer {saved} in parameter group {index}, this run's {live}: configure the "
        f"saved optimizer, or {FRESH}"
    )
    raise CheckpointMismatchError(msg)


def _kept_states(inner: Any, index: int, saved: Mapping[str, Plain]) -> set[str] | None:
    """Return the names of the states that an optimizer keeps; None if unknown."""
    if inner.param_groups[index].get("use_muon"):
        return {MOMENTUM_KEY}  # DeepSpeed adds it before the optimizer's own step.
    try:
        return set(probe_after_a_step(inner, index, saved))
    except Exception as error:  # noqa: BLE001 (any optimizer, anybody's)
        log.debug("cannot determine the states of %s: %r", type(inner).__name__, error)
        return None


def weight_decay_change(source: Manifest, inner: Any) -> str:
    """Return a warning if the kind of weight decay changes, else ""."""
    name = type(inner).__name__
    if name not in ADAM_FAMILY:
        return ""
    for index, (saved_group, live_group) in enumerate(
        zip(source.groups, inner.param_groups, strict=False)
    ):
        known = saved_group.hyperparameters
        was = known.get(DECOUPLED_KEY, BY_CLASS.get(source.writer.optimizer))
        assumed = was is None and "bias_correction" in known and not hasattr(inner, "adam_w_mode")
        was = True if assumed else was
        now = live_group.get(DECOUPLED_KEY, getattr(inner, "adam_w_mode", BY_CLASS.get(name)))
        if not known.get("weight_decay") or None in (was, now) or bool(was) == bool(now):
            continue
        was_kind, now_kind = BY_DEFAULT if assumed else NAMED[bool(was)], NAMED[bool(now)]
        if DECOUPLED_KEY in known and DECOUPLED_KEY in live_group:
            return (
                f"Weight decay of parameter group {index} stays {was_kind}, as in the checkpoint; "
                f"{name} is configured with {now_kind} weight decay. Pass "
                "load_hyperparameters=False to use the configured one."
            )
        return (
            f"Weight decay of parameter group {index} was {was_kind} in the checkpoint and is "
            f"{now_kind} with {name}, so steps will differ. Configure the saved optimizer to "
            "continue as before."
        )
    return ""


def check_lacking_hyperparameters(source: Manifest, inner: Any) -> str:
    """Return a warning that lists saved numbers that another optimizer of the family lacks, or "".

    Raises CheckpointMismatchError if the sign of the update depends on one.
    """
    name = type(inner).__name__
    if source.writer.optimizer == name:
        return ""
    lacking = []
    counters = group_counters(inner)
    # DeepSpeed's CPU Adam has this key, but only its constructor reads it.
    ignored = {"amsgrad"} if hasattr(inner, "adam_w_mode") else set()
    for index, (saved_group, live_group) in enumerate(
        zip(source.groups, inner.param_groups, strict=False)
    ):
        had = saved_group.hyperparameters
        beyond = _own_keys(had) - (live_group.keys() - ignored)
        for key in sorted(beyond - counters - {DECOUPLED_KEY}):
            value = had[key]
            if not isinstance(value, (bool, int, float)) or value == NEUTRAL.get(key, False):
                continue
            if key == "maximize":
                msg = (
                    f"parameter group {index} was saved with maximize=True, which {name} lacks: it "
                    "would minimize. Configure the saved optimizer, or negate the loss and pass "
                    "load_hyperparameters=False"
                )
                raise CheckpointMismatchError(msg)
            lacking.append(f"parameter group {index} had {key}={value!r}")
    if not lacking:
        return ""
    return (
        f"{name} ignores them, so steps will differ: {'; '.join(lacking)}. Configure the saved "
        "optimizer to continue as before."
    )
