"""Each name of DeepSpeed's that is relied upon: what for; and the releases that have it.

Found in the sources of 0.16.0, 0.16.9, 0.17.0, 0.17.5, 0.18.4, 0.18.9, 0.19.0 and 0.19.8: what is
said of a table holds in each of them, from the construction of an engine to its ``destroy()``,
also between steps, within a window of micro-batches, and while ``offload_states()`` has put states
on the host. ``release_check`` asks for them at setup. A name that only some releases have is asked
for here, so that the rest of the engine need not know of releases.
``tests/house/test_deepspeed_names.py`` finds any that is used elsewhere and does not stand here.
Those that are private are used in ``deepspeed_internals`` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Purposes = Mapping[str, str]
"""Names, each with what this library needs it for: "to ..."."""

PRECISION = "know in which type forward computes"
CUTTING_GROUP = "know the ranks that a group is cut over"
COUNTED = "go on counting where the saved run was"
STEPS_INSIDE = "reach the optimizer that steps"
LINKS = "have DeepSpeed link parameters to restored states"
OFFLOADED_GRADIENTS = "drop offloaded gradients of a window that a load interrupts"
GRADIENTS = "drop the gradients of a window that a load interrupts"
MUON_TYPE = "restore Muon's momentum in the type of its stage"
OFFLOADED_WEIGHTS = "read weights that offload_states() has put on the host"
HOST_STATES = "know what offload_states() has put on the host"
SCALER = "go on with the loss scale"
GRAD_SCALER = "go on with the scale of torch's GradScaler"
LOSS_SCALE = "know by what the loss is scaled"
REPLACED = "let go of links to states that are replaced"
MUON_MEMORY = "know where ZeRO-3 keeps Muon's momentum"
SHARED_MEMORY = "start where DeepSpeed's shared-memory collectives do not compile"

ENGINE_NAMES: dict[str, str] = {
    "bfloat16_enabled": PRECISION,
    "curriculum_learning_enabled": "refuse a curriculum, whose sampler has a state of its own",
    "fp16_enabled": PRECISION,
    "global_rank": "know which pieces this rank has",
    "global_samples": COUNTED,
    "global_steps": COUNTED,
    "gradient_accumulation_steps": "go on at the start of a window of micro-batches",
    "has_moe_layers": "refuse experts that not every rank has",
    "lr_scheduler": "save and restore the schedule that DeepSpeed steps",
    "micro_steps": "go on at the start of a window of micro-batches",
    "module": "name the parameters and buffers",
    "mp_world_size": "refuse tensor parallelism",
    "optimizer": "reach masters and states",
    "random_ltd_enabled": "refuse random-LTD, whose scheduler has a state of its own",
    "seq_dp_world_size": "know how many ranks ZeRO cuts over",
    "set_gradient_accumulation_boundary": "end the last window of an epoch with a step",
    "skipped_steps": COUNTED,
    "train_batch_size": "record the global batch that the run was trained with",
    "zero_load_from_fp32_weights": "know whether masters are restored, or rounded to the weights",
    "zero_optimization_stage": "know how the state is cut",
    "zero_partial_offload": "know whether a second optimizer steps a part of the weights",
    "zero_quantized_nontrainable_weights": "refuse frozen weights that are integers",
}
"""Of ``DeepSpeedEngine``, since 0.16 or before."""

OPTIMIZER_NAMES: dict[str, dict[str, str]] = {
    "DeepSpeedZeroOptimizer": {
        "_hp_optimizer_states_linked": LINKS,
        "_lazy_init_hp_params_optimizer_state": LINKS,
        "_release_ipg_buffers": GRADIENTS,
        "averaged_gradients": GRADIENTS,
        "bit16_groups": "know the parameters of each group in the order that they were given in",
        "bit16_groups_flat": OFFLOADED_WEIGHTS,
        "cpu_offload": "know whether gradients and Muon's momentum are on the host",
        "dtype": MUON_TYPE,
        "gradient_accumulation_dtype": MUON_TYPE,
        "loss_scale": LOSS_SCALE,
        "loss_scaler": SCALER,
        "micro_step_id": GRADIENTS,
        "optimizer": STEPS_INSIDE,
        "parallel_partitioned_bit16_groups": "reach the weights of all ranks in a flat buffer",
        "params_in_partition": "know whose whole momenta Muon keeps on this rank",
        "partition_size": OFFLOADED_WEIGHTS,
        "real_dp_process_group": CUTTING_GROUP,
        "round_robin_bit16_groups": "know the order of the parameters in a flat buffer",
        "single_partition_of_fp32_groups": "reach this rank's masters",
        "use_grad_accum_attribute": MUON_TYPE,
        "zero_grad": GRADIENTS,
    },
    "BF16_Optimizer": {
        "_hp_optimizer_states_linked": LINKS,
        "_lazy_init_hp_params_optimizer_state": LINKS,
        "bf16_groups": "know the order of the parameters in a flat buffer",
        "bf16_partitioned_groups": "reach the weights of all ranks in a flat buffer",
        "fp32_groups_flat_partition": "reach this rank's masters",
        "optimizer": STEPS_INSIDE,
        "real_dp_process_group": CUTTING_GROUP,
        "using_real_optimizer": "know an engine that evaluates",
    },
    "FP16_Optimizer": {
        "fp16_groups": "know the order of the parameters in a flat buffer",
        "fp16_groups_flat": "reach the weights in a flat buffer",
        "fp32_groups_flat": "reach the masters",
        "loss_scale": LOSS_SCALE,
        "optimizer": STEPS_INSIDE,
        "zero_grad": GRADIENTS,
    },
    "FP16_UnfusedOptimizer": {
        "fp16_groups": "reach the weights",
        "fp32_groups": "reach the masters",
        "loss_scale": LOSS_SCALE,
        "optimizer": STEPS_INSIDE,
        "zero_grad": GRADIENTS,
    },
    "DeepSpeedZeroOptimizer_Stage3": {
        "_reassign_or_swap_out_partitioned_parameters": "write restored masters into the weights",
        "averaged_gradients": GRADIENTS,
        "checkpoint_event_prologue": "have gathered weights cut before they are read",
        "communication_data_type": MUON_TYPE,
        "fp16_groups": "know the order of the parameters in a sub-group",
        "fp16_partitioned_groups_flat": "reach this rank's weights",
        "fp32_partitioned_groups_flat": "reach this rank's masters",
        "grad_partitions_flat_buffer": GRADIENTS,
        "loss_scale": LOSS_SCALE,
        "loss_scaler": SCALER,
        "offload_optimizer": "know whether gradients are on the host",
        "offload_param": "know whether weights are on the host",
        "offloaded_states": HOST_STATES,
        "optimizer": STEPS_INSIDE,
        "params_in_nvme_and_cpu": "refuse weights in files",
        "persistent_parameters": "gather anew the weights that stay whole",
        "sub_group_to_group_id": "know the parameter group of a sub-group",
        "zero_grad": GRADIENTS,
    },
    "DeepSpeedZeRoOffload": {
        "partition_all_parameters": "have gathered weights cut before they are read",
    },
}
"""Of each optimizer wrapper, and of what stands in its place in a ZeRO-3 run without an optimizer,
since 0.16 or before."""

PARAMETER_NAMES: dict[str, str] = {
    "ds_id": "know what is swapped, and which weights are placeholders",
    "ds_numel": "know how many elements the whole parameter has",
    "ds_process_group": CUTTING_GROUP,
    "ds_secondary_tensor": "drop hpZ's copies of weights that are replaced",
    "ds_shape": "know the whole parameter's shape",
    "ds_tensor": "reach this rank's piece of a weight",
    "partition_numel": "know how many elements a rank's piece has",
}
"""Of a parameter that ZeRO-3 has cut up, since 0.16 or before."""

SWAPPER_NAMES: dict[str, str] = {
    "dtype": "know the type of what is in files",
    "purge_state": "forget the states in files before others are written; 0.16.4 brought it",
    "swap_folder": "receive state in files beside those",
    "swap_params_info": "find the files of a sub-group",
}
"""Of the optimizer swapper, where offload goes to NVMe: since 0.16.4, so that older releases are
refused there."""

OPTION_NAMES: dict[str, dict[str, str]] = {
    "swap_optimizer": {
        "_optimizer_states_and_gradient_swap_in": "write restored state to files",
        "_optimizer_states_and_gradient_swap_out": "write restored state to files",
        "_swappable_optimizer_subgroup": "know which sub-groups are in files",
        "fp16_partitioned_groups_flat_numel": "know how many elements a file holds",
        "optimizer_swapper": "find the files of a sub-group",
    },
    "backup_optimizer": {"subgroup_to_device": "know which optimizer steps a sub-group"},
    "cpu_offload": {
        "accumulated_grads_in_cpu": OFFLOADED_GRADIENTS,
        "reset_cpu_buffers": OFFLOADED_GRADIENTS,
    },
    "offload_optimizer": {"reset_cpu_buffers": OFFLOADED_GRADIENTS},
}
"""Of an optimizer wrapper that has, and does not leave empty, the name on the left."""

FILE_NAMES: dict[str, dict[str, str]] = {
    "a sub-group in files": {
        "swapped_gradients": "forget gradients on their way to files",
        "tensors": "find the files of a sub-group",
    },
    "a file of a sub-group": {
        "compute_tensor": "know which state a file holds",
        "swap_path": "find the files of a sub-group",
    },
}
"""Of what the swapper knows of the first sub-group that it has in files."""

PARTIAL_OFFLOAD_NAMES: dict[str, str] = {
    "backup_optimizer": "save what the second optimizer of partial offload holds",
}
"""Of ZeRO-3's wrapper, where ``offload_optimizer.ratio`` is below 1."""

