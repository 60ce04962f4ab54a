"""``verify``: whether a checkpoint is whole, every byte of it, without an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.dcp.detection import is_dcp
from lightning_elastic_zero.formats.deepspeed.missing_latest import describe_missing_latest
from lightning_elastic_zero.formats.deepspeed.tag_folder import is_deepspeed
from lightning_elastic_zero.formats.open_files import foreign_files
from lightning_elastic_zero.formats.path_suggestions import MARKS, looks_like_checkpoint
from lightning_elastic_zero.manifest import MANIFEST_NAME
from lightning_elastic_zero.storage import check_local_path, ignore_bytes, open_file, real_path
from lightning_elastic_zero.storage.file_ownership import TAG
from lightning_elastic_zero.tools.checkpoint_view import open_view
from lightning_elastic_zero.tools.parallel import run_parts
from lightning_elastic_zero.tools.progress_line import OnBytes

DAMAGE = (CheckpointCorruptedError, CheckpointFormatError)
"""What may mean that a checkpoint is not what was written."""


FILE_BEGINNINGS = {b"PK", b"\x80\x02"}
"""How files of ``torch.save`` begin: archives, and the pickles from before."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``verify_checkpoint`` found."""

    path: str
    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``; empty where it could not be opened."""
    steps: int
    """Optimizer steps that had been taken."""
    problem: str
    """What is wrong with it; empty if it is sound."""
    compared_masters: bool
    """Whether low-precision weights lay in it, and were compared with the masters."""
    bytes: int
    """That were read and verified."""
    seconds: float
    note: str = ""
    """What other software cannot do with it, though nothing is wrong with it; empty as a rule."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problem


def verify_checkpoint(
    path: str | os.PathLike[str], *, threads: int = 0, on_bytes: OnBytes = ignore_bytes
) -> Verification:
    """Verify a checkpoint of any kind: what every rank of a load would verify, all of it.

    - Every file that belongs to it is there, of one save, with its size.
    - Each element of each tensor is held once.
    - Every checksum that was written fits: of our own format one for each 64 KiB, of files of other
      software the CRC-32 of each record, where there is one.
    - Where low-precision weights lie beside masters, they are the masters, rounded.

    Args:
        path: its directory, or file.
        threads: how many read side by side; 0: as many as there are processors.
        on_bytes: told of the bytes that were verified, from any thread.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: what is there is nothing like a checkpoint, damaged or not.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """
    began, count = time.monotonic(), _Count(on_bytes)
    kind, steps, rounded, problem, note = "", 0, False, "", ""
    try:
        with open_view(path) as checkpoint:
            kind, steps = checkpoint.reader.info.kind, checkpoint.manifest.progress.global_steps
            checkpoint.reader.check_all()
            checkpoint.check_tiling()
            rounded = checkpoint.has_rounded_weights()
            problem = checkpoint.reader.info.mixed or checkpoint.reader.info.incomplete
            note = describe_missing_latest(checkpoint.path)
        if not problem:
            run_parts(_bytes_of(path, count), threads)
            if rounded:
                run_parts(_masters_of(path, count), threads)
    except DAMAGE as error:
        if not kind and not _may_be_checkpoint(Path(path)):
            raise
        problem = str(error)
    seconds = time.monotonic() - began
    read_bytes = sum(count.told)
    return Verification(str(path), kind, steps, problem, rounded, read_bytes, seconds, note)


def _may_be_checkpoint(path: Path) -> bool:
    """Whether something may be what is left of a checkpoint, and is no mistyped path."""
    if path.is_dir():
        if path.name == TAG and (path.parent / MANIFEST_NAME).is_file():
            return False  # It is the inside of a checkpoint, which was not asked for.
        # What has chunks, and not what tells of them, has no other mark.
        return looks_like_checkpoint(path) or any(path.glob("*.distcp"))
    if is_deepspeed(path.parent) or is_dcp(path.parent):
        return False  # It is one of the files of a checkpoint, which was not asked for.
    if _is_intact(path):
        return False  # It is as torch.save wrote it, and holds something else.
    with suppress(OSError), os.fdopen(open_file(path)[0], "rb") as file:
        return file.read(2) in {b"", *FILE_BEGINNINGS} or looks_like_checkpoint(path)
    return True  # It cannot be read: what opened it has said why.


def _is_intact(path: Path) -> bool:
    """Whether something is a file of ``torch.save`` whose records have CRC-32s, and fit them."""
    verified = _Count(ignore_bytes)
    with suppress(ElasticZeroError, OSError), closing(foreign_files(path.parent)) as files:
        files.get(path.name).verify(verified)
        return sum(verified.told) > 0  # Nothing tells of a file without any.
    return False


class _Count:
    """Counts bytes for threads; a list's ``append`` needs no lock."""

    def __init__(self, on_bytes: OnBytes) -> None:
        self.told: list[int] = []
        self._on_bytes = on_bytes

    def __call__(self, count: int) -> None:
        self.told.append(count)
        self._on_bytes(count)


def _bytes_of(path: str | os.PathLike[str], on_bytes: OnBytes) -> Callable[[int, int], None]:
    def work(part: int, parts: int) -> None:
        with open_view(path) as checkpoint:
            checkpoint.reader.verify_whole(part, parts, on_bytes)

    return work


def _masters_of(path: str | os.PathLike[str], on_bytes: OnBytes) -> Callable[[int, int], None]:
    def work(part: int, parts: int) -> None:
        with open_view(path, on_bytes=on_bytes) as checkpoint:
            for _ in checkpoint.runs(part, parts, masters_only=True):
                pass  # They are compared while they are read.

    return work


def newest_sound_checkpoint(
    folder: str | os.PathLike[str],
    *,
    threads: int = 0,
    on_bytes: OnBytes = ignore_bytes,
    on_verified: Callable[[Verification], None] = lambda _: None,
) -> Path | None:
    """Find the newest checkpoint in a folder that is sound, every byte of it verified.

    Args:
        folder: where checkpoints lie, of any kind; hidden names are not looked at.
        threads: see ``verify_checkpoint``.
        on_bytes: likewise.
        on_verified: told of each that was looked at, the newest first.

    Returns:
        Its path, behind links; None where none is sound.

    Raises:
        CheckpointNotFoundError: there is no such folder.
    """
    for path in checkpoints_in(check_local_path(folder)):
        try:
            found = verify_checkpoint(path, threads=threads, on_bytes=on_bytes)
        except ElasticZeroError as error:  # Another run has deleted it, or it cannot be read.
            found = Verification(str(path), "", 0, str(error), False, 0, 0.0)  # noqa: FBT003
        on_verified(found)
        if found.is_sound and found.bytes:  # Without a checksum nothing tells that it is.
            return path
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return what may be a checkpoint in a folder, the newest first; several names of one are one.

    Raises:
        CheckpointNotFoundError: there is no such folder.
    """
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        msg = f"{folder} cannot be listed ({error.strerror})"
        raise CheckpointNotFoundError(msg) from error
    found = {real_path(e) for e in entries if e.exists() and looks_like_checkpoint(e)}
    return sorted(found, key=lambda path: (_published_at(path), str(path)), reverse=True)


def _published_at(path: Path) -> int:
    """Return when the last of its marks was written, in nanoseconds; else the path itself."""
    times = list(_times(path))
    return max(times, default=0)


def _times(path: Path) -> Iterator[int]:
    marks = [path / mark for mark in MARKS if (path / mark).is_file()] if path.is_dir() else []
    for there in marks or [path]:
        yield there.stat().st_mtime_ns
