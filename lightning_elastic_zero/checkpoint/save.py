"""Saving: every rank writes its shards into a hidden directory, and rank 0 publishes it."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from lightning_elastic_zero.checkpoint.consistency import (
    RankZeroTables,
    Tables,
    check_consistent,
    comparison_tables,
    drifted_hyperparameters,
    drifted_replicas,
    table_digests,
    warn_of_drift,
    warn_of_replicas,
    write_tables,
)
from lightning_elastic_zero.checkpoint.extra_state import warn_of_unsaved, with_extra_states
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    SaveOptions,
    io_progress,
    manifest_to_save,
    state_to_save,
    warn_of_objects,
)
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MODULE_WEIGHTS, SCALARS, FileEntry, Manifest
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.tensors import RankState
from lightning_elastic_zero.core.text import format_names, format_tree_path
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.support import recovery_script
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.formats.client_state import (
    ClientPart,
    Objects,
    check_loads_weights_only,
    fingerprints,
    rank_differences,
    split_objects,
)
from lightning_elastic_zero.formats.elastic import RankWriter
from lightning_elastic_zero.formats.reader import OPTIMIZER_STATE
from lightning_elastic_zero.storage.file_write import as_save_error, write_durably
from lightning_elastic_zero.storage.folder import Folder, Staged
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.object_store import AnyPath
from lightning_elastic_zero.storage.own_files import (
    LATEST,
    RECOVERY_SCRIPT,
    TABLE_PREFIX,
    TAG,
    TOKEN_PREFIX,
)
from lightning_elastic_zero.storage.paths import parse_path

SCHEDULERS = "lr_schedulers"
"""The client state's entry for schedulers' states, which belong to the rates: Lightning's name."""


class Cancellation:
    """Decides once whether a save is cancelled or published. Used by two threads."""

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._cancelled = False
        self.committed = False
        self.published = False
        """Whether the checkpoint is in its place, even if not all ranks have agreed on it."""

    def cancel(self) -> bool:
        """Cancel the save; return False if it is already being published."""
        with self._deciding:
            self._cancelled = not self.committed
        return self._cancelled

    def check(self) -> None:
        """Raise SaveError if the save was cancelled."""
        if self._cancelled:
            msg = "the save was cancelled before it was written, because the run has ended"
            raise SaveError(msg)

    def commit(self) -> None:
        """Decide that the save is published, unless it was cancelled; see ``check``."""
        with self._deciding:
            self.check()
            self.committed = True


def save_engine(
    engine: LiveEngine,
    path: str | os.PathLike[str],
    ranks: Ranks,
    client_state: Mapping[str, Any],
    options: SaveOptions,
) -> CheckpointStats:
    """Save an engine while training waits; collective. See ``lightning_elastic_zero.api``.

    A checkpoint at the same path stays until the new one is published.

    Args:
        engine: the engine.
        path: the checkpoint directory.
        ranks: the ranks of the training threads.
        client_state: the trainer's state.
        options: the options.

    Raises:
        SaveError: the checkpoint could not be written; the last published one is intact.
        UnsupportedError: part of the state cannot be saved.
        RanksError: a rank failed, died, or did not call this function.
    """
    began = time.monotonic()
    contents = ranks.run_all(
        f"save: look at the engine {engine.at_step()}",
        lambda: collect(engine, path, ranks.rank, client_state, options),
    )
    stats = write_shards(contents, ranks)
    seconds = time.monotonic() - began
    return replace(stats, seconds=seconds, waited_s=seconds)


@dataclass(frozen=True, slots=True)
class ShardContents:
    """The state that one rank writes, and the target."""

    target: AnyPath
    """The checkpoint's directory."""
    manifest: Manifest
    state: RankState
    client: dict[str, Any]
    objects: Objects = ()
    options: SaveOptions = field(default_factory=SaveOptions)

    def tables(self) -> Tables:
        """Return the tables that ranks compare."""
        return {
            **comparison_tables(self.manifest, self.state),
            "buffers": fingerprints(dict(self.state.module_buffers)),
            "client": fingerprints(self.client, self.objects),
        }


@dataclass(frozen=True, slots=True)
class _NewSave:
    """Rank 0's message to all ranks before they write."""

    path: str
    save_id: str
    digests: Mapping[str, str]
    """Digest of each of rank 0's tables."""

    @property
    def token(self) -> str:
        """Name of the file by which a rank recognises the directory of this save."""
        return f"{TOKEN_PREFIX}{self.save_id}"


@dataclass(frozen=True, slots=True)
class _Written:
    """A rank's message to rank 0 after it has written."""

    files: Sequence[Mapping[str, Any]]
    """Each ``FileEntry`` as plain data."""
    kept: Sequence[str]
    """Kinds of state that this rank has kept besides the rest (``Manifest.rank_state``)."""
    drifted: list[list[Any]]
    """See ``drifted_hyperparameters``."""
    replicas: Sequence[int]
    """See ``drifted_replicas``."""
    requests: int
    """Requests to an object store."""


