"""The mapping of a checkpoint's layer names to the model's, where they differ.

Matching of parameter groups whose members have changed (``strict_optimizer=False``).

A group goes on with the hyperparameters and the states of the saved group that its members were in.
What it has beside them is fresh; it shares the group's step counter, because a flat buffer has one,
and because which parameters share one must not depend on the stage or the number of devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from lightning_elastic_zero.core.manifest import Group, Manifest
from lightning_elastic_zero.errors import CheckpointMismatchError

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What ``torch.compile`` and torch's ``checkpoint_wrapper`` put into names of what they wrap."""

MOST_SUGGESTED = 3
"""Renamed beginnings that an error suggests; of many layers the first ones show what to do."""

_MOST_COMPARED = 256
"""Names of each side that a guess is made from."""

_MOST_TRIED = 16
"""Names that are explained, and beginnings that are tried for each of them."""


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """What users call ``rename``: beginnings of a checkpoint's names, and what they are here.

    A beginning is whole names between dots, or a whole name. ``""`` stands before every name. With
    a ``*`` in it, it is a pattern of the whole name: each ``*`` stands for any characters, as few
    as can be, which follow in the place of the ``*`` on the other side, one after the other. Of
    what fits, the one with the most characters beside ``*`` counts.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    wrapped: Mapping[str, str] = field(default_factory=dict)
    """The model's names by what they are without ``WRAPPERS``: layers that are compiled now, or
    were when saved, are the same layers."""
    live: AbstractSet[str] = frozenset()
    """All names of the model's."""

    def here(self, saved: str) -> str:
        """Return what a name of the checkpoint's is in the model."""
        beginning = self._beginning(saved)
        if beginning is None and self._beginning(unwrapped(saved)) is not None:
            return self.here(unwrapped(saved))
        if beginning is not None:
            saved = _renamed(saved, beginning, self.of[beginning])
        return saved if saved in self.live else self.wrapped.get(unwrapped(saved), saved)

    def table(self, saved: Iterable[str], where: str) -> dict[str, str]:
        """Return the model's name for each of a checkpoint's.

        Raises:
            CheckpointMismatchError: two would have one name, or one none; a beginning or pattern
                fits none, or has other numbers of ``*`` on its two sides.
        """
        self._check_stars(where)
        names = list(saved)
        found = {name: self.here(name) for name in names}
        used = {self._beginning(name) for name in names}
        used |= {self._beginning(unwrapped(name)) for name in names}
        if strange := [beginning for beginning in self.of if beginning not in used]:
            msg = (
                f"{where}: rename names {strange[0]!r}, and no name in the checkpoint "
                f"{'is like' if '*' in strange[0] else 'begins with'} that; its names are "
                f"{', '.join(names[:4])}, ..."
            )
            raise CheckpointMismatchError(msg)
        first: dict[str, str] = {}
        for name, here in found.items():
            if not here:
                msg = f"{where}: rename leaves nothing of {name!r}, which is a whole name"
                raise CheckpointMismatchError(msg)
            if here in first:
                msg = f"{where}: rename makes {here!r} of both {first[here]!r} and {name!r}"
                raise CheckpointMismatchError(msg)
            first[here] = name
        return found

    def _check_stars(self, where: str) -> None:
        for old, new in self.of.items():
            if old.count("*") != new.count("*"):
                msg = (
                    f"{where}: rename of {old!r} to {new!r}: each * stands for a part of the name, "
                    "and both sides need as many"
                )
                raise CheckpointMismatchError(msg)

    def _beginning(self, name: str) -> str | None:
        """Return the longest beginning or pattern that a name has, of those that are renamed."""
        fitting = [b for b in self.of if _fits(name, b)]
        return max(fitting, key=lambda b: len(b) - b.count("*"), default=None)


