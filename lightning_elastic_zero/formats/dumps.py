"""Hand-made dumps: each rank's ``optimizer.state_dict()`` and the model's state dict.

::

    folder/
    ├── elastic_dumps.json                        written by ``describe_dumps``
    ├── model.pt                                  ``model.state_dict()``, or DeepSpeed's 16-bit one
    └── optimizer.00.pt, optimizer.01.pt, ...     ``optimizer.state_dict()`` of each rank

The dumps have the content of DeepSpeed's optimizer shards (``ZeroShardSet``), but no model file
that names the parameters. ``elastic_dumps.json`` lists the parameters of each flat buffer. It
contains names, shapes and file sizes, and no values. Every read of master weights compares them
with the model file, so a wrong list cannot restore anything.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer, spans
from lightning_elastic_zero.core.manifest import (
    STAGE_WEIGHTS,
    Manifest,
    Parameter,
    Writer,
    from_json,
    load_json,
)
from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    frozen_partition,
    piece_numel,
    round_robin_order,
)
from lightning_elastic_zero.core.tensors import Scalar, dtype_name, precision_of
from lightning_elastic_zero.core.text import format_names, format_ranks
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import stub_fields
from lightning_elastic_zero.formats.deepspeed_shards import (
    BF16,
    ShardMetadata,
    ZeroShardSet,
    shard_metadata,
)
from lightning_elastic_zero.formats.reader import (
    COMPARED_ELEMENTS,
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    as_format_error,
    differing_sizes,
    file_list_digest,
    read_run,
    same_rounded,
)
from lightning_elastic_zero.formats.torch_read import ForeignFiles, StoredRun, foreign_files
from lightning_elastic_zero.storage.file_write import replace_durably
from lightning_elastic_zero.storage.paths import check_local_path, read_file

TABLE_NAME = "elastic_dumps.json"
FORMAT = "lightning_elastic_zero.dumps"
FORMAT_VERSION = 2

WEIGHTS_UNDER = ("module", "model", "state_dict", "model_state_dict")
"""Keys of a model file that may contain the module's state dict, if it is not the whole file."""

MAX_OPEN_FILES = 256
"""Each parameter of ZeRO-3 is spread over the dumps of all ranks."""

GROUPS_HINT = (
    "Pass groups=[[name, ...], ...]: the names of the parameters in each parameter group of the "
    "optimizer, in its order"
)
SAME_STEP_HINT = (
    "Use the model file that was saved at the same step as the dumps, in the precision of the run, "
    "and the dumps of all ranks of one run"
)

Rows = Mapping[str, Parameter]
"""The model's parameters by the first of their names."""

Order = Sequence[Sequence[str]]
"""The parameters of each parameter group, in the order of the flat buffers."""


