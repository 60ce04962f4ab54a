"""The newest complete checkpoint of several folders, without reading its data; and deletions."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from lightning_elastic_zero.checkpoint.nodes import join_folder
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import CheckpointCorruptedError, SaveError
from lightning_elastic_zero.formats.newest import checkpoints_in, manifest_of, newest_first
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.object_store import AnyPath, StorePath
from lightning_elastic_zero.storage.paths import parse_path

_MOST_NAMED = 3

log = logging.getLogger(__name__)


def find_newest(folders: Sequence[str | os.PathLike[str]], ranks: Ranks) -> str | None:
    """Return the path of the newest checkpoint whose files are all there; None if there is none.

    Newer ones with missing files are named in a warning.

    Raises:
        CheckpointCorruptedError: there are checkpoints, but files of all of them are missing.
        OSError: a folder cannot be listed.
    """
    for folder in folders:
        join_folder(folder, ranks)
    step = f"find the newest checkpoint in {format_names(list(map(str, folders)))}"
    return ranks.broadcast(step, lambda: _newest([*map(parse_path, folders)], ranks.progress))


def _newest(folders: Sequence[AnyPath], progress: Progress) -> str | None:
    """On rank 0: search."""
    steps: dict[AnyPath, int] = {}
    for folder in folders:
        for path in checkpoints_in(folder, progress):
            if folder_at(path).is_checkpoint():
                manifest = manifest_of(path)
                steps[path] = manifest.progress.global_steps if manifest else 0
            progress.check()
    incomplete: list[str] = []
    for path in newest_first(steps):
        if not (lacks := _lacks(path)):
            if incomplete:
                log.warning("%s Resume from %s.", " ".join(incomplete), path)
            return str(path)
        incomplete.append(f"{path} is incomplete: {lacks}.")
    if incomplete:
        remedy = "Start the nodes that have them again, or pass a folder of older checkpoints too."
        msg = f"no checkpoint is complete. {' '.join(incomplete)} {remedy}"
        raise CheckpointCorruptedError(msg)
    return None


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
    """Return which files of a checkpoint are missing; empty if it is complete."""
    folder = folder_at(path)
    recorded = folder.recorded()
    if recorded.problem:
        return recorded.problem
    expected = {name: size for name, size in recorded.sizes.items() if size is not None}
    missing = [name for name, size in folder.sizes(expected) if size != expected[name]]
    if not missing:
        return ""
    why = path.store.why_missing() if isinstance(path, StorePath) else ""
    named = format_names(missing, _MOST_NAMED)
    return f"{len(missing)} of its files are missing ({named}){f'; {why}' if why else ''}"
