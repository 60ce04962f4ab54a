"""Fragments, layouts, and the planner of restores: intersection of intervals.

At every ZeRO stage, a rank holds a set of *fragments*: elements ``[start, stop)`` of the flattened
parameter ``name`` are at ``offset`` of flat buffer ``buffer`` of rank ``rank``. Master weights and
element-wise optimizer states share the same fragments. A checkpoint is a layout (the fragments that
are held) and a way to read a run of elements. A live optimizer is a layout (the fragments that are
wanted) and writable buffers. A restore finds, for each wanted fragment, the held runs that cover
it, each element exactly once. Elements that no fragment covers are padding and are never saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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

    def covering(self, name: str, start: int, stop: int) -> Iterator[Fragment]:
        """Yield the runs that hold ``[start, stop)`` of a parameter, cut to it, in order.

        Raises KeyError if no rank holds the parameter.
        """
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """One run to copy: ``[start, stop)`` of a parameter, from a held place to a wanted one."""

    name: str
    start: int
    stop: int
    source_rank: int
    source_buffer: int
    source_offset: int
    target_buffer: int
    target_offset: int


class TransferPlan:
    """The transfers that fill wanted fragments from held ones, one source rank at a time.

    From a thousand ranks of ZeRO-3 onto a few, there are millions of transfers. A plan stores only
    the range of source ranks of each wanted fragment, and computes the transfers from a rank when
    it gets there, so its memory grows with the number of wanted fragments.
    """

    def __init__(self, wanted: Iterable[Fragment], held: Layout) -> None:
        self._held = held
        self._from: dict[int, list[Fragment]] = {}
        extents = set()
        for fragment in wanted:
            first, last = _extent(fragment, held)
            self._from.setdefault(first, []).append(fragment)
            extents.add((first, last))
        self.ranks: Sequence[int] = sorted({r for a, b in extents for r in range(a, b + 1)})
        """The ranks from which there are transfers, ascending."""

    def by_rank(self) -> Iterator[tuple[int, list[Transfer]]]:
        """Yield each source rank with the transfers from it, ranks ascending.

        Raises CheckpointFormatError if a wanted element is not held, or held twice.
        """
        unfinished: list[tuple[Fragment, Iterator[Transfer]]] = []
        for rank in self.ranks:
            beginning = self._from.get(rank, ())
            unfinished += [(fragment, _fill(fragment, self._held)) for fragment in beginning]
            transfers = [next(runs) for _, runs in unfinished]
            if strange := [t for t in transfers if t.source_rank != rank]:
                msg = f"the checkpoint's layout does not hold {strange[0].name} on ranks in order"
                raise CheckpointFormatError(msg)
            unfinished = [
                (fragment, runs)
                for (fragment, runs), transfer in zip(unfinished, transfers, strict=True)
                # A run after the last one overlaps and is refused.
                if transfer.stop != fragment.stop or next(runs, None)
            ]
            yield rank, transfers
        if unfinished:
            msg = f"the checkpoint's layout holds {unfinished[0][0].name} on too many ranks"
            raise CheckpointFormatError(msg)


def _extent(wanted: Fragment, held: Layout) -> tuple[int, int]:
    """Return the first and the last source rank of a wanted fragment."""
    whole, end = (wanted.start, wanted.stop), (wanted.stop - 1, wanted.stop)
    try:
        first, last = (next(held.covering(wanted.name, *part), None) for part in (whole, end))
    except KeyError as error:
        msg = f"the checkpoint's layout holds no parameter named {wanted.name}"
        raise CheckpointFormatError(msg) from error
    if not (first and last and (first.start, last.stop) == whole):
        reached = max((t.stop for t in _fill(wanted, held)), default=wanted.start)
        raise CheckpointFormatError(_not_once(wanted, reached))
    return first.rank, last.rank


def _fill(wanted: Fragment, held: Layout) -> Iterator[Transfer]:
    """Yield the transfers of one wanted fragment, checking that they tile it."""
    reached = wanted.start
    for source in held.covering(wanted.name, wanted.start, wanted.stop):
        if source.start != reached or source.stop > wanted.stop:
            raise CheckpointFormatError(_not_once(wanted, reached))
        yield Transfer(
            name=wanted.name,
            start=source.start,
            stop=source.stop,
            source_rank=source.rank,
            source_buffer=source.buffer,
            source_offset=source.offset,
            target_buffer=wanted.buffer,
            target_offset=wanted.offset + source.start - wanted.start,
        )
        reached = source.stop
    if reached != wanted.stop:
        raise CheckpointFormatError(_not_once(wanted, reached))


def _not_once(wanted: Fragment, reached: int) -> str:
    return (
        f"the checkpoint's layout does not hold {wanted.name}[{wanted.start}:{wanted.stop}] "
        f"exactly once: there is a gap or an overlap at element {reached}"
    )
