"""Matching of a checkpoint's parameter groups to those of an optimizer that differs.

With ``strict_optimizer=False``, a group takes the hyperparameters and states of the saved group
that contained its members. Its new members have fresh state but share the group's step counter: a
flat buffer has one, and which parameters share one must not depend on the stage or the number of
devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_elastic_zero.core.manifest import Group, Manifest

MEMBER_KEYS = frozenset({"params", "param_names"})
"""Keys of a parameter group that list its members."""

OWN_GROUP = "put new parameters into a parameter group of their own"

_CONFIGURED = "pass load_hyperparameters=False to use the configured ones"
_FRESH = "pass load_optimizer_state=False to start a fresh optimizer"

_SCHEDULERS_PER_GROUP = frozenset(
    {
        *("base_lrs", "_last_lr", "max_lrs", "min_lrs", "lr_lambdas"),
        *("base_momentums", "max_momentums"),
    }
)
"""Entries of torch's schedulers with one value per parameter group."""

_STEPS_LOOKED_AT = 10_000


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    """A live parameter group and the saved groups of its members."""

    origins: tuple[int, ...]
    """Saved groups that contained its members, ascending; empty if none was trained."""
    known: tuple[str, ...]
    """Its members that were trained in the saved run."""
    fresh: tuple[str, ...]
    """Its other members."""


def match_groups(saved: Manifest, live: Manifest) -> tuple[MatchedGroup, ...]:
    """Return, for each live parameter group, the saved groups of its members."""
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
    """Return, for each live group, the saved group that provides its hyperparameters, or None."""
    return tuple(group.origins[0] if group.origins else None for group in matched)


def with_live_groups(saved: Manifest, live: Manifest) -> Manifest:
    """Return the saved manifest with its parameter groups arranged as in the live run.

    Each group contains the members that were trained in the saved run. A group without any has the
    configured hyperparameters and no state.
    """
    matched = match_groups(saved, live)
    groups = [
        replace(saved.groups[group.origins[0]], names=group.known)
        if group.origins
        else Group((), live_group.hyperparameters, ())
        for group, live_group in zip(matched, live.groups, strict=True)
    ]
    return replace(saved, groups=tuple(groups))


def group_conflicts(
    saved: Manifest,
    live: Manifest,
    *,
    state: bool,
    hyperparameters: bool,
    counter_keys: Collection[str],
) -> Iterator[str]:
    """Yield the reasons why a live group cannot take the state of its members' saved groups.

    ``state`` and ``hyperparameters`` select the parts that are restored. The saved hyperparameters
    in ``counter_keys`` are part of the state.
    """
    for index, group in enumerate(match_groups(saved, live)):
        origins = [saved.groups[origin] for origin in group.origins]
        numbers = ", ".join(map(str, group.origins))
        where = f"parameter group {index} here has members of saved groups {numbers}"
        if another := other_algorithm(origins, live.groups[index]):
            yield f"{where}, some of them {another}"
        tables = {origin.state for origin in origins}
        if state and len(tables) > 1:
            kept = " and ".join(str(sorted(key.name for key in table)) for table in tables)
            yield f"{where}, which have the states {kept}: use separate groups"
        differing = _differing_values([origin.hyperparameters for origin in origins])
        for kind, wanted, counts, remedy in (
            ("counters", state, True, _FRESH),
            ("hyperparameters", hyperparameters, False, _CONFIGURED),
        ):
            listed = [f"{k}: {v}" for k, v in differing.items() if (k in counter_keys) == counts]
            if wanted and listed:
                what = f"whose {kind} differ ({'; '.join(listed)})"
                yield f"{where}, {what}: use separate groups, or {remedy}"


def other_algorithm(origins: Sequence[Group], live_group: Group) -> str:
    """Return a text if members were trained by another algorithm (Adam or Muon), else "".

    DeepSpeed decides at initialization which groups of a Muon optimizer Adam trains.
    """
    muon = bool(live_group.hyperparameters.get("use_muon"))
    known = [origin.hyperparameters for origin in origins if origin.hyperparameters]
    if all(bool(hyperparameters.get("use_muon")) == muon for hyperparameters in known):
        return ""
    was, now = ("Adam", "Muon") if muon else ("Muon", "Adam")
    return f"trained with {was} in the checkpoint and with {now} here: use separate groups"


def _differing_values(of_groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    keys = dict.fromkeys(key for group in of_groups for key in group if key not in MEMBER_KEYS)
    values = {key: [repr(group.get(key)) for group in of_groups] for key in keys}
    return {key: ", ".join(texts) for key, texts in values.items() if len(set(texts)) > 1}


def shared_step_counters(saved: Manifest, live: Manifest) -> Iterator[tuple[int, str]]:
    """Yield each group that mixes fresh and restored members, and the effect on the fresh ones.

    Optimizers that do not count steps are not affected.
    """
    for index, group in enumerate(match_groups(saved, live)):
        if not (group.origins and group.fresh):
            continue
        origin = saved.groups[group.origins[0]]
        if any(key.name == "step" for key in origin.scalars):
            yield index, _first_updates(origin.hyperparameters)


def _first_updates(hyperparameters: Mapping[str, Any]) -> str:
    """Return the effect of treating fresh moments as old ones, or ""."""
    match hyperparameters.get("betas"):
        case (float(first), float(second)) if 0 < second < 1 and 0 <= first < 1:
            factor = largest_uncorrected_update(first, second)
            return (
                ", so Adam applies no bias correction to them: their first updates are up to "
                f"{factor:.1f} times those of a new run"
            )
    return ""


def largest_uncorrected_update(first: float, second: float) -> float:
    """Return the largest ratio of Adam's updates without bias correction to those of a new run.

    ``first`` and ``second`` are Adam's ``betas``.
    """
    reached = range(1, _STEPS_LOOKED_AT)
    return max((1 - first**k) / math.sqrt(1 - second**k) for k in reached)


def regrouped(
    saved: Mapping[str, Any], live: Mapping[str, Any], origins: Sequence[int | None], count: int
) -> dict[str, Any]:
    """Return a scheduler's state with its per-group values rearranged for the live groups.

    ``origins`` has the saved group of each live group, or None for a new one, whose values come
    from ``live``; ``count`` is the number of saved groups.
    """
    if list(origins) == list(range(count)):
        return dict(saved)
    return {key: _regrouped(key, value, live, origins, count) for key, value in saved.items()}


def _regrouped(
    key: str, value: object, live: Mapping[str, Any], origins: Sequence[int | None], count: int
) -> object:
    live_value = live.get(key)
    if not (isinstance(value, list) and isinstance(live_value, list)):
        return value
    if key == "_schedulers":
        pairs = zip(value, live_value, strict=False)
        return [*(regrouped(*pair, origins, count) for pair in pairs), *value[len(live_value) :]]
    per_group = key in _SCHEDULERS_PER_GROUP or len(origins) != count
    if not per_group or len(value) != count or len(live_value) != len(origins):
        return value
    return [live_value[i] if origin is None else value[origin] for i, origin in enumerate(origins)]
