"""Fragments, layouts, and the planner of restores: intersection of intervals.

At every ZeRO stage, a rank holds a set of *fragments*: elements ``[start, stop)`` of the flattened
parameter ``name`` are at ``offset`` of flat buffer ``buffer`` of rank ``rank``. Master weights and
element-wise optimizer states share the same fragments. A checkpoint is a layout (the fragments that
are held) and a way to read a run of elements. A live optimizer is a layout (the fragments that are
wanted) and writable buffers. A restore finds, for each wanted fragment, the held runs that cover
it, each element exactly once. Elements that no fragment covers are padding and are never saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from lightning_elastic_zero.core.cuts import Cut, Rows
from lightning_elastic_zero.errors import CheckpointFormatError


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``[start, stop)`` of a flattened parameter, and their place.

    Half-open, in elements, never in bytes; ``0 <= start < stop <= numel``.
    """

    name: str
    """The parameter's name, as in ``named_parameters()`` (tied weights: the first name)."""
    start: int
    """First element in the flattened parameter."""
    stop: int
    """One past the last element."""
    rank: int
    """The data-parallel rank that holds them."""
    buffer: int
    """Index of the rank's flat buffer: a parameter group (ZeRO-1/2) or a sub-group (ZeRO-3)."""
    offset: int
    """Position of element ``start`` in that buffer, in elements."""

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.stop and self.offset >= 0):
            msg = f"invalid fragment: [{self.start}, {self.stop}) at {self.offset} of {self.name}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Names a tensor of a rank's state that grows with the model."""

    kind: Literal["master", "state", "module", "frozen"]
    """A flat buffer's masters or one of its optimizer states, the module's part of a trained
    parameter, or of a frozen one."""
    place: int | str
    """Index of the flat buffer, or name of the parameter."""
    state: str = ""
    """Name of the optimizer state."""


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ``[start, stop)`` in parts of at most ``size`` elements, in order."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


class Layout(Protocol):
    """The fragments of all ranks, which an implementation computes instead of storing them.

    A thousand ranks of a large model hold a million fragments, so both methods use arithmetic. A
    rank holds at most one run of a parameter, and consecutive ranks hold consecutive runs.
    """

    def on_rank(self, rank: int) -> Sequence[Fragment]:
        """Return a rank's fragments, ordered by buffer and offset."""
        ...

    def covering(self, name: str, start: int, stop: int, shard: int = 0) -> Iterator[Fragment]:
        """Yield the runs that hold ``[start, stop)`` of a parameter, cut to it, in order.

        ``shard`` is the tensor rank in whose shard elements are counted. Raises KeyError if no rank
        holds the parameter.
        """
        ...


class ShardedLayout:
    """The layouts of several tensor ranks: rank ``r`` has the shard ``r % len(shards)``."""

    def __init__(self, shards: Sequence[Layout]) -> None:
        self._shards = shards

    def on_rank(self, rank: int) -> list[Fragment]:
        data_rank, shard = divmod(rank, len(self._shards))
        return [_on(rank, held) for held in self._shards[shard].on_rank(data_rank)]

    def covering(self, name: str, start: int, stop: int, shard: int = 0) -> Iterator[Fragment]:
        for held in self._shards[shard].covering(name, start, stop):
            yield _on(held.rank * len(self._shards) + shard, held)


