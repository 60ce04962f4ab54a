"""Saving: every rank writes its shards into a hidden directory; rank 0 publishes it."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lightning_elastic_zero.checkpoint.rank_consistency import (
    SCHEDULERS,
    check_consistent,
    comparison_tables,
    drifted_hyperparameters,
    warn_of_drift,
)
from lightning_elastic_zero.checkpoint.rank_tables import (
    DIGESTS,
    RankZeroTables,
    Tables,
    table_digests,
    write_tables,
)
from lightning_elastic_zero.checkpoint.save_selection import (
    manifest_to_save,
    warn_of_objects,
    written,
)
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LiveState,
    SaveCallbacks,
    SaveOptions,
    report_bytes,
)
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats.elastic.client_state import (
    dotted,
    fingerprints,
    pickled,
    rank_differences,
    split_objects,
)
from lightning_elastic_zero.formats.elastic.weights_only_check import check_loads_weights_only
from lightning_elastic_zero.formats.elastic.writer import ClientPart, WriteCallbacks, write_rank
from lightning_elastic_zero.manifest import MANIFEST_NAME, FileEntry, Manifest
from lightning_elastic_zero.storage import (
    TABLE_PREFIX,
    TOKEN_PREFIX,
    StagedDirectory,
    await_shared,
    check_local_path,
    remove_leftovers,
    remove_shared,
    staging_path,
    write_durably,
    write_shared,
)
from lightning_elastic_zero.storage.file_ownership import LATEST, RECOVERY_SCRIPT, TAG
from lightning_elastic_zero.tensor_state import RankState


def save(
    path: str | os.PathLike[str],
    live: LiveState,
    ranks: Ranks,
    client_state: Mapping[str, Any],
    *,
    options: SaveOptions,
    recovery_script: Path | None = None,
) -> CheckpointStats:
    """Write a checkpoint and publish it; the one it replaces stays until then. Collective.

    Raises:
        SaveError: it could not be written; the last published checkpoint is intact.
        UnsupportedError: something in the state has no rule by which it could be saved.
        RanksError: a rank failed, died, or did not call this.
    """
    return write(
        path,
        lambda: collect(live, client_state, options),
        ranks,
        recovery_script=recovery_script,
    )


def write(
    path: str | os.PathLike[str],
    make_contents: Callable[[], ShardContents],
    ranks: Ranks,
    *,
    recovery_script: Path | None = None,
    callbacks: SaveCallbacks = SaveCallbacks(),  # noqa: B008 - it is frozen
) -> CheckpointStats:
    """Write a rank's contents and publish them; see ``save``. Collective.

    Args:
        path: the checkpoint's directory.
        make_contents: returns what this rank writes, in the first step of the save: what it raises
            fails the save on all ranks.
        ranks: to agree with, in the thread that runs this.
        recovery_script: DeepSpeed's, to be laid beside the files.
        callbacks: who is asked and told while it goes on.
    """
    began = time.monotonic()
    staged: list[StagedDirectory] = []  # on rank 0: what has to go, wherever this fails
    contents = cache(make_contents)
    tables = cache(lambda: contents().tables())

    def stage() -> dict[str, Any]:
        sent = {"path": str(check_local_path(path)), "save_id": uuid.uuid4().hex}
        _stage(contents(), tables(), sent, ranks, staged, target_checked=callbacks.target_checked)
        return {**sent, DIGESTS: table_digests(tables())}

    def write_files() -> dict[str, Any]:
        staging = _await_staging(first, path)
        theirs = RankZeroTables(first[DIGESTS], tables(), staging)
        contents().check_consistent_with(theirs)
        saved = replace(contents(), manifest=replace(contents().manifest, save_id=first["save_id"]))
        files = _write_files(saved, staging, theirs, ranks.rank, _while_writing(callbacks, ranks))
        return {"files": files, "drifted": drifted_hyperparameters(theirs, saved.manifest)}

    def publish() -> list[float]:
        warn_of_drift(contents().manifest, [of_rank["drifted"] for of_rank in written or []])
        entries = [entry for of_rank in written or [] for entry in of_rank["files"]]
        remove_shared(staged[0].path, *(f"{TABLE_PREFIX}{name}" for name in first[DIGESTS]))
        _complete(contents(), staged[0], first["save_id"], entries, recovery_script)
        staged[0].publish(commit=callbacks.commit, on_progress=ranks.progress)
        return [time.monotonic() - began, sum(entry["size_bytes"] for entry in entries)]

    try:
        first = ranks.broadcast("save: make a directory", stage)
        target = Path(first["path"])
        with staged[0].touch_regularly() if staged else nullcontext():
            written = ranks.gather(f"save {target}: write", write_files)
            seconds, size_bytes = ranks.broadcast(f"save {target}: publish", publish)
    except BaseException:
        for directory in staged:
            directory.abandon()
        raise
    return CheckpointStats(str(target), seconds, int(size_bytes), waited_s=seconds)


@dataclass(frozen=True, slots=True)
class ShardContents:
    """What one rank is about to write."""

    manifest: Manifest
    state: RankState
    client: Mapping[str, Any]
    objects: tuple[tuple[tuple[str | int, ...], object], ...]
    told: set[str] | None = None
    """See ``SaveOptions``."""

    def tables(self) -> Tables:
        """Return what ranks compare with each other."""
        return {
            **comparison_tables(self.manifest, self.state),
            "buffers": fingerprints(dict(self.state.module_buffers)),
            "client": fingerprints(self.client),
            "objects": self.object_digests(),
        }

    def object_digests(self) -> dict[str, str]:
        """Return a digest of each object of the client state, by where it belongs."""
        return {
            dotted(path): hashlib.sha256(pickled(value, path)).hexdigest()
            for path, value in self.objects
        }

    def check_consistent_with(self, first: RankZeroTables) -> None:
        """Refuse ranks that would write different checkpoints."""
        check_consistent(first, self.manifest, self.state)


def collect(
    live: LiveState, client_state: Mapping[str, Any], options: SaveOptions
) -> ShardContents:
    """Return what this rank writes of a live engine and the trainer's state, by reference.

    Raises:
        UnsupportedError: something in the state has no rule by which it could be saved.
    """
    manifest = manifest_to_save(live.describe(), options)
    state = live.rank_state(
        exclude_frozen=options.exclude_frozen, keep_module_weights=options.module_weights
    )
    state = written(state, manifest, options)
    _check_state(state)
    split = split_objects(client_state)
    return ShardContents(manifest, state, split.plain, split.objects, options.told)


def _while_writing(callbacks: SaveCallbacks, ranks: Ranks) -> WriteCallbacks:
    """Return the calls that a rank's writing makes."""
    report = report_bytes("writing", ranks)

    def on_bytes(count: int) -> None:
        callbacks.check_cancelled()
        report(count)

    return WriteCallbacks(on_bytes, callbacks.on_read)


