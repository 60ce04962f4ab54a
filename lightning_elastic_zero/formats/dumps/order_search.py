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

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.dumps.flat_groups import BufferPosition, FlatGroup
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.partition import round_robin_order
from lightning_elastic_zero.text import format_names

Order: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The names in each stream, in flat order."""

MAX_STATES = 4096
"""Ways to deal out the parameters so far that are followed at once."""

MAX_STEPS = 1_000_000
"""Places that are looked at in the search for any order."""


@dataclass(slots=True)
class OrderSearch:
    """Streams without names, and parameters with values."""

    flat_groups: Sequence[FlatGroup]
    numels: Mapping[str, int]
    """Elements of each parameter that the optimizer owns, in the model's order."""
    compare: Callable[[str, Sequence[Fragment]], bool]
    """Tells whether the masters at some place are a parameter's weights, all of them."""
    weights_digest: Callable[[str], Hashable]
    """The same for parameters whose weights are the same."""
    where: str
    """For messages."""
    _known: dict[tuple[str, int, BufferPosition], bool] = field(default_factory=dict)

    def same(self, name: str, flat_group: int, position: BufferPosition) -> bool:
        """Whether a parameter's weights are what lies at a spot, where it has room."""
        key = (name, flat_group, position)
        if key not in self._known:
            fragments = self.flat_groups[flat_group].fragments(name, self.numels[name], position)
            self._known[key] = self.compare(name, fragments)
        return self._known[key]

    def places(self, order: Order) -> list[tuple[str, int, BufferPosition]] | None:
        """Return the place of each parameter in an order; None where the sizes do not fit."""
        found = []
        for index, (flat_group, names) in enumerate(zip(self.flat_groups, order, strict=True)):
            position = BufferPosition()
            for name in names:
                after = flat_group.after(position, self.numels[name])
                if after is None:
                    return None
                found.append((name, index, position))
                position = after
            if not flat_group.is_end(position):
                return None
        return found

    def fits(self, order: Order) -> bool:
        """Whether every element of every parameter fits in an order."""
        places = self.places(order)
        return places is not None and all(self.same(*place) for place in places)

    def refuse(self, what: str, help_: str) -> NoReturn:
        """Refuse the dumps.

        Raises:
            CheckpointMismatchError: always.
        """
        msg = f"{self.where}: {what}. {help_}"
        raise CheckpointMismatchError(msg)


GROUPS_HINT = (
    "Pass groups=[[name, ...], ...], the parameters' names in each of the optimizer's parameter "
    "groups, in their order"
)
SAME_STEP_HINT = (
    "Use the model file that was saved at the same step as the dumps, in the precision of the run, "
    "and the dumps of all ranks of one run"
)


def find_order(
    search: OrderSearch, candidates: Sequence[Sequence[Sequence[str]]], *, only: bool
) -> Order:
    """Find the one order in which every element fits.

    Args:
        search: what is to be found out.
        candidates: the parameters of each group as the optimizer may have had them, the likeliest
            first.
        only: try no others.

    Raises:
        CheckpointMismatchError: there is none, or more than one.
    """
    _check_sizes(search)
    for base in candidates:
        if order := _fitting(search, base):
            return order
    if not only and (order := _assign_in_model_order(search) or _any_order(search)):
        return order
    return _refuse_all(search, candidates, only=only)


def _check_sizes(search: OrderSearch) -> None:
    """Refuse parameters of more elements than the dumps have, or fewer, whatever their order."""
    held = sum(flat_group.capacity for flat_group in search.flat_groups)
    first = search.flat_groups[0]
    wanted = sum(first.counts(numel) for numel in search.numels.values())
    if held != wanted:
        on_each = " on each rank" if first.stage == STAGE_WEIGHTS else ""
        search.refuse(
            f"the dumps hold {held:,} master weights{on_each}, the {len(search.numels)} trained "
            f"parameters of the model take {wanted:,}",
            "Pass the model that was trained, with the same parameters frozen; or, where the "
            "optimizer was given other parameters than those with requires_grad, groups=",
        )


def _fitting(search: OrderSearch, base: Sequence[Sequence[str]]) -> Order | None:
    """Return the order in which a base fits, as it is or dealt out by round robin."""
    return next((order for order in _variants(search, base) if search.fits(order)), None)


