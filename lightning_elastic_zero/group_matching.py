"""Matching of parameter groups whose members have changed (``strict_optimizer=False``).

A group goes on with the hyperparameters and the states of the saved group that its members were in.
What it has beside them is fresh; it shares the group's step counter, because a flat buffer has one,
and because which parameters share one must not depend on the stage or the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_elastic_zero.manifest import Group, Manifest

MEMBER_KEYS = frozenset({"params", "param_names"})
"""Who is in a group, which is no hyperparameter."""

OWN_GROUP = "put what is new into a parameter group of its own"

_SCHEDULERS_PER_GROUP = frozenset(
    {
        *("base_lrs", "_last_lr", "max_lrs", "min_lrs", "lr_lambdas"),
        *("base_momentums", "max_momentums"),
    }
)
"""What torch's schedulers keep as one value for each parameter group."""

_STEPS_LOOKED_AT = 10_000


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    """A live parameter group beside those that were saved."""

    origins: tuple[int, ...]
    """Saved groups in which its members were, ascending; empty: none of them was trained."""
    known: tuple[str, ...]
    """Its members that were trained when saved."""
    fresh: tuple[str, ...]
    """Its other members."""


def match_groups(saved: Manifest, live: Manifest) -> tuple[MatchedGroup, ...]:
    """Return for each live parameter group which saved ones its members were in."""
    group_of = {p.name: p.group for p in saved.optimized if p.group is not None}
    return tuple(
        MatchedGroup(
            origins=tuple(sorted({group_of[name] for name in group.names if name in group_of})),
            known=tuple(name for name in group.names if name in group_of),
            fresh=tuple(name for name in group.names if name not in group_of),
        )
        for group in live.groups
    )


def origins_of(matched: Sequence[MatchedGroup]) -> tuple[int | None, ...]:
    """Return the saved group whose hyperparameters each live one goes on with; None: of none."""
    return tuple(group.origins[0] if group.origins else None for group in matched)


def with_live_groups(saved: Manifest, live: Manifest) -> Manifest:
    """Return what was saved, its parameter groups cut as the live ones are.

    Each has the members that are known, and what they were saved with; where none is, the
    hyperparameters that are configured here, and no state.
    """
    matched = match_groups(saved, live)
    groups = [
        replace(saved.groups[group.origins[0]], names=group.known)
        if group.origins
        else Group((), here.hyperparameters, ())
        for group, here in zip(matched, live.groups, strict=True)
    ]
    return replace(saved, groups=tuple(groups))


def group_conflicts(
    saved: Manifest, live: Manifest, *, state: bool, hyperparameters: bool
) -> Iterator[str]:
    """Yield why a live group cannot go on with what its members were saved with.

    Args:
        saved: the checkpoint's manifest.
        live: what the engine says of itself.
        state: whether the optimizer's state is wanted.
        hyperparameters: whether those of the groups are.
    """
    for index, group in enumerate(match_groups(saved, live)):
        origins = [saved.groups[origin] for origin in group.origins]
        numbers = ", ".join(map(str, group.origins))
        where = f"parameter group {index} here has members of the saved groups {numbers}"
        if another := other_algorithm(origins, live.groups[index]):
            yield f"{where}, some of them {another}"
        tables = {origin.state for origin in origins}
        if state and len(tables) > 1:
            kept = " and ".join(str(sorted(key.name for key in table)) for table in tables)
            yield f"{where}, which kept the states {kept}: keep them apart"
        differing = _differing_values([origin.hyperparameters for origin in origins])
        if hyperparameters and differing:
            values = "; ".join(f"{key}: {values}" for key, values in differing.items())
            yield (
                f"{where}, whose hyperparameters differ ({values}): keep them apart, or pass "
                "load_hyperparameters=False to take those that are configured here"
            )


def other_algorithm(origins: Sequence[Group], here: Group) -> str:
    """Return that members were trained by another algorithm; empty where they were not.

    An optimizer of Muon has groups that Adam trains; which ones, DeepSpeed fixes when it starts.
    """
    muon = bool(here.hyperparameters.get("use_muon"))
    told = [origin.hyperparameters for origin in origins if origin.hyperparameters]
    if all(bool(held.get("use_muon")) == muon for held in told):
        return ""
    was, now = ("Adam", "Muon") if muon else ("Muon", "Adam")
    return f"that {was} trained when it was saved, and {now} does here: keep them apart"


def _differing_values(of_groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the hyperparameters in which groups differ, with their values."""
    keys = dict.fromkeys(key for group in of_groups for key in group if key not in MEMBER_KEYS)
    values = {key: [repr(group.get(key)) for group in of_groups] for key in keys}
    return {key: ", ".join(found) for key, found in values.items() if len(set(found)) > 1}


def shared_step_counters(saved: Manifest, live: Manifest) -> Iterator[tuple[int, str]]:
    """Yield the groups that have fresh members beside restored ones, and what that does to them.

    Where the optimizer counts no steps it does nothing.
    """
    for index, group in enumerate(match_groups(saved, live)):
        if not (group.origins and group.fresh):
            continue
        origin = saved.groups[group.origins[0]]
        if any(key.kind == "scalar" and key.name == "step" for key in origin.state):
            yield index, _first_updates(origin.hyperparameters)


def _first_updates(hyperparameters: Mapping[str, Any]) -> str:
    """Return what an optimizer makes of fresh moments that it takes for old ones."""
    match hyperparameters.get("betas"):
        case (float(first), float(second)) if 0 < second < 1 and 0 <= first < 1:
            factor = largest_uncorrected_update(first, second)
            return (
                ", so that Adam's bias correction leaves it out: its first updates are up to "
                f"{factor:.1f} times those of a new run"
            )
    return ""


def largest_uncorrected_update(first: float, second: float) -> float:
    """Return how much larger than a new run's Adam's updates become without bias correction.

    Args:
        first: the moment's coefficient, the first of ``betas``.
        second: that of the squares.
    """
    reached = range(1, _STEPS_LOOKED_AT)
    return max((1 - first**k) / math.sqrt(1 - second**k) for k in reached)


def regrouped(
    saved: Mapping[str, Any], live: Mapping[str, Any], origins: Sequence[int | None], count: int
) -> dict[str, Any]:
    """Return a scheduler's state with its values for each parameter group put in their places.

    Args:
        saved: the state that was saved.
        live: that of the live scheduler: what it has for groups that are new stays.
        origins: for each live group the saved one; None: it is new.
        count: how many groups were saved.
    """
    if list(origins) == list(range(count)):
        return dict(saved)
    return {key: _regrouped(key, value, live, origins, count) for key, value in saved.items()}


def _regrouped(
    key: str, value: object, live: Mapping[str, Any], origins: Sequence[int | None], count: int
) -> object:
    """Return one entry of a scheduler's state; of schedulers within it, each one's."""
    here = live.get(key)
    if not (isinstance(value, list) and isinstance(here, list)):
        return value
    if key == "_schedulers":
        pairs = zip(value, here, strict=False)
        return [*(regrouped(*pair, origins, count) for pair in pairs), *value[len(here) :]]
    per_group = key in _SCHEDULERS_PER_GROUP or len(origins) != count
    if not per_group or len(value) != count or len(here) != len(origins):
        return value
    return [here[i] if origin is None else value[origin] for i, origin in enumerate(origins)]