RESIDENT_NAMES: dict[str, str] = {"lp_param_buffer": OFFLOADED_WEIGHTS}
"""Of ZeRO-3's wrapper without ``offload_param``: with it, there is no such buffer, and DeepSpeed
itself refuses ``offload_states()``."""

MUON_MEMORY_NAMES: dict[str, str] = {
    "muon_momentum_buffer_partitioned_groups_flat": "restore momentum that is kept in memory",
}
"""Of ZeRO-3's wrapper with Muon and ``save_muon_momentum_buffer_in_memory``, which 0.18.9 has."""

LINK_NAMES: dict[str, dict[str, str]] = {
    "a parameter of ZeRO-1/2": {"_hp_mapping": REPLACED},
    "a parameter's link to its master": {"optim_fragment": REPLACED},
}
"""Of a parameter that ZeRO-1/2 or BF16_Optimizer trains: None where another rank has it, and while
states are on the host. Of the link, where there is one: None until the optimizer has states."""

MODULE_NAMES: dict[str, str] = {"INITIAL_MICRO_STEP_ID": GRADIENTS}
"""Of the module of ZeRO-1/2's wrapper."""

LATER_NAMES: dict[str, dict[str, dict[str, str]]] = {
    "0.16.9": {"BF16_Optimizer": {"zero_grad": GRADIENTS}},
    "0.17.5": {"DeepSpeedEngine": {"zenflow": "refuse ZenFlow"}},
    "0.18.4": {
        "DeepSpeedEngine": {"torch_autocast_z0_gradscaler": GRAD_SCALER},
        "DeepSpeedZeroOptimizer": {
            "all_grad_tensors": GRADIENTS,
            "offloaded_states": HOST_STATES,
            "torch_autocast_gradscaler": GRAD_SCALER,
        },
        "DeepSpeedZeroOptimizer_Stage3": {"torch_autocast_gradscaler": GRAD_SCALER},
    },
    "0.18.9": {
        "BF16_Optimizer": {"torch_autocast_gradscaler": GRAD_SCALER},
        "FP16_Optimizer": {"loss_scale_config": SCALER},
        "FP16_UnfusedOptimizer": {"loss_scale_config": SCALER},
        "DeepSpeedZeroOptimizer_Stage3": {
            "save_muon_momentum_buffer_in_memory": MUON_MEMORY,
            "use_muon": MUON_MEMORY,
        },
    },
    "0.19.8": {
        "DeepSpeedEngine": {"_unmanaged_backward_count": GRADIENTS},
        "DeepSpeedZeroOptimizer": {
            "_muon_pending_momentum": "drop momentum that was staged for a step",
            "round_robin_bit16_padding": "know the padding that parameter_alignment puts in",
        },
        "DeepSpeedZeroOptimizer_Stage3": {"_offload_boundary_param_ids": OFFLOADED_GRADIENTS},
    },
}
"""By the first release, of those that were read, whose constructors always set them. Older ones do
without what they lack; this one and newer ones are refused without it. 0.17.5 sets torch's scalers
only with ``torch_autocast``."""

