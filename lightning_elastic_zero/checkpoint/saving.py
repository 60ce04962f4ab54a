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
from pathlib import Path
from typing import Any

from lightning_elastic_zero.checkpoint.words import (
    CheckpointFigures,
    Course,
    LiveState,
    SaveOptions,
    report_bytes,
)
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.formats.client_state import (
    differing,
    dotted,
    fingerprints,
    pickled,
    split_objects,
)
from lightning_elastic_zero.formats.elastic_write import ClientPart, Told, write_rank
from lightning_elastic_zero.formats.names import LATEST, RECOVERY_SCRIPT, TAG
from lightning_elastic_zero.manifest import MANIFEST_NAME, FileEntry, Manifest
from lightning_elastic_zero.ranks import Ranks
from lightning_elastic_zero.state import RankState
from lightning_elastic_zero.storage import (
    StagedDirectory,
    check_local_path,
    leave_token,
    remove_leftovers,
    remove_token,
    see_token,
    staging_path,
    write_durably,
)


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
    return write(
        path, Draft.make(live, client_state, options), ranks, recovery_script=recovery_script
    )


def write(
    path: str | os.PathLike[str],
    draft: Callable[[], Draft],
    ranks: Ranks,
    *,
    recovery_script: Path | None = None,
    course: Course = Course(),  # noqa: B008 - it is frozen
) -> CheckpointFigures:
    """Write what was drafted and publish it; see ``save``. Collective.

    Args:
        path: the checkpoint's directory.
        draft: gives what this rank writes; what it raises fails the save on all ranks.
        ranks: to agree with, in the thread that runs this.
        recovery_script: DeepSpeed's, to be laid beside the files.
        course: who is asked and told while it goes on.
    """
    began = time.monotonic()
    staged: list[StagedDirectory] = []  # on rank 0: what has to go, wherever this fails
    report = report_bytes("writing", ranks)

    def stage() -> dict[str, Any]:
        first = draft().to_first(path)
        _stage(first, name_below(draft()), ranks, staged, begun=course.begun)
        return first

    def on_bytes(count: int) -> None:
        course.go_on()
        report(count)

    def write_files() -> list[dict[str, Any]]:
        draft().check_like(first, path, ranks.rank)
        staging = staging_path(target, first["save_id"])
        return _write_files(draft(), staging, first, ranks.rank, Told(on_bytes, course.on_read))

    def publish() -> list[float]:
        entries = [entry for of_rank in files or [] for entry in of_rank]
        _complete(draft(), staged[0], first["save_id"], entries, recovery_script)
        staged[0].publish(
            on_step=lambda step: course.commit() if step == "synced" else None,
            on_work=ranks.progress,
        )
        return [time.monotonic() - began, sum(entry["size_bytes"] for entry in entries)]

    try:
        first = ranks.from_first("save: make a directory", stage)
        target = Path(first["path"])
        with staged[0].kept_alive() if staged else nullcontext():
            files = ranks.gather(f"save {target}: write", write_files)
            seconds, size_bytes = ranks.from_first(f"save {target}: publish", publish)
    except BaseException:
        for directory in staged:
            directory.abandon()
        raise
    return CheckpointFigures(str(target), seconds, int(size_bytes), waited_s=seconds)


@dataclass(frozen=True, slots=True)
class Draft:
    """What one rank is about to write."""

    manifest: Manifest
    state: RankState
    client: Mapping[str, Any]
    objects: tuple[tuple[tuple[str | int, ...], object], ...]

    @classmethod
    def make(
        cls, live: LiveState, client_state: Mapping[str, Any], options: SaveOptions
    ) -> Callable[[], Draft]:
        """Give a function that makes the draft once: what it raises must reach all ranks."""
        made: list[Draft] = []

        def draft() -> Draft:
            if not made:
                manifest = live.describe()
                if options.sampler:
                    progress = replace(manifest.progress, sampler=options.sampler)
                    manifest = replace(manifest, progress=progress)
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
                if options.module_buffers is not None:
                    kept = options.module_buffers
                    buffers = {n: kept.get(n, b) for n, b in state.module_buffers.items()}
                    state = replace(state, module_buffers=buffers)
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
            "objects": self.object_digests(),
        }

    def object_digests(self) -> dict[str, str]:
        """Give a digest of each object of the client state, by where it belongs."""
        return {
            dotted(path): hashlib.sha256(pickled(value, path)).hexdigest()
            for path, value in self.objects
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
    first: Mapping[str, Any],
    below: str,
    ranks: Ranks,
    staged: list[StagedDirectory],
    *,
    begun: bool,
) -> None:
    """Rank 0: make the hidden directory beside the target, and note that it is there."""
    target, save_id = Path(first["path"]), first["save_id"]
    with _as_save_error(target):
        if target.parent.is_dir():
            remove_leftovers(target.parent, ranks.progress)
        staged.append(StagedDirectory.create(target, save_id, below=below, begun=begun))
        (staged[0].path / TAG).mkdir()
        leave_token(staged[0].path, save_id)


def name_below(draft: Draft) -> str:
    """Return the name that an error suggests for a checkpoint in a folder of other things."""
    return f"step-{draft.manifest.progress.global_steps}"


def _write_files(
    draft: Draft,
    staging: Path,
    first: Mapping[str, Any],
    rank: int,
    told: Told,
) -> list[dict[str, Any]]:
    """Write this rank's files; give their records as plain data."""
    see_token(staging, first["save_id"])
    manifest = replace(draft.manifest, save_id=first["save_id"])
    state, client = draft.state, ClientPart(draft.client, draft.objects)
    if rank:
        theirs = fingerprints(dict(state.module_buffers))
        own = {n: t for n, t in state.module_buffers.items() if theirs[n] != first["buffers"][n]}
        state = replace(state, module_buffers=own)
        alike = draft.object_digests() == first["objects"]
        client = ClientPart(
            {},
            own=differing(draft.client, first["client"]),
            own_objects=() if alike else draft.objects,
        )
    records = write_rank(staging, manifest, rank, state, client, told)
    entries = [asdict(record) for record in records]
    kept = {
        "buffers": bool(rank and state.module_buffers),
        "client_state": bool(client.own or client.own_objects),
    }
    return [{**entry, "kept": [k for k, is_kept in kept.items() if is_kept]} for entry in entries]


def _complete(
    draft: Draft,
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
        draft.manifest,
        save_id=save_id,
        files=tuple(FileEntry(e["name"], e["size_bytes"], e["sums_digest"]) for e in entries),
        rank_state=tuple(sorted({kept for e in entries for kept in e["kept"]})),
        client_objects=tuple(dotted(path) for path, _ in draft.objects),
    )
    remove_token(staged.path, save_id)
    write_durably(staged.path / MANIFEST_NAME, manifest.to_json().encode())
