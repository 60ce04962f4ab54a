"""The files of a save, by their paths in the checkpoint. ``docs/format.md`` describes them.

The names are those of DeepSpeed 0.19.8 (``runtime/engine.py``), so that ``zero_to_fp32.py`` and
Lightning's converter find the files that they expect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_elastic_zero.core.manifest import MANIFEST_NAME, STAGE_WEIGHTS

TAG = "checkpoint"
"""The folder in a checkpoint: the tag that Lightning passes to DeepSpeed."""

LATEST = "latest"
RECOVERY_SCRIPT = "zero_to_fp32.py"
CLIENT_OBJECTS = f"{TAG}/client_objects.pt"

SEEN_PREFIX = ".seen-"
"""Prefix of the names of files that other ranks wait for during a save."""

MODEL_NAME = "mp_rank_00_model_states.pt"
"""The only model file of ZeRO-1/2."""


def optimizer_name(rank: int | str, prefix: str) -> str:
    """Return the name of a rank's optimizer shard."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def partitioned_model_name(rank: int | str) -> str:
    """Return the name of a rank's model file in ZeRO-3."""
    return f"zero_pp_rank_{rank}_{MODEL_NAME}"


def optimizer_file(rank: int | str, precision: str) -> str:
    """Return the path of a rank's optimizer shard in a checkpoint of this library."""
    return f"{TAG}/{optimizer_name(rank, 'bf16_' if precision == 'bf16' else '')}"


def model_file(rank: int | str, stage: int) -> str:
    """Return the path of a rank's model file; in ZeRO-1/2 only rank 0 writes one."""
    return f"{TAG}/{partitioned_model_name(rank) if stage == STAGE_WEIGHTS else MODEL_NAME}"


_RANK, _TOKEN = "{rank}", "{token}"
_PLACEHOLDERS = {"rank": r"\d+", "token": "[0-9A-Za-z-]+"}


@dataclass(frozen=True, slots=True)
class SaveFile:
    """A file of a save; a placeholder in its path stands for ranks or for a token."""

    path: str
    has_checksums: bool = False
    """It has a sidecar, and the manifest has its size."""
    is_copied_with_id: bool = False
    """Without checksums, but kept: in a copy of an object store also below the save's id."""

    @property
    def pattern(self) -> str:
        """Regular expression of the path."""
        escaped = re.escape(self.path)
        return re.sub(r"\\{(\w+)\\}", lambda found: _PLACEHOLDERS[found[1]], escaped)


SAVE_FILES = (
    SaveFile(MANIFEST_NAME),
    SaveFile(f"{SEEN_PREFIX}{_TOKEN}"),
    SaveFile(LATEST, is_copied_with_id=True),
    SaveFile(RECOVERY_SCRIPT, is_copied_with_id=True),
    SaveFile(optimizer_file(_RANK, "fp32"), has_checksums=True),
    SaveFile(optimizer_file(_RANK, "bf16"), has_checksums=True),
    SaveFile(model_file(_RANK, STAGE_WEIGHTS), has_checksums=True),
    SaveFile(model_file(_RANK, 0), has_checksums=True),
    SaveFile(CLIENT_OBJECTS, has_checksums=True),
)
"""Only these may be removed from a checkpoint that has no readable manifest."""
