"""How far a run is that another program saved: read from what it counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.progress import Record, accumulation_of, position_of


def guessed_record(loops: Mapping[str, Any], manifest: Manifest, global_step: int) -> Record:
    """Make a record from the counters of a checkpoint of another writer's."""
    progress = manifest.progress
    # DeepSpeed's own config says it; counters cannot where epochs end within a window.
    told = progress.gradient_accumulation_steps
    accumulate = told if told > 1 else accumulation_of(loops)
    position = position_of(loops, accumulate, batches=float("inf"), validating=True)
    return Record(
        position,
        global_step=global_step,
        global_batch_size=progress.global_batch_size,
        accumulate=accumulate,
        world_size=manifest.world_size,
    )
