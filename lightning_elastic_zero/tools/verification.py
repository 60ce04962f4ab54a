"""``verify``: check every byte and every tensor of a checkpoint, without an engine."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import NO_PROGRESS, ByteCount, Progress
from lightning_elastic_zero.core.save_files import TAG
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.copies import drifted_copies
from lightning_elastic_zero.formats.dcp_read import is_dcp
from lightning_elastic_zero.formats.deepspeed_files import describe_missing_latest, is_deepspeed
from lightning_elastic_zero.formats.newest import (
    checkpoints_in,
    manifest_of,
    newest_first,
    newest_intact,
)
from lightning_elastic_zero.formats.open import (
    MARKS,
    MAX_ENTRIES,
    check_unmixed,
    checkpoint_names,
    looks_like_checkpoint,
)
from lightning_elastic_zero.formats.reader import CheckpointReader
from lightning_elastic_zero.formats.torch_read import OLD_FORMAT_MARK, foreign_files
from lightning_elastic_zero.storage.file_read import VerifiedFile
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, is_on_nodes, open_file, parse_path
from lightning_elastic_zero.tools.view import OpenCheckpoint, open_view, run_parts

DAMAGE = (CheckpointCorruptedError, CheckpointFormatError)
"""Errors that can mean a damaged checkpoint."""

FILE_BEGINNINGS = (b"PK", OLD_FORMAT_MARK[:4])
"""First bytes of files of ``torch.save``: archives, and pickles of its older format."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of ``verify_checkpoint``."""

    path: str
    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``; empty if it cannot be opened."""
    steps: int
    """Optimizer steps of the run."""
    problem: str
    """The damage; empty if the checkpoint is intact."""
    compared_masters: bool
    """Whether it contains low-precision weights that equal the rounded masters."""
    bytes: int
    """Number of bytes that were verified."""
    seconds: float
    unverified: tuple[str, ...] = ()
    """Files without checksums, which may be damaged although no damage was found."""
    elsewhere: tuple[str, ...] = ()
    """Files that this node does not have; those that it has are intact if no damage was found."""
    note: str = ""
    """What users should know of the checkpoint although it is intact; usually empty."""

    @property
    def is_sound(self) -> bool:
        """Whether no damage was found."""
        return not self.problem


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    threads: int = 0,
    progress: Progress = NO_PROGRESS,
    allow_pickle: bool = False,
) -> Verification:
    """Verify a checkpoint of any kind, as all ranks of a load would together.

    - All its files exist, have their recorded sizes and belong to one save.
    - Each element of each tensor is stored exactly once.
    - All checksums match: one per 64 KiB in this library's format, the CRC-32 of each record in
      files of other software. Files without checksums (``compute_crc32=False``) are listed in
      ``unverified``.
    - Outside of a job, the files of a checkpoint on nodes that this one has; others are listed in
      ``elsewhere``.
    - Low-precision weights that are stored next to masters equal the rounded masters, or resemble
      them and are of the same step (a note names them).

    Args:
        path: Directory, file or URL of the checkpoint.
        threads: Number of reading threads; 0: one per processor.
        progress: Receives the number of bytes verified, from any thread.
        allow_pickle: Build Python objects of any class; this can run code.

    Raises:
        CheckpointNotFoundError: Nothing is at the path.
        CheckpointFormatError: It is not a checkpoint, not even a damaged one.
        UnsupportedError: The run that wrote it cannot be resumed.
    """
    began, count = time.monotonic(), ByteCount(progress)
    kind, steps, rounded, problem, note = "", 0, False, "", ""

    unverified: list[str] = []
    elsewhere: list[str] = []

    def verify_bytes(part: int, parts: int) -> list[str]:
        with open_view(path, allow_pickle=allow_pickle, to_describe=True) as checkpoint:
            return checkpoint.reader.verify_whole(part, parts, count)

    def compare_masters(part: int, parts: int) -> list[str]:
        with open_view(path, allow_pickle=allow_pickle, progress=count) as checkpoint:
            for _ in checkpoint.runs(part, parts, masters_only=True):
                pass  # Reading compares them.
            return list(checkpoint.reader.comparison.changed)

    try:
        with open_view(path, allow_pickle=allow_pickle, to_describe=True) as checkpoint:
            kind, steps = checkpoint.reader.info.kind, checkpoint.manifest.progress.global_steps
            elsewhere = _on_other_nodes(checkpoint.reader)
            if elsewhere:
                _verify_files_here(checkpoint.reader, elsewhere, count)
            else:
                checkpoint.reader.check_all()
                checkpoint.check_tiling()
                rounded = checkpoint.has_rounded_weights()
                info = checkpoint.reader.info
                problem = info.mixed or info.incomplete
                note = describe_missing_latest(checkpoint.path) or _describe_copies(checkpoint)
                note = note or info.doubt
        if not (problem or elsewhere):
            unverified = sorted({name for of in run_parts(verify_bytes, threads) for name in of})
            changed = run_parts(compare_masters, threads) if rounded else []
            if names := dict.fromkeys(name for of_part in changed for name in of_part):
                rounded = False
                note = note or (
                    f"weights that are not its masters, rounded: {format_names(names)}. User code "
                    "had changed them in place, or the model file is of another step and the "
                    "optimizer counts none"
                )
    except DAMAGE as error:
        if not kind and not _may_be_checkpoint(folder_at(path)):
            raise
        problem = str(error)
    seconds = time.monotonic() - began
    size = count.total()
    lists = tuple(unverified), tuple(elsewhere)
    return Verification(str(path), kind, steps, problem, rounded, size, seconds, *lists, note)


def _describe_copies(checkpoint: OpenCheckpoint) -> str:
    if drifted := drifted_copies(checkpoint.reader):
        return (
            f"copies of {format_names(drifted)} that differ between tensor ranks: each tensor rank "
            "trained its own, by other gradients"
        )
    return ""


def _on_other_nodes(reader: CheckpointReader) -> list[str]:
    """Return the files that are not on this node, of a checkpoint on nodes."""
    folder = folder_at(reader.files.folder)
    sizes = folder.sizes(reader.names()) if is_on_nodes(folder.path) else ()
    return [name for name, size in sizes if isinstance(size, FileNotFoundError)]


def _verify_files_here(
    reader: CheckpointReader, elsewhere: Collection[str], progress: Progress
) -> None:
    for entry in reader.manifest.files:
        if not {entry.name, entry.name + SUMS_SUFFIX}.intersection(elsewhere):
            with VerifiedFile(reader.files.folder, entry, reader.manifest.save_id) as file:
                for _, view in file.read_runs([(0, file.size_bytes)]):
                    progress.advance(view.nbytes)


def _may_be_checkpoint(folder: Folder) -> bool:
    """Whether the path may be a damaged checkpoint, as opposed to a mistyped path."""
    path = folder.local
    if path is None:
        return folder.exists()
    if path.is_dir():
        if path.name == TAG and (path.parent / MANIFEST_NAME).is_file():
            return False  # The inside of a checkpoint.
        is_marked = any((path / mark).is_file() for mark in {*MARKS} - {MANIFEST_NAME})
        if (path / MANIFEST_NAME).is_file() and not (is_marked or (path / TAG).exists()):
            return False  # The manifest of another program.
        # Chunks without their metadata have no other mark.
        return looks_like_checkpoint(path) or any(path.glob("*.distcp"))
    if is_deepspeed(path.parent) or is_dcp(path.parent):
        return False  # One file of a checkpoint.
    if _is_intact(path) or _is_other_archive(path):
        return False
    with suppress(OSError), os.fdopen(open_file(path)[0], "rb") as file:
        start = file.read(4)
        return not start or start.startswith(FILE_BEGINNINGS) or looks_like_checkpoint(path)
    return True  # It cannot be read; the error says why.


def _is_other_archive(path: Path) -> bool:
    """Whether the path is a zip with a complete directory that is not of ``torch.save``."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return not any(name.endswith("data.pkl") for name in archive.namelist())
    return False


