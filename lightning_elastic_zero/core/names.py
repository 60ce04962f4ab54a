"""Matching of a checkpoint's names and parameter groups to those of a model that differs.

``rename`` maps names (``KeyMapping``). With ``strict_optimizer=False``, a group takes the
hyperparameters and states of the saved group that contained its members. Its new members have fresh
state but share the group's step counter: a flat buffer has one, and which parameters share one must
not depend on the stage or the number of devices.
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
"""Name parts that ``torch.compile`` and torch's ``checkpoint_wrapper`` insert."""

MOST_SUGGESTED = 3
"""Maximum number of renamed prefixes that an error suggests."""

_MOST_COMPARED = 256
"""Maximum number of names per side that a guess considers."""

_MOST_TRIED = 16
"""Maximum number of names explained, and of prefixes tried for each of them."""


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """The ``rename`` option: prefixes of a checkpoint's names, and their replacements.

    A prefix consists of whole names between dots, or is a whole name. ``""`` matches every name. A
    prefix with ``*`` is a pattern of the whole name: each ``*`` matches any characters, as few as
    possible, and replaces the ``*`` at the same position in the replacement. If several match, the
    one with the most characters other than ``*`` applies.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    wrapped: Mapping[str, str] = field(default_factory=dict)
    """The model's names by their form without ``WRAPPERS``, so that a layer matches whether or not
    it is compiled now or was compiled in the saved run."""
    live: AbstractSet[str] = frozenset()
    """All names of the model."""

    def here(self, saved: str) -> str:
        """Return the model's name for a name of the checkpoint."""
        beginning = self._beginning(saved)
        if beginning is None and self._beginning(unwrapped(saved)) is not None:
            return self.here(unwrapped(saved))
        if beginning is not None:
            saved = _renamed(saved, beginning, self.of[beginning])
        return saved if saved in self.live else self.wrapped.get(unwrapped(saved), saved)

    def table(self, saved: Iterable[str], where: str) -> dict[str, str]:
        """Return the model's name for each name of the checkpoint.

        Raises CheckpointMismatchError if two names become one, a name becomes empty, a prefix or
        pattern matches no name, or its two sides differ in the number of ``*``.
        """
        found = {name: self.here(name) for name in saved}
        if problem := next(self._problems(found), ""):
            msg = f"{where}: {problem}"
            raise CheckpointMismatchError(msg)
        return found

    def _problems(self, found: Mapping[str, str]) -> Iterator[str]:
        for old, new in self.of.items():
            if old.count("*") != new.count("*"):
                yield f"rename of {old!r} to {new!r}: both sides need the same number of *"
        used = {self._beginning(form) for name in found for form in (name, unwrapped(name))}
        for old in self.of:
            if old not in used:
                names = f"its names are {', '.join(islice(found, 4))}, ..."
                yield f"rename={old!r} matches no name in the checkpoint; {names}"
        first: dict[str, str] = {}
        for name, here in found.items():
            if not here:
                yield f"rename turns {name!r} into an empty name"
            if first.setdefault(here, name) != name:
                yield f"rename maps both {first[here]!r} and {name!r} to {here!r}"

    def _beginning(self, name: str) -> str | None:
        fitting = [b for b in self.of if _fits(name, b)]
        return max(fitting, key=lambda b: len(b) - b.count("*"), default=None)


def unwrapped(name: str) -> str:
    """Return a name without the parts that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def mapping_to(live: Iterable[str], of: Mapping[str, str]) -> KeyMapping:
    """Return the mapping of a checkpoint's names to a model's.

    Of two live names that differ only by wrappers, the first is preferred. ``of`` is the user's
    ``rename`` option.
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
    if "*" not in beginning:
        return ".".join(filter(None, (new.rstrip("."), _rest(name, beginning))))
    found = _pattern(beginning).fullmatch(name)
    parts = iter(found.groups() if found else ())
    return "".join(next(parts, "") if char == "*" else char for char in new)


@lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, text.split("*"))), re.DOTALL)


def _rest(name: str, beginning: str) -> str | None:
    parts = beginning.rstrip(".")
    if name == parts:
        return ""
    if not parts:
        return name
    return name[len(parts) + 1 :] if name.startswith(f"{parts}.") else None


def guess_key_mapping(
    unexpected: Mapping[str, object], missing: Mapping[str, object], common: Iterable[str] = ()
) -> dict[str, str]:
    """Guess a ``rename`` that explains missing and unexpected names, for an error message.

    ``unexpected`` has the names that only the checkpoint has, each with its shape, or all with
    None. ``common`` names must not be renamed.
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
    """Whether two names have the same shape and last part."""
    return left[name] == free[other] and name.rpartition(".")[2] == other.rpartition(".")[2]


def _name_difference(name: str, other: str, kept: AbstractSet[str]) -> tuple[str, str]:
    """Return the shortest differing prefixes of two names that match no kept name."""
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
    renaming = KeyMapping(dict([pair]))
    renamed = {name: renaming.here(name) for name in left}
    return {was: now for was, now in renamed.items() if now in free and left[was] == free[now]}


MEMBER_KEYS = frozenset({"params", "param_names"})
"""Keys of a parameter group that list its members."""

OWN_GROUP = "put new parameters into a parameter group of their own"

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
        else Group((), here.hyperparameters, ())
        for group, here in zip(matched, live.groups, strict=True)
    ]
    return replace(saved, groups=tuple(groups))


def group_conflicts(
    saved: Manifest, live: Manifest, *, state: bool, hyperparameters: bool
) -> Iterator[str]:
    """Yield the reasons why a live group cannot take the state of its members' saved groups.

    ``state`` and ``hyperparameters`` determine what is restored.
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
        if hyperparameters and differing:
            values = "; ".join(f"{key}: {values}" for key, values in differing.items())
            yield (
                f"{where}, whose hyperparameters differ ({values}): use separate groups, or pass "
                "load_hyperparameters=False to use the configured ones"
            )


def other_algorithm(origins: Sequence[Group], here: Group) -> str:
    """Return a text if members were trained by another algorithm (Adam or Muon), else "".

    DeepSpeed decides at initialization which groups of a Muon optimizer Adam trains.
    """
    muon = bool(here.hyperparameters.get("use_muon"))
    known = [origin.hyperparameters for origin in origins if origin.hyperparameters]
    if all(bool(held.get("use_muon")) == muon for held in known):
        return ""
    was, now = ("Adam", "Muon") if muon else ("Muon", "Adam")
    return f"trained with {was} in the checkpoint and with {now} here: use separate groups"


def _differing_values(of_groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    keys = dict.fromkeys(key for group in of_groups for key in group if key not in MEMBER_KEYS)
    values = {key: [repr(group.get(key)) for group in of_groups] for key in keys}
    return {key: ", ".join(found) for key, found in values.items() if len(set(found)) > 1}


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
