"""The newest complete checkpoint of a run's folders, found by all ranks.

Folders on nodes may have lost files or all checkpoints with their nodes, and a warning says which.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence

from lightning_elastic_zero.checkpoint.nodes import hosts_of, join_folder
from lightning_elastic_zero.coordination.launchers import was_restarted
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.formats.newest import (
    check_complete,
    checkpoints_in,
    manifest_of,
    newest_first,
    newest_intact,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, parse_path

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
    in_order = sorted(newest_first(steps), key=weights_only.__contains__)
    search = newest_intact(map(str, in_order), lambda path: check_complete(parse_path(path)))
    incomplete = [f"{problem}." for problem in search.problems.values()]
    if search.path is None and incomplete:
        remedy = (
            "Start the nodes that have them again, or pass a folder of older checkpoints too. To "
            "start at step 0, remove their folders by hand (of node:// on each node)."
        )
        msg = f"no checkpoint is complete. {' '.join(incomplete)} {remedy}"
        raise CheckpointCorruptedError(msg)
    if search.path is not None and (worse := incomplete + _empty_nodes(empty)):
        log.warning("%s Resume from %s.", " ".join(worse), search.path)
    return search.path
