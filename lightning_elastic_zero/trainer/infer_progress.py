"""How far a run is that another program saved: read from what it counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_elastic_zero.data_progress import DataProgress, guess_accumulation, read_position
from lightning_elastic_zero.manifest import Manifest


def infer_record(loops: Mapping[str, Any], manifest: Manifest, global_step: int) -> DataProgress:
    """Make a record from the counters of a checkpoint of another writer's."""
    progress = manifest.progress
    # DeepSpeed's own config says it; counters cannot where epochs end within a window.
    told = progress.gradient_accumulation_steps
    accumulate = told if told > 1 else guess_accumulation(loops)
    position = read_position(loops, accumulate, batches=float("inf"), validating=True)
    return DataProgress(
        position,
        global_step=global_step,
        global_batch_size=progress.global_batch_size,
        accumulate=accumulate,
        world_size=manifest.world_size,
    )