def collect(
    engine: LiveEngine,
    path: str | os.PathLike[str],
    rank: int,
    client_state: Mapping[str, Any],
    options: SaveOptions,
) -> ShardContents:
    """Return the state of the engine and trainer that this rank writes, by reference.

    Rank 0 also restores or refuses the target of an interrupted save.

    Raises:
        SaveError: on rank 0, the path must not be replaced.
        UnsupportedError: part of the state cannot be saved.
    """
    target = parse_path(path)
    engine.check()
    manifest = manifest_to_save(engine.describe(), options)
    state = engine.rank_state(
        exclude_frozen=options.exclude_frozen, keep_module_weights=options.module_weights
    )
    state = state_to_save(state, manifest, rank)
    check_loads_weights_only(
        {
            "the scheduler's state": state.lr_scheduler,
            "the loss scaler's state": dict(state.loss_scaler),
            "the optimizer's state": [dict(flat.scalars) for flat in state.flats],
            "the optimizer's state of no parameter": dict(state.optimizer_state),
            "the module's buffers": dict(state.module_buffers),
        }
    )
    client = dict(with_extra_states(client_state, engine.module(), options))
    if state.optimizer_state and not manifest.weights_only:
        client[OPTIMIZER_STATE] = dict(state.optimizer_state)
    split = split_objects(client)
    if rank == 0:
        warn_of_unsaved(engine.module(), options.examined_modules)
        folder_at(target).prepare(f"step-{manifest.progress.global_steps}")
    return ShardContents(target, manifest, state, split.plain, split.objects, options)


def write_shards(
    contents: ShardContents,
    ranks: Ranks,
    cancellation: Cancellation | None = None,
) -> CheckpointStats:
    """Write the collected state and publish the checkpoint; see ``save_engine``. Collective.

    Args:
        contents: the state that this rank writes.
        ranks: the ranks of the calling thread.
        cancellation: lets another thread cancel the save.
    """
    began, cancellation = time.monotonic(), cancellation or Cancellation()
    requests = folder_at(contents.target).requests
    staged: list[Staged] = []  # on rank 0: removed if the save fails
    tables, progress = cache(contents.tables), _progress(contents, ranks, cancellation)

    def write_files() -> dict[str, Any]:
        staging = _await_staging(new, folder_at(contents.target))
        theirs = RankZeroTables(new.digests, tables(), staging)
        manifest = replace(contents.manifest, save_id=new.save_id)
        writer = RankWriter(staging.path, manifest, ranks.rank, progress)
        return asdict(_write_files(contents, theirs, writer, requests))

    def publish() -> dict[str, Any]:
        write_s = time.monotonic() - began
        written = [_Written(**of_rank) for of_rank in of_ranks or []]
        warn_of_drift(contents.manifest, [of_rank.drifted for of_rank in written])
        warn_of_replicas(contents.manifest, [of_rank.replicas for of_rank in written])
        files = _complete(staged[0], contents, new, written)
        staged[0].sync(ranks.progress)
        cancellation.commit()
        staged[0].put_in_place()
        cancellation.published = True
        staged[0].clean(ranks.progress)
        seconds = time.monotonic() - began
        others = sum(of_rank.requests for of_rank in written[1:])
        return {
            "seconds": seconds,
            "waited_s": seconds,
            "write_s": write_s,
            "publish_s": seconds - write_s,
            "bytes": sum(entry.size_bytes for entry in files),
            "requests": others + folder_at(contents.target).requests - requests,
        }

    try:
        made = ranks.broadcast(
            "save: make a directory", lambda: asdict(_stage(contents, tables(), ranks, staged))
        )
        new = _NewSave(**made)
        with staged[0].touch_regularly() if staged else nullcontext():
            of_ranks = ranks.gather(f"save {new.path}: write", write_files)
            published = ranks.broadcast(f"save {new.path}: publish", publish)
    except BaseException:
        for directory in staged:
            directory.abandon()
        raise
    steps = contents.options.step
    steps = contents.manifest.progress.global_steps if steps is None else steps
    return CheckpointStats(new.path, step=steps, **published)


def _stage(contents: ShardContents, tables: Tables, ranks: Ranks, staged: list[Staged]) -> _NewSave:
    """Rank 0: make the folder in which all ranks write; return its description."""
    target, folder = contents.target, folder_at(contents.target)
    new = _NewSave(str(target), uuid.uuid4().hex, table_digests(tables))
    folder.check_shareable(ranks.world_size)
    warn_of_objects(target, contents.objects, contents.options.warned_objects)
    with as_save_error(target):
        staged.append(folder.stage(new.save_id, ranks.progress))
        staging = folder.staging(new.save_id)
        write_tables(staging, tables)
        staging.leave(new.token)
    return new