@dataclass(frozen=True, slots=True)
class DumpsTable:
    """The content of ``elastic_dumps.json``."""

    files: Mapping[str, int]
    """The bytes of each file by name: ``optimizer.state_dict()`` by rank, and last the model's."""
    buffers: tuple[FlatBuffer, ...]
    """The flat buffers of the dumps, without padding."""
    parameters: tuple[Parameter, ...]
    """All parameters of the model, with the dtypes of the model file."""
    module_buffers: tuple[str, ...]
    """Persistent buffers that the model file contains."""
    round_robin: bool = False
    """Whether the run had ``round_robin_gradients``, as the order in the buffers shows."""

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name:
                msg = f"invalid file name {name!r}: expected a path within the folder of dumps"
                raise ValueError(msg)

    def to_json(self) -> str:
        """Return the text of the file."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"


def read_table(folder: Path) -> DumpsTable:
    """Read ``elastic_dumps.json``; errors are ``CheckpointFormatError``."""
    path = folder / TABLE_NAME
    try:
        content = load_json(read_file(path))
        version = content["format"], content["format_version"]
        if version != (FORMAT, FORMAT_VERSION):
            msg = f"format and version are {version}, expected {(FORMAT, FORMAT_VERSION)}"
            raise ValueError(msg)  # noqa: TRY301 (one message for every cause)
        return from_json(DumpsTable, content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{path} cannot be read ({error!r}). Call describe_dumps again"
        raise CheckpointFormatError(msg) from error


class DumpsReader(CheckpointReader):
    """A described folder of dumps."""

    def __init__(self, files: ForeignFiles, table: DumpsTable | None = None) -> None:
        self.files = files
        self.table = table = table or read_table(files.folder)
        *self._dumps, self._model = table.files
        if wrong := differing_sizes(files.folder, table.files.items()):
            msg = (
                f"{files.folder} differs from {TABLE_NAME}: {', '.join(wrong)}. Restore the files "
                "of one save, or call describe_dumps again"
            )
            raise CheckpointCorruptedError(msg)
        numels = [dict(zip(b.names, b.numels, strict=True)) for b in table.buffers]
        self._shards = ZeroShardSet(
            files,
            self._dumps.__getitem__,
            numels,
            len(self._dumps),
            round_robin=table.round_robin,
        )
        described = tuple(buffer.group for buffer in table.buffers)
        if self._shards.group_of != described:
            msg = (
                f"{files.folder}: the flat buffers belong to the parameter groups "
                f"{self._shards.group_of}, expected {described}. Call describe_dumps again"
            )
            raise CheckpointFormatError(msg)
        self._names = {p.name: (p.name, *p.aliases) for p in table.parameters}
        self.manifest = Manifest(
            save_id=file_list_digest(files.folder, table.files, files.progress),
            stage=self._shards.stage,
            world_size=self._shards.world_size,
            precision=precision_of(self._tensor(table.parameters[0].name).dtype),
            master_dtype=dtype_name(self._shards.master_dtype),
            parameters=table.parameters,
            groups=self._shards.groups,
            buffers=self._shards.buffers,
            module_buffers=table.module_buffers,
            files=(),
            writer=Writer(
                deepspeed=str(files.tree(self._dumps[0]).get("ds_version") or ""),
                engine=self._shards.engine,
            ),
        )
        hyperparameters = any(group.hyperparameters for group in self.manifest.groups)
        groups = () if hyperparameters else ("hyperparameters of the parameter groups",)
        self.info = SourceInfo(
            f"set of hand-made dumps of optimizer.state_dict(), {self._shards.engine}",
            (
                *("step counters", "the trainer's state", "RNG states"),
                *("buffers of ranks other than 0", *groups),
            ),
            hyperparameters=hyperparameters,
            has_counters=False,
            unmatched=self._shards.unmatched(),
        )

    def names(self) -> Sequence[str]:
        return [self._model, *self._dumps]

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        """Return the layout of frozen weights: whole, in the model file."""
        return frozen_partition(((p.name, p.numel) for p in manifest.frozen), 1)

    def check_files(self) -> None:
        self._shards.check_all()

    def locate(self, key: str, transfer: Transfer) -> Location:
        if key == WEIGHT and transfer.name in self._frozen:
            return self.model_weights(transfer)
        file = self.files.get(self._dumps[transfer.source_rank])
        return file, self._shards.locate(key, transfer)

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        return None if transfer.name in self._frozen else self.model_weights(transfer)

    @cached_property
    def other_steps(self) -> str:
        return "describe_dumps found them equal, so a file was replaced since"

    def model_weights(self, transfer: Transfer) -> Location:
        """Return the location of a run of weights in the model file."""
        tensor = self._tensor(transfer.name)
        file = self.files.get(self._model)
        return file, StoredRun(tensor, transfer.start, transfer.stop)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a model file's tensor, by the first of a tied weight's names that it contains."""
        weights = state_dict_in(self.files, self._model)
        path = self.files.folder / self._model
        names = self._names.get(name, (name,))
        tensor = next((weights[each] for each in names if each in weights), None)
        if not isinstance(tensor, torch.Tensor):
            msg = f"{path} lacks {name}: it was replaced. Call describe_dumps again"
            raise CheckpointFormatError(msg)
        return tensor

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        return self._shards.scalars(at)

    def module_state(self, rank: int, world_size: int) -> SharedState:
        del rank, world_size  # the same for all ranks
        return self.engine_state()

    def engine_state(self) -> SharedState:
        buffers = {name: self._tensor(name) for name in self.table.module_buffers}
        return SharedState(
            buffers=self.files.load(self._model, buffers),
            client_state={},
            loss_scaler=stub_fields(self.files.tree(self._dumps[0]).get("loss_scaler")),
            lr_scheduler=None,
        )