def _is_intact(path: Path) -> bool:
    """Whether the path is a file of ``torch.save`` whose records match their CRC-32."""
    with suppress(ElasticZeroError, OSError), closing(foreign_files(path.parent)) as files:
        return files.get(path.name).verify()
    return False


def newest_sound_checkpoint(
    folder: str | os.PathLike[str],
    *,
    threads: int = 0,
    progress: Progress = NO_PROGRESS,
    allow_pickle: bool = False,
    on_verified: Callable[[Verification], None] = lambda _: None,
) -> AnyPath | None:
    """Find the newest intact checkpoint in a folder; every byte of it is verified.

    Checkpoints with files without checksums are skipped.

    Args:
        folder: Contains checkpoints of any kind, or of this library if it is a URL; hidden names
            are ignored.
        threads: See ``verify_checkpoint``.
        progress: See ``verify_checkpoint``.
        allow_pickle: See ``verify_checkpoint``.
        on_verified: Called with the result for each candidate, the newest first.

    Returns:
        Its path with links resolved; None if no checkpoint is intact.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
    """
    if not os.fspath(folder):
        msg = "the path is empty, perhaps from an unset variable: pass a folder"
        raise CheckpointNotFoundError(msg)

    def verify(path: str) -> None:
        try:
            check_unmixed(parse_path(path))
            verified = verify_checkpoint(
                path, threads=threads, progress=progress, allow_pickle=allow_pickle
            )
        except ElasticZeroError as error:  # Unreadable, or deleted by another run.
            verified = Verification(path, "", 0, str(error), False, 0, 0.0)  # noqa: FBT003
        on_verified(verified)
        if not verified.is_sound or verified.unverified or verified.elsewhere:
            raise CheckpointCorruptedError(verified.problem)

    candidates = _candidates(parse_path(folder), allow_pickle=allow_pickle)
    newest = newest_intact(map(str, candidates), verify).path
    return None if newest is None else parse_path(newest)


def _candidates(folder: AnyPath, *, allow_pickle: bool) -> list[AnyPath]:
    try:
        if (local := folder_at(folder).local) is not None:
            os.scandir(local).close()  # A missing one is empty for others.
        candidates = checkpoints_in(folder, allow_pickle=allow_pickle)
    except OSError as error:
        msg = f"{folder} cannot be listed ({error.strerror}): check the path and its permissions"
        raise CheckpointNotFoundError(msg) from error
    return newest_first({path: _steps_of(path) for path in candidates})


def _steps_of(path: AnyPath) -> int:
    """Return a checkpoint's optimizer steps; 0 if it is of other software or cannot be opened."""
    with suppress(OSError):
        if folder_at(path).is_checkpoint() and (manifest := manifest_of(path)) is not None:
            return manifest.progress.global_steps
    return 0


def folders_with_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the folders below a folder that contain checkpoints, at most two levels deep.

    For a suggestion: Lightning's folders are ``lightning_logs/version_0/checkpoints``.
    """
    location = folder_at(folder).local
    if location is None:
        return []
    with suppress(OSError):
        below = islice((*location.glob("*/"), *location.glob("*/*/")), MAX_ENTRIES)
        return sorted(p for p in below if not looks_like_checkpoint(p) and checkpoint_names(p))
    return []