def _variants(search: OrderSearch, base: Sequence[Sequence[str]]) -> Iterator[Order]:
    yield tuple(map(tuple, base))
    first = search.flat_groups[0]
    if first.stage != STAGE_WEIGHTS and first.world_size > 1:
        yield tuple(
            tuple(names[i] for i in round_robin_order(len(names), first.world_size))
            for names in base
        )


# -- every group in the model's order, whichever parameters it has ---------------------------------


_Assignment: TypeAlias = "tuple[int, _Assignment | None]"
"""To which stream the last of the parameters was dealt out, and those before it."""


def _assign_in_model_order(search: OrderSearch) -> Order | None:
    """Deal the parameters out to the groups, each group in the model's order.

    All ways are followed at once; those that have come to the same spots go on as one.

    Raises:
        CheckpointMismatchError: there are two ways to do it.
    """
    if len(search.flat_groups) == 1:
        return None
    layer: dict[tuple[BufferPosition, ...], list[_Assignment | None]] = {
        tuple(BufferPosition() for _ in search.flat_groups): [None]
    }
    for name in search.numels:
        following: dict[tuple[BufferPosition, ...], list[_Assignment | None]] = {}
        for positions, ways in layer.items():
            for index, moved in _possible_assignments(search, name, positions):
                known = following.setdefault(moved, [])
                known.extend((index, way) for way in ways[: 2 - len(known)])
        if len(following) > MAX_STATES:
            search.refuse("the weights of too many parameters are alike", GROUPS_HINT)
        layer = following
    done = [
        way
        for positions, ways in layer.items()
        if all(
            s.is_end(position) for s, position in zip(search.flat_groups, positions, strict=True)
        )
        for way in ways
    ]
    chosen = [_flat_groups_of(way) for way in done[:2]]
    if len(chosen) > 1:
        open_ = [n for n, one, two in zip(search.numels, *chosen, strict=True) if one != two]
        _refuse_alike(search, open_)
    return _grouped(search, chosen[0]) if chosen else None


def _possible_assignments(
    search: OrderSearch, name: str, positions: tuple[BufferPosition, ...]
) -> Iterator[tuple[int, tuple[BufferPosition, ...]]]:
    """Yield the streams in which a parameter can come next, and the spots after it."""
    for index, (flat_group, position) in enumerate(zip(search.flat_groups, positions, strict=True)):
        after = flat_group.after(position, search.numels[name])
        if after is not None and search.same(name, index, position):
            yield index, (*positions[:index], after, *positions[index + 1 :])


def _flat_groups_of(way: _Assignment | None) -> list[int]:
    found: list[int] = []
    while way is not None:
        index, way = way
        found.append(index)
    return found[::-1]


def _grouped(search: OrderSearch, flat_groups: Sequence[int]) -> Order:
    return tuple(
        tuple(n for n, index in zip(search.numels, flat_groups, strict=True) if index == wanted)
        for wanted in range(len(search.flat_groups))
    )


def _refuse_alike(search: OrderSearch, names: Iterable[str]) -> NoReturn:
    search.refuse(
        f"the weights of {format_names(names)} fit into more than one place, and nothing else "
        "tells which of them lies where",
        GROUPS_HINT,
    )


# -- any order -------------------------------------------------------------------------------------

_Placement: TypeAlias = "tuple[int, Hashable, BufferPosition]"
"""A stream, which kind of parameter comes next in it, and the spot after that."""


def _any_order(search: OrderSearch) -> Order | None:
    """Place the parameters one after the other wherever their weights are found.

    Raises:
        CheckpointMismatchError: there are two ways to do it.
    """
    kinds: dict[Hashable, list[str]] = {}
    for name in search.numels:
        kinds.setdefault(search.weights_digest(name), []).append(name)
    ways = list(islice(_ways(search, kinds), 2))
    if not ways:
        return None
    laid: list[list[Hashable]] = [[] for _ in search.flat_groups]
    for index, kind, _ in ways[0]:
        laid[index].append(kind)
    several = {kind for kind, names in kinds.items() if len(names) > 1}
    if len(ways) > 1 or any(len([k for k in laid if kind in k]) > 1 for kind in several):
        one, two = ways[0], ways[-1]
        open_ = {a[1] for a, b in zip(one, two, strict=True) if a != b} | several
        _refuse_alike(search, (n for kind in kinds if kind in open_ for n in kinds[kind]))
    # Who is in which group is certain now. Parameters that are alike lie in the model's order if
    # all of them can; else nothing tells.
    members = [[n for kind in kinds if kind in set(k) for n in kinds[kind]] for k in laid]
    at = {name: i for i, name in enumerate(search.numels)}
    if order := _fitting(search, [sorted(names, key=at.__getitem__) for names in members]):
        return order
    if several:
        _refuse_alike(search, (n for kind in kinds if kind in several for n in kinds[kind]))
    return tuple(tuple(kinds[kind][0] for kind in names) for names in laid)


