"""Save and load, told as two short stories.

Both talk to the live engine through ``LiveState``, to the disk through ``formats`` and
``storage``, and to the other ranks through ``ranks``: a step that fails on one rank fails on all
of them, before anything is published and before anything live is changed.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    SaveError,
    UnsupportedError,
)
from lightning_elastic_zero.formats import WEIGHT, ElasticReader, ReadRequest, open_checkpoint
from lightning_elastic_zero.formats.client_state import differing, dotted, fingerprints, split_objects
from lightning_elastic_zero.formats.elastic_write import ClientPart, write_rank
from lightning_elastic_zero.formats.names import LATEST, RECOVERY_SCRIPT, TAG
from lightning_elastic_zero.layout import Fragment, Transfer, plan_transfers
from lightning_elastic_zero.manifest import MANIFEST_NAME, FileEntry, Manifest
from lightning_elastic_zero.match import Wanted, check_fits, describe
from lightning_elastic_zero.ranks import Ranks
from lightning_elastic_zero.state import Incoming, RankState, Receiving, Scalar
from lightning_elastic_zero.storage import (
    StagedDirectory,
    check_local_path,
    leave_token,
    remove_leftovers,
    remove_token,
    repair_target,
    see_token,
    staging_path,
    write_durably,
)

REPORT_EVERY_S = 10.0
"""How often long reading and writing says how far it is."""

log = logging.getLogger(__name__)


class LiveState(Protocol):
    """What a live engine offers; ``lightning_elastic_zero.engine`` implements it twice."""

    def describe(self) -> Manifest:
        """Say what it is, as a manifest without files."""
        ...

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Give what this rank holds, by reference."""
        ...

    def check_optimizer(self, source: Manifest) -> None:
        """Refuse the state of another optimizer."""
        ...

    def receive(self, source: Manifest, *, with_optimizer: bool) -> Receiving:
        """Give buffers to fill; nothing live is lost before ``commit``."""
        ...

    def abandon(self) -> None:
        """Undo ``receive`` after a failure; no collective."""
        ...

    def commit(self, received: Receiving, incoming: Incoming) -> None:
        """Take what was received; collective."""
        ...


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What a save writes."""

    weights_only: bool = False
    """Masters, frozen weights and buffers, and no optimizer state."""
    exclude_frozen: bool = False
    """Leave out weights that the optimizer does not own; a load keeps the model's own."""
    module_weights: bool = False
    """Write the low-precision weights too, for tools that insist on them."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load restores."""

    optimizer_state: bool = True
    """False: a fresh optimizer on the saved weights."""
    hyperparameters: bool = True
    """False: learning rate, weight decay, ... stay as they are configured now."""
    strict: bool = True
    """False: frozen parameters and buffers may be missing, or too many."""
    allow_pickle: bool = False
    """Build Python objects of any class from the trainer's state; that can run code."""


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """What a save or a load cost."""

    path: str
    seconds: float
    """Wall clock, from the call until all ranks were done."""
    bytes: int
    """Written, or read, by all ranks together."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load gives back."""

    client_state: dict[str, Any]
    """What the trainer, module, datamodule and callbacks had saved."""
    manifest: Manifest
    figures: CheckpointFigures


def save(
    path: str | os.PathLike[str],
    live: LiveState,
    ranks: Ranks,
    client_state: Mapping[str, Any],
    *,
    options: SaveOptions,
    recovery_script: Path | None = None,
) -> CheckpointFigures:
    """Write a checkpoint and publish it; the one it replaces stays until then. Collective.

    Raises:
        SaveError: it could not be written; the last published checkpoint is intact.
        UnsupportedError: something in the state has no rule by which it could be saved.
        RanksError: a rank failed, died, or did not call this.
    """
    began = time.monotonic()
    draft = _Draft.make(live, client_state, options)
    first = ranks.from_first(f"save {path}: describe", lambda: draft().to_first(path))
    target, save_id = Path(first["path"]), first["save_id"]
    ranks.together(f"save {target}: compare", lambda: draft().check_like(first, path, ranks.rank))
    staging = staging_path(target, save_id)
    try:
        ranks.from_first(f"save {target}: make a directory", lambda: _stage(target, save_id))
        files = ranks.gather(
            f"save {target}: write", lambda: _write_files(draft(), staging, first, ranks)
        )
        ranks.from_first(
            f"save {target}: publish",
            lambda: _publish(draft(), target, save_id, files or [], recovery_script),
        )
    except BaseException:
        if ranks.rank == 0:
            StagedDirectory(target, save_id).abandon()
        raise
    size_bytes = sum(sum(entry["size_bytes"] for entry in of_rank) for of_rank in files or [])
    figures = ranks.from_first(
        f"save {target}: done", lambda: {"bytes": size_bytes, "seconds": time.monotonic() - began}
    )
    return CheckpointFigures(str(target), figures["seconds"], figures["bytes"])


