"""The files of a save, by their paths in the checkpoint, and the entries in these files.

The names are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``checkpoint/constants.py``), so
that ``zero_to_fp32.py`` and Lightning's converter find what they expect. ``docs/format.md``
describes all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from lightning_elastic_zero.core.manifest import MANIFEST_NAME, STAGE_WEIGHTS

TAG = "checkpoint"
"""The folder in a checkpoint: the tag that Lightning passes to DeepSpeed."""

LATEST = "latest"
RECOVERY_SCRIPT = "zero_to_fp32.py"
CLIENT_OBJECTS = f"{TAG}/client_objects.pt"

SAVE_ID = re.compile("[0-9a-f]{32}")
"""The folder of a save's files in an object store, on nodes, and in a copy on a disk."""

SEEN_PREFIX = ".seen-"
"""Prefix of the names of files that other ranks wait for during a save."""

OURS = "elastic_zero"
"""The entry of every file with this library's own data."""
OPTIMIZER = "optimizer_state_dict"
STATES = "base_optimizer_state"
GROUP_STEP = "base_optimizer_state_step"
"""Elastic shards: the ``step`` of the parameter groups, if they have one."""
FP32_STAGE_3 = "fp32_flat_groups"
FP32_STAGE_1_2 = "single_partition_of_fp32_groups"
FROZEN = "frozen_param_fragments"


def model_name(tensor_rank: int | str = 0) -> str:
    """Return the name of a tensor rank's only model file in ZeRO-1/2."""
    return f"mp_rank_{tensor_rank:0>2}_model_states.pt"


MODEL_NAME = model_name()
"""The only model file of ZeRO-1/2 without tensor parallelism."""


def optimizer_name(rank: int | str, prefix: str, tensor_rank: int | str = 0) -> str:
    """Return the name of a data rank's optimizer shard."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{tensor_rank:0>2}_optim_states.pt"


def partitioned_model_name(rank: int | str, tensor_rank: int | str = 0) -> str:
    """Return the name of a data rank's model file in ZeRO-3."""
    return f"zero_pp_rank_{rank}_{model_name(tensor_rank)}"


def optimizer_file(rank: int | str, precision: str, tensor_rank: int | str = 0) -> str:
    """Return the path of a data rank's optimizer shard in a checkpoint of this library."""
    return f"{TAG}/{optimizer_name(rank, 'bf16_' if precision == 'bf16' else '', tensor_rank)}"


def model_file(rank: int | str, stage: int, tensor_rank: int | str = 0) -> str:
    """Return the path of a data rank's model file; in ZeRO-1/2 only data rank 0 writes one."""
    partitioned = stage == STAGE_WEIGHTS
    name = partitioned_model_name(rank, tensor_rank) if partitioned else model_name(tensor_rank)
    return f"{TAG}/{name}"


def tensor_rank_of(name: str) -> int:
    """Return the tensor rank that wrote a file; rank 0 wrote those that name none."""
    named = re.search(r"mp_rank_(\d+)_[a-z_]+\.pt$", name)
    return int(named[1]) if named else 0


_RANK, _TENSOR_RANK, _TOKEN = "{rank}", "{tensor_rank}", "{token}"
_PLACEHOLDERS = {"rank": r"\d+", "tensor_rank": r"\d\d+", "token": "[0-9A-Za-z-]+"}


@dataclass(frozen=True, slots=True)
class SaveFile:
    """A file of a save; a placeholder in its path stands for ranks or for a token."""

    path: str
    has_checksums: bool = False
    """It has a sidecar, and the manifest has its size."""
    is_unlisted: bool = False
    """Part of a published checkpoint, with any size, although the manifest does not list it. In a
    copy of an object store it is below the save's id."""

    @property
    def pattern(self) -> str:
        """Regular expression of the path."""
        escaped = re.escape(self.path)
        return re.sub(r"\\{(\w+)\\}", lambda found: _PLACEHOLDERS[found[1]], escaped)


SAVE_FILES = (
    SaveFile(MANIFEST_NAME),
    SaveFile(f"{SEEN_PREFIX}{_TOKEN}"),
    SaveFile(LATEST, is_unlisted=True),
    SaveFile(RECOVERY_SCRIPT, is_unlisted=True),
    SaveFile(optimizer_file(_RANK, "fp32", _TENSOR_RANK), has_checksums=True),
    SaveFile(optimizer_file(_RANK, "bf16", _TENSOR_RANK), has_checksums=True),
    SaveFile(model_file(_RANK, STAGE_WEIGHTS, _TENSOR_RANK), has_checksums=True),
    SaveFile(model_file(_RANK, 0, _TENSOR_RANK), has_checksums=True),
    SaveFile(CLIENT_OBJECTS, has_checksums=True),
)
"""All files that a save writes. Without a readable manifest, only these may be removed.

A published checkpoint on a disk consists of the manifest, the files that it lists, and those that
are ``is_unlisted``. With any other file it is neither replaced nor deleted.
"""


def fp32_key(stage: int) -> str:
    """Return the entry with the flat buffers of the masters."""
    return FP32_STAGE_3 if stage == STAGE_WEIGHTS else FP32_STAGE_1_2


def recovery_script() -> Path | None:
    """Return DeepSpeed's ``zero_to_fp32.py``, which checkpoints include; None if not found."""
    spec = util.find_spec("deepspeed")
    script = Path((spec and spec.origin) or "").parent / "utils" / "zero_to_fp32.py"
    return script if spec and script.is_file() else None
