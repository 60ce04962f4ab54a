"""Resume learning-rate schedulers as saved, or as they are configured now.

With the new configuration, torch's own schedulers are stepped from their start to the saved number
of steps, so the rates equal those of a run with this configuration from its start, bit for bit.
The steps of other schedulers are unknown: their rates are scaled by the change of the base rate.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedulers

from lightning_elastic_zero.core.group_matching import regrouped
from lightning_elastic_zero.core.manifest import Group
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
"""State of torch's schedulers that is configuration: rates and the shape of the schedule."""

CLASS_KEYS = CONFIGURATION_KEYS - {"_last_lr"}
"""Configuration by which classes differ. Some have a last rate only after their first step."""

_AS_SAVED = ", or omit load_hyperparameters=False to continue as saved"

_DEEPSPEEDS = {"last_batch_iteration"}
"""Complete state of DeepSpeed's schedulers, which compute their rates from it."""


def resume_as_saved(
    schedulers: Sequence[Any], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the states to load, with numbers converted to the types of the live schedulers."""
    kept = [cast_like(s, live.state_dict()) for live, s in zip(schedulers, states, strict=False)]
    return [*kept, *map(dict, states[len(kept) :])]


def with_new_groups(
    schedulers: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
    origins: Sequence[int | None],
    saved_groups: int,
    *,
    as_saved: bool,
) -> list[dict[str, Any]]:
    """Return saved states adapted to other parameter groups than in the saved run.

    If schedules continue ``as_saved``, new groups get the rates that theirs has at the saved step,
    if it is one of torch's schedulers; otherwise they keep the configured ones. ``origins``: for
    each live parameter group, the saved one; None: it is new.
    """
    if list(origins) == list(range(saved_groups)):
        return [dict(state) for state in states]
    for scheduler, saved in zip(schedulers, states, strict=False):
        place = completed_steps(saved)
        is_stepped = as_saved and None in origins  # else ``resume_as_configured`` steps all groups
        if is_stepped and place is not None and _can_be_run(scheduler):
            _advance_new_groups(scheduler, place, origins)
    live_states = [scheduler.state_dict() for scheduler in schedulers]
    pairs = zip(states, live_states, strict=False)
    regrouped_states = [regrouped(saved, live, origins, saved_groups) for saved, live in pairs]
    return [*regrouped_states, *map(dict, states[len(regrouped_states) :])]


def _advance_new_groups(scheduler: Any, place: int, origins: Sequence[int | None]) -> None:
    """Step a newly created scheduler to a place, for the new groups only."""
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
    """Return states that advance new schedulers to the saved steps, as configured now."""
    kept = [_resumed_state(*pair, saved_groups) for pair in zip(schedulers, states, strict=False)]
    return [*kept, *map(dict, states[len(kept) :])]


def _resumed_state(
    scheduler: Any,
    saved: Mapping[str, Any],
    saved_groups: Sequence[Group],
) -> dict[str, Any]:
    place, live_state = completed_steps(saved), scheduler.state_dict()
    if place is not None and _can_be_run(scheduler) and completed_steps(live_state) == 0:
        _fast_forward(scheduler, place, otherwise=_AS_SAVED)
        taken: dict[str, Any] = scheduler.state_dict()
        return taken
    if saved.keys() == live_state.keys() == _DEEPSPEEDS:
        if saved["last_batch_iteration"] >= 0:
            scheduler.step(saved["last_batch_iteration"])
        return dict(saved)
    live_count, saved_count = (len(state.get("_schedulers", ())) for state in (live_state, saved))
    if live_count != saved_count:
        msg = (
            f"the saved learning-rate scheduler contains {saved_count or 'no'} other schedulers, "
            f"and {type(scheduler).__name__} of this run contains {live_count or 'no'}. Configure "
            "the saved scheduler, or use only torch's own schedulers, which can be stepped to the "
            "saved place."
        )
        raise CheckpointMismatchError(msg)
    kept = _without_configured(saved)
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is not None:
        _scale_rates(optimizer.param_groups, saved_groups)
        if "_last_lr" in live_state:
            kept["_last_lr"] = [_copied(group["lr"]) for group in optimizer.param_groups]
    return kept


def completed_steps(state: Mapping[str, Any]) -> int | None:
    """Return the number of steps that a scheduler had made, by its state; None: unknown."""
    if float(state.get("T_cur", 0)) % 1:  # was set between two steps, by step(epoch)
        return None
    if "last_epoch" in state:
        return int(state["last_epoch"])
    places = {completed_steps(inner) for inner in state.get("_schedulers", [])}
    return places.pop() if len(places) == 1 else None


def _can_be_run(scheduler: object) -> bool:
    """Whether a scheduler is torch's and its rates depend only on the number of steps."""
    return (
        type(scheduler).__module__ == torch_schedulers.__name__
        and not isinstance(scheduler, torch_schedulers.ReduceLROnPlateau)
        and all(map(_can_be_run, getattr(scheduler, "_schedulers", [])))
    )


def _fast_forward(scheduler: Any, place: int, *, otherwise: str) -> None:
    """Make a number of steps. ``otherwise``: an alternative remedy for the error message."""
    with warnings.catch_warnings():
        # Warnings that the optimizer has not stepped, and about arguments of inner schedulers.
        warnings.simplefilter("ignore", UserWarning)
        try:
            for _ in range(place):
                scheduler.step()
        except ValueError as error:  # OneCycleLR's
            msg = (
                f"{type(scheduler).__name__} as configured now is shorter than the {place} steps "
                f"that the saved schedule has taken: {error}. Configure it for the whole run, "
                f"including the steps before the checkpoint{otherwise}."
            )
            raise CheckpointMismatchError(msg) from error


def _scale_rates(groups: Sequence[dict[str, Any]], saved_groups: Sequence[Group]) -> None:
    """Scale each group's saved rate by the change of its initial rate.

    The configured rate stays if a rate is unknown or the saved initial rate is 0.
    """
    if len(groups) != len(saved_groups):
        return
    for group, of_saved in zip(groups, saved_groups, strict=True):
        saved = of_saved.hyperparameters
        if not {"lr", "initial_lr"} <= group.keys() & saved.keys():
            continue
        rates: tuple[Any, ...] = (group["initial_lr"], saved["initial_lr"], saved["lr"])
        # The manifest has a dictionary for a tensor.
        now, then, rate = (float(r["tensor"] if isinstance(r, Mapping) else r) for r in rates)
        if not then:
            continue
        scaled = rate if now == then else rate * now / then
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)  # a compiled step may hold on to it
        else:
            group["lr"] = scaled


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _without_configured(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state, and those inside it, without configuration; the place stays.

    ``LRScheduler.load_state_dict`` updates only the given fields. Other fields of a user's own
    scheduler are restored as saved.
    """
    return {
        key: [_without_configured(inner) for inner in value] if key == "_schedulers" else value
        for key, value in state.items()
        if key not in CONFIGURATION_KEYS
    }