def load(
    path: str | os.PathLike[str], live: LiveState, ranks: Ranks, *, options: LoadOptions
) -> Loaded:
    """Restore a checkpoint into a live engine, whole or not at all. Collective.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointMismatchError: it does not fit this model, or lacks what is asked of it.
        CheckpointCorruptedError: it is damaged.
        RanksError: a rank failed, died, or did not call this.
    """
    began = time.monotonic()
    first = ranks.from_first(f"load {path}: find", lambda: _find(path))
    directory = Path(first["path"])
    source = ranks.together(
        f"load {directory}: open", lambda: _open(path, first, options.allow_pickle)
    )
    try:
        ranks.together(
            f"load {directory}: check", lambda: _check(source, live, options, str(path), ranks.rank)
        )
        try:
            receiving, incoming, bytes_read = ranks.together(
                f"load {directory}: read", lambda: _read(source, live, options, ranks)
            )
        except BaseException:
            live.abandon()
            raise
        live.commit(receiving, incoming)
        module_state = source.module_state(ranks.rank, ranks.world_size)
    finally:
        source.close()
    of_ranks = ranks.gather(f"load {directory}: done", lambda: bytes_read) or []
    figures = CheckpointFigures(str(directory), time.monotonic() - began, sum(of_ranks))
    return Loaded(dict(module_state.client_state), source.manifest, figures)


