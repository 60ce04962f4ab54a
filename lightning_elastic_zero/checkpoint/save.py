"""Saving: every rank writes its shards into a hidden directory, and rank 0 publishes it."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from lightning_elastic_zero.checkpoint.consistency import (
    ComparedState,
    Differences,
    check_consistent,
    differing_items,
    warn_of_differences,
)
from lightning_elastic_zero.checkpoint.extra_state import warn_of_unsaved, with_extra_states
from lightning_elastic_zero.checkpoint.nodes import check_room, join_folder_of
from lightning_elastic_zero.checkpoint.shards import check_shards, shard_report
from lightning_elastic_zero.checkpoint.streams import finish_device_work
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    SaveOptions,
    SaveRequest,
    io_progress,
)
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import (
    BUFFERS,
    MODULE_WEIGHTS,
    OWN_STATE,
    SCALARS,
    FileEntry,
    Manifest,
)
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.save_files import (
    LATEST,
    RECOVERY_SCRIPT,
    SEEN_PREFIX,
    TAG,
    recovery_script,
)
from lightning_elastic_zero.core.tensors import RankState
from lightning_elastic_zero.core.text import format_tree_path
from lightning_elastic_zero.engine.addresses import without_equal_weights
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats.client_state import (
    Objects,
    SplitState,
    check_loads_weights_only,
    find_unknown,
    split_objects,
)
from lightning_elastic_zero.formats.elastic_plan import writes_weights
from lightning_elastic_zero.formats.elastic_write import RankWriter
from lightning_elastic_zero.formats.reader import EXTRA_STATES, OPTIMIZER_STATE
from lightning_elastic_zero.storage.file_write import as_save_error, write_durably
from lightning_elastic_zero.storage.folder import Folder, Staged
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, parse_path

log = logging.getLogger(__name__)


def save_engine(request: SaveRequest, ranks: Ranks) -> CheckpointStats:
    """Save an engine while training waits; collective. See ``lightning_elastic_zero.api``.

    A checkpoint at the same path stays until the new one is published. ``ranks`` are those of the
    training threads.

    Raises:
        SaveError: the checkpoint could not be written; the last published one is intact.
        UnsupportedError: part of the state cannot be saved.
        RanksError: a rank failed, died, or did not call this function.
    """
    began = time.monotonic()
    join_folder_of(request.path, ranks, request.options.node_copies)
    step = f"save: look at the engine {request.engine.at_step()}"
    stats = _write(ranks, step, lambda: collect(request, ranks.rank), Cancellation())
    seconds = time.monotonic() - began
    return replace(stats, seconds=seconds, waited_s=seconds)


@dataclass(frozen=True, slots=True)
class ShardContents:
    """The state that one rank writes, and the target."""

    target: AnyPath
    """The checkpoint's directory."""
    manifest: Manifest
    state: RankState
    client: SplitState
    """The trainer's state, of which rank 0's is written."""
    rank_state: SplitState = field(default_factory=SplitState)
    """The declared state of this rank."""
    options: SaveOptions = field(default_factory=SaveOptions)

    def compared(self) -> ComparedState:
        """Return the state that ranks compare."""
        return ComparedState.of(self.manifest, self.state, self.client, self.rank_state)


