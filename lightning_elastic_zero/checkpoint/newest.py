"""The newest complete checkpoint of several folders, by the sizes of its files; and deletions.

``formats.newest`` lists the candidates, and verifies their data where a damaged one is replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence

from lightning_elastic_zero.checkpoint.nodes import hosts_of, join_folder
from lightning_elastic_zero.coordination.launchers import was_restarted
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    SaveError,
)
from lightning_elastic_zero.formats.newest import checkpoints_in, manifest_of, newest_first
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, StorePath, parse_path

_MOST_NAMED = 3

log = logging.getLogger(__name__)


def find_newest(
    folders: Sequence[str | os.PathLike[str]],
    ranks: Ranks,
    candidates: Callable[[AnyPath, Progress], Iterable[AnyPath]] = checkpoints_in,
) -> str | None:
    """Return the path of the newest checkpoint whose files are all there; None if there is none.

    One of weights alone is taken only if no other is complete.

    ``candidates`` returns those of a folder, behind links; called on rank 0.

    A warning names newer ones with missing files or a damaged manifest. It also names nodes on
    which there is none although the job was restarted or another folder has one: their memory was
    lost.

    Raises:
        CheckpointCorruptedError: there are checkpoints, but none of them is complete.
        OSError: a folder cannot be listed.
    """
    for folder in folders:
        join_folder(folder, ranks)
    paths = [*map(parse_path, folders)]
    step = f"find the newest checkpoint in {format_names(list(map(str, folders)))}"
    newest = ranks.broadcast(step, lambda: _newest(paths, candidates, ranks.progress))
    # The agent of a node that replaces a lost one counts from zero, so all ranks are asked.
    restarted = newest is None and any(ranks.all_gather(f"{step}: restarted", was_restarted))
    if restarted and ranks.rank == 0 and (empty := _empty_nodes(paths)):
        log.warning("%s The job was restarted, and no checkpoint was found.", " ".join(empty))
    return newest


def _empty_nodes(folders: Sequence[AnyPath]) -> list[str]:
    """Return a sentence for each of these folders that is on nodes."""
    hosts = {folder: hosts_of(folder) for folder in folders}
    return [
        f"{folder}: none of the nodes here ({format_names(names)}) has a checkpoint."
        for folder, names in hosts.items()
        if names
    ]


def _newest(
    folders: Sequence[AnyPath],
    candidates: Callable[[AnyPath, Progress], Iterable[AnyPath]],
    progress: Progress,
) -> str | None:
    """On rank 0: search."""
    steps: dict[AnyPath, int] = {}
    weights_only: set[AnyPath] = set()  # They can be resumed only without optimizer state.
    empty: list[AnyPath] = []
    for folder in folders:
        before = len(steps)
        for path in candidates(folder, progress):
            found = folder_at(path)
            if found.is_checkpoint() or found.has_damaged_manifest():
                manifest = manifest_of(path)
                steps[path] = manifest.progress.global_steps if manifest else 0
                if manifest and manifest.weights_only:
                    weights_only.add(path)
            progress.check()
        if len(steps) == before:
            empty.append(folder)
    incomplete: list[str] = []
    for path in sorted(newest_first(steps), key=weights_only.__contains__):
        if not (lacks := _lacks(path)):
            if worse := incomplete + _empty_nodes(empty):
                log.warning("%s Resume from %s.", " ".join(worse), path)
            return str(path)
        incomplete.append(f"{path} is incomplete: {lacks}.")
    if incomplete:
        remedy = (
            "Start the nodes that have them again, or pass a folder of older checkpoints too. To "
            "start at step 0, remove their folders by hand (of node:// on each node)."
        )
        msg = f"no checkpoint is complete. {' '.join(incomplete)} {remedy}"
        raise CheckpointCorruptedError(msg)
    return None


def check_complete(path: AnyPath) -> None:
    """Refuse a checkpoint with missing files, or without a manifest, without reading its data.

    Raises:
        CheckpointNotFoundError: the path has no checkpoint.
        CheckpointCorruptedError: it has lost files.
    """
    if not folder_at(path).exists():
        msg = f"{path} has no checkpoint"
        raise CheckpointNotFoundError(msg)
    if lacks := _lacks(path):
        msg = f"{path} is incomplete: {lacks}"
        raise CheckpointCorruptedError(msg)


def delete_at(path: str | os.PathLike[str], progress: Progress) -> None:
    """On rank 0: delete a checkpoint or a link.

    Raises:
        SaveError: it is neither, or could not be deleted.
    """
    try:
        why = folder_at(path).delete(progress=progress)
    except OSError as error:
        why = f"could not be renamed ({error.strerror or error})"
    if why:
        msg = f"{os.fspath(path)} was not deleted: it {why}."
        raise SaveError(msg)


def _lacks(path: AnyPath) -> str:
    """Return which files of a checkpoint are missing or damaged; empty if it is complete."""
    folder = folder_at(path)
    if folder.has_damaged_manifest():
        return f"its {MANIFEST_NAME} is damaged"
    recorded = folder.recorded()
    if recorded.problem:
        return recorded.problem
    if not (missing := list(folder.lacking(recorded))):
        return ""
    why = path.store.why_missing() if isinstance(path, StorePath) else ""
    named = format_names(missing, _MOST_NAMED)
    return f"{len(missing)} of its files are missing ({named}){f'; {why}' if why else ''}"