def _on(rank: int, at: Fragment) -> Fragment:
    """Return a fragment on another rank; ``replace`` would take three times as long."""
    return Fragment(at.name, at.start, at.stop, rank, at.buffer, at.offset)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shards that tensor ranks have of the parameters."""

    size: int = 1
    """Number of tensor ranks."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """By parameter; every tensor rank has all others whole."""


@dataclass(frozen=True, slots=True)
class Resharding:
    """Where the shards of a checkpoint contain a live tensor rank's shards."""

    held: Sharding = Sharding()
    """Of the checkpoint."""
    wanted: Sharding = Sharding()
    """Of the live run; of a tool that reads whole parameters, the default."""
    rank: int = 0
    """The live tensor rank."""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Whole shapes of the parameters that are cut."""

    def sources(self, wanted: Iterable[Fragment]) -> Iterator[Source]:
        """Yield the parts of saved shards that contain wanted fragments.

        Of a parameter that every tensor rank has, live ranks take turns with the saved copies.
        """
        known: dict[object, list[tuple[int, Rows, Rows | None]]] = {}
        for of in wanted:
            held, live = self.held.cuts.get(of.name), self.wanted.cuts.get(of.name)
            # Widths of fused parameters may be those of a plain one on more tensor ranks.
            if held == live and (held is None or self.held.size == self.wanted.size):
                yield Source(of, self.rank % self.held.size)
                continue
            shape = tuple(self.shapes[of.name])
            # The layers of a model have equal weights: their rows are computed once.
            key = held and held.place, live and live.place, shape, of.start, of.stop
            if key not in known:
                known[key] = [
                    (shard, rows, None if rows.count == 1 else rows.from_zero())
                    for shard, rows in self._rows(held, live, shape, of.start, of.stop)
                ]
            for shard, rows, several in known[key]:
                offset = of.offset + rows.target - of.start
                at = Fragment(of.name, rows.source, rows.source_stop, of.rank, of.buffer, offset)
                yield Source(at, shard, several)

    def _rows(
        self, held: Cut | None, live: Cut | None, shape: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[int, Rows]]:
        """Yield saved shards with the rows that they share with a live one's ``[start, stop)``."""
        whole = (Rows(1, math.prod(shape), 0, 0),)
        ours = live.rows(self.rank, self.wanted.size, shape) if live else whole
        parts = [part.swapped() for rows in ours for part in rows.clip(start, stop)]
        for shard in range(self.held.size) if held else (self.rank % self.held.size,):
            for theirs in held.rows(shard, self.held.size, shape) if held else whole:
                for part in parts:
                    for rows in theirs.through(part):
                        yield shard, rows


SAME_SHARDS = Resharding()
"""Both sides have whole parameters."""


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a saved shard that is copied to one place."""

    at: Fragment
    """The elements in the saved shard, and the first one's place in the target."""
    shard: int
    """The saved tensor rank."""
    rows: Rows | None = None
    """The rows of these elements that are copied, from their first to the first of the target;
    None: all."""


