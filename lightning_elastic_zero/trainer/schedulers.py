"""Resumed schedulers: as they were saved, or as they are configured now.

A schedule is at a place, and its rates follow from that place and from how it is configured.
Torch's own schedulers step from the last rate, or to a rate of their place, and which one does what
is their affair: so they are run through, from their configured start to the saved place. Their
rates are then those of a run that was configured like this from its start, bit for bit. Of any
other scheduler it is not known what its steps do, or ask for: its rates are scaled by what the base
rate has become.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedulers

from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.core.names import regrouped
from lightning_elastic_zero.core.tensors import cast_like
from lightning_elastic_zero.errors import CheckpointMismatchError

CONFIGURATION_KEYS = frozenset(
    {
        *("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min"),
        *("base_momentums", "max_momentums", "cycle_momentum", "use_beta1"),
        *("step_size", "milestones", "_milestones", "T_max", "T_0", "T_mult"),
        *("gamma", "factor", "start_factor", "end_factor", "power", "total_iters"),
        *("total_steps", "_schedule_phases", "_anneal_func_type"),
        *("total_size", "step_ratio", "scale_mode", "anneal_epochs", "_anneal_strategy"),
        *("mode", "mode_worse", "patience", "cooldown", "threshold", "threshold_mode", "eps"),
    }
)
"""What torch's schedulers are configured with: rates, and the shape of their course."""

_AS_SAVED = ", or leave out load_hyperparameters=False to go on as saved"

_DEEPSPEEDS = {"last_batch_iteration"}
"""All that DeepSpeed's own schedulers keep; told a place, they set the rates of it."""


