"""``describe_dumps``: makes a checkpoint of a folder with dumps, once and for all."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path

import torch

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed.zero_shard import BF16, ShardMetadata, shard_metadata
from lightning_elastic_zero.formats.dumps.flat_groups import FlatGroup
from lightning_elastic_zero.formats.dumps.order_search import Order, OrderSearch, find_order
from lightning_elastic_zero.formats.dumps.reader import DumpsReader
from lightning_elastic_zero.formats.dumps.table import (
    FORMAT,
    TABLE_NAME,
    BufferRow,
    DumpsTable,
    SizedFile,
    state_dict_in,
)
from lightning_elastic_zero.formats.dumps.weight_comparison import ModelTable, WeightComparison
from lightning_elastic_zero.formats.open_files import ForeignFiles, foreign_files
from lightning_elastic_zero.formats.reader import as_format_error
from lightning_elastic_zero.formats.safe_pickle.policy import FOREIGN_TREE
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, Manifest
from lightning_elastic_zero.storage import check_local_path, sync_directory, write_durably
from lightning_elastic_zero.text import format_names

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
    """Make a checkpoint of dumps of ``optimizer.state_dict()`` that were saved by hand.

    Call it once, in one process. It finds out which parameter lies where in the dumps' flat
    buffers, compares every master weight, rounded, with the model file, and writes that down in
    ``elastic_dumps.json`` beside them. From then on the folder is loaded as any checkpoint is.

    Args:
        folder: with one dump for each rank of the run, and the model's state dict.
        model: a module of the architecture that was trained, with the same parameters frozen; its
            weights are not looked at, so it may have been made under ``torch.device("meta")``.
        dumps: their names: a pattern, whose last number is the rank, or a list by rank.
        model_file: name of the file with the weights of the same step.
        groups: the parameters' names in each of the optimizer's parameter groups, in their order,
            where they cannot be told by the weights.
        allow_pickle: build objects of any class from the files; that can run code.

    Returns:
        The folder as a checkpoint, as ``open_checkpoint(folder).manifest`` has it from now on: the
        parameters with their groups, stage and ranks of the run, hyperparameters and the table of
        optimizer states. It can be ignored: what a load needs is in ``elastic_dumps.json``.

    Raises:
        CheckpointNotFoundError: there are no dumps.
        CheckpointCorruptedError: a rank's dump is missing, or damaged.
        CheckpointFormatError: files are not what they should be, or not of one run.
        CheckpointMismatchError: the model file, or the model, is not that of the dumps: parameters
            fit nowhere, or into more than one place.
        UnsupportedError: the dumps are of no ZeRO optimizer, or without its masters.
        SaveError: the description cannot be written.
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