# -- saving --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draft:
    """What one rank is about to write."""

    manifest: Manifest
    state: RankState
    client: Mapping[str, Any]
    objects: tuple[tuple[tuple[str | int, ...], object], ...]

    @classmethod
    def make(
        cls, live: LiveState, client_state: Mapping[str, Any], options: SaveOptions
    ) -> Callable[[], _Draft]:
        """Give a function that makes the draft once: what it raises must reach all ranks."""
        made: list[_Draft] = []

        def draft() -> _Draft:
            if not made:
                manifest = live.describe()
                if options.weights_only:
                    groups = tuple(replace(group, state=()) for group in manifest.groups)
                    manifest = replace(manifest, weights_only=True, groups=groups)
                if options.exclude_frozen:
                    left_out = tuple(p.name for p in manifest.parameters if p.group is None)
                    manifest = replace(manifest, excluded=left_out)
                state = live.rank_state(
                    exclude_frozen=options.exclude_frozen,
                    keep_module_weights=options.module_weights,
                )
                split = split_objects(client_state)
                made.append(cls(manifest, state, split.plain, split.objects))
            return made[0]

        return draft

    def to_first(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Rank 0: give what the others compare themselves with."""
        return {
            "path": str(check_local_path(path)),
            "save_id": uuid.uuid4().hex,
            "tables": self._tables(),
            "buffers": fingerprints(dict(self.state.module_buffers)),
            "client": fingerprints(self.client),
        }

    def _tables(self) -> dict[str, str]:
        """Give what must be alike on all ranks."""
        scalars = [
            {key: repr(value) for key, value in sorted(flat.scalars.items())}
            for flat in self.state.flats
        ]
        described = asdict(self.manifest)
        tables = ("parameters", "groups", "buffers", "progress", "module_buffers", "stage")
        return {**{key: repr(described[key]) for key in tables}, "scalar states": repr(scalars)}

    def check_like(self, first: Mapping[str, Any], path: str | os.PathLike[str], rank: int) -> None:
        """Refuse ranks that would write different checkpoints, or into different places."""
        mine = str(check_local_path(path))
        if mine != first["path"]:
            msg = (
                f"rank 0 saves to {first['path']}, this rank to {mine}: a checkpoint is one "
                "directory; give all ranks the same path (ModelCheckpoint does)"
            )
            raise SaveError(msg)
        tables = self._tables()
        if differ := [key for key, table in first["tables"].items() if tables[key] != table]:
            msg = f"the ranks do not agree on their {', '.join(differ)}: they do not hold one run"
            raise UnsupportedError(msg)
        fragments = [f for flat in self.state.flats for f in flat.fragments]
        if list(self.manifest.layout().on_rank(rank)) != fragments:
            msg = (
                f"DeepSpeed {self.manifest.writer.deepspeed} cuts parameters in a way that this "
                "library does not know: report it with your DeepSpeed config"
            )
            raise UnsupportedError(msg)


def _stage(target: Path, save_id: str) -> None:
    """Make the hidden directory beside the target, and what all files of it stand in."""
    if target.parent.is_dir():
        remove_leftovers(target.parent)
    staged = StagedDirectory.create(target, save_id)
    (staged.path / TAG).mkdir()
    leave_token(staged.path, save_id)


def _write_files(
    draft: _Draft, staging: Path, first: Mapping[str, Any], ranks: Ranks
) -> list[dict[str, Any]]:
    """Write this rank's files; give their records as plain data."""
    see_token(staging, first["save_id"])
    manifest = replace(draft.manifest, save_id=first["save_id"])
    state, client = draft.state, ClientPart(draft.client, draft.objects)
    if ranks.rank:
        theirs = fingerprints(dict(state.module_buffers))
        own = {n: t for n, t in state.module_buffers.items() if theirs[n] != first["buffers"][n]}
        state = replace(state, module_buffers=own)
        client = ClientPart({}, own=differing(draft.client, first["client"]))
    records = write_rank(staging, manifest, ranks.rank, state, client, _on_bytes("writing", ranks))
    entries = [asdict(record) for record in records]
    kept = {"buffers": bool(ranks.rank and state.module_buffers), "client_state": bool(client.own)}
    return [{**entry, "kept": [k for k, is_kept in kept.items() if is_kept]} for entry in entries]


def _publish(
    draft: _Draft,
    target: Path,
    save_id: str,
    files: list[list[dict[str, Any]]],
    recovery_script: Path | None,
) -> None:
    """Rank 0: write what DeepSpeed's tools look for, the manifest last, and publish."""
    staged = StagedDirectory(target, save_id)
    write_durably(staged.path / LATEST, TAG.encode())
    if recovery_script is not None:
        shutil.copyfile(recovery_script, staged.path / RECOVERY_SCRIPT)
    entries = [entry for of_rank in files for entry in of_rank]
    manifest = replace(
        draft.manifest,
        save_id=save_id,
        files=tuple(FileEntry(e["name"], e["size_bytes"], e["sums_digest"]) for e in entries),
        rank_state=tuple(sorted({kept for e in entries for kept in e["kept"]})),
        client_objects=tuple(dotted(path) for path, _ in draft.objects),
    )
    remove_token(staged.path, save_id)
    write_durably(staged.path / MANIFEST_NAME, manifest.to_json().encode())
    staged.publish()


# -- loading -------------------------------------------------------------------------------------


def _find(path: str | os.PathLike[str]) -> dict[str, str]:
    """Rank 0: find the checkpoint, behind links, so that all ranks open the same one."""
    found = check_local_path(path)
    repair_target(found)
    directory = Path(os.path.realpath(found)) if found.exists() else found
    with_manifest = open_checkpoint(directory)
    with_manifest.check_all()
    return {"path": str(directory), "save_id": with_manifest.manifest.save_id}


def _open(path: str | os.PathLike[str], first: Mapping[str, str], allow_pickle: bool) -> ElasticReader:  # noqa: FBT001
    """Open the checkpoint that rank 0 found."""
    directory = Path(first["path"])
    mine = os.path.realpath(check_local_path(path))
    if mine != first["path"]:
        log.warning("this rank was asked for %s; all ranks load rank 0's %s", mine, directory)
    source = open_checkpoint(directory, allow_pickle=allow_pickle)
    if source.manifest.save_id != first["save_id"]:
        msg = (
            f"{directory} is save {source.manifest.save_id} on this rank and {first['save_id']} on "
            "rank 0: the ranks do not share the directory, or a save replaced it just now"
        )
        raise CheckpointFormatError(msg)
    return source


def _check(
    source: ElasticReader, live: LiveState, options: LoadOptions, where: str, rank: int
) -> None:
    """Find all that can be wrong before anything is changed."""
    here = live.describe()
    training = bool(here.groups)
    wanted = Wanted(
        optimizer_state=training and options.optimizer_state,
        hyperparameters=training and options.hyperparameters and not source.manifest.weights_only,
        strict=options.strict,
    )
    check_fits(source.manifest, here, wanted, where)
    if wanted.optimizer_state and any(group.state for group in source.manifest.groups):
        live.check_optimizer(source.manifest)
    if rank == 0:
        log.info("loading %s (%s) into %s", where, describe(source.manifest), describe(here))


def _read(
    source: ElasticReader, live: LiveState, options: LoadOptions, ranks: Ranks
) -> tuple[Receiving, Incoming, int]:
    """Fill this rank's buffers from the checkpoint."""
    manifest = source.manifest
    here = live.describe()
    with_optimizer = options.optimizer_state and bool(here.groups) and not manifest.weights_only
    receiving = live.receive(manifest, with_optimizer=with_optimizer)
    requests = list(_requests(source, receiving))
    source.check(requests)
    once = source.module_state(ranks.rank, ranks.world_size)
    # Weights alone start a new run; a whole checkpoint goes on, if need be with a fresh optimizer.
    restores_run = bool(here.groups) and not manifest.weights_only
    incoming = Incoming(
        scalars=tuple(
            _scalars_of(source, buffer.names) if with_optimizer else {} for buffer in here.buffers
        ),
        hyperparameters=tuple(group.hyperparameters for group in manifest.groups)
        if restores_run and options.hyperparameters
        else None,
        module_buffers=once.buffers,
        progress=manifest.progress if restores_run else here.progress,
        loss_scaler=once.loss_scaler if restores_run else {},
        lr_scheduler=once.lr_scheduler if restores_run and options.hyperparameters else None,
        optimizer=manifest.writer.optimizer,
    )
    bytes_read = source.read(requests, _on_bytes("reading", ranks))
    return receiving, incoming, bytes_read


def _requests(source: ElasticReader, receiving: Receiving) -> list[ReadRequest]:
    """Plan every run to be read: weights from masters or frozen weights, then states."""
    owned = {p.name for p in source.manifest.optimized}
    mine = [f for f in receiving.fragments if f.name in owned]
    frozen = [f for f in receiving.fragments if f.name not in owned]
    plan = plan_transfers(mine, source.layout())
    weights = [*plan, *plan_transfers(frozen, source.frozen_layout())]
    requests = [ReadRequest(WEIGHT, t, receiving.weights[t.target_buffer]) for t in weights]
    return requests + [
        ReadRequest(key, transfer, target)
        for transfer in plan
        for key, target in _states_of(transfer, receiving).items()
    ]


def _states_of(transfer: Transfer, receiving: Receiving) -> Mapping[str, Any]:
    """Give the state targets that share a transfer's place; frozen weights have none."""
    states = receiving.states
    return states[transfer.target_buffer] if transfer.target_buffer < len(states) else {}


def _scalars_of(source: ElasticReader, names: tuple[str, ...]) -> Mapping[str, Scalar]:
    """Give the scalars of a live flat buffer, whose parameters may have lain in several.

    Raises:
        CheckpointMismatchError: those differ, and the live buffer can have one value only.
    """
    held: dict[int, Fragment] = {}
    for name in names:
        at = next(iter(source.layout().covering(name, 0, 1)))
        held.setdefault(at.buffer, at)
    scalars = [source.scalars(at) for at in held.values()]
    for other in scalars[1:]:
        if repr(dict(other)) != repr(dict(scalars[0])):
            msg = (
                f"parameters that share a flat buffer here were saved with the states "
                f"{dict(scalars[0])} and {dict(other)}: resume with the sub_group_size of the save"
            )
            raise CheckpointMismatchError(msg)
    return scalars[0]


def _on_bytes(doing: str, ranks: Ranks) -> Callable[[int], None]:
    """Give a callback for long I/O: shows the other ranks that this one lives, and reports."""
    done, reported = 0, time.monotonic()

    def on_bytes(count: int) -> None:
        nonlocal done, reported
        done += count
        ranks.progress()
        if ranks.rank == 0 and time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            log.info("%s a checkpoint: %.1f GB on rank 0 so far", doing, done / 1e9)

    return on_bytes