def collect(request: SaveRequest, rank: int) -> ShardContents:
    """Return the state of the engine and trainer that this rank writes, by reference.

    It still has the module's weights that equal the masters, which are not written. Rank 0 also
    restores or refuses the target of an interrupted save.

    Raises:
        SaveError: on rank 0, the path must not be replaced.
        UnsupportedError: part of the state cannot be saved.
    """
    engine, options, target = request.engine, request.options, parse_path(request.path)
    finish_device_work()  # offload_states(non_blocking=True) may still copy state to the host.
    engine.check()
    manifest = manifest_to_save(engine.describe(), options)
    state = engine.rank_state(
        exclude_frozen=options.exclude_frozen, keep_module_weights=options.module_weights
    )
    state = _state_to_save(state, manifest, manifest.grid.data_rank(rank))
    check_loads_weights_only(
        {
            "the scheduler's state": state.lr_scheduler,
            "the loss scaler's state": dict(state.loss_scaler),
            "the optimizer's state": [dict(flat.scalars) for flat in state.flats],
            "the optimizer's state of no parameter": dict(state.optimizer_state),
            "the module's buffers": dict(state.module_buffers),
        }
    )
    client = dict(with_extra_states(request.client_state, engine.module(), options))
    if state.optimizer_state and not manifest.weights_only:
        client[OPTIMIZER_STATE] = dict(state.optimizer_state)
    if rank == 0:
        warn_of_unsaved(engine.module(), options.examined_modules)
        folder_at(target).prepare(f"step-{manifest.progress.global_steps}")
    rank_state = split_objects(request.rank_state)
    return ShardContents(target, manifest, state, split_objects(client), rank_state, options)


def manifest_to_save(manifest: Manifest, options: SaveOptions) -> Manifest:
    """Return an engine's manifest as it is saved: with stage, progress and excluded names.

    Only frozen weights and buffers can be excluded.
    """
    manifest = replace(
        manifest,
        # An engine without an optimizer has no stage: the files are ZeRO-1's.
        stage=manifest.stage or int(not manifest.groups),
        progress=replace(manifest.progress, **options.progress),
    )
    if options.weights_only or not manifest.groups:
        groups = tuple(replace(group, state=()) for group in manifest.groups)
        manifest = replace(manifest, weights_only=True, groups=groups)
    left_out = {
        p.name
        for p in manifest.parameters
        if p.group is None
        and (
            (options.exclude_frozen and bool(manifest.groups))
            or options.left_out.issuperset({p.name, *p.aliases})
        )
    }
    in_order = [p.name for p in manifest.parameters if p.name in left_out]
    buffers = [name for name in manifest.module_buffers if name in options.left_out]
    return replace(
        manifest,
        excluded=(*in_order, *buffers),
        module_buffers=tuple(n for n in manifest.module_buffers if n not in options.left_out),
    )


def _state_to_save(state: RankState, manifest: Manifest, rank: int) -> RankState:
    """Return the part of a data rank's state that it writes."""
    flats, writes = state.flats, writes_weights(manifest, rank)
    if manifest.weights_only:
        flats = tuple(replace(flat, elementwise={}) for flat in flats)
    saved = {p.name for p in manifest.frozen}
    frozen = saved if writes else set()
    return replace(
        state,
        flats=flats,
        frozen={name: piece for name, piece in state.frozen.items() if name in frozen},
        frozen_sums={name: each for name, each in state.frozen_sums.items() if name in saved},
        module_weights=state.module_weights if writes else {},
        module_buffers={name: state.module_buffers[name] for name in manifest.module_buffers},
    )


def write_shards(
    contents: ShardContents,
    ranks: Ranks,
    cancellation: Cancellation | None = None,
) -> CheckpointStats:
    """Write collected state and publish the checkpoint; see ``save_engine``. Collective.

    Args:
        contents: the state that this rank writes.
        ranks: the ranks of the calling thread.
        cancellation: lets another thread cancel the save.
    """
    cancellation = cancellation or Cancellation()
    return _write(ranks, "save: make a directory", lambda: contents, cancellation)


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