def _progress(contents: ShardContents, ranks: Ranks, cancellation: Cancellation) -> Progress:
    """Return the progress of writing; a cancelled save fails at its next check."""
    size_bytes = sum(tensor.nbytes for tensor in contents.state.large_tensors())
    return io_progress("writing", ranks, contents.options.show, size_bytes, cancellation.check)


def _await_staging(new: _NewSave, target: Folder) -> Folder:
    """Wait until this rank sees rank 0's files, and return the folder for this save.

    Raises SaveError if this rank has another path or does not see the files.
    """
    if str(target) != new.path:
        msg = (
            f"this rank saves to {target}, rank 0 to {new.path}. Pass the same path on all "
            "ranks, in a directory that they share (ModelCheckpoint does; with Ray Train, a folder "
            "below RunConfig(storage_path=...) instead of a temporary one)."
        )
        raise SaveError(msg)
    staging = target.staging(new.save_id)
    staging.await_left(new.token)
    return staging


def _write_files(
    contents: ShardContents, first: RankZeroTables, writer: RankWriter, requests: int
) -> _Written:
    """Write this rank's files. ``requests`` are those to the store before this save."""
    scalars_differ = check_consistent(first, contents.manifest)
    drifted = drifted_hyperparameters(first, contents.manifest)
    state, client = _own_part(contents, first, writer.rank, drifted=bool(drifted))
    files = writer.write(state, client)
    kept = {
        "buffers": bool(writer.rank and state.module_buffers),
        "client_state": bool(client.own or client.own_objects),
        SCALARS: scalars_differ,
        MODULE_WEIGHTS: any(flat.weights for flat in state.flats),
    }
    return _Written(
        [asdict(entry) for entry in files],
        [name for name, is_kept in kept.items() if is_kept],
        drifted,
        drifted_replicas(first),
        folder_at(contents.target).requests - requests,
    )


def _own_part(
    contents: ShardContents, first: RankZeroTables, rank: int, *, drifted: bool
) -> tuple[RankState, ClientPart]:
    """Return the state that this rank writes: rank 0 all of it, others what differs.

    ``drifted``: this rank's hyperparameters differ, so its schedulers are left out.
    """
    if not rank:
        return contents.state, ClientPart(contents.client, contents.objects)
    mine, theirs = first.own["buffers"], first["buffers"]
    buffers = {n: t for n, t in contents.state.module_buffers.items() if mine[n] != theirs[n]}
    own, objects = rank_differences(
        contents.client, contents.objects, first.own["client"], first["client"]
    )
    if any(path[0] == OPTIMIZER_STATE for path, _ in own):
        kept = format_names(map(repr, contents.client.get(OPTIMIZER_STATE, {}))) or "(any)"
        msg = (
            f"{contents.manifest.writer.optimizer} keeps state under the key {kept}, which "
            "differs from rank 0's: optimizer state without a parameter must be equal on all ranks"
        )
        raise UnsupportedError(msg)
    if drifted:
        own = tuple(item for item in own if item[0][0] != SCHEDULERS)
        objects = tuple(item for item in objects if item[0][0] != SCHEDULERS)
    state = replace(contents.state, module_buffers=buffers)
    if not state.module_weights:
        return state, ClientPart({}, own=own, own_objects=objects)
    # DeepSpeed's loader for ZeRO-3 reads nothing but the rank's own model file.
    module = {**state.module_weights, **contents.state.module_buffers}
    return replace(state, module_weights=module), ClientPart(contents.client, (), own, objects)


def _complete(
    staged: Staged, contents: ShardContents, new: _NewSave, written: Sequence[_Written]
) -> tuple[FileEntry, ...]:
    """Rank 0: write the files for DeepSpeed's tools, and the manifest last; return its files."""
    folder = staged.path
    write_durably(folder / LATEST, TAG.encode())
    if (source := recovery_script()) is not None:
        with as_save_error(contents.target):
            script = source.read_bytes()
        write_durably(folder / RECOVERY_SCRIPT, script)
    manifest = replace(
        contents.manifest,
        save_id=new.save_id,
        files=tuple(
            FileEntry(**{**entry, "name": f"{staged.prefix}{entry['name']}"})
            for of_rank in written
            for entry in of_rank.files
        ),
        rank_state=tuple(sorted({kept for of_rank in written for kept in of_rank.kept})),
        client_objects=tuple(format_tree_path(path) for path, _ in contents.objects),
    )
    tables = (f"{TABLE_PREFIX}{name}" for name in new.digests)
    folder_at(folder).remove_left(*tables, new.token)
    staged.seal(manifest.to_json().encode())
    return manifest.files