def unwrapped(name: str) -> str:
    """Return a name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def mapping_to(live: Iterable[str], of: Mapping[str, str]) -> KeyMapping:
    """Return how a checkpoint's names become a model's.

    Args:
        live: the model's names; of two that wrappers alone tell apart, the first counts for others.
        of: what users have renamed.
    """
    names, wrapped = list(live), dict[str, str]()
    for name in names:
        wrapped.setdefault(unwrapped(name), name)
    return KeyMapping(of, wrapped, frozenset(names))


def _fits(name: str, beginning: str) -> bool:
    if "*" in beginning:
        return _pattern(beginning).fullmatch(name) is not None
    return _rest(name, beginning) is not None


def _renamed(name: str, beginning: str, new: str) -> str:
    """Return a name with another beginning, or by a pattern that it fits."""
    if "*" not in beginning:
        return _joined(new.rstrip("."), _rest(name, beginning))
    found = _pattern(beginning).fullmatch(name)
    parts = iter(found.groups() if found else ())
    return "".join(next(parts, "") if char == "*" else char for char in new)


@lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, text.split("*"))), re.DOTALL)


def _rest(name: str, beginning: str) -> str | None:
    """Return what follows a beginning in a name; None where it does not begin so."""
    parts = beginning.rstrip(".")
    if name == parts:
        return ""
    if not parts:
        return name
    return name[len(parts) + 1 :] if name.startswith(f"{parts}.") else None


def _joined(beginning: str, rest: str | None) -> str:
    return ".".join(part for part in (beginning, rest) if part)


def guess_key_mapping(
    unexpected: Mapping[str, object], missing: Mapping[str, object], common: Iterable[str] = ()
) -> dict[str, str]:
    """Return a ``rename`` that may explain what only one side has; a guess, for a message.

    Args:
        unexpected: names that only the checkpoint has, each with its shape, or None of all.
        missing: those that only the model has.
        common: names that both have, which are not to be renamed.
    """
    kept = set(common)
    left, free = (dict(islice(side.items(), _MOST_COMPARED)) for side in (unexpected, missing))
    found: dict[str, str] = {}
    for name in list(left)[:_MOST_TRIED]:
        if name not in left or len(found) == MOST_SUGGESTED:
            continue
        others = [other for other in free if _may_be(name, other, left, free)]
        pairs = [_name_difference(name, other, kept) for other in others[:_MOST_TRIED]]
        tried = dict.fromkeys(pairs)
        best = max(tried, key=lambda pair: len(_explained(pair, left, free)), default=None)
        if best is None or found.get(best[0], best[1]) != best[1]:
            continue
        found[best[0]] = best[1]
        for was, now in _explained(best, left, free).items():
            del left[was], free[now]
    return found


def _may_be(name: str, other: str, left: Mapping[str, object], free: Mapping[str, object]) -> bool:
    """Whether a name may be another one's: of one shape, with the same end."""
    return left[name] == free[other] and name.rpartition(".")[2] == other.rpartition(".")[2]


def _name_difference(name: str, other: str, kept: AbstractSet[str]) -> tuple[str, str]:
    """Return the shortest beginnings in which two names differ, and which no kept name has."""
    was, now = name.split("."), other.split(".")
    same = 0
    while same < min(len(was), len(now)) and was[-1 - same] == now[-1 - same]:
        same += 1
    pairs = [
        (".".join(was[: len(was) - end]), ".".join(now[: len(now) - end]))
        for end in range(same, -1, -1)
    ]
    fitting = (p for p in pairs if not any(_rest(name, p[0]) is not None for name in kept))
    return next(fitting, pairs[-1])


def _explained(
    pair: tuple[str, str], left: Mapping[str, object], free: Mapping[str, object]
) -> dict[str, str]:
    """Return the names that a renamed beginning leads to one that is missing."""
    renaming = KeyMapping(dict([pair]))
    renamed = {name: renaming.here(name) for name in left}
    return {was: now for was, now in renamed.items() if now in free and left[was] == free[now]}


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