LATER_OPTION_NAMES: dict[str, dict[str, dict[str, str]]] = {
    "0.19.8": {"cpu_offload": {"_offload_accumulated_param_ids": OFFLOADED_GRADIENTS}},
}
"""As ``OPTION_NAMES``, by release."""

OLDER_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "BF16_Optimizer": ("zero_grad", {"clear_hp_grads": GRADIENTS}),
    "FP16_Optimizer": ("loss_scale_config", {"cur_scale": SCALER}),
    "FP16_UnfusedOptimizer": ("loss_scale_config", {"cur_scale": SCALER}),
}
"""Of a wrapper that lacks a later name, the one on the left: what stood in its place before."""

UNASKED: dict[str, str] = {
    "_apply_muon_updates_cpu_offload": "refuse what keeps offloaded momentum elsewhere",
    "losses": "drop the sum of a window's losses",
}
"""Not asked for. ``support`` refuses Muon with offload in ZeRO-1/2, and nothing else, by the first.
The second is a sum that older releases show in their logs: 0.19.8 has it no more than by name."""

OPS_NAMES: dict[str, str] = {"__compatible_ops__": SHARED_MEMORY}
"""Of ``deepspeed.ops``, on CPU ranks: since 0.19 a table that is made when it is asked for."""

ACCELERATOR_NAMES: dict[str, str] = {"create_op_builder": SHARED_MEMORY}
"""Of DeepSpeed's accelerator, on CPU ranks. An operator that it does not know is no error there: a
release without "ShareMemCommBuilder" builds none that could fail."""

