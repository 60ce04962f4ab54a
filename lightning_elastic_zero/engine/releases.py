"""Each name of DeepSpeed's that is relied upon: what for; and the releases that have it.

Found in the sources of 0.16.0, 0.16.9, 0.17.0, 0.17.5, 0.18.4, 0.18.9, 0.19.0 and 0.19.8, but for
``NEWEST_NAMES``, ``SOMETIMES`` and for ``purge_state``, which 0.16.4 brought. A name that only some
of them have is asked for here, so that the rest of the engine need not know of releases.
``tests/house/test_deepspeed_names.py`` finds any that is used elsewhere and does not stand here.
Those that are private are used in ``deepspeed_internals`` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.requirements import DEEPSPEED, missing_names

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
        "micro_step_id": GRADIENTS,
        "optimizer": STEPS_INSIDE,
        "parallel_partitioned_bit16_groups": "reach the weights of all ranks in a flat buffer",
        "params_in_partition": "know whose whole momenta Muon keeps on this rank",
        "partition_size": OFFLOADED_WEIGHTS,
        "real_dp_process_group": CUTTING_GROUP,
        "round_robin_bit16_groups": "know the order of the parameters in a flat buffer",
        "single_partition_of_fp32_groups": "reach this rank's masters",
    },
    "BF16_Optimizer": {
        "_hp_optimizer_states_linked": LINKS,
        "_lazy_init_hp_params_optimizer_state": LINKS,
        "bf16_groups": "know the order of the parameters in a flat buffer",
        "bf16_partitioned_groups": "reach the weights of all ranks in a flat buffer",
        "fp32_groups_flat_partition": "reach this rank's masters",
        "optimizer": STEPS_INSIDE,
        "real_dp_process_group": CUTTING_GROUP,
    },
    "FP16_Optimizer": {
        "fp16_groups": "know the order of the parameters in a flat buffer",
        "fp16_groups_flat": "reach the weights in a flat buffer",
        "fp32_groups_flat": "reach the masters",
        "optimizer": STEPS_INSIDE,
    },
    "FP16_UnfusedOptimizer": {
        "fp16_groups": "reach the weights",
        "fp32_groups": "reach the masters",
        "optimizer": STEPS_INSIDE,
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
        "offload_optimizer": "know whether gradients are on the host",
        "optimizer": STEPS_INSIDE,
        "persistent_parameters": "gather anew the weights that stay whole",
        "sub_group_to_group_id": "know the parameter group of a sub-group",
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

SCALER = "go on with the loss scale"
GRAD_SCALER = "go on with the scale of torch's GradScaler"
HOST_STATES = "know what offload_states() has put on the host"
STAGED = {
    "loss_scaler": SCALER,
    "offloaded_states": HOST_STATES,
    "torch_autocast_gradscaler": GRAD_SCALER,
    "zero_grad": GRADIENTS,
}
IN_STAGE_0 = {"loss_scale_config": SCALER, "zero_grad": GRADIENTS}

NEWEST_NAMES: dict[str, dict[str, str]] = {
    "DeepSpeedEngine": {
        "_unmanaged_backward_count": GRADIENTS,
        "losses": GRADIENTS,
        "torch_autocast_z0_gradscaler": GRAD_SCALER,
        "zenflow": "refuse ZenFlow",
    },
    "DeepSpeedZeroOptimizer": {
        **STAGED,
        "_apply_muon_updates_cpu_offload": "refuse what keeps offloaded momentum elsewhere",
        "_muon_pending_momentum": "drop momentum that was staged for a step",
        "all_grad_tensors": GRADIENTS,
        "round_robin_bit16_padding": "know the padding that parameter_alignment puts in",
        "use_grad_accum_attribute": MUON_TYPE,
    },
    "BF16_Optimizer": {
        "torch_autocast_gradscaler": GRAD_SCALER,
        "using_real_optimizer": "know an engine that evaluates",
        "zero_grad": GRADIENTS,
    },
    "FP16_Optimizer": IN_STAGE_0,
    "FP16_UnfusedOptimizer": dict(IN_STAGE_0),
    "DeepSpeedZeroOptimizer_Stage3": {
        **STAGED,
        "_offload_boundary_param_ids": OFFLOADED_GRADIENTS,
        "params_in_nvme_and_cpu": "refuse weights in files",
    },
    "a partitioned parameter": {
        "ds_secondary_tensor": "drop hpZ's copies of weights that are replaced",
    },
}
"""What came between 0.16 and the newest release that was tested. Older ones do without what they
lack, and were read and run; one as new as that, or newer, is refused where it lacks it."""

SOMETIMES: dict[str, str] = {
    "_hp_mapping": "let go of links to states that are replaced",
    "_offload_accumulated_param_ids": OFFLOADED_GRADIENTS,
    "clear_hp_grads": GRADIENTS,
    "loss_scale": "know by what the loss is scaled",
    "lp_param_buffer": OFFLOADED_WEIGHTS,
    "muon_momentum_buffer_partitioned_groups_flat": "restore momentum that is kept in memory",
    "optim_fragment": "let go of links to states that are replaced",
}
"""Only some configurations have them, or some moments (an engine whose weights
``offload_states()`` has put on the host has no ``lp_param_buffer`` before they are back), or
``clear_hp_grads`` only old releases: not asked for as the others are."""

PARTIAL_OFFLOAD_NAMES: dict[str, str] = {
    "backup_optimizer": "save what the second optimizer of partial offload holds",
}
"""Of ZeRO-3's wrapper, where ``offload_optimizer.ratio`` is below 1."""