def resume_as_saved(
    schedulers: Sequence[Any], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the states to load, their numbers of the types that the live schedulers have."""
    kept = [cast_like(s, live.state_dict()) for live, s in zip(schedulers, states, strict=False)]
    return [*kept, *map(dict, states[len(kept) :])]


def with_new_groups(
    schedulers: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
    origins: Sequence[int | None],
    saved_groups: int,
) -> list[dict[str, Any]]:
    """Return saved states for other parameter groups than were saved.

    Groups that are new come to the rates that the schedule has for them at the saved place, where
    that follows from how it is configured (``resume_as_configured``); else they keep theirs.

    Args:
        schedulers: the live ones, as they were made.
        states: what was saved of each; left as they are.
        origins: for each live parameter group the saved one; None: it is new.
        saved_groups: how many there were.

    Raises:
        CheckpointMismatchError: a schedule ends before the saved place.
    """
    if list(origins) == list(range(saved_groups)):
        return [dict(state) for state in states]
    for scheduler, saved in zip(schedulers, states, strict=False):
        place = completed_steps(saved)
        if None in origins and place is not None and _can_be_run(scheduler):
            _advance_new_groups(scheduler, place, origins)
    own = [scheduler.state_dict() for scheduler in schedulers]
    pairs = zip(states, own, strict=False)
    found = [regrouped(saved, live, origins, saved_groups) for saved, live in pairs]
    return [*found, *map(dict, states[len(found) :])]


def _advance_new_groups(scheduler: Any, place: int, origins: Sequence[int | None]) -> None:
    """Run a scheduler that was just made to a place, for the groups that are new."""
    if completed_steps(scheduler.state_dict()) != 0:
        return
    groups = zip(scheduler.optimizer.param_groups, origins, strict=True)
    known = [group for group, origin in groups if origin is not None]
    kept = [{k: _copied(v) for k, v in g.items() if k != "params"} for g in known]
    _fast_forward(scheduler, place, otherwise="")
    for group, values in zip(known, kept, strict=True):
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                group[key].copy_(value)  # a compiled step may hold on to it
            else:
                group[key] = value


def resume_as_configured(
    schedulers: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Group],
) -> list[dict[str, Any]]:
    """Advance schedulers and their rates to the saved places, as they are configured now.

    Args:
        schedulers: the live ones, as they were made.
        states: what was saved of each; left as they are.
        saved_groups: the parameter groups that were saved.

    Returns:
        The states to load: what else of the saved ones is to be restored.

    Raises:
        CheckpointMismatchError: a schedule ends before the saved place, or is of another kind.
    """
    kept = [_resumed_state(*pair, saved_groups) for pair in zip(schedulers, states, strict=False)]
    return [*kept, *map(dict, states[len(kept) :])]


def _resumed_state(
    scheduler: Any,
    saved: Mapping[str, Any],
    saved_groups: Sequence[Group],
) -> dict[str, Any]:
    place, own = completed_steps(saved), scheduler.state_dict()
    if place is not None and _can_be_run(scheduler) and completed_steps(own) == 0:
        _fast_forward(scheduler, place, otherwise=_AS_SAVED)
        taken: dict[str, Any] = scheduler.state_dict()
        return taken
    if saved.keys() == own.keys() == _DEEPSPEEDS:
        if saved["last_batch_iteration"] >= 0:
            scheduler.step(saved["last_batch_iteration"])
        return dict(saved)
    _check_same_structure(scheduler, own, saved)
    kept = _without_configured(saved)
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is not None:
        _scale_rates(optimizer.param_groups, saved_groups)
        if "_last_lr" in own:
            kept["_last_lr"] = [_copied(group["lr"]) for group in optimizer.param_groups]
    return kept


def completed_steps(state: Mapping[str, Any]) -> int | None:
    """Return how many steps a scheduler had made, by its state; None where that does not say it."""
    if float(state.get("T_cur", 0)) % 1:  # it was told where it is, between two steps
        return None
    if "last_epoch" in state:
        return int(state["last_epoch"])
    places = {completed_steps(inner) for inner in state.get("_schedulers", [])}
    return places.pop() if len(places) == 1 else None


def _can_be_run(scheduler: object) -> bool:
    """Whether a scheduler's rates follow from its place: it is torch's, and asks no metric."""
    return (
        type(scheduler).__module__ == torch_schedulers.__name__
        and not isinstance(scheduler, torch_schedulers.ReduceLROnPlateau)
        and all(map(_can_be_run, getattr(scheduler, "_schedulers", [])))
    )


def _fast_forward(scheduler: Any, place: int, *, otherwise: str) -> None:
    """Make a scheduler's steps from its start to a place.

    Args:
        scheduler: as it was made.
        place: how many steps.
        otherwise: what else helps where it does not have so many.

    Raises:
        CheckpointMismatchError: it has no step of that number.
    """
    with warnings.catch_warnings():
        # That the optimizer has not stepped, and, in some releases, that inner ones are told steps.
        warnings.simplefilter("ignore", UserWarning)
        try:
            for _ in range(place):
                scheduler.step()
        except ValueError as error:  # OneCycleLR's
            msg = (
                f"the checkpoint was saved after {place} steps of its learning-rate schedule, and "
                f"{type(scheduler).__name__} as it is configured now does not have so many: "
                f"{error}. Configure it for the whole run, the steps before the checkpoint among "
                f"them{otherwise}."
            )
            raise CheckpointMismatchError(msg) from error


def _check_same_structure(
    scheduler: object, own: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Refuse a state of other schedulers within one.

    Raises:
        CheckpointMismatchError: there are more or fewer of them, which no load could restore.
    """
    here, there = (len(state.get("_schedulers", ())) for state in (own, saved))
    if here != there:
        msg = (
            f"the learning-rate scheduler that was saved is made of {there or 'no'} others, and "
            f"{type(scheduler).__name__}, which this run has, of {here or 'no'}: configure the "
            "scheduler that was saved, or make one of torch's own schedulers only, which can be "
            "run through to the saved place."
        )
        raise CheckpointMismatchError(msg)


def _scale_rates(groups: Sequence[dict[str, Any]], saved_groups: Sequence[Group]) -> None:
    """Scale each group's saved rate by what its initial rate has become, where both are known.

    Otherwise the configured rate stays; so it does where the saved one started from 0.
    """
    if len(groups) != len(saved_groups):
        return
    for group, of_saved in zip(groups, saved_groups, strict=True):
        saved = of_saved.hyperparameters
        if not {"lr", "initial_lr"} <= group.keys() & saved.keys():
            continue
        rates = (group["initial_lr"], saved["initial_lr"], saved["lr"])
        now, then, rate = (float(_number(value)) for value in rates)
        if not then:
            continue
        scaled = rate if now == then else rate * now / then
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)  # a compiled step may hold on to it
        else:
            group["lr"] = scaled


def _number(value: Any) -> Any:
    """Return the number of a saved or live rate: a manifest has a dictionary for a tensor."""
    return value["tensor"] if isinstance(value, Mapping) else value


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _without_configured(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, and those inside it, without what is configured; the place is left.

    ``LRScheduler.load_state_dict`` updates the fields that it is given and keeps the others. So
    what a scheduler of the user's own keeps under other names is restored as it was saved.
    """
    return {
        key: [_without_configured(inner) for inner in value] if key == "_schedulers" else value
        for key, value in state.items()
        if key not in CONFIGURATION_KEYS
    }
