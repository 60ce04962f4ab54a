"""``describe_dumps``: makes a checkpoint of a folder with dumps, once and for all.

Possible places of parameters in dumps whose flat buffers name none.

The order of the parameters in flat buffers that name none: found by their values, or refused.

An order is accepted only where every element fits. Tried are, in this sequence: what was passed, or
the names that DeepSpeed left in the dumps, or the model's own order; then each parameter group in
the model's order, whichever parameters it has; then any order at all. Each of the first is also
tried as ``round_robin_gradients`` deals it out. What the values leave open is refused, not guessed.

The tensors behind the search: masters in the dumps, weights in the model file.
"""

from __future__ import annotations

import os
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import accumulate, islice
from pathlib import Path
from typing import NoReturn, TypeAlias

import torch
import xxhash

from lightning_elastic_zero.core.layout import Fragment, spans
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, Manifest
from lightning_elastic_zero.core.partition import (
    ContiguousPartition,
    FlatBuffer,
    PerParameterPartition,
    piece_numel,
    round_robin_order,
)
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_shards import BF16, ShardMetadata, shard_metadata
from lightning_elastic_zero.formats.dumps import (
    FORMAT,
    TABLE_NAME,
    BufferRow,
    DumpsReader,
    DumpsTable,
    ParameterRow,
    SizedFile,
    find_tensor,
    state_dict_in,
)
from lightning_elastic_zero.formats.open_files import ForeignFiles, foreign_files
from lightning_elastic_zero.formats.pickles import FOREIGN_TREE
from lightning_elastic_zero.formats.reader import COMPARED_ELEMENTS, as_format_error, same_rounded
from lightning_elastic_zero.formats.torch_read import StoredRun
from lightning_elastic_zero.storage.checksums import write_durably
from lightning_elastic_zero.storage.paths import check_local_path, sync_directory


@dataclass(frozen=True, slots=True)
class BufferPosition:
    """A place in a stream where a parameter can begin."""

    at: int = 0
    """Elements before it: of the whole buffer in ZeRO-1/2, of each rank's in ZeRO-3."""
    count: int = 0
    """Parameters before it."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """The flat buffers of one parameter group, end to end, with the parameters unknown."""

    stage: int
    world_size: int
    first_buffer: int
    """Index of its first flat buffer."""
    sizes: tuple[int, ...]
    """Elements of each flat buffer on each rank: one in ZeRO-1/2, the sub-groups in ZeRO-3."""
    total: int
    """What is not padding at the end, counted as ``BufferPosition``."""
    paddings: tuple[int, ...] = ()
    """ZeRO-1/2: recorded padding after each parameter; empty where nothing was recorded."""

    @property
    def capacity(self) -> int:
        """Elements that its parameters must have together; in ZeRO-3 on each rank."""
        return self.total - sum(self.paddings)

    def counts(self, numel: int) -> int:
        """Return what a parameter takes of ``capacity``."""
        return piece_numel(numel, self.world_size) if self.stage == STAGE_WEIGHTS else numel

    def after(self, position: BufferPosition, numel: int) -> BufferPosition | None:
        """Return the spot behind a parameter of so many elements; None where it does not fit."""
        if self.stage == STAGE_WEIGHTS:
            if position.at >= self.total:
                return None
            index, begin = self._sub_group(position)
            at = position.at + piece_numel(numel, self.world_size)
            return (
                BufferPosition(at, position.count + 1) if at <= begin + self.sizes[index] else None
            )
        if self.paddings and position.count >= len(self.paddings):
            return None
        at = position.at + numel + (self.paddings[position.count] if self.paddings else 0)
        return BufferPosition(at, position.count + 1) if at <= self.total else None

    def is_end(self, position: BufferPosition) -> bool:
        """Whether nothing is left behind a spot."""
        whole = not self.paddings or position.count == len(self.paddings)
        return position.at == self.total and whole

    def fragments(self, name: str, numel: int, position: BufferPosition) -> list[Fragment]:
        """Return where a parameter's elements lie if it begins at a spot, by the stage's rule."""
        if self.stage == STAGE_WEIGHTS:
            index, begin = self._sub_group(position)
            before = (position.at - begin) * self.world_size
            buffer = FlatBuffer(0, ("", name), (before, numel))
            found = PerParameterPartition([buffer], self.world_size).covering(name, 0, numel)
        else:
            index = 0
            buffer = FlatBuffer(0, ("", name), (position.at, numel), (), self.sizes[0])
            found = ContiguousPartition([buffer], self.world_size).covering(name, 0, numel)
        return [replace(f, buffer=self.first_buffer + index) for f in found]

    def _sub_group(self, position: BufferPosition) -> tuple[int, int]:
        """Return the index of a spot's sub-group, and where that begins."""
        ends = list(accumulate(self.sizes))
        index = bisect_right(ends, position.at)
        return index, ends[index] - self.sizes[index]

    def split(self, members: Iterable[tuple[str, int]]) -> list[list[str]]:
        """Cut the names and sizes that fill the stream into its flat buffers."""
        found: list[list[str]] = [[] for _ in self.sizes]
        position: BufferPosition | None = BufferPosition()
        for name, numel in members:
            if position is not None:
                index = self._sub_group(position)[0] if self.stage == STAGE_WEIGHTS else 0
                found[index].append(name)
                position = self.after(position, numel)
        return found


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


