"""The choice of the newest sound checkpoint beside a damaged one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from lightning_elastic_zero.checkpoint.types import report_bytes
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats import open_checkpoint
from lightning_elastic_zero.formats.elastic.reader import verify_files
from lightning_elastic_zero.manifest import MANIFEST_NAME, Manifest
from lightning_elastic_zero.storage import SUMS_SUFFIX, check_local_path, real_path

DAMAGE_ERRORS = (CheckpointCorruptedError, CheckpointFormatError, CheckpointNotFoundError)
"""What may mean that the checkpoint which was asked for is not what it was."""


def find_fallback(
    asked: str | os.PathLike[str],
    ranks: Ranks,
    fits_model: Callable[[Manifest], bool],
) -> tuple[str, int] | None:
    """Find the newest sound checkpoint of this library beside one that is damaged. Collective.

    Every byte of it has been verified, each rank reading its share. It has the parameters of the
    damaged one. It may be another run's all the same, so that the user decides whether to take it.

    Args:
        asked: the path of the damaged one, on rank 0.
        ranks: those that load.
        fits_model: whether a checkpoint has the parameters of the model; asked where the damaged
            one cannot say what it had.

    Returns:
        Its path, and the optimizer steps that had been taken. None where there is none, where
        nothing says that there was ever one, or where other software wrote the damaged one.
    """
    found = ranks.broadcast(
        f"load {asked}: look for an older one",
        lambda: _beside(asked, ranks.report_progress, fits_model),
    )
    for path, step in found:
        problems = ranks.all_gather(f"load: verify {path}", partial(_problem, path, ranks))
        if not any(problems):
            return path, step
    return None


def _beside(
    asked: str | os.PathLike[str],
    on_progress: Callable[[], None],
    fits_model: Callable[[Manifest], bool],
) -> list[tuple[str, int]]:
    """Rank 0: return the published checkpoints in the same folder, the newest first."""
    damaged = check_local_path(asked)
    if not os.path.lexists(damaged):
        # A path that is misspelt: another checkpoint is not what is meant.
        return []
    real = real_path(damaged)
    if _is_foreign(real):
        return []
    mine = _manifest_of(real)
    rows: set[tuple[int, int, str]] = set()
    # What a link leads to may be in another folder.
    folders = (damaged.parent, real.parent)
    for manifest_path in {p for folder in folders for p in folder.glob(f"*/{MANIFEST_NAME}")}:
        path = real_path(manifest_path.parent)
        manifest = _manifest_of(path)
        on_progress()
        if path == real or path.name.startswith(".") or manifest is None:
            continue
        if mine:
            usable = _can_replace(manifest, mine)
        else:  # The damaged one can no longer say what it was: by the clock.
            before = _published_at(path) <= _published_at(real, damaged)
            usable = fits_model(manifest) and before and not manifest.weights_only
        if usable:
            rows.add((_published_at(path), manifest.progress.global_steps, str(path)))
    return [(path, step) for _, step, path in sorted(rows, reverse=True)]


def _is_foreign(path: Path) -> bool:
    """Whether other software wrote what is there: no trace of a save of this library."""
    if not path.is_dir():
        return path.exists()
    traces = (MANIFEST_NAME, f"*{SUMS_SUFFIX}")
    return any(path.iterdir()) and not any(next(path.rglob(trace), None) for trace in traces)


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in manifest.parameters}


def _manifest_of(path: Path) -> Manifest | None:
    with suppress(ElasticZeroError), closing(open_checkpoint(path)) as source:
        # Of other software's checkpoints it cannot be told what a load would find.
        return source.manifest if (path / MANIFEST_NAME).exists() else None
    return None


def _can_replace(other: Manifest, damaged: Manifest) -> bool:
    """Whether a run can go on from the other one: it is alike, older, and as whole."""
    older = other.progress.global_steps <= damaged.progress.global_steps
    whole = damaged.weights_only or not other.weights_only
    return _shapes(other) == _shapes(damaged) and older and whole


def _published_at(*paths: Path) -> int:
    """Return when a manifest, or else a folder or link, was written, in nanoseconds."""
    for there in (paths[0] / MANIFEST_NAME, *paths):
        with suppress(OSError):
            return there.lstat().st_mtime_ns
    return 0


def _problem(path: str, ranks: Ranks) -> str:
    """Verify this rank's share; return what is wrong with it."""
    try:
        with closing(open_checkpoint(Path(path), on_progress=ranks.report_progress)) as source:
            source.check_all()
            on_bytes = report_bytes("verifying", ranks)
            verify_files(Path(path), source.manifest, ranks.rank, ranks.world_size, on_bytes)
    except DAMAGE_ERRORS as error:
        return str(error)
    return ""