def state_dict_in(files: ForeignFiles, name: str) -> Mapping[str, Any]:
    """Return the state dict in a model file: a mapping with tensors."""
    tree = files.tree(name)
    if isinstance(tree, Mapping):
        inside = (tree.get(key) for key in WEIGHTS_UNDER)
        state_dict = next((part for part in inside if isinstance(part, Mapping)), tree)
        if any(isinstance(value, torch.Tensor) for value in state_dict.values()):
            return state_dict
    msg = (
        f"{files.folder / name} contains no state dict, neither as a whole nor under one of the "
        f"keys {', '.join(WEIGHTS_UNDER)}. Pass the file with model.state_dict()"
    )
    raise CheckpointFormatError(msg)


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

    Call it once, in one process. It compares every rounded master weight with the model file and
    writes the order of the parameters to ``elastic_dumps.json`` in the folder. The folder then
    loads like any checkpoint.

    Args:
        folder: Contains one dump per rank of the run, and the model's state dict.
        model: A module of the trained architecture, with the same parameters frozen. Its weights
            are not used, so it may be created under ``torch.device("meta")``.
        dumps: A pattern whose last number is the rank, or the file names by rank.
        model_file: File with the weights of the same step: a state dict of ``torch.save``, or one
            under ``module``, ``model``, ``state_dict`` or ``model_state_dict``.
        groups: Parameter names of each optimizer group, in the optimizer's order. Default: the
            names in the dumps (ZeRO-1 and 2), else the trainable parameters of ``model``, if there
            is one group.
        allow_pickle: Build objects of any class from the files. This can run code.

    Returns:
        The manifest of the folder as a checkpoint: parameters with their groups, stage and ranks of
        the run, hyperparameters and the table of optimizer states.

    Raises:
        CheckpointNotFoundError: There are no dumps.
        CheckpointCorruptedError: A rank's dump is missing or damaged.
        CheckpointFormatError: Files have another structure, or are not of one run.
        CheckpointMismatchError: The model, the model file or the order does not belong to the
            dumps, or ``groups`` is required.
        UnsupportedError: The dumps are not of a ZeRO optimizer, or lack its masters.
        SaveError: The description cannot be written.
    """
    path = check_local_path(folder)
    table = path / TABLE_NAME
    if os.path.lexists(table) and not _is_table(table):
        msg = f"{table} was not written by this library and would be overwritten. Move it away"
        raise CheckpointFormatError(msg)
    names = _by_rank(path, dumps) if isinstance(dumps, str) else list(dumps)
    if not names:
        msg = f"dumps= is empty: pass the names of the dumps in {path}, one per rank of the run"
        raise CheckpointNotFoundError(msg)
    limit = min(len(names) + 1, MAX_OPEN_FILES)
    files = foreign_files(path, allow_pickle=allow_pickle, limit=limit)
    with closing(files):
        with as_format_error(path):
            reader = _verified_reader(files, names, model_file, model, groups)
        reader.check_all()
        replace_durably(table, reader.table.to_json().encode())
        return reader.manifest


def _is_table(path: Path) -> bool:
    with suppress(OSError):
        return FORMAT.encode() in read_file(path)
    return False


def _by_rank(folder: Path, pattern: str) -> list[str]:
    """Return the files that match a pattern, ordered by the last number in their names."""
    ranks: dict[int, str] = {}
    for path in sorted(folder.glob(pattern)):
        numbers = re.findall(r"\d+", path.name)
        if not numbers or int(numbers[-1]) in ranks:
            twice = f" and {ranks[int(numbers[-1])]}" if numbers else ""
            msg = (
                f"{folder}: the rank of {path.name}{twice} is not clear from the name. Pass the "
                "names in the order of the ranks, dumps=[...]"
            )
            raise CheckpointCorruptedError(msg)
        ranks[int(numbers[-1])] = path.relative_to(folder).as_posix()
    if not ranks:
        msg = f"{folder} contains no files {pattern}. Pass their names, dumps=[...]"
        raise CheckpointNotFoundError(msg)
    return [ranks[rank] for rank in sorted(ranks)]


def _verified_reader(
    files: ForeignFiles,
    names: Sequence[str],
    model_file: str,
    model: torch.nn.Module,
    groups: Sequence[Sequence[str]] | None,
) -> DumpsReader:
    """Return a reader with the first order in which all masters round to the model file."""
    folder = files.folder
    weights = state_dict_in(files, model_file)
    tied: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    kept = model.state_dict().keys()
    buffers = [n for n, _ in model.named_buffers(remove_duplicate=False) if n in kept]
    shapes = {tuple(names): tuple(p.shape) for p, names in tied.items()}
    _check_architecture(shapes, buffers, weights, folder / model_file)
    rows = {}
    for names_of, shape in shapes.items():
        dtype = next(weights[n].dtype for n in names_of if n in weights)
        name, *others = names_of
        rows[name] = Parameter(name, shape, dtype_name(dtype), None, tuple(others))
    trained = [first for p, (first, *_) in tied.items() if p.requires_grad and p.numel()]
    shards = [shard_metadata(files.tree(name), str(folder / name)) for name in names]
    _check_one_run(folder, names, shards)

    def table_of(order: Order, *, round_robin: bool) -> DumpsTable:
        flats = _flat_buffers(folder, shards[0], order, rows)
        group_of = {name: buffer.group for buffer in flats for name in buffer.names}
        return DumpsTable(
            files={name: (folder / name).stat().st_size for name in (*names, model_file)},
            buffers=flats,
            parameters=tuple(replace(p, group=group_of.get(p.name)) for p in rows.values()),
            module_buffers=tuple(name for name in buffers if name in weights),
            round_robin=round_robin,
        )

    orders = _orders(folder, shards, groups, rows, trained)
    tables = [table_of(order, round_robin=dealt) for order, dealt in orders]
    for table in tables:
        reader = DumpsReader(files, table)
        if next(_mismatches(reader), None) is None:
            return reader
    first = DumpsReader(files, tables[0])
    wrong = list(_mismatches(first))
    affected, ranks = list(dict.fromkeys(f.name for f in wrong)), sorted({f.rank for f in wrong})
    only = f", only in the dumps of {format_ranks(ranks)}" if len(ranks) < len(names) else ""
    msg = (
        f"{folder}: the master weights of {len(affected)} of "
        f"{len(first.manifest.optimized)} parameters, rounded, differ from "
        f"{model_file}{only}: {format_names(affected)}. {SAME_STEP_HINT}. {GROUPS_HINT}"
    )
    raise CheckpointMismatchError(msg)


def _check_architecture(
    parameters: Mapping[tuple[str, ...], tuple[int, ...]],
    buffers: Sequence[str],
    weights: Mapping[str, object],
    path: Path,
) -> None:
    """Compare the shapes of parameters, by all their names, with the model file."""
    shapes = {n: shape for names, shape in parameters.items() for n in names}
    saved_shapes = {n: tuple(t.shape) for n, t in weights.items() if isinstance(t, torch.Tensor)}
    different = {
        "parameters missing from the file": [
            names[0] for names in parameters if not saved_shapes.keys() & {*names}
        ],
        "in the file, but not in the model": [
            n for n in saved_shapes if n not in shapes and n not in buffers
        ],
        "different shapes": [
            f"{n} (saved {saved_shapes[n]}, here {shape})"
            for n, shape in shapes.items()
            if saved_shapes.get(n, shape) != shape
        ],
    }
    lines = [f"\n  - {what}: {format_names(n, 20)}" for what, n in different.items() if n]
    if lines:
        msg = f"{path} does not match the model:{''.join(lines)}"
        raise CheckpointMismatchError(msg)


def _check_one_run(folder: Path, names: Sequence[str], shards: Sequence[ShardMetadata]) -> None:
    """Refuse dumps that are not one per rank of one run, or lack the masters."""
    first = shards[0]
    if first.world_size > len(names):
        msg = (
            f"{folder} is incomplete: {names[0]} was dumped on {first.world_size} ranks, found "
            f"{len(names)} dumps. Copy the dumps of all ranks"
        )
        raise CheckpointCorruptedError(msg)
    for name, other in zip(names, shards, strict=True):
        mine = (other.engine, other.stage, other.groups, other.world_size)
        if mine != (first.engine, first.stage, first.groups, len(names)):
            msg = (
                f"{folder}: {name} is of {other.engine}, stage {other.stage}, on "
                f"{other.world_size} ranks with {len(other.flats)} flat buffers; {names[0]} of "
                f"{first.engine}, stage {first.stage}, on {first.world_size} ranks with "
                f"{len(first.flats)}; found {len(names)} dumps. Keep only the dumps of one run"
            )
            raise CheckpointFormatError(msg)
    if not any(flat.numel() for flat in first.flats):
        msg = f"{folder}: {names[0]} lacks the master weights: offload to NVMe is not supported"
        raise UnsupportedError(msg)


def _orders(
    folder: Path,
    shards: Sequence[ShardMetadata],
    groups: Order | None,
    rows: Rows,
    trained: list[str],
) -> list[tuple[Order, bool]]:
    """Return the order of the parameters, and that which ``round_robin_gradients`` makes of it.

    Each with whether it is of a run with ``round_robin_gradients``. The names in the dumps may have
    that order already: it is recognised if the optimizer has the order of the model.
    """
    first, group_numels = shards[0], _group_numels(shards)

    def numels(order: Order) -> list[int]:
        return [sum(_numel_in_flat(first, rows[n]) for n in names) for names in order]

    listed = [
        list(dict.fromkeys(name for o in shards for name in o.names[index]))
        for index in range(len(first.flats))
        if all(len(o.names) == len(o.flats) for o in shards)
    ]
    base: Order
    if groups is not None:
        base = _checked_groups(groups, rows, len(group_numels))
    elif all(n in rows for names in listed for n in names) and numels(listed) == group_numels:
        base = listed
    elif len(group_numels) == 1:
        base = [trained]
    else:
        msg = (
            f"{folder}: the dumps do not name the parameters of their {len(group_numels)} "
            f"parameter groups. {GROUPS_HINT}"
        )
        raise CheckpointMismatchError(msg)
    for index, (numel, wanted) in enumerate(zip(group_numels, numels(base), strict=True)):
        if numel != wanted:
            each = " on each rank" if first.stage == STAGE_WEIGHTS else ""
            msg = (
                f"{folder}: the dumps contain {numel:,} master weights{each} of parameter group "
                f"{index}, but its {len(base[index])} parameters have {wanted:,}. Pass the model "
                f"that was trained, with the same parameters frozen. {GROUPS_HINT}"
            )
            raise CheckpointMismatchError(msg)
    if first.stage == STAGE_WEIGHTS or len(shards) == 1:
        return [(base, False)]

    def dealt(order: Order) -> Order:
        return [[names[i] for i in round_robin_order(len(names), len(shards))] for names in order]

    place = {name: index for index, name in enumerate(rows)}
    of_model = [sorted(names, key=place.__getitem__) for names in base]
    return [(base, base != of_model and base == dealt(of_model)), (dealt(base), True)]


def _numel_in_flat(first: ShardMetadata, row: Parameter) -> int:
    """Return the elements of a parameter in the flat buffer: in ZeRO-3, on each rank."""
    numel = row.numel
    return piece_numel(numel, first.world_size) if first.stage == STAGE_WEIGHTS else numel


def _group_numels(shards: Sequence[ShardMetadata]) -> list[int]:
    """Return the elements of each parameter group without padding: in ZeRO-3, on each rank."""
    first = shards[0]
    numels = dict.fromkeys(sorted(set(first.groups)), 0)
    for index, (flat, group) in enumerate(zip(first.flats, first.groups, strict=True)):
        numels[group] += flat.numel()
        if first.stage == STAGE_WEIGHTS:
            continue
        # BF16_Optimizer does not remove the padding from the masters. Each rank, or the last one
        # alone, records the padding at the end of its partition.
        cut = 0 if first.engine == BF16 else first.tail_paddings[index]
        padding = sum(o.tail_paddings[index] for o in shards)
        padding += sum(first.paddings[index]) if first.paddings else 0
        numels[group] = (flat.numel() + cut) * len(shards) - padding
    return list(numels.values())


def _checked_groups(groups: Order, rows: Rows, count: int) -> Order:
    """Return groups= with the first name of tied weights, without parameters without elements."""
    first = {n: row.name for row in rows.values() for n in (row.name, *row.aliases)}
    if unknown := [n for names in groups for n in names if n not in first]:
        msg = f"groups= names parameters that the model does not have: {format_names(unknown)}"
        raise CheckpointMismatchError(msg)
    order = [[first[n] for n in names if 0 not in rows[first[n]].shape] for names in groups]
    every = [n for names in order for n in names]
    if twice := sorted({n for n in every if every.count(n) > 1}):
        msg = f"groups= names parameters twice: {format_names(twice)}"
        raise CheckpointMismatchError(msg)
    if len(groups) != count:
        msg = f"groups= has {len(groups)} parameter groups, the dumps have {count}"
        raise CheckpointMismatchError(msg)
    return order


def _flat_buffers(
    folder: Path, first: ShardMetadata, order: Order, rows: Rows
) -> tuple[FlatBuffer, ...]:
    """Distribute the parameters of each group over its flat buffers: in ZeRO-3, its sub-groups."""
    left = {g: list(names)[::-1] for g, names in zip(sorted(set(first.groups)), order, strict=True)}
    buffers: list[FlatBuffer] = []
    for flat, group in zip(first.flats, first.groups, strict=True):
        names = left[group][::-1]
        if first.stage == STAGE_WEIGHTS:
            names, room = [], flat.numel()
            while room > 0 and left[group]:
                names.append(left[group].pop())
                room -= _numel_in_flat(first, rows[names[-1]])
            if room:
                msg = (
                    f"{folder}: in this order, the parameters do not fill sub-group {len(buffers)} "
                    f"of the dumps ({flat.numel():,} master weights on each rank). {GROUPS_HINT}"
                )
                raise CheckpointMismatchError(msg)
        buffers.append(FlatBuffer(group, tuple(names), tuple(rows[name].numel for name in names)))
    return tuple(buffers)


def _mismatches(reader: DumpsReader) -> Iterator[Fragment]:
    """Yield the fragments in which masters, rounded, differ from the model file."""
    layout = reader.layout()
    for rank in range(reader.manifest.world_size):
        for fragment in layout.on_rank(rank):
            for start, stop in spans(fragment.start, fragment.stop, COMPARED_ELEMENTS):
                offset = fragment.offset + start - fragment.start
                at = Transfer(fragment.name, start, stop, rank, fragment.buffer, offset, 0, 0)
                master = read_run(reader.locate(WEIGHT, at))
                if not same_rounded(master, read_run(reader.model_weights(at))):
                    yield fragment
                    break
