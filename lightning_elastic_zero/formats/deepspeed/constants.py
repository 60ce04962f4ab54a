"""The names of DeepSpeed's checkpoint files and of the entries inside them, where we share them.

They are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``checkpoint/constants.py``), so that
``zero_to_fp32.py`` and Lightning's ``convert_zero_checkpoint_to_fp32_state_dict`` find what they
expect.
"""

from __future__ import annotations

from lightning_elastic_zero.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.storage.file_ownership import TAG

CLIENT_OBJECTS = f"{TAG}/client_objects.pt"

OURS = "elastic_zero"
"""The entry of every file that holds what is this library's own."""
OPTIMIZER = "optimizer_state_dict"
STATES = "base_optimizer_state"
GROUP_STEP = "base_optimizer_state_step"
"""Elastic shards: the ``step`` of the parameter groups, where they have one."""
FP32_STAGE_3 = "fp32_flat_groups"
FP32_STAGE_1_2 = "single_partition_of_fp32_groups"
FROZEN = "frozen_param_fragments"


def fp32_key(stage: int) -> str:
    """Return the entry that holds the masters' flat buffers."""
    return FP32_STAGE_3 if stage == STAGE_WEIGHTS else FP32_STAGE_1_2


def optimizer_file(rank: int, precision: str) -> str:
    """Return the name of a rank's optimizer shard, inside the checkpoint's directory."""
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{TAG}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(rank: int, stage: int) -> str:
    """Return the name of a rank's model file; in ZeRO-1/2 rank 0 alone writes one."""
    if stage == STAGE_WEIGHTS:
        return f"{TAG}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    return f"{TAG}/mp_rank_00_model_states.pt"