class Transfer(NamedTuple):
    """Elements to copy: ``[start, stop)`` of a held parameter, from there to a wanted place.

    A plan may have millions: a tuple is created in a third of the time of a frozen dataclass.
    """

    name: str
    start: int
    stop: int
    source_rank: int
    source_buffer: int
    source_offset: int
    target_buffer: int
    target_offset: int
    rows: Rows | None = None
    """The rows of these elements that are copied, from their first to the first of the target;
    None: all elements, to consecutive places."""

    def parts(self, size: int) -> Iterator[Transfer]:
        """Yield parts of at most ``size`` elements of the source, or of one row if it is longer."""
        if self.rows is None:
            for start, stop in spans(0, self.stop - self.start, size):
                yield self._part(start, stop, start)
            return
        rows = self.rows
        most = max(1, 1 + (size - rows.length) // rows.source_step)
        for first, last in spans(0, rows.count, most):
            part = rows.part(first, last, 0, rows.length)
            yield self._part(part.source, part.source_stop, part.target, part)

    def _part(self, start: int, stop: int, target: int, rows: Rows | None = None) -> Transfer:
        return self._replace(
            start=self.start + start,
            stop=self.start + stop,
            source_offset=self.source_offset + start,
            target_offset=self.target_offset + target,
            rows=rows.from_zero() if rows and rows.count > 1 else None,
        )


class TransferPlan:
    """The transfers that fill wanted fragments from held ones, one source rank at a time.

    From a thousand ranks of ZeRO-3 onto a few, there are millions of transfers. A plan stores only
    the range of source ranks of each wanted fragment, or its transfer if there is one, and computes
    the transfers from a rank when it gets there, so its memory grows with the number of wanted
    fragments.
    """

    def __init__(
        self, wanted: Iterable[Fragment], held: Layout, resharding: Resharding = SAME_SHARDS
    ) -> None:
        self._held = held
        self._from: dict[int, list[Source | Transfer]] = {}
        extents, step = set(), resharding.held.size
        for source in resharding.sources(wanted):
            first, last = _ends(source, held)
            begun = _transfer(first, source.at, source.rows) if first is last else source
            self._from.setdefault(first.rank, []).append(begun)
            extents.add((first.rank, last.rank))
        self.ranks: Sequence[int] = sorted({r for a, b in extents for r in range(a, b + 1, step)})
        """The ranks from which there are transfers, ascending."""

    def by_rank(self) -> Iterator[tuple[int, list[Transfer]]]:
        """Yield each source rank with the transfers from it, ranks ascending.

        Raises CheckpointFormatError if a wanted element is not held, or held twice.
        """
        unfinished: list[tuple[Transfer, Iterator[Transfer]]] = []
        for rank in self.ranks:
            for begun in self._from.get(rank, ()):
                runs = iter((begun,)) if isinstance(begun, Transfer) else _fill(begun, self._held)
                unfinished += [(first, runs) for first in itertools.islice(runs, 1)]
            transfers, waiting = [], []
            for first, runs in unfinished:
                run: Transfer | None = first
                while run is not None and run.source_rank == rank:
                    transfers.append(run)
                    run = next(runs, None)
                if run is not None:
                    waiting.append((run, runs))
            if strange := [t for t, _ in waiting if t.source_rank < rank]:
                msg = f"the checkpoint's layout does not hold {strange[0].name} on ranks in order"
                raise CheckpointFormatError(msg)
            unfinished = waiting
            yield rank, transfers
        if unfinished:
            msg = f"the checkpoint's layout holds {unfinished[0][0].name} on too many ranks"
            raise CheckpointFormatError(msg)


def _ends(source: Source, held: Layout) -> tuple[Fragment, Fragment]:
    """Return the runs that hold the first and the last element of a part of a shard."""
    at = source.at
    try:
        runs = held.covering(at.name, at.start, at.stop, source.shard)
        first = last = next(runs, None)
        if first and first.stop < at.stop:
            last = next(held.covering(at.name, at.stop - 1, at.stop, source.shard), None)
        elif next(runs, None):
            last = None  # There is another run of the same elements.
    except KeyError as error:
        msg = f"the checkpoint's layout holds no parameter named {at.name}"
        raise CheckpointFormatError(msg) from error
    if not (first and last and (first.start, last.stop) == (at.start, at.stop)):
        reached = max((t.stop for t in _fill(source, held)), default=at.start)
        raise CheckpointFormatError(_not_once(at, reached))
    return first, last


def _fill(source: Source, held: Layout) -> Iterator[Transfer]:
    """Yield the transfers from a part of a shard, checking that fragments tile it."""
    at, reached = source.at, source.at.start
    for run in held.covering(at.name, at.start, at.stop, source.shard):
        if run.start != reached or run.stop > at.stop:
            raise CheckpointFormatError(_not_once(at, reached))
        if source.rows is None:
            yield _transfer(run, at)
        else:
            yield from _rows_in(run, source.rows, at)
        reached = run.stop
    if reached != at.stop:
        raise CheckpointFormatError(_not_once(at, reached))


def _transfer(run: Fragment, at: Fragment, rows: Rows | None = None) -> Transfer:
    """Return the transfer from one held fragment; ``rows`` if it has all of them."""
    return Transfer(
        at.name,
        run.start,
        run.stop,
        source_rank=run.rank,
        source_buffer=run.buffer,
        source_offset=run.offset,
        target_buffer=at.buffer,
        target_offset=at.offset + run.start - at.start,
        rows=rows,
    )


def _rows_in(run: Fragment, rows: Rows, at: Fragment) -> Iterator[Transfer]:
    """Yield the transfers of rows from one held fragment; ``at`` places the first row."""
    skipped = run.start - at.start
    for part in rows.clip(skipped, run.stop - at.start):
        yield Transfer(
            at.name,
            at.start + part.source,
            at.start + part.source_stop,
            source_rank=run.rank,
            source_buffer=run.buffer,
            source_offset=run.offset + part.source - skipped,
            target_buffer=at.buffer,
            target_offset=at.offset + part.target,
            rows=part.from_zero() if part.count > 1 else None,
        )


def _not_once(wanted: Fragment, reached: int) -> str:
    return (
        f"the checkpoint's layout does not hold {wanted.name}[{wanted.start}:{wanted.stop}] "
        f"exactly once: there is a gap or an overlap at element {reached}"
    )
