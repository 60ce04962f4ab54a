"""The search for the newest intact checkpoint, of loads, of resumes and of the command line.

**Candidates** are the published checkpoints of a folder. Hidden names are being written or deleted.
A link stands for the checkpoint behind it, which counts once. Of those in folders below, only the
saves of a ``ModelCheckpoint`` count that saved into this folder (its ``filename`` has a slash):
others may be those of other runs.

**Newest** is the last one published, not the one with the most steps: a run that was restarted from
an earlier step leaves checkpoints of later steps behind. Steps decide between equal times, since
object stores count in seconds. A loop that numbers its folders defines the order itself.

**Damage** is what ``DAMAGE_ERRORS`` report, of the sizes of all files (``check_complete``), of all
bytes (``verify_share``), or of what else a caller verifies. An ``OSError`` may be temporary: it
ends the search, since an older checkpoint would be the wrong one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from lightning_elastic_zero.core.manifest import MANIFEST_NAME, Manifest
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    DAMAGE_ERRORS,
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ElasticZeroError,
)
from lightning_elastic_zero.formats.open import (
    MARKS,
    MAX_ENTRIES,
    check_unmixed,
    looks_like_checkpoint,
    open_checkpoint,
)
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import NO_ENTRY, AnyPath

_MOST_NAMED = 3

_MAX_DEPTH = 4
"""Number of slashes that are followed in a name of ``ModelCheckpoint``."""


@dataclass(frozen=True, slots=True)
class Search:
    """Result of ``newest_intact``."""

    path: str | None
    """The newest intact candidate; None if no candidate is intact."""
    problems: Mapping[str, str]
    """The damage of each newer candidate, by path."""


def _on_this_rank(_step: str, work: Callable[[], object], /) -> object:
    return work()


def newest_intact(
    candidates: Iterable[str],
    verify: Callable[[str], object],
    run_all: Callable[[str, Callable[[], object]], object] = _on_this_rank,
    call: str = "",
) -> Search:
    """Return the first candidate that is intact.

    Args:
        candidates: their paths, the newest first; equal on all ranks.
        verify: verifies a candidate, or this rank's share of it; raises one of ``DAMAGE_ERRORS``.
        run_all: that of the ranks, if each verifies a share: all of them skip a candidate in which
            one has found damage.
        call: the call that needs the checkpoint, for messages about ranks.
    """
    problems: dict[str, str] = {}
    for path in candidates:
        try:
            run_all(f"{call}: verify {path}", partial(verify, path))
        except DAMAGE_ERRORS as error:
            problems[path] = str(error)
        else:
            return Search(path, problems)
    return Search(None, problems)


def verify_share(
    path: AnyPath, rank: int, world_size: int, progress: Progress, *, allow_pickle: bool = False
) -> None:
    """Verify one rank's share of a candidate's bytes, and that all its files are of one save.

    Raises:
        CheckpointCorruptedError, CheckpointFormatError, CheckpointNotFoundError: it is damaged.
    """
    if rank == 0:
        check_unmixed(path, progress)
    with closing(open_checkpoint(path, allow_pickle=allow_pickle, progress=progress)) as source:
        source.check_all()
        if source.info.mixed:
            msg = f"{path} mixes files of several saves: {source.info.mixed}"
            raise CheckpointFormatError(msg)
        if source.info.incomplete:
            raise CheckpointCorruptedError(source.info.incomplete)
        source.verify_whole(rank, world_size, progress)


def check_complete(path: AnyPath) -> None:
    """Verify the sizes of a candidate's files, without reading its data.

    Raises:
        CheckpointNotFoundError: the path has no checkpoint.
        CheckpointCorruptedError: it has lost files, or its manifest is damaged.
    """
    folder = folder_at(path)
    if lacks := _lacks(folder):
        if not folder.exists():
            msg = f"{path} has no checkpoint"
            raise CheckpointNotFoundError(msg)
        msg = f"{path} is incomplete: {lacks}"
        raise CheckpointCorruptedError(msg)


def _lacks(folder: Folder) -> str:
    """Return which files of a checkpoint are missing or damaged; empty if it is complete."""
    if folder.has_damaged_manifest():
        return f"its {MANIFEST_NAME} is damaged"
    recorded = folder.recorded()
    if recorded.problem:
        return recorded.problem
    if not (missing := list(folder.lacking(recorded))):
        return ""
    why = folder.why_missing()
    named = format_names(missing, _MOST_NAMED)
    return f"{len(missing)} of its files are missing ({named}){f'; {why}' if why else ''}"


# -- candidates ----------------------------------------------------------------------------------


def checkpoints_in(
    folder: AnyPath, progress: Progress = NO_PROGRESS, *, allow_pickle: bool = False
) -> set[AnyPath]:
    """Return the possible checkpoints in a folder, behind links; empty if it does not exist.

    They are of any kind, or of this library if the folder is in a store. An unreadable folder is
    one too: its verification fails.

    Raises:
        OSError: the folder cannot be listed.
    """
    real = folder_at(folder).follow_links()
    real.repair()
    direct = {each.follow_links().path for each in real.entries() if _may_be_candidate(each)}
    return direct.union(_nested_saves(real, progress, allow_pickle=allow_pickle))


def newest_first(steps: Mapping[AnyPath, int]) -> list[AnyPath]:
    """Sort checkpoints, given their optimizer steps, or 0 if they are unknown."""
    return sorted(steps, key=lambda p: (_published_at(p), steps[p], str(p)), reverse=True)


def manifest_of(path: AnyPath) -> Manifest | None:
    """Return the manifest of a checkpoint of this library; None if it is another or none."""
    local = folder_at(path).local
    if local is not None and not os.path.exists(local / MANIFEST_NAME):  # noqa: PTH110 (never raises)
        return None
    with suppress(ElasticZeroError), closing(open_checkpoint(path)) as source:
        return source.manifest
    return None


def _may_be_candidate(entry: Folder) -> bool:
    path = entry.local
    if path is None:
        with suppress(PermissionError):
            return entry.exists()
        return False
    if not os.path.isdir(path):  # noqa: PTH112 (returns False if access is denied)
        return looks_like_checkpoint(path) and os.path.exists(path)  # noqa: PTH110 (as above)
    is_readable = os.access(path, os.R_OK | os.X_OK, effective_ids=True)
    return not is_readable or looks_like_checkpoint(path)


def _nested_saves(folder: Folder, progress: Progress, *, allow_pickle: bool) -> Iterator[AnyPath]:
    """Yield the checkpoints in folders below that a ``ModelCheckpoint`` of this folder saved.

    Each contains the callback's own list, which has its place in the folder.
    """
    try:
        for entry in islice(folder.entries_below(_MAX_DEPTH), MAX_ENTRIES):
            if not entry.is_checkpoint():
                continue
            progress.check()
            place = str(entry).removeprefix(str(folder))
            with (
                suppress(ElasticZeroError),
                closing(open_checkpoint(entry.path, allow_pickle=allow_pickle)) as source,
            ):
                state = source.module_state(0, source.manifest.world_size).client_state
                callbacks = state.get("callbacks")
                states = callbacks.values() if isinstance(callbacks, dict) else ()
                if any(_has_saved(callback, place) for callback in states):
                    yield entry.path
    except OSError as error:
        if error.errno not in NO_ENTRY:
            raise
        # Of a folder that is not accessible: other checkpoints remain.


def _has_saved(callback: object, place: str) -> bool:
    """Whether the state of a callback lists a checkpoint at a place below its ``dirpath``."""
    if not isinstance(callback, dict) or not callback.get("dirpath"):
        return False
    path = str(callback["dirpath"]).rstrip("/") + place
    return path == callback.get("best_model_path") or path in callback.get("best_k_models", ())


def _published_at(path: AnyPath) -> int:
    """Return when a checkpoint of any kind was published, in ns; 0 if it is gone.

    The manifest is written last; other software writes another file that marks its format.
    """
    folder = folder_at(path)
    local = folder.local
    if local is None or folder.is_checkpoint():
        return folder.published_ns()
    with suppress(OSError):
        marks = [local / mark for mark in MARKS if os.path.isfile(local / mark)]  # noqa: PTH113 (never raises)
        return max(file.stat().st_mtime_ns for file in marks or [local])
    return 0