OPS_NAMES: dict[str, str] = {
    "__compatible_ops__": "start where DeepSpeed's shared-memory collectives do not compile",
}
"""Of ``deepspeed.ops``, on CPU ranks."""


def check_names(engine: Any, wrapper: str, found: str) -> Iterator[str]:  # noqa: ANN401
    """Yield what the installed release of DeepSpeed lacks of what is relied upon.

    Args:
        engine: a live engine.
        wrapper: class name of its optimizer wrapper; empty without one.
        found: the installed release.
    """
    for owner, live, names in _owners(engine, wrapper, found):
        lost = [f"{name} (to {names[name]})" for name in missing_names(live, names)]
        if sentence := DEEPSPEED.missing_names_message(found, owner, lost):
            yield sentence


def check_ops(ops: object, found: str) -> None:
    """Refuse a release whose table of operators cannot be told what does not compile.

    Args:
        ops: ``deepspeed.ops``.
        found: the installed release.

    Raises:
        UnsupportedError: it lacks a name of ``OPS_NAMES``.
    """
    lost = [f"{name} (to {OPS_NAMES[name]})" for name in missing_names(ops, OPS_NAMES)]
    if sentence := DEEPSPEED.missing_names_message(found, "deepspeed.ops", lost):
        raise UnsupportedError(sentence)


def _owners(
    engine: Any,  # noqa: ANN401 (untyped library)
    wrapper: str,
    found: str,
) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield what is looked at: how it is called, the live object, and the names it is to have."""
    optimizer = getattr(engine, "optimizer", None)
    yield type(engine).__name__, engine, ENGINE_NAMES
    yield from _of_optimizer(engine, wrapper)
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from _of_swapper(swapper)
    module = getattr(engine, "module", None)
    parameters = module.parameters() if module is not None else ()
    cut = next((p for p in parameters if hasattr(p, "ds_id")), None)
    if cut is not None:
        yield "a partitioned parameter", cut, PARAMETER_NAMES
    if DEEPSPEED.is_as_new_as_tested(found):
        live = {"DeepSpeedEngine": engine, wrapper: optimizer, "a partitioned parameter": cut}
        for owner, held in live.items():
            if held is not None and owner in NEWEST_NAMES:
                yield owner, held, NEWEST_NAMES[owner]


def _of_optimizer(engine: Any, wrapper: str) -> Iterator[tuple[str, Any, Purposes]]:  # noqa: ANN401
    """Yield the optimizer wrapper, or what stands in its place, with the names it is to have."""
    optimizer = getattr(engine, "optimizer", None)
    kind = wrapper or type(optimizer).__name__
    if kind not in OPTIMIZER_NAMES or not (wrapper or kind == "DeepSpeedZeRoOffload"):
        return
    yield kind, optimizer, OPTIMIZER_NAMES[kind]
    for option, names in OPTION_NAMES.items():
        if getattr(optimizer, option, None):
            yield kind, optimizer, names
    partial_offload = getattr(engine, "zero_partial_offload", lambda: 1.0)()
    if kind == "DeepSpeedZeroOptimizer_Stage3" and (partial_offload or 1.0) < 1.0:
        yield kind, optimizer, PARTIAL_OFFLOAD_NAMES


def _of_swapper(swapper: Any) -> Iterator[tuple[str, Any, Purposes]]:  # noqa: ANN401
    """Yield the swapper of an optimizer in files, and what it knows of the first ones."""
    yield type(swapper).__name__, swapper, SWAPPER_NAMES
    in_files, of_file = FILE_NAMES.items()
    for swapped in [*getattr(swapper, "swap_params_info", {}).values()][:1]:
        yield in_files[0], swapped, in_files[1]
        for file in getattr(swapped, "tensors", [])[:1]:
            yield of_file[0], file, of_file[1]


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

    Stage 0 has a ``LossScaleConfig`` since 0.18; before, its fields were the wrapper's own.
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