HEAD_ELEMENTS = 64
"""Compared first: few parameters begin alike."""


class ModelTable:
    """What a module says of the parameters, without their values."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Read names and shapes of a module of the architecture that was trained."""
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self.rows = {
            first: ParameterRow(first, tuple(parameter.shape), tuple(aliases))
            for parameter, (first, *aliases) in names.items()
        }
        """Every parameter, by the first of its names, in the module's order."""
        self.trained = [first for p, (first, *_) in names.items() if p.requires_grad and p.numel()]
        """The parameters that an optimizer is given as a rule."""
        kept = model.state_dict().keys()
        self.buffers = [n for n, _ in model.named_buffers(remove_duplicate=False) if n in kept]

    def check_compatible(self, weights: Mapping[str, object], where: str) -> None:
        """Compare with a model file.

        Raises:
            CheckpointMismatchError: it is of another architecture; with all differences.
        """
        known = {n for row in self.rows.values() for n in (row.name, *row.aliases)}
        found = {n: t for n, t in weights.items() if isinstance(t, torch.Tensor)}
        missing = [n for n, row in self.rows.items() if not found.keys() & {n, *row.aliases}]
        unknown = [n for n in found if n not in known and n not in self.buffers]
        reshaped = [
            f"{n} (saved {tuple(tensor.shape)}, here {row.shape})"
            for n, row in self.rows.items()
            if (tensor := found.get(n)) is not None and tuple(tensor.shape) != row.shape
        ]
        lines = [
            f"\n  - {what}: {format_names(names, 20)}"
            for what, names in (
                ("parameters missing from the file", missing),
                ("in the file, but not in the model", unknown),
                ("of other shapes", reshaped),
            )
            if names
        ]
        if lines:
            msg = f"{where} is not of this model:{''.join(lines)}"
            raise CheckpointMismatchError(msg)