def _write(
    ranks: Ranks, step: str, look: Callable[[], ShardContents], cancellation: Cancellation
) -> CheckpointStats:
    """Get the contents on every rank, write them and publish the checkpoint. Collective.

    In the first step, rank 0 also makes the directory in which all ranks write.
    """
    began = time.monotonic()
    looked: list[_Looked] = []
    staged: list[Staged] = []  # on rank 0: removed if the save fails

    def look_at_state() -> None:
        contents = look()
        progress = io_progress("comparing", ranks, check_cancelled=cancellation.check)
        flats = tuple(without_equal_weights(flat, progress) for flat in contents.state.flats)
        contents = replace(contents, state=replace(contents.state, flats=flats))
        requests = folder_at(contents.target).requests
        looked.append(_Looked(contents, contents.compared(), requests))

    def look_and_stage() -> dict[str, Any]:
        look_at_state()
        return asdict(_stage(looked[0], ranks, staged))

    def write_files() -> dict[str, Any]:
        staging = _await_staging(new, folder_at(contents.target))
        manifest, tensor_rank = contents.manifest, contents.state.tensor_rank
        shard = manifest.as_shard(tensor_rank, manifest.buffers)
        shard = replace(shard, save_id=new.save_id)
        progress = _progress(contents, ranks, cancellation)
        data_rank = manifest.grid.data_rank(ranks.rank)
        writer = RankWriter(staging.path, shard, data_rank, progress, tensor_rank)
        return asdict(_write_files(looked[0], new, writer))

    def publish() -> dict[str, Any]:
        write_s = time.monotonic() - began
        written = [_Written.from_plain(of_rank) for of_rank in of_ranks or []]
        files = _complete(staged[0], looked[0], new, written)
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
            "requests": others + folder_at(contents.target).requests - looked[0].requests,
        }

    try:
        new = _NewSave(**ranks.broadcast(step, look_and_stage, look_at_state))
        contents = looked[0].contents
        check_room(contents.target, partial(_size_bytes, contents), ranks)
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


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a rank has found at the begin of a save."""

    contents: ShardContents
    compared: ComparedState
    requests: int
    """Requests to the object store before this save."""


@dataclass(frozen=True, slots=True)
class _NewSave:
    """Rank 0's message to all ranks before they write."""

    path: str
    save_id: str
    digests: Mapping[str, Any]
    """Rank 0's ``ComparedState.digests``."""

    @property
    def token(self) -> str:
        """Name of the file by which a rank recognises the directory of this save."""
        return f"{SEEN_PREFIX}{self.save_id}"


@dataclass(frozen=True, slots=True)
class _Written:
    """A rank's message to rank 0 after it has written."""

    files: Sequence[FileEntry]
    kept: Sequence[str]
    """Kinds of state that this rank has kept besides the rest (``Manifest.rank_state``)."""
    differences: Differences
    requests: int
    """Requests to an object store."""
    shard: Mapping[str, Any] = field(default_factory=dict)
    """With tensor parallelism: its ``shard_report``."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> _Written:
        files = [FileEntry(**entry) for entry in plain["files"]]
        differences = Differences(**plain["differences"])
        return cls(files, plain["kept"], differences, plain["requests"], plain["shard"])


def _stage(looked: _Looked, ranks: Ranks, staged: list[Staged]) -> _NewSave:
    """Rank 0: make the folder in which all ranks write; return its description."""
    contents = looked.contents
    target, folder = contents.target, folder_at(contents.target)
    new = _NewSave(str(target), uuid.uuid4().hex, looked.compared.digests())
    folder.check_shareable(ranks.world_size)
    objects = (*contents.client.objects, *contents.rank_state.objects)
    _warn_of_objects(target, objects, contents.options.warned_objects)
    with as_save_error(target):
        staged.append(folder.stage(new.save_id, ranks.progress))
        folder.staging(new.save_id).leave(new.token)
    return new


def _warn_of_objects(path: AnyPath, objects: Objects, warned: set[str] | None) -> None:
    """Rank 0: warn once of each object that a load without ``allow_pickle`` refuses."""
    if warned is None:
        return
    new = [(at, value) for at, value in objects if format_tree_path(at) not in warned]
    warned.update(format_tree_path(at) for at, _ in new)
    for where, name in find_unknown(tuple(new)).items():
        log.warning(
            "%s: %s contains a Python object of %s, which is not plain data: loading this "
            "checkpoint needs allow_pickle=True. Save numbers, strings, lists, dicts or tensors "
            "instead.",
            path,
            where,
            name,
        )


def _progress(contents: ShardContents, ranks: Ranks, cancellation: Cancellation) -> Progress:
    """Return the progress of writing; a cancelled save fails at its next check."""
    show = contents.options.show
    return io_progress("writing", ranks, show, _size_bytes(contents), cancellation.check)


def _size_bytes(contents: ShardContents) -> int:
    return sum(tensor.nbytes for tensor in contents.state.large_tensors())


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


def _write_files(looked: _Looked, new: _NewSave, writer: RankWriter) -> _Written:
    """Write this rank's files, unless it is of another run than rank 0."""
    contents, differences = looked.contents, Differences.between(looked.compared, new.digests)
    if differences.tables:
        return _Written([], [], differences, 0)
    if not writer.is_first:
        names = differing_items(looked.compared, new.digests, "buffers")
        contents = _part_of_rank(contents, differences, names)
    files = writer.write(contents.state, contents.client, contents.rank_state)
    kept = {
        BUFFERS: bool(not writer.is_first and contents.state.module_buffers),
        OWN_STATE: bool(contents.rank_state.plain),
        MODULE_WEIGHTS: any(flat.weights for flat in contents.state.flats),
    }
    requests = folder_at(contents.target).requests - looked.requests
    names = [name for name, is_kept in kept.items() if is_kept]
    report = shard_report(contents.manifest, contents.state, writer.rank)
    return _Written(files, names, differences, requests, report)


