"""Saving and loading of a live state: ``saving``, ``loading``, ``async_save``.

Both talk to the live engine through ``LiveState``, to the disk through ``formats`` and
``storage``, and to the other ranks through ``ranks``: a step that fails on one rank fails on all
of them, before anything is published and before anything live is changed.
"""

from __future__ import annotations

from lightning_elastic_zero.checkpoint.async_save import DRAIN_TIMEOUT_S, AsyncCheckpointer
from lightning_elastic_zero.checkpoint.directory_check import (
    TRIAL_BYTES,
    CheckedDirectory,
    check_directories,
    find_unseen,
)
from lightning_elastic_zero.checkpoint.engine_handle import EngineHandle
from lightning_elastic_zero.checkpoint.loading import load, load_engine
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.saving import save_engine
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LiveState,
    LoadOptions,
    LoadResult,
    SaveOptions,
    ShowBytes,
    show_nothing,
)

__all__ = [
    "DRAIN_TIMEOUT_S",
    "TRIAL_BYTES",
    "AsyncCheckpointer",
    "CheckedDirectory",
    "CheckpointManager",
    "CheckpointStats",
    "EngineHandle",
    "LiveState",
    "LoadOptions",
    "LoadResult",
    "SaveOptions",
    "ShowBytes",
    "check_directories",
    "find_unseen",
    "load",
    "load_engine",
    "save_engine",
    "show_nothing",
]
