"""Names of DeepSpeed's checkpoint files and entries, and stand-ins for its pickled classes.

The names are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``checkpoint/constants.py``), so
that ``zero_to_fp32.py`` and Lightning's converter find the files that they expect. The stand-ins
keep the saved fields and do nothing else, so that files are read without importing DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, Plain
from lightning_elastic_zero.storage.ownership import TAG

CLIENT_OBJECTS = f"{TAG}/client_objects.pt"

OURS = "elastic_zero"
"""The entry of every file with this library's own data."""
OPTIMIZER = "optimizer_state_dict"
STATES = "base_optimizer_state"
GROUP_STEP = "base_optimizer_state_step"
"""Elastic shards: the ``step`` of the parameter groups, if they have one."""
FP32_STAGE_3 = "fp32_flat_groups"
FP32_STAGE_1_2 = "single_partition_of_fp32_groups"
FROZEN = "frozen_param_fragments"


def fp32_key(stage: int) -> str:
    """Return the entry with the flat buffers of the masters."""
    return FP32_STAGE_3 if stage == STAGE_WEIGHTS else FP32_STAGE_1_2


def optimizer_file(rank: int, precision: str) -> str:
    """Return the name of a rank's optimizer shard, relative to the checkpoint."""
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{TAG}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(rank: int, stage: int) -> str:
    """Return the name of a rank's model file; in ZeRO-1/2 only rank 0 writes one."""
    if stage == STAGE_WEIGHTS:
        return f"{TAG}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    return f"{TAG}/mp_rank_00_model_states.pt"


class Fields:
    """The fields of an object, without its methods."""


class FragmentAddress(Fields):
    """The address of a fragment; not used, as it is wrong with round-robin gradients."""


class LossScaler(Fields):
    """A constant loss scale."""


class DynamicLossScaler(LossScaler):
    """A loss scale that follows overflows."""


class ZeroStage(int):
    """DeepSpeed's enumeration of the ZeRO stages."""


CLASS_STUBS: Mapping[str, type] = {
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
}
"""Stand-ins by the names of DeepSpeed's classes; other classes are refused by name."""


def stub_fields(scaler: object) -> dict[str, Plain]:
    """Return the class and plain fields of a loss scaler; empty if there is none."""
    if not isinstance(scaler, LossScaler):
        return {}
    fields = {k: v for k, v in vars(scaler).items() if isinstance(v, (bool, int, float))}
    return {"class": type(scaler).__name__, **fields}
