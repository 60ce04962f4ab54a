"""Names of a checkpoint in a model that has others: the ``rename`` option, and guesses at it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

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

    def live_name(self, saved: str) -> str:
        """Return the model's name for a name of the checkpoint."""
        beginning = self._beginning(saved)
        if beginning is None and self._beginning(unwrapped(saved)) is not None:
            return self.live_name(unwrapped(saved))
        if beginning is not None:
            saved = _renamed(saved, beginning, self.of[beginning])
        return saved if saved in self.live else self.wrapped.get(unwrapped(saved), saved)

    def table(self, saved: Iterable[str], where: str) -> dict[str, str]:
        """Return the model's name for each name of the checkpoint.

        Raises CheckpointMismatchError if two names become one, a name becomes empty, a prefix or
        pattern matches no name, or its two sides differ in the number of ``*``.
        """
        renamed = {name: self.live_name(name) for name in saved}
        if problem := next(self._problems(renamed), ""):
            msg = f"{where}: {problem}"
            raise CheckpointMismatchError(msg)
        return renamed

    def _problems(self, renamed: Mapping[str, str]) -> Iterator[str]:
        for old, new in self.of.items():
            if old.count("*") != new.count("*"):
                yield f"rename of {old!r} to {new!r}: both sides need the same number of *"
        used = {self._beginning(form) for name in renamed for form in (name, unwrapped(name))}
        for old in self.of:
            if old not in used:
                names = f"its names are {', '.join(islice(renamed, 4))}, ..."
                yield f"rename={old!r} matches no name in the checkpoint; {names}"
        first: dict[str, str] = {}
        for name, live in renamed.items():
            if not live:
                yield f"rename turns {name!r} into an empty name"
            if first.setdefault(live, name) != name:
                yield f"rename maps both {first[live]!r} and {name!r} to {live!r}"

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
    match = _pattern(beginning).fullmatch(name)
    parts = iter(match.groups() if match else ())
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
    guessed: dict[str, str] = {}
    for name in list(left)[:_MOST_TRIED]:
        if name not in left or len(guessed) == MOST_SUGGESTED:
            continue
        others = [other for other in free if _may_be(name, other, left, free)]
        pairs = [_name_difference(name, other, kept) for other in others[:_MOST_TRIED]]
        tried = dict.fromkeys(pairs)
        best = max(tried, key=lambda pair: len(_explained(pair, left, free)), default=None)
        if best is None or guessed.get(best[0], best[1]) != best[1]:
            continue
        guessed[best[0]] = best[1]
        for was, now in _explained(best, left, free).items():
            del left[was], free[now]
    return guessed


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
    renamed = {name: renaming.live_name(name) for name in left}
    return {was: now for was, now in renamed.items() if now in free and left[was] == free[now]}
