"""The checkpoints that a load may take in place of a damaged one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from lightning_elastic_zero.checkpoint.types import LoadOptions, io_progress
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest
from lightning_elastic_zero.formats.newest import (
    checkpoints_in,
    manifest_of,
    newest_first,
    newest_intact,
    verify_share,
)
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, is_on_nodes, parse_path


def find_fallback(
    asked: str | os.PathLike[str],
    ranks: Ranks,
    fits_model: Callable[[Manifest], bool],
    options: LoadOptions,
) -> tuple[str, int] | None:
    """Find the newest intact checkpoint in place of a damaged one. Collective.

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

    def verify(path: str) -> None:
        progress = io_progress("verifying", ranks)
        verify_share(parse_path(path), ranks.rank, ranks.world_size, progress)

    steps = ranks.broadcast(
        f"load {asked}: look for an older one",
        lambda: _older_than(parse_path(asked), ranks, fits_model, options),
    )
    older = newest_intact(steps, verify, ranks.run_all, "load").path
    return None if older is None else (older, steps[older])


def is_there(path: AnyPath) -> bool:
    """Whether a path has an entry; False if its store does not answer."""
    with suppress(OSError):  # Of the store, which has refused the load too.
        return folder_at(path).inspect().kind != "nothing"
    return False


def _older_than(
    damaged: AnyPath,
    ranks: Ranks,
    fits_model: Callable[[Manifest], bool],
    options: LoadOptions,
) -> dict[str, int]:
    """Rank 0: return the candidates with their steps, in the order in which to try them.

    The newest is the first. Those of fewer steps that were published after the damaged one come
    last: they belong to another branch of the run, unless a copy has lost the times.
    """
    real = folder_at(damaged).follow_links().path if is_there(damaged) else None
    if real is None or _is_foreign(folder_at(real)):
        return {}  # Nothing is suggested for a path that is probably misspelt.
    asked = manifest_of(real)
    if asked and not options.in_series(real, asked):
        return {}
    # A link may be newer than the checkpoint behind it, which may be missing.
    damaged_ns = folder_at(real).published_ns() or folder_at(damaged).published_ns()
    # What a link leads to may be in another folder.
    folders = {damaged.parent, real.parent}
    for folder in map(parse_path, options.folders):
        # Another one is for the loss of nodes.
        if is_on_nodes(real) or any(str(p).startswith(f"{folder}/") for p in (damaged, real)):
            folders.add(folder)
    steps: dict[AnyPath, int] = {}
    progress, pickle = ranks.progress, options.allow_pickle
    by_folder = (checkpoints_in(folder, progress, allow_pickle=pickle) for folder in folders)
    for path in set[AnyPath]().union(*by_folder):
        manifest = None if path == real else manifest_of(path)
        progress.check()
        if manifest is None or not options.in_series(path, manifest):
            continue
        if asked:
            usable = _can_replace(manifest, asked)
        else:  # The manifest of the damaged one cannot be read: compare the times.
            before = folder_at(path).published_ns() <= damaged_ns
            usable = fits_model(manifest) and before and not manifest.weights_only
        if usable:
            steps[path] = manifest.progress.global_steps
    fewer = {path for path in steps if asked and steps[path] < asked.progress.global_steps}
    later = {path for path in fewer if folder_at(path).published_ns() > damaged_ns}
    return {str(p): steps[p] for p in sorted(newest_first(steps), key=later.__contains__)}


def _is_foreign(folder: Folder) -> bool:
    """Whether a folder contains files, but no trace of a save of this library."""
    path = folder.local
    if path is None:
        return False  # It was refused by its format.
    if not path.is_dir():
        return path.exists()
    traces = (MANIFEST_NAME, f"*{SUMS_SUFFIX}")
    return any(path.iterdir()) and not any(next(path.rglob(trace), None) for trace in traces)


def _can_replace(other: Manifest, damaged: Manifest) -> bool:
    """Whether one has the same shapes, no later step and, if the other has it, optimizer state."""
    older = other.progress.global_steps <= damaged.progress.global_steps
    whole = damaged.weights_only or not other.weights_only
    return _shapes(other) == _shapes(damaged) and older and whole


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {p.name: p.shape for p in manifest.parameters}
