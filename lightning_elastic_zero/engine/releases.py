"""Each name of DeepSpeed's that is relied upon, and the releases that have it.

Read in 0.16.0, 0.16.9, 0.17.6, 0.18.9, 0.19.0 and 0.19.8. A name that only some of them have is
asked for here, so that the rest of the engine need not know of releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_elastic_zero.requirements import DEEPSPEED, missing_names

ENGINE_NAMES = (
    "bfloat16_enabled",
    "curriculum_learning_enabled",
    "fp16_enabled",
    "global_rank",
    "global_samples",
    "global_steps",
    "gradient_accumulation_steps",
    "has_moe_layers",
    "lr_scheduler",
    "micro_steps",
    "module",
    "mp_world_size",
    "optimizer",
    "random_ltd_enabled",
    "seq_dp_world_size",
    "set_gradient_accumulation_boundary",
    "skipped_steps",
    "train_batch_size",
    "zero_load_from_fp32_weights",
    "zero_optimization_stage",
    "zero_quantized_nontrainable_weights",
)
"""Of ``DeepSpeedEngine``, since 0.16 or before."""

OPTIMIZER_NAMES = {
    "DeepSpeedZeroOptimizer": (
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
        "bit16_groups",
        "optimizer",
        "parallel_partitioned_bit16_groups",
        "params_in_partition",
        "real_dp_process_group",
        "round_robin_bit16_groups",
        "single_partition_of_fp32_groups",
    ),
    "BF16_Optimizer": (
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
        "bf16_groups",
        "bf16_partitioned_groups",
        "fp32_groups_flat_partition",
        "optimizer",
        "real_dp_process_group",
    ),
    "FP16_Optimizer": ("fp16_groups", "fp16_groups_flat", "fp32_groups_flat", "optimizer"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups", "optimizer"),
    "DeepSpeedZeroOptimizer_Stage3": (
        "_reassign_or_swap_out_partitioned_parameters",
        "checkpoint_event_prologue",
        "fp16_groups",
        "fp16_partitioned_groups_flat",
        "fp32_partitioned_groups_flat",
        "optimizer",
        "persistent_parameters",
        "sub_group_to_group_id",
    ),
}
"""Of each optimizer wrapper, since 0.16 or before."""

PARAMETER_NAMES = (
    "ds_id",
    "ds_numel",
    "ds_process_group",
    "ds_shape",
    "ds_tensor",
    "partition_numel",
)
"""Of a parameter that ZeRO-3 has cut up, since 0.16 or before."""

SWAPPER_NAMES = (
    "dtype",
    "purge_state",
    "swap_folder",
    "swap_params_info",
)
"""Of the optimizer swapper, where offload goes to NVMe."""

OPTION_NAMES = {
    "swap_optimizer": (
        "_optimizer_states_and_gradient_swap_in",
        "_optimizer_states_and_gradient_swap_out",
        "_swappable_optimizer_subgroup",
        "fp16_partitioned_groups_flat_numel",
        "optimizer_swapper",
    ),
    "backup_optimizer": ("subgroup_to_device",),
}
"""Of an optimizer wrapper that has, and does not leave empty, the name on the left."""


def check_names(engine: Any, wrapper: str, found: str) -> Iterator[str]:  # noqa: ANN401
    """Yield what the installed release of DeepSpeed lacks of what is relied upon.

    Args:
        engine: a live engine.
        wrapper: class name of its optimizer wrapper; empty without one.
        found: the installed release.
    """
    checked: list[tuple[str, Any, tuple[str, ...]]] = [
        (type(engine).__name__, engine, ENGINE_NAMES)
    ]
    if wrapper in OPTIMIZER_NAMES:
        checked.append((wrapper, engine.optimizer, OPTIMIZER_NAMES[wrapper]))
        for option, names in OPTION_NAMES.items():
            if getattr(engine.optimizer, option, None):
                checked.append((wrapper, engine.optimizer, names))
    if swapper := getattr(engine.optimizer, "optimizer_swapper", None):
        checked.append((type(swapper).__name__, swapper, SWAPPER_NAMES))
    partitioned = next((p for p in engine.module.parameters() if hasattr(p, "ds_id")), None)
    if partitioned is not None:
        checked.append(("a partitioned parameter", partitioned, PARAMETER_NAMES))
    for owner, live, names in checked:
        if sentence := DEEPSPEED.missing_names_message(found, owner, missing_names(live, names)):
            yield sentence


def parameter_paddings(optimizer: Any, group: int) -> tuple[int, ...]:  # noqa: ANN401 (untyped)
    """Return the elements of padding after each parameter of a ZeRO-1/2 group; empty without any.

    ``parameter_alignment`` came with 0.19.7; before it, parameters follow one another.
    """
    paddings = getattr(optimizer, "round_robin_bit16_padding", None)
    return tuple(paddings[group]) if paddings and any(paddings[group]) else ()


@dataclass(frozen=True, slots=True)
class LossScaler:
    """What scales the loss in a wrapper of DeepSpeed's."""

    name: str
    """Name of its class."""
    holder: Any
    """Whose attributes its fields are."""
    fields: tuple[str, ...]
    """Their names."""


SCALE_FIELDS = (
    "cur_iter",
    "cur_scale",
    "dynamic_loss_scale",
    "last_overflow_iter",
    "min_loss_scale",
    "scale_factor",
    "scale_window",
)
"""Of stage 0's scaler."""


def loss_scaler(optimizer: Any) -> LossScaler | None:  # noqa: ANN401 (untyped library)
    """Return what scales the loss in a wrapper; None where nothing does.

    Stage 0 has a ``LossScaleConfig`` since 0.18; before, its fields were the wrapper's own.
    """
    if (scaler := getattr(optimizer, "loss_scaler", None)) is not None:
        return LossScaler(type(scaler).__name__, scaler, tuple(vars(scaler)))
    if type(optimizer).__name__ not in {"FP16_Optimizer", "FP16_UnfusedOptimizer"}:
        return None
    holder = getattr(optimizer, "loss_scale_config", optimizer)
    fields = tuple(name for name in SCALE_FIELDS if hasattr(holder, name))
    return LossScaler("LossScaleConfig", holder, fields)


def zero_grad(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Drop the gradients of a wrapper's parameters.

    ``BF16_Optimizer`` got ``zero_grad`` after 0.16; before, the engine cleared its fp32 gradients.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.zero_grad()  # In stage 0: those of DeepSpeed's own take no argument.
    elif hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad(set_to_none=True)
    else:
        optimizer.clear_hp_grads()