def _await_staging(first: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Return the directory that rank 0 has made, as soon as this rank sees it.

    Raises:
        SaveError: this rank was given another path, or does not see the directory.
    """
    _check_path(first["path"], path)
    staging = staging_path(Path(first["path"]), first["save_id"])
    await_shared(staging, f"{TOKEN_PREFIX}{first['save_id']}")
    return staging


def _check_path(first: str, path: str | os.PathLike[str]) -> None:
    """Refuse ranks that would write into different places."""
    mine = str(check_local_path(path))
    if mine != first:
        msg = (
            f"rank 0 saves to {first}, this rank to {mine}: a checkpoint is one "
            "directory; give all ranks the same path (ModelCheckpoint does)"
        )
        raise SaveError(msg)


def _check_state(state: RankState) -> None:
    """Refuse what in an engine's state no load could read."""
    check_loads_weights_only(
        {
            "the scheduler's state": state.lr_scheduler,
            "the loss scaler's state": dict(state.loss_scaler),
            "the optimizer's state": [dict(flat.scalars) for flat in state.flats],
            "the module's buffers": dict(state.module_buffers),
        }
    )


@contextmanager
def _as_save_error(target: Path) -> Iterator[None]:
    """Raise what the system refused as what it means to a save."""
    try:
        yield
    except OSError as error:
        msg = (
            f"Could not write {target}: {error}. The last published checkpoint is intact. See that "
            "the disk has room and that its directory can be written, and save again."
        )
        raise SaveError(msg) from error


def _stage(
    contents: ShardContents,
    tables: Tables,
    sent: Mapping[str, str],
    ranks: Ranks,
    staged: list[StagedDirectory],
    *,
    target_checked: bool,
) -> None:
    """Rank 0: make the hidden directory beside the target, and note that it is there."""
    target, save_id = Path(sent["path"]), sent["save_id"]
    warn_of_objects(target, contents.objects, contents.told)
    with _as_save_error(target):
        if target.parent.is_dir():
            remove_leftovers(target.parent, ranks.progress)
        staged.append(
            StagedDirectory.create(
                target, save_id, below=suggested_name(contents), target_checked=target_checked
            )
        )
        (staged[0].path / TAG).mkdir()
        write_tables(staged[0].path, tables)
        write_shared(staged[0].path, f"{TOKEN_PREFIX}{save_id}")


def suggested_name(contents: ShardContents) -> str:
    """Return the name that an error suggests for a checkpoint in a folder of other things."""
    return f"step-{contents.manifest.progress.global_steps}"


def _write_files(
    contents: ShardContents,
    staging: Path,
    first: RankZeroTables,
    rank: int,
    callbacks: WriteCallbacks,
) -> list[dict[str, Any]]:
    """Write this rank's files; return their records as plain data."""
    manifest, state = contents.manifest, contents.state
    client = ClientPart(contents.client, contents.objects)
    if rank:
        mine, theirs = first.own["buffers"], first["buffers"]
        own = {n: t for n, t in state.module_buffers.items() if mine[n] != theirs[n]}
        state = replace(state, module_buffers=own)
        client = ClientPart(
            {},
            own=()
            if first.is_same("client")
            else rank_differences(contents.client, first["client"]),
            own_objects=() if first.own["objects"] == first["objects"] else contents.objects,
        )
        if drifted_hyperparameters(first, manifest):
            client = _without_schedulers(client)
    records = write_rank(staging, manifest, rank, state, client, callbacks)
    entries = [asdict(record) for record in records]
    kept = {
        "buffers": bool(rank and state.module_buffers),
        "client_state": bool(client.own or client.own_objects),
    }
    return [{**entry, "kept": [k for k, is_kept in kept.items() if is_kept]} for entry in entries]


def _without_schedulers(own: ClientPart) -> ClientPart:
    """Leave out the states of schedulers whose rates are not the ones that are saved."""
    return ClientPart(
        {},
        own=tuple(item for item in own.own if item[0][0] != SCHEDULERS),
        own_objects=tuple(item for item in own.own_objects if item[0][0] != SCHEDULERS),
    )


def _complete(
    contents: ShardContents,
    staged: StagedDirectory,
    save_id: str,
    entries: list[dict[str, Any]],
    recovery_script: Path | None,
) -> None:
    """Rank 0: write what DeepSpeed's tools look for, and the manifest last."""
    write_durably(staged.path / LATEST, TAG.encode())
    if recovery_script is not None:
        with _as_save_error(staged.target):
            shutil.copyfile(recovery_script, staged.path / RECOVERY_SCRIPT)
    manifest = replace(
        contents.manifest,
        save_id=save_id,
        files=tuple(FileEntry(e["name"], e["size_bytes"], e["sums_digest"]) for e in entries),
        rank_state=tuple(sorted({kept for e in entries for kept in e["kept"]})),
        client_objects=tuple(dotted(path) for path, _ in contents.objects),
    )
    remove_shared(staged.path, f"{TOKEN_PREFIX}{save_id}")
    write_durably(staged.path / MANIFEST_NAME, manifest.to_json().encode())
