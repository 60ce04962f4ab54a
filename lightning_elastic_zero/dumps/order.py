"""The order of the parameters in flat buffers that name none: found by their values, or refused.

An order is accepted only where every element fits. Tried are, in this sequence: what was passed, or
the names that DeepSpeed left in the dumps, or the model's own order; then each parameter group in
the model's order, whichever parameters it has; then any order at all. Each of the first is also
tried as ``round_robin_gradients`` deals it out. What the values leave open is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn, TypeAlias

from lightning_elastic_zero.dumps.streams import Spot, Stream
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.partition import round_robin_order

Order: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The names in each stream, in flat order."""

LISTED = 8
"""Parameters that a message names; the rest is counted."""

MOST_STATES = 4096
"""Ways to deal out the parameters so far that are followed at once."""

MOST_STEPS = 1_000_000
"""Places that are looked at in the search for any order."""


@dataclass(slots=True)
class Puzzle:
    """Streams without names, and parameters with values."""

    streams: Sequence[Stream]
    numels: Mapping[str, int]
    """Elements of each parameter that the optimizer owns, in the model's order."""
    compare: Callable[[str, Sequence[Fragment]], bool]
    """Tells whether the masters at some place are a parameter's weights, all of them."""
    alike: Callable[[str], Hashable]
    """The same for parameters whose weights are the same."""
    where: str
    """For messages."""
    _known: dict[tuple[str, int, Spot], bool] = field(default_factory=dict)

    def same(self, name: str, stream: int, spot: Spot) -> bool:
        """Tell whether a parameter's weights are what lies at a spot, where it has room."""
        key = (name, stream, spot)
        if key not in self._known:
            fragments = self.streams[stream].fragments(name, self.numels[name], spot)
            self._known[key] = self.compare(name, fragments)
        return self._known[key]

    def places(self, order: Order) -> list[tuple[str, int, Spot]] | None:
        """Give the place of each parameter in an order; None where the sizes do not fit."""
        found = []
        for index, (stream, names) in enumerate(zip(self.streams, order, strict=True)):
            spot = Spot()
            for name in names:
                after = stream.after(spot, self.numels[name])
                if after is None:
                    return None
                found.append((name, index, spot))
                spot = after
            if not stream.is_end(spot):
                return None
        return found

    def fits(self, order: Order) -> bool:
        """Tell whether every element of every parameter fits in an order."""
        places = self.places(order)
        return places is not None and all(self.same(*place) for place in places)

    def refuse(self, what: str, help_: str) -> NoReturn:
        """Refuse the dumps.

        Raises:
            CheckpointMismatchError: always.
        """
        msg = f"{self.where}: {what}. {help_}"
        raise CheckpointMismatchError(msg)


TELL_GROUPS = (
    "Pass groups=[[name, ...], ...], the parameters' names in each of the optimizer's parameter "
    "groups, in their order"
)
SAME_STEP = (
    "Use the model file that was saved at the same step as the dumps, in the precision of the run, "
    "and the dumps of all ranks of one run"
)


def find_order(puzzle: Puzzle, bases: Sequence[Sequence[Sequence[str]]], *, only: bool) -> Order:
    """Find the one order in which every element fits.

    Args:
        puzzle: what is to be found out.
        bases: the parameters of each group as the optimizer may have had them, the likeliest first.
        only: try no others.

    Raises:
        CheckpointMismatchError: there is none, or more than one.
    """
    _check_sizes(puzzle)
    for base in bases:
        if order := _fitting(puzzle, base):
            return order
    if not only and (order := _dealt_out(puzzle) or _any_order(puzzle)):
        return order
    return _refuse_all(puzzle, bases, only=only)