BUILDER_NAMES: dict[str, str] = {"NAME": SHARED_MEMORY, "load": SHARED_MEMORY}
"""Of what builds that operator, where there is something."""


def parameter_paddings(optimizer: Any, group: int) -> tuple[int, ...]:  # noqa: ANN401 (untyped)
    """Return the elements of padding after each parameter of a ZeRO-1/2 group; empty without any.

    ``parameter_alignment`` came with 0.19.7; before it, parameters follow one another.
    """
    paddings = getattr(optimizer, "round_robin_bit16_padding", None)
    return tuple(paddings[group]) if paddings and any(paddings[group]) else ()


@dataclass(frozen=True, slots=True)
class LossScalerAccess:
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


def loss_scaler(optimizer: Any) -> LossScalerAccess | None:  # noqa: ANN401 (untyped library)
    """Return what scales the loss in a wrapper; None where nothing does.

    Stage 0 has a ``LossScaleConfig`` since 0.18.9 at the latest; in 0.18.4 its fields were the
    wrapper's own.
    """
    if (scaler := getattr(optimizer, "loss_scaler", None)) is not None:
        return LossScalerAccess(type(scaler).__name__, scaler, tuple(vars(scaler)))
    if type(optimizer).__name__ not in {"FP16_Optimizer", "FP16_UnfusedOptimizer"}:
        return None
    holder = getattr(optimizer, "loss_scale_config", optimizer)
    fields = tuple(name for name in SCALE_FIELDS if hasattr(holder, name))
    return LossScalerAccess("LossScaleConfig", holder, fields)


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