class WeightComparison:
    """Compares masters, rounded, with a model file's weights, a bounded part at a time."""

    def __init__(
        self,
        files: ForeignFiles,
        dumps: Sequence[str],
        model_file: str,
        rows: Mapping[str, ParameterRow],
    ) -> None:
        """Keep what is compared.

        Args:
            files: with the dumps and the model file.
            dumps: the names of the dumps, by rank.
            model_file: the name of the file with the weights.
            rows: the parameters, by name.
        """
        self._files = files
        self._dumps = dumps
        self._model_file = model_file
        self._rows = rows
        self._flats: dict[str, tuple[object, Sequence[torch.Tensor]]] = {}
        self._heads: dict[str, torch.Tensor] = {}
        self._last_head: tuple[object, torch.Tensor] = (None, torch.empty(0))

    def __call__(self, name: str, fragments: Sequence[Fragment]) -> bool:
        """Whether what lies in the fragments is a parameter's weights, all of them."""
        return all(self._head_fits(name, f) for f in fragments[:1]) and all(
            same_rounded(self._masters(f, start, stop), self._low(name, start, stop))
            for f in fragments
            for start, stop in spans(f.start, f.stop, COMPARED_ELEMENTS)
        )

    def weights_digest(self, name: str) -> Hashable:
        """Return what is the same for parameters of the same weights."""
        digest, dtype = xxhash.xxh3_128(), None
        numel = self._rows[name].numel
        for start, stop in spans(0, numel, COMPARED_ELEMENTS):
            low = self._low(name, start, stop)
            # Zeros are alike, whatever their sign, and so are all NaN: see same_rounded.
            plain = torch.nan_to_num(low, nan=0.5) + 0
            digest.update(plain.view(torch.uint8).numpy().tobytes())
            dtype = low.dtype
        return str(dtype), numel, digest.hexdigest()

    def _head_fits(self, name: str, at: Fragment) -> bool:
        """Compare the first few elements: those of the weights are kept, as is the last place."""
        stop = min(at.stop, at.start + HEAD_ELEMENTS)
        if at.start or self._missing(at):
            return not self._missing(at)
        if name not in self._heads:
            self._heads[name] = self._low(name, 0, min(HEAD_ELEMENTS, self._rows[name].numel))
        place = (at.rank, at.buffer, at.offset, stop)
        if self._last_head[0] != place:
            self._last_head = place, self._masters(at, 0, stop)
        return same_rounded(self._last_head[1], self._heads[name][:stop])

    def _missing(self, at: Fragment) -> bool:
        """Whether a dump is too short to hold a fragment."""
        return at.offset + at.stop - at.start > self._flat(at).numel()

    def _flat(self, at: Fragment) -> torch.Tensor:
        dump = self._dumps[at.rank]
        tree = self._files.tree(dump)
        # Tensors of a file that was closed and opened again are others.
        if dump not in self._flats or self._flats[dump][0] is not tree:
            self._flats[dump] = tree, shard_metadata(tree, dump).flats
        return self._flats[dump][1][at.buffer]

    def _masters(self, at: Fragment, start: int, stop: int) -> torch.Tensor:
        flat = self._flat(at)
        first = at.offset + start - at.start
        found = torch.empty(stop - start, dtype=flat.dtype)
        run = StoredRun(flat, first, first + stop - start)
        self._files.get(self._dumps[at.rank]).read_into([(found, run)])
        return found

    def _low(self, name: str, start: int, stop: int) -> torch.Tensor:
        row = self._rows[name]
        where = str(self._files.folder / self._model_file)
        weights = state_dict_in(self._files.tree(self._model_file), where)
        tensor = find_tensor((name, *row.aliases), weights, where)
        found = torch.empty(stop - start, dtype=tensor.dtype)
        run = StoredRun(tensor.view(-1), start, stop)
        self._files.get(self._model_file).read_into([(found, run)])
        return found


MAX_OPEN_FILES = 256
"""Every parameter of ZeRO-3 lies in the dumps of all ranks."""

_RANK = re.compile(r"\d+")