def _part_of_rank(
    contents: ShardContents, differences: Differences, buffers: Sequence[str]
) -> ShardContents:
    """Return the state that a rank other than 0 writes; ``buffers`` differ from rank 0's."""
    state, client, rank_state = contents.state, SplitState(), contents.rank_state
    if differences.extra_states:
        rank_state = rank_state | contents.client.only(EXTRA_STATES)
    weights = state.module_weights
    if weights:
        # DeepSpeed's loader for ZeRO-3 reads nothing but the rank's own model file.
        weights = {**weights, **state.module_buffers}
        client = SplitState(contents.client.plain)
    differing = {name: state.module_buffers[name] for name in buffers}
    state = replace(state, module_weights=weights, module_buffers=differing)
    return replace(contents, state=state, client=client, rank_state=rank_state)


def _complete(
    staged: Staged, looked: _Looked, new: _NewSave, written: Sequence[_Written]
) -> tuple[FileEntry, ...]:
    """Rank 0: compare the ranks, write the files for DeepSpeed's tools, and the manifest last.

    Returns the files in the manifest.
    """
    folder, contents, manifest = staged.path, looked.contents, looked.contents.manifest
    differences = [of_rank.differences for of_rank in written]
    kept = {kind for of_rank in written for kind in of_rank.kept}
    shards = check_shards(manifest, [of_rank.shard for of_rank in written])
    if check_consistent(looked.compared, manifest, differences):
        kept.add(SCALARS)
    warned = contents.options.warned_entries
    warn_of_differences(looked.compared, manifest, differences, warned)
    write_durably(folder / LATEST, TAG.encode())
    if (source := recovery_script()) is not None:
        with as_save_error(contents.target):
            script = source.read_bytes()
        write_durably(folder / RECOVERY_SCRIPT, script)
    manifest = replace(
        manifest,
        save_id=new.save_id,
        files=tuple(
            replace(entry, name=f"{staged.prefix}{entry.name}")
            for of_rank in written
            for entry in of_rank.files
        ),
        rank_state=tuple(sorted(kept)),
        client_objects=tuple(format_tree_path(path) for path, _ in contents.client.objects),
        tensor_parallel=replace(manifest.tensor_parallel, shards=shards),
    )
    folder_at(folder).remove_left(new.token)
    staged.seal(manifest.to_json().encode())
    return manifest.files
