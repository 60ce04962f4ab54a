"""Finding the newest intact checkpoint next to a damaged one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from lightning_elastic_zero.checkpoint.types import LoadOptions, io_progress
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest
from lightning_elastic_zero.core.names import mapping_to
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import DAMAGE_ERRORS, ElasticZeroError
from lightning_elastic_zero.formats.deepspeed_files import is_deepspeed
from lightning_elastic_zero.formats.open import open_checkpoint
from lightning_elastic_zero.storage.checkpoints import (
    has_entry,
    published_ns,
    resolved,
    siblings,
)
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX
from lightning_elastic_zero.storage.object_store import AnyPath, StorePath
from lightning_elastic_zero.storage.paths import parse_path


def find_fallback(
    asked: str | os.PathLike[str],
    ranks: Ranks,
    fits_model: Callable[[Manifest], bool],
    options: LoadOptions,
) -> tuple[str, int] | None:
    """Find the newest intact checkpoint of this library next to a damaged one. Collective.

    The ranks verify all of its bytes, each a share. It has the parameters of the damaged one, but
    may belong to another run, so it is loaded only with ``fallback``.

    Args:
        asked: the path of the damaged one, on rank 0.
        ranks: those that load.
        fits_model: whether a checkpoint has the parameters of the model; called if the manifest of
            the damaged one cannot be read.
        options: those of the load.

    Returns:
        Its path and its optimizer steps. None if none is intact, the path has no entry, or other
        software wrote the damaged one.
    """
    found = ranks.broadcast(
        f"load {asked}: look for an older one",
        lambda: _older_than(asked, ranks.progress, fits_model, options),
    )
    for path, step in found:
        with suppress(*DAMAGE_ERRORS):
            share = partial(verify_share, parse_path(path), ranks)
            ranks.run_all(f"load: verify {path}", share)
            return path, step
    return None


def _older_than(
    asked: str | os.PathLike[str],
    progress: Progress,
    fits_model: Callable[[Manifest], bool],
    options: LoadOptions,
) -> list[tuple[str, int]]:
    """Rank 0: return the published checkpoints in the run's folders, the newest first."""
    damaged = parse_path(asked)
    if not is_there(damaged):
        # The path is probably misspelt: suggest nothing.
        return []
    real = resolved(damaged)
    if _is_foreign(real):
        return []
    mine = manifest_of(real)
    if mine and not options.can_replace(real, mine):
        return []
    rows: set[tuple[int, int, str]] = set()
    # What a link leads to may be in another folder.
    found = {path for place in {damaged, real} for path in (place, *siblings(place))}
    for path in {resolved(path) for path in found.union(options.more_saves())}:
        manifest = None if path == real else manifest_of(path)
        progress.check()
        if manifest is None or (isinstance(path, Path) and is_deepspeed(path)):
            continue  # DeepSpeed has saved into the last: either of the two may be meant.
        if not options.can_replace(path, manifest):
            continue
        if mine:
            usable = _can_replace(manifest, mine)
        else:  # The manifest of the damaged one cannot be read: compare the times.
            before = published_ns(path) <= published_ns(real, damaged)
            usable = fits_model(manifest) and before and not manifest.weights_only
        if usable:
            rows.add((published_ns(path), manifest.progress.global_steps, str(path)))
    return [(path, step) for _, step, path in sorted(rows, reverse=True)]


def is_there(path: AnyPath) -> bool:
    """Whether a path has an entry; False if its store does not answer."""
    with suppress(OSError):  # Of the store, which has refused the load too.
        return has_entry(path)
    return False


def _is_foreign(path: AnyPath) -> bool:
    """Whether a path contains files, but no trace of a save of this library."""
    if isinstance(path, StorePath):
        return False  # It was refused by its format.
    if not path.is_dir():
        return path.exists()
    traces = (MANIFEST_NAME, f"*{SUMS_SUFFIX}")
    return any(path.iterdir()) and not any(next(path.rglob(trace), None) for trace in traces)


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in manifest.parameters}


def manifest_of(path: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint of this library; None if it is another or none."""
    if isinstance(path, Path) and not (path / MANIFEST_NAME).exists():
        return None
    with suppress(ElasticZeroError), closing(open_checkpoint(path)) as source:
        return source.manifest
    return None


def _can_replace(other: Manifest, damaged: Manifest) -> bool:
    """Whether one has the same shapes, no later step and, if the other has it, optimizer state."""
    older = other.progress.global_steps <= damaged.progress.global_steps
    whole = damaged.weights_only or not other.weights_only
    return _shapes(other) == _shapes(damaged) and older and whole


def verify_share(path: AnyPath, ranks: Ranks) -> None:
    """Verify this rank's share of a checkpoint.

    Raises:
        CheckpointCorruptedError, CheckpointFormatError, CheckpointNotFoundError: it is damaged.
    """
    with closing(open_checkpoint(path, progress=ranks.progress)) as source:
        source.check_all()
        source.verify_whole(ranks.rank, ranks.world_size, io_progress("verifying", ranks))


def has_same_shapes(live: LiveEngine, options: LoadOptions, saved: Manifest) -> bool:
    """Whether a checkpoint and the model share parameters, all of the same shapes."""
    described = live.describe()
    renaming = mapping_to(described.names(), options.renamed)
    here = {p.name: p.shape for p in described.parameters}
    pairs = [(renaming.here(p.name), p.shape) for p in saved.parameters]
    shared = [here[name] == shape for name, shape in pairs if name in here]
    return bool(shared) and all(shared)