def describe_dumps(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    dumps: str | Sequence[str] = "optimizer.*.pt",
    model_file: str = "model.pt",
    groups: Sequence[Sequence[str]] | None = None,
    allow_pickle: bool = False,
) -> Manifest:
    """Make dumps of ``optimizer.state_dict()`` loadable as a checkpoint.

    Call it once, in one process. It determines the position of each parameter in the dumps' flat
    buffers, compares every rounded master weight with the model file, and writes the result to
    ``elastic_dumps.json`` in the folder. The folder then loads like any checkpoint.

    Args:
        folder: Contains one dump per rank of the run, and the model's state dict.
        model: A module of the trained architecture, with the same parameters frozen. Its weights
            are not used, so it may be created under ``torch.device("meta")``.
        dumps: A pattern whose last number is the rank, or the file names by rank.
        model_file: File with the weights of the same step: a state dict of ``torch.save``, or one
            under ``module``, ``model``, ``state_dict`` or ``model_state_dict``.
        groups: Parameter names of each optimizer group, in order, if the weights do not determine
            them.
        allow_pickle: Build objects of any class from the files. This can run code.

    Returns:
        The manifest of the folder as a checkpoint: parameters with their groups, stage and ranks of
        the run, hyperparameters and the table of optimizer states.

    Raises:
        CheckpointNotFoundError: There are no dumps.
        CheckpointCorruptedError: A rank's dump is missing or damaged.
        CheckpointFormatError: Files have another structure, or are not of one run.
        CheckpointMismatchError: The model file or the model does not belong to the dumps:
            parameters fit nowhere, or in several places.
        UnsupportedError: The dumps are not of a ZeRO optimizer, or lack its masters.
        SaveError: The description cannot be written.
    """
    path = check_local_path(folder)
    _check_free(path)
    names = _by_rank(path, dumps) if isinstance(dumps, str) else list(dumps)
    if not names:
        msg = f"dumps= names no files in {path}: pass one for each rank of the run"
        raise CheckpointNotFoundError(msg)
    policy = FOREIGN_TREE.with_any_class(allow_pickle)
    files = foreign_files(path, policy, limit=min(len(names) + 1, MAX_OPEN_FILES))
    try:
        with as_format_error(path):
            table = _build_table(files, names, model_file, ModelTable(model), groups)
    finally:
        files.close()
    with as_format_error(path):
        reader = DumpsReader(foreign_files(path, policy), table)
    with closing(reader):
        reader.check_all()
    _write(path, table)
    return reader.manifest


# -- which files -----------------------------------------------------------------------------------


def _by_rank(folder: Path, pattern: str) -> list[str]:
    """Return the files that a pattern names, by the last number in their names.

    Raises:
        CheckpointNotFoundError: there are none.
        CheckpointCorruptedError: a rank's is missing, or there are two of it.
    """
    ranks: dict[int, str] = {}
    for path in sorted(folder.glob(pattern)):
        numbers = _RANK.findall(path.name)
        if not numbers or int(numbers[-1]) in ranks:
            twice = f" and {ranks[int(numbers[-1])]}" if numbers else ""
            msg = (
                f"{folder}: {path.name}{twice} do not say which rank wrote them: pass the names "
                "by rank, dumps=[...]"
            )
            raise CheckpointCorruptedError(msg)
        ranks[int(numbers[-1])] = path.relative_to(folder).as_posix()
    if not ranks:
        msg = f"there are no files {pattern} in {folder}: pass their names, dumps=[...]"
        raise CheckpointNotFoundError(msg)
    if missing := sorted(set(range(max(ranks))) - ranks.keys()):
        msg = (
            f"{folder} is incomplete: the dumps of ranks {format_names(map(str, missing))} are "
            "missing. Copy the dumps of all ranks"
        )
        raise CheckpointCorruptedError(msg)
    return [ranks[rank] for rank in sorted(ranks)]


def _sized(folder: Path, name: str) -> SizedFile:
    return SizedFile(name, (folder / name).stat().st_size)


# -- what is in them -------------------------------------------------------------------------------


