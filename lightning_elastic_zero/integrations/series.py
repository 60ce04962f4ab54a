"""Folders that a loop numbers: ``checkpoint-10`` of a Trainer, ``checkpoint_3`` of accelerate.

The number defines their order, as for the loop itself. They differ in the number only: other
folders may be those of another engine with parameters of the same shapes.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, NamedTuple, TypeVar, cast

from lightning_elastic_zero.api import ElasticOptions
from lightning_elastic_zero.checkpoint.nodes import join_folder_of
from lightning_elastic_zero.checkpoint.types import io_progress
from lightning_elastic_zero.coordination.ranks import connect_ranks
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.errors import CheckpointNotFoundError
from lightning_elastic_zero.formats.newest import newest_intact, verify_share
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, parse_path

P = TypeVar("P", bound=AnyPath)

log = logging.getLogger(__name__)

OWN_SUFFIX = "-elastic"
"""Appended to a tag whose folder DeepSpeed itself has written."""


class NumberedName(NamedTuple):
    """A name with a number at its end, or before its suffix."""

    series: tuple[str, str]
    """The parts before and after the number."""
    number: int


def _numbered(name: str) -> NumberedName | None:
    """Return the parts of a name; None if it has no number."""
    parts = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
    return parts and NumberedName((parts[1], parts[3]), int(parts[2]))


def resume_folder(
    asked: AnyPath | None,
    series: AnyPath,
    checkpoints_of: Callable[[Any], Iterable[AnyPath]],
    options: ElasticOptions,
) -> str | None:
    """Return the folder to resume from, or, with ``fallback``, an older intact one. Collective.

    Args:
        asked: the folder that the user asked for; None: the newest of the series.
        series: the path of the loop's folders, without their number.
        checkpoints_of: checks the loop's own files in a folder, and returns its checkpoints, whose
            bytes are verified with ``fallback``; raises one of ``DAMAGE_ERRORS``.
        options: those of ``elastic``.

    Returns:
        The folder; None if no folder was asked for, and the series has none.

    Raises:
        CheckpointNotFoundError: none is intact.
    """

    def candidates() -> list[str]:
        if asked is None:
            return [str(path) for path in folders_of(series)]
        older = _older_folders(asked) if options.fallback else []
        return [str(path) for path in (asked, *older)]

    def verify(folder: str) -> None:
        checkpoints = [*checkpoints_of(parse_path(folder))]
        progress, pickle = io_progress("verifying", ranks), options.allow_pickle
        for path in checkpoints if options.fallback else ():
            verify_share(path, ranks.rank, ranks.world_size, progress, allow_pickle=pickle)

    call = f"resume from {asked or series.parent}"
    with closing(connect_ranks(options.timeouts(), "elastic-zero engine", call)) as ranks:
        join_folder_of(asked or series, ranks)
        folders = ranks.broadcast(call, candidates)
        search = newest_intact(folders, verify, ranks.run_all, call)
        reasons = "; ".join(f"{folder}: {why}" for folder, why in search.problems.items())
        if search.path is not None:
            if reasons and ranks.rank == 0:
                log.warning("Resuming from %s, because %s", search.path, reasons)
            return search.path
    if not folders:
        return None
    msg = (
        f"found no intact checkpoint to resume from: {reasons}. Resume from another folder, or "
        "begin without a checkpoint"
    )
    raise CheckpointNotFoundError(msg)


def folders_of(series: P) -> list[P]:
    """Return the folders of a series, given its path without the number; the newest first."""
    return _older_folders(cast("P", series.with_name(f"{series.name}{sys.maxsize}")))


def _older_folders(folder: P) -> list[P]:
    """Return the folders next to one whose names have a lower number, the newest first."""
    if (name := _numbered(folder.name)) is None:
        return []
    paths = (folder.with_name(e.path.name) for e in folder_at(folder).siblings() if _is_folder(e))
    names = ((_numbered(path.name), cast("P", path)) for path in paths)
    others = {other.number: path for other, path in names if other and other.series == name.series}
    return [others[number] for number in sorted(others, reverse=True) if number < name.number]


def _is_folder(entry: Folder) -> bool:
    return entry.exists() if entry.local is None else entry.local.is_dir()


def series_of(path: AnyPath, *, counts_steps: bool) -> Callable[[AnyPath, Manifest], bool]:
    """Return whether a checkpoint belongs to the same series of tags.

    Where the engine counts steps, the number must be the step: it may be the engine's number.
    """
    name = _numbered(path.name.removesuffix(OWN_SUFFIX))

    def is_in_series(other_path: AnyPath, manifest: Manifest) -> bool:
        other = _numbered(other_path.name.removesuffix(OWN_SUFFIX))
        if not (name and other and other.series == name.series):
            return False
        if counts_steps:
            return other.number == manifest.progress.global_steps
        return other.number <= name.number

    return is_in_series