def _ways(
    search: OrderSearch, kinds: Mapping[Hashable, Sequence[str]]
) -> Iterator[list[_Placement]]:
    """Yield the ways to fill the streams, by trial and error.

    Raises:
        CheckpointMismatchError: there is no end to it.
    """
    left = {kind: len(names) for kind, names in kinds.items()}
    path: list[_Placement] = []
    trials = [_options(search, kinds, left, path)]
    steps = 0
    while trials:
        steps += 1
        if steps > MAX_STEPS:
            search.refuse("the weights of too many parameters are alike", GROUPS_HINT)
        step = next(trials[-1], None)
        if step is None:
            trials.pop()
            if path:
                left[path.pop()[1]] += 1
            continue
        path.append(step)
        left[step[1]] -= 1
        if not any(left.values()) and _next_place(search, path) is None:
            yield list(path)
        trials.append(_options(search, kinds, left, path))


def _next_place(
    search: OrderSearch, path: Sequence[_Placement]
) -> tuple[int, BufferPosition] | None:
    """Return the stream and the spot that are next to be filled; None when all streams are full."""
    index, position = (path[-1][0], path[-1][2]) if path else (0, BufferPosition())
    while search.flat_groups[index].is_end(position):
        index, position = index + 1, BufferPosition()
        if index == len(search.flat_groups):
            return None
    return index, position


def _options(
    search: OrderSearch,
    kinds: Mapping[Hashable, Sequence[str]],
    left: Mapping[Hashable, int],
    path: Sequence[_Placement],
) -> Iterator[_Placement]:
    """Yield what can come next, in the model's order."""
    place = _next_place(search, path)
    if place is None:
        return
    index, position = place
    for kind, names in kinds.items():
        after = (
            search.flat_groups[index].after(position, search.numels[names[0]])
            if left[kind]
            else None
        )
        if after is not None and search.same(names[0], index, position):
            yield index, kind, after


# -- when there is none ----------------------------------------------------------------------------


def _refuse_all(
    search: OrderSearch, candidates: Sequence[Sequence[Sequence[str]]], *, only: bool
) -> NoReturn:
    """Refuse the dumps, naming the first parameters that fit nowhere."""
    help_ = (
        SAME_STEP_HINT if only else f"{SAME_STEP_HINT}. {GROUPS_HINT}, if they were not the model's"
    )
    for base in candidates:
        places = search.places(tuple(map(tuple, base)))
        wrong = [place for place in places or () if not search.same(*place)]
        if places:
            search.refuse(
                f"of {len(places)} parameters, {len(wrong)} fit nowhere: the masters, rounded, are "
                f"not the model file's weights of {format_names(name for name, *_ in wrong)}"
                f"{_where_wrong(search, wrong)}",
                help_,
            )
    if only:
        search.refuse("the sizes of the parameters in groups= do not fill the dumps", GROUPS_HINT)
    matched = {name for (name, *_), same in search._known.items() if same}  # noqa: SLF001
    lost = [name for name in search.numels if name not in matched]
    search.refuse(
        "there is no order in which the masters, rounded, are the model file's weights; nowhere "
        f"were found those of {format_names(lost or search.numels)}",
        help_,
    )


def _where_wrong(search: OrderSearch, wrong: Iterable[tuple[str, int, BufferPosition]]) -> str:
    """Describe which ranks' dumps hold what does not fit, where others fit."""
    ranks = {
        fragment.rank
        for name, index, position in wrong
        for fragment in search.flat_groups[index].fragments(name, search.numels[name], position)
        if not search.compare(name, [fragment])
    }
    if len(ranks) >= search.flat_groups[0].world_size:
        return ""
    return f", in the dumps of no other ranks than {format_names(map(str, sorted(ranks)))}"