def listed(names: Iterable[str]) -> str:
    """List the first names, and count the rest."""
    found = list(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more


def _check_sizes(puzzle: Puzzle) -> None:
    """Refuse parameters that cannot be those of the dumps, whatever their order.

    Raises:
        CheckpointMismatchError: they have more elements, or fewer.
    """
    held = sum(stream.capacity for stream in puzzle.streams)
    first = puzzle.streams[0]
    wanted = sum(first.counts(numel) for numel in puzzle.numels.values())
    if held != wanted:
        on_each = " on each rank" if first.stage == STAGE_WEIGHTS else ""
        puzzle.refuse(
            f"the dumps hold {held:,} master weights{on_each}, the {len(puzzle.numels)} trained "
            f"parameters of the model take {wanted:,}",
            "Pass the model that was trained, with the same parameters frozen; or, where the "
            "optimizer was given other parameters than those with requires_grad, groups=",
        )


def _fitting(puzzle: Puzzle, base: Sequence[Sequence[str]]) -> Order | None:
    """Give the order in which a base fits, as it is or dealt out by round robin."""
    return next((order for order in _variants(puzzle, base) if puzzle.fits(order)), None)


def _variants(puzzle: Puzzle, base: Sequence[Sequence[str]]) -> Iterator[Order]:
    yield tuple(map(tuple, base))
    first = puzzle.streams[0]
    if first.stage != STAGE_WEIGHTS and first.world_size > 1:
        yield tuple(
            tuple(names[i] for i in round_robin_order(len(names), first.world_size))
            for names in base
        )


# -- every group in the model's order, whichever parameters it has ---------------------------------


@dataclass(frozen=True, slots=True)
class _Dealt:
    """The last of the parameters that were dealt out, and to which stream."""

    stream: int
    before: _Dealt | None


def _dealt_out(puzzle: Puzzle) -> Order | None:
    """Deal the parameters out to the groups, each group in the model's order.

    All ways are followed at once; those that have come to the same spots go on as one.

    Raises:
        CheckpointMismatchError: there are two ways to do it.
    """
    if len(puzzle.streams) == 1:
        return None
    layer: dict[tuple[Spot, ...], list[_Dealt | None]] = {
        tuple(Spot() for _ in puzzle.streams): [None]
    }
    for name in puzzle.numels:
        following: dict[tuple[Spot, ...], list[_Dealt | None]] = {}
        for spots, ways in layer.items():
            for index, moved in _dealings(puzzle, name, spots):
                known = following.setdefault(moved, [])
                known.extend(_Dealt(index, way) for way in ways[: 2 - len(known)])
        if len(following) > MOST_STATES:
            puzzle.refuse("the weights of too many parameters are alike", TELL_GROUPS)
        layer = following
    done = [
        way
        for spots, ways in layer.items()
        if all(s.is_end(spot) for s, spot in zip(puzzle.streams, spots, strict=True))
        for way in ways
    ]
    chosen = [_streams_of(way) for way in done[:2]]
    if len(chosen) > 1:
        open_ = [n for n, one, two in zip(puzzle.numels, *chosen, strict=True) if one != two]
        _refuse_alike(puzzle, open_)
    return _grouped(puzzle, chosen[0]) if chosen else None


def _dealings(
    puzzle: Puzzle, name: str, spots: tuple[Spot, ...]
) -> Iterator[tuple[int, tuple[Spot, ...]]]:
    """Yield the streams in which a parameter can come next, and the spots after it."""
    for index, (stream, spot) in enumerate(zip(puzzle.streams, spots, strict=True)):
        after = stream.after(spot, puzzle.numels[name])
        if after is not None and puzzle.same(name, index, spot):
            yield index, (*spots[:index], after, *spots[index + 1 :])


def _streams_of(way: _Dealt | None) -> list[int]:
    found: list[int] = []
    while way is not None:
        found.append(way.stream)
        way = way.before
    return found[::-1]


def _grouped(puzzle: Puzzle, streams: Sequence[int]) -> Order:
    return tuple(
        tuple(n for n, index in zip(puzzle.numels, streams, strict=True) if index == wanted)
        for wanted in range(len(puzzle.streams))
    )


def _refuse_alike(puzzle: Puzzle, names: Iterable[str]) -> NoReturn:
    puzzle.refuse(
        f"the weights of {listed(names)} fit into more than one place, and nothing else tells "
        "which of them lies where",
        TELL_GROUPS,
    )


# -- any order -------------------------------------------------------------------------------------

_Step: TypeAlias = "tuple[int, Hashable, Spot]"
"""A stream, which kind of parameter comes next in it, and the spot after that."""


def _any_order(puzzle: Puzzle) -> Order | None:
    """Lay the parameters one behind the other wherever their weights are found.

    Raises:
        CheckpointMismatchError: there are two ways to do it.
    """
    kinds: dict[Hashable, list[str]] = {}
    for name in puzzle.numels:
        kinds.setdefault(puzzle.alike(name), []).append(name)
    ways = list(islice(_ways(puzzle, kinds), 2))
    if not ways:
        return None
    laid: list[list[Hashable]] = [[] for _ in puzzle.streams]
    for index, kind, _ in ways[0]:
        laid[index].append(kind)
    several = {kind for kind, names in kinds.items() if len(names) > 1}
    if len(ways) > 1 or any(len([k for k in laid if kind in k]) > 1 for kind in several):
        one, two = ways[0], ways[-1]
        open_ = {a[1] for a, b in zip(one, two, strict=True) if a != b} | several
        _refuse_alike(puzzle, (n for kind in kinds if kind in open_ for n in kinds[kind]))
    # Who is in which group is certain now. Parameters that are alike lie in the model's order if
    # all of them can; else nothing tells.
    members = [[n for kind in kinds if kind in set(k) for n in kinds[kind]] for k in laid]
    at = {name: i for i, name in enumerate(puzzle.numels)}
    if order := _fitting(puzzle, [sorted(names, key=at.__getitem__) for names in members]):
        return order
    if several:
        _refuse_alike(puzzle, (n for kind in kinds if kind in several for n in kinds[kind]))
    return tuple(tuple(kinds[kind][0] for kind in names) for names in laid)


def _ways(puzzle: Puzzle, kinds: Mapping[Hashable, Sequence[str]]) -> Iterator[list[_Step]]:
    """Yield the ways to fill the streams, by trial and error.

    Raises:
        CheckpointMismatchError: there is no end to it.
    """
    left = {kind: len(names) for kind, names in kinds.items()}
    path: list[_Step] = []
    trials = [_options(puzzle, kinds, left, path)]
    steps = 0
    while trials:
        steps += 1
        if steps > MOST_STEPS:
            puzzle.refuse("the weights of too many parameters are alike", TELL_GROUPS)
        step = next(trials[-1], None)
        if step is None:
            trials.pop()
            if path:
                left[path.pop()[1]] += 1
            continue
        path.append(step)
        left[step[1]] -= 1
        if not any(left.values()) and _next_place(puzzle, path) is None:
            yield list(path)
        trials.append(_options(puzzle, kinds, left, path))


def _next_place(puzzle: Puzzle, path: Sequence[_Step]) -> tuple[int, Spot] | None:
    """Give the stream and the spot that are next to be filled; None when all streams are full."""
    index, spot = (path[-1][0], path[-1][2]) if path else (0, Spot())
    while puzzle.streams[index].is_end(spot):
        index, spot = index + 1, Spot()
        if index == len(puzzle.streams):
            return None
    return index, spot


def _options(
    puzzle: Puzzle,
    kinds: Mapping[Hashable, Sequence[str]],
    left: Mapping[Hashable, int],
    path: Sequence[_Step],
) -> Iterator[_Step]:
    """Yield what can come next, in the model's order."""
    place = _next_place(puzzle, path)
    if place is None:
        return
    index, spot = place
    for kind, names in kinds.items():
        after = puzzle.streams[index].after(spot, puzzle.numels[names[0]]) if left[kind] else None
        if after is not None and puzzle.same(names[0], index, spot):
            yield index, kind, after


# -- when there is none ----------------------------------------------------------------------------


def _refuse_all(
    puzzle: Puzzle, bases: Sequence[Sequence[Sequence[str]]], *, only: bool
) -> NoReturn:
    """Name the first parameters that fit nowhere.

    Raises:
        CheckpointMismatchError: always.
    """
    help_ = SAME_STEP if only else f"{SAME_STEP}. {TELL_GROUPS}, if they were not the model's"
    for base in bases:
        places = puzzle.places(tuple(map(tuple, base)))
        wrong = [place for place in places or () if not puzzle.same(*place)]
        if places:
            puzzle.refuse(
                f"of {len(places)} parameters, {len(wrong)} fit nowhere: the masters, rounded, are "
                f"not the model file's weights of {listed(name for name, *_ in wrong)}"
                f"{_where_wrong(puzzle, wrong)}",
                help_,
            )
    if only:
        puzzle.refuse("the sizes of the parameters in groups= do not fill the dumps", TELL_GROUPS)
    matched = {name for (name, *_), same in puzzle._known.items() if same}  # noqa: SLF001
    lost = [name for name in puzzle.numels if name not in matched]
    puzzle.refuse(
        "there is no order in which the masters, rounded, are the model file's weights; nowhere "
        f"were found those of {listed(lost or puzzle.numels)}",
        help_,
    )


def _where_wrong(puzzle: Puzzle, wrong: Iterable[tuple[str, int, Spot]]) -> str:
    """Say which ranks' dumps hold what does not fit, where others fit."""
    ranks = {
        fragment.rank
        for name, index, spot in wrong
        for fragment in puzzle.streams[index].fragments(name, puzzle.numels[name], spot)
        if not puzzle.compare(name, [fragment])
    }
    if len(ranks) >= puzzle.streams[0].world_size:
        return ""
    return f", in the dumps of no other ranks than {listed(map(str, sorted(ranks)))}"