def _build_table(
    files: ForeignFiles,
    names: Sequence[str],
    model_file: str,
    model: ModelTable,
    groups: Sequence[Sequence[str]] | None,
) -> DumpsTable:
    """Find out which parameter lies where."""
    where = str(files.folder)
    weights = state_dict_in(files.tree(model_file), str(files.folder / model_file))
    model.check_compatible(weights, str(files.folder / model_file))
    shards = [shard_metadata(files.tree(name), str(files.folder / name)) for name in names]
    _check_alike(where, names, shards)
    flat_groups = _flat_groups(shards)
    candidates = _candidate_orders(groups, shards, flat_groups, model)
    owned = {name for base in candidates[:1] for names_ in base for name in names_} or set(
        model.trained
    )
    search = OrderSearch(
        flat_groups=flat_groups,
        numels={name: row.numel for name, row in model.rows.items() if name in owned},
        compare=(compare := WeightComparison(files, names, model_file, model.rows)),
        weights_digest=compare.weights_digest,
        where=where,
    )
    order = find_order(search, candidates, only=groups is not None)
    return DumpsTable(
        dumps=tuple(_sized(files.folder, name) for name in names),
        model=_sized(files.folder, model_file),
        flats=_flats(search, order, shards[0], model),
        frozen=tuple(row for name, row in model.rows.items() if name not in owned),
        module_buffers=tuple(name for name in model.buffers if name in weights),
        absent_buffers=tuple(name for name in model.buffers if name not in weights),
        library=_library(),
        torch=str(torch.__version__),
    )


def _check_alike(where: str, names: Sequence[str], shards: Sequence[ShardMetadata]) -> None:
    """Refuse dumps that are not one of each rank of one run.

    Raises:
        CheckpointCorruptedError: ranks' dumps are missing.
        CheckpointFormatError: they are of two runs.
        UnsupportedError: they hold no masters.
    """
    first = shards[0]
    if first.world_size > len(names):
        msg = (
            f"{where} is incomplete: {names[0]} was dumped on {first.world_size} ranks, there are "
            f"{len(names)} dumps. Copy the dumps of all ranks"
        )
        raise CheckpointCorruptedError(msg)
    for name, other in zip(names, shards, strict=True):
        mine = (other.engine, other.stage, other.groups, other.world_size)
        if mine != (first.engine, first.stage, first.groups, len(names)):
            msg = (
                f"{where}: {name} is of {other.engine}, stage {other.stage}, on "
                f"{other.world_size} ranks with {len(other.flats)} flat buffers; {names[0]} of "
                f"{first.engine}, stage {first.stage}, on {first.world_size} with "
                f"{len(first.flats)}; there are {len(names)} dumps. Put the dumps of one run "
                "together, without those of another"
            )
            raise CheckpointFormatError(msg)
    if not any(flat.numel() for flat in first.flats):
        msg = f"{where}: {names[0]} has no master weights in it: offload to NVMe is not supported"
        raise UnsupportedError(msg)


def _flat_groups(shards: Sequence[ShardMetadata]) -> list[FlatGroup]:
    """Return the streams of the parameter groups that have flat buffers."""
    first = shards[0]
    found = []
    for group in sorted(set(first.groups)):
        flats = [index for index, g in enumerate(first.groups) if g == group]
        sizes = tuple(first.flats[index].numel() for index in flats)
        total, paddings = sum(sizes), tuple[int, ...]()
        if first.stage != STAGE_WEIGHTS:
            sizes = (_partition_numel(first, flats[0]),)
            # Each rank, or the last one alone, says what of its partition is padding at the end.
            total = sizes[0] * len(shards) - sum(o.tail_paddings[flats[0]] for o in shards)
            recorded = first.paddings[flats[0]] if first.paddings else ()
            paddings = recorded if any(recorded) else ()
        found.append(FlatGroup(first.stage, len(shards), flats[0], sizes, total, paddings))
    return found


def _partition_numel(first: ShardMetadata, index: int) -> int:
    """Return the elements of a partition, padding included: BF16_Optimizer does not cut it off."""
    padded = first.engine == BF16
    return first.flats[index].numel() + (0 if padded else first.tail_paddings[index])


