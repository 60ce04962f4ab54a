"""Save a DeepSpeed ZeRO run on N devices, resume it on M, inside Lightning's Trainer.

Names are handed out lazily (PEP 562), because Lightning and DeepSpeed take seconds to import and
the command line needs neither. The import of a strategy registers its names
(``elastic_deepspeed``, ...) with Lightning or Fabric.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ElasticZeroError,
    RanksError,
    SaveError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from lightning_elastic_zero.api import (
        delete_checkpoint,
        load_checkpoint,
        newest_checkpoint,
        save_checkpoint,
    )
    from lightning_elastic_zero.checkpoint.types import CheckpointStats, LoadResult
    from lightning_elastic_zero.core.manifest import Manifest
    from lightning_elastic_zero.core.progress import Progress
    from lightning_elastic_zero.data_progress.batches import BatchPlan, plan_batches
    from lightning_elastic_zero.data_progress.sampler import ElasticSampler
    from lightning_elastic_zero.formats.dumps import describe_dumps
    from lightning_elastic_zero.integrations.fabric import ElasticDeepSpeedFabricStrategy
    from lightning_elastic_zero.integrations.huggingface import elastic, wrap_initialize
    from lightning_elastic_zero.integrations.ray import RayCheckpointReport
    from lightning_elastic_zero.selftest import run_selftest
    from lightning_elastic_zero.tools.conversion import convert_checkpoint
    from lightning_elastic_zero.tools.differences import diff_checkpoints
    from lightning_elastic_zero.tools.fingerprint import fingerprint_checkpoint
    from lightning_elastic_zero.tools.inspection import inspect_checkpoint
    from lightning_elastic_zero.tools.selection import ConvertOptions
    from lightning_elastic_zero.tools.verification import newest_sound_checkpoint, verify_checkpoint
    from lightning_elastic_zero.trainer.loaders import ResumesAtSample
    from lightning_elastic_zero.trainer.monitor import CheckpointMonitor
    from lightning_elastic_zero.trainer.preemption import PreemptionCheckpoint
    from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

    __version__: str

__all__ = [
    "BatchPlan",
    "CheckpointCorruptedError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointMonitor",
    "CheckpointNotFoundError",
    "CheckpointStats",
    "ConvertOptions",
    "ElasticDeepSpeedFabricStrategy",
    "ElasticDeepSpeedStrategy",
    "ElasticSampler",
    "ElasticZeroError",
    "LoadResult",
    "Manifest",
    "PreemptionCheckpoint",
    "Progress",
    "RanksError",
    "RayCheckpointReport",
    "ResumesAtSample",
    "SaveError",
    "UnsupportedError",
    "__version__",
    "convert_checkpoint",
    "delete_checkpoint",
    "describe_dumps",
    "diff_checkpoints",
    "elastic",
    "fingerprint_checkpoint",
    "inspect_checkpoint",
    "load_checkpoint",
    "newest_checkpoint",
    "newest_sound_checkpoint",
    "plan_batches",
    "run_selftest",
    "save_checkpoint",
    "verify_checkpoint",
    "wrap_initialize",
]

_MODULE_OF_NAME = {
    "BatchPlan": "lightning_elastic_zero.data_progress.batches",
    "CheckpointMonitor": "lightning_elastic_zero.trainer.monitor",
    "CheckpointStats": "lightning_elastic_zero.checkpoint.types",
    "ConvertOptions": "lightning_elastic_zero.tools.selection",
    "ElasticDeepSpeedFabricStrategy": "lightning_elastic_zero.integrations.fabric",
    "ElasticDeepSpeedStrategy": "lightning_elastic_zero.trainer.strategy",
    "ElasticSampler": "lightning_elastic_zero.data_progress.sampler",
    "LoadResult": "lightning_elastic_zero.checkpoint.types",
    "Manifest": "lightning_elastic_zero.core.manifest",
    "PreemptionCheckpoint": "lightning_elastic_zero.trainer.preemption",
    "Progress": "lightning_elastic_zero.core.progress",
    "RayCheckpointReport": "lightning_elastic_zero.integrations.ray",
    "ResumesAtSample": "lightning_elastic_zero.trainer.loaders",
    "convert_checkpoint": "lightning_elastic_zero.tools.conversion",
    "delete_checkpoint": "lightning_elastic_zero.api",
    "describe_dumps": "lightning_elastic_zero.formats.dumps",
    "diff_checkpoints": "lightning_elastic_zero.tools.differences",
    "elastic": "lightning_elastic_zero.integrations.huggingface",
    "fingerprint_checkpoint": "lightning_elastic_zero.tools.fingerprint",
    "inspect_checkpoint": "lightning_elastic_zero.tools.inspection",
    "load_checkpoint": "lightning_elastic_zero.api",
    "newest_checkpoint": "lightning_elastic_zero.api",
    "newest_sound_checkpoint": "lightning_elastic_zero.tools.verification",
    "plan_batches": "lightning_elastic_zero.data_progress.batches",
    "run_selftest": "lightning_elastic_zero.selftest",
    "save_checkpoint": "lightning_elastic_zero.api",
    "verify_checkpoint": "lightning_elastic_zero.tools.verification",
    "wrap_initialize": "lightning_elastic_zero.integrations.huggingface",
}


if not TYPE_CHECKING:  # Type checkers have the imports above, and so catch a misspelt name.

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name == "__version__":
            requirements = importlib.import_module("lightning_elastic_zero.core.requirements")
            value = requirements.own_version()
        elif name in _MODULE_OF_NAME:
            value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
        else:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})
