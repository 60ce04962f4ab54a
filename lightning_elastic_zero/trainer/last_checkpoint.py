"""The answer to ``ckpt_path="last"``, where Lightning's own would be wrong.

Lightning asks each ``ModelCheckpoint`` on each rank, before the ranks are connected, and takes the
newest answer by the times of files.

- On a disk, a crash between two renames can hide a checkpoint, which is restored first.
- In an object store, it would make a local path of the URL, find nothing there, and start from the
  beginning.
- On nodes, an empty node would find nothing, and files of a checkpoint may be lost with their
  nodes. So the ranks connect, and the answer is the newest complete one of all checkpoints on
  nodes and of the last ones elsewhere. If none is complete, the error names the missing nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_elastic_zero.checkpoint.newest import find_newest
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import (
    CheckpointNotFoundError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, is_on_nodes, parse_path

_FIND = "_find_last_checkpoints"


def answer_last(trainer: pl.Trainer, connect: Callable[[], Ranks]) -> None:
    """Replace the search of callbacks that Lightning would not answer correctly.

    ``connect`` returns the ranks; collective.
    """
    callbacks = [c for c in _saving(trainer) if c.dirpath and _searches_as_lightning(c)]
    on_nodes = [folder for folder in _folders(trainer) if is_on_nodes(parse_path(folder))]
    if on_nodes and not any(callback.dirpath for callback in _saving(trainer)):
        msg = (
            f"OnExceptionCheckpoint({on_nodes[0]!r}) saves on nodes, and the search for the last "
            "checkpoint there needs a ModelCheckpoint: add one with this dirpath, and save_top_k=0 "
            "if it shall save nothing"
        )
        raise UnsupportedError(msg)
    for callback in callbacks:
        vars(callback).pop(_FIND, None)  # of an earlier run
        folder_at(str(callback.dirpath)).repair()
        if on_nodes:
            vars(callback)[_FIND] = lambda _: set()
        elif _is_remote(callback):
            vars(callback)[_FIND] = partial(_last_in_store, callback)
    if on_nodes and callbacks:
        vars(callbacks[0])[_FIND] = partial(_newest_complete, callbacks, connect)


def is_found_as_last(trainer: pl.Trainer, path: str) -> bool:
    """Whether ``ckpt_path="last"`` finds a checkpoint, if it is the newest; for one rank."""
    with suppress(OSError, ElasticZeroError):  # of the store
        last_paths = {each for c in _saving(trainer) for each in _last_of(c, trainer)}
        return not last_paths.isdisjoint({path, f"{path}/{MANIFEST_NAME}"})  # the latter in a store
    return False


def _newest_complete(
    callbacks: Sequence[ModelCheckpoint], connect: Callable[[], Ranks], trainer: pl.Trainer
) -> set[str]:
    """Return the newest complete checkpoint of all callbacks; collective."""

    def last_in(folder: AnyPath, _: Progress) -> set[AnyPath]:
        if is_on_nodes(folder):  # The last one may be incomplete, and an older one complete.
            saved = {each.follow_links() for each in folder_at(folder).entries() if each.exists()}
            return {each.path for each in saved if not each.recorded().weights_only}
        here = [c for c in callbacks if parse_path(str(c.dirpath)) == folder]
        paths = {path for callback in here for path in _last_of(callback, trainer)}
        return {folder_at(path).follow_links().path for path in paths}

    if newest := find_newest(_folders(trainer), connect(), last_in):
        return {newest if folder_at(newest).local else f"{newest}/{MANIFEST_NAME}"}
    # Those of other software are not searched.
    return {path for c in callbacks if not _is_remote(c) for path in _last_of(c, trainer)}


def _last_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
    """Return the last checkpoints of a callback, as this process finds them."""
    if _is_remote(callback) and _searches_as_lightning(callback):
        return _last_in_store(callback, trainer)
    return type(callback)._find_last_checkpoints(callback, trainer)


def _last_in_store(callback: ModelCheckpoint, _: pl.Trainer) -> set[str]:
    """Return the manifests of the last checkpoints: Lightning asks for the time of an object.

    Behind links, which each end of an epoch makes again, also of an old checkpoint.
    """
    folder, name = folder_at(str(callback.dirpath)), re.escape(callback.CHECKPOINT_NAME_LAST)
    pattern = re.compile(rf"{name}(-\d+)?.*{re.escape(callback.FILE_EXTENSION)}")
    try:
        last = [entry for entry in folder.entries() if pattern.fullmatch(entry.path.name)]
        saved = (entry.follow_links() for entry in last if entry.exists())
        return {str(checkpoint.path / MANIFEST_NAME) for checkpoint in saved}
    except OSError as error:
        msg = f"{folder} cannot be listed ({error.strerror})"
        raise CheckpointNotFoundError(msg) from error


def _saving(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _folders(trainer: pl.Trainer) -> list[str]:
    callbacks = trainer.checkpoint_callbacks
    known = [c for c in callbacks if isinstance(c, (ModelCheckpoint, OnExceptionCheckpoint))]
    return list(dict.fromkeys(str(c.dirpath) for c in known if c.dirpath))


def _is_remote(callback: ModelCheckpoint) -> bool:
    return bool(callback.dirpath) and folder_at(str(callback.dirpath)).local is None


def _searches_as_lightning(callback: ModelCheckpoint) -> bool:
    return type(callback)._find_last_checkpoints is ModelCheckpoint._find_last_checkpoints
