"""Save and load, told as two short stories: ``saving`` and ``loading``; ``background`` saves too.

Both talk to the live engine through ``LiveState``, to the disk through ``formats`` and
``storage``, and to the other ranks through ``ranks``: a step that fails on one rank fails on all
of them, before anything is published and before anything live is changed.
"""

from __future__ import annotations

from lightning_elastic_zero.checkpoint.background import PATIENCE_S, BackgroundWriter
from lightning_elastic_zero.checkpoint.loading import load
from lightning_elastic_zero.checkpoint.saving import save
from lightning_elastic_zero.checkpoint.words import (
    CheckpointFigures,
    LiveState,
    Loaded,
    LoadOptions,
    SaveOptions,
)

__all__ = [
    "PATIENCE_S",
    "BackgroundWriter",
    "CheckpointFigures",
    "LiveState",
    "LoadOptions",
    "Loaded",
    "SaveOptions",
    "load",
    "save",
]