def _candidate_orders(
    groups: Sequence[Sequence[str]] | None,
    shards: Sequence[ShardMetadata],
    flat_groups: Sequence[FlatGroup],
    model: ModelTable,
) -> list[list[list[str]]]:
    """Return the orders that the optimizer may have had its parameters in, the likeliest first.

    Raises:
        CheckpointMismatchError: ``groups`` cannot be the groups of these dumps.
    """
    if groups is not None:
        return [_checked([list(names) for names in groups], flat_groups, model)]
    listed_names = [
        list(dict.fromkeys(name for o in shards for name in o.names[flat_group.first_buffer]))
        for flat_group in flat_groups
        if all(len(o.names) == len(o.flats) for o in shards)
    ]
    found = [listed_names] if _may_be(listed_names, flat_groups, model) else []
    return [*found, [model.trained]] if len(flat_groups) == 1 else found


def _may_be(
    names: Sequence[Sequence[str]], flat_groups: Sequence[FlatGroup], model: ModelTable
) -> bool:
    """Whether names can be those of all parameters: wrapped modules have others."""
    if len(names) != len(flat_groups) or any(n not in model.rows for part in names for n in part):
        return False
    return all(
        sum(flat_group.counts(model.rows[name].numel) for name in part) == flat_group.capacity
        for flat_group, part in zip(flat_groups, names, strict=True)
    )


def _checked(
    groups: list[list[str]], flat_groups: Sequence[FlatGroup], model: ModelTable
) -> list[list[str]]:
    """Return groups, without parameters that have no elements, by the first of their names.

    Raises:
        CheckpointMismatchError: they are not those of the dumps.
    """
    first = {n: row.name for row in model.rows.values() for n in (row.name, *row.aliases)}
    if unknown := [n for names in groups for n in names if n not in first]:
        msg = f"groups= names what the model does not have: {format_names(unknown)}"
        raise CheckpointMismatchError(msg)
    found = [[first[n] for n in names if model.rows[first[n]].numel] for names in groups]
    every = [n for names in found for n in names]
    if twice := sorted({n for n in every if every.count(n) > 1}):
        msg = f"groups= names parameters twice: {format_names(twice)}"
        raise CheckpointMismatchError(msg)
    if len(groups) != len(flat_groups):
        msg = f"groups= has {len(groups)} parameter groups, the dumps have {len(flat_groups)}"
        raise CheckpointMismatchError(msg)
    return found


def _flats(
    search: OrderSearch, order: Order, first: ShardMetadata, model: ModelTable
) -> tuple[BufferRow, ...]:
    """Return the flat buffers with the parameters in them."""
    found: dict[int, BufferRow] = {}
    for flat_group, names in zip(search.flat_groups, order, strict=True):
        split = flat_group.split((name, search.numels[name]) for name in names)
        for index, part in enumerate(split, flat_group.first_buffer):
            found[index] = BufferRow(first.groups[index], tuple(model.rows[name] for name in part))
    return tuple(found[index] for index in sorted(found))


# -- writing it down -------------------------------------------------------------------------------


def _check_free(folder: Path) -> None:
    """Refuse to overwrite a file that this library did not write.

    Raises:
        CheckpointFormatError: it has the description's name.
    """
    path = folder / TABLE_NAME
    if os.path.lexists(path) and not (path.is_file() and FORMAT.encode() in path.read_bytes()):
        msg = f"{path} is not of this library, which would overwrite it: move it away"
        raise CheckpointFormatError(msg)


def _write(folder: Path, table: DumpsTable) -> None:
    """Write the description: it is there whole, or not at all."""
    hidden = folder / f".{TABLE_NAME}.{uuid.uuid4().hex}.tmp"
    write_durably(hidden, table.to_json().encode())
    try:
        _check_free(folder)
        hidden.replace(folder / TABLE_NAME)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    sync_directory(folder)


def _library() -> str:
    try:
        return metadata.version("lightning-elastic-zero")
    except metadata.PackageNotFoundError:
        return ""
