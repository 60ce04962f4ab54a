"""DeepSpeed's internal names, which only this module uses, and their check at setup.

The tables list each name that the library relies on, its purpose, and the releases that have it.
They were verified in the sources of 0.16.0, 0.16.9, 0.17.0, 0.17.5, 0.18.4, 0.18.9, 0.19.0 and
0.19.8, and apply from the construction of an engine to its ``destroy()``: between steps, within a
window of micro-batches, and while ``offload_states()`` has moved states to the host. Functions here
hide differences between releases from the rest of ``engine``.
``tests/house/test_deepspeed_names.py`` finds names that are used elsewhere or not listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lightning_elastic_zero.core.requirements import DEEPSPEED, missing_names
from lightning_elastic_zero.errors import UnsupportedError

OFFLOADED_COPY_SUFFIX = "_offload_buffer"
"""Suffix of the keys of host copies in ZeRO-3's optimizer states."""


def compatible_operators(ops: Any) -> dict[str, bool]:
    """Return the table of operators that DeepSpeed may build."""
    table: dict[str, bool] = ops.__compatible_ops__
    return table


def links_states(optimizer: Any) -> bool:
    """Whether a wrapper links parameters to their optimizer states: ZeRO-1/2, BF16_Optimizer."""
    return hasattr(optimizer, "_hp_optimizer_states_linked")


def unlink_states(
    optimizer: Any,
    parameters: Iterable[torch.nn.Parameter] = (),
) -> None:
    """Make a wrapper recreate its links from parameters to optimizer states.

    Args:
        optimizer: A wrapper that ``links_states``.
        parameters: Parameters whose links are removed, because they would keep old states alive.
    """
    optimizer._hp_optimizer_states_linked = False
    for parameter in parameters:
        if (link := link_to_master(parameter)) is not None:
            link.optim_fragment = None


def link_to_master(parameter: torch.nn.Parameter) -> Any:
    """Return a parameter's link to its master and states, or None."""
    return getattr(parameter, "_hp_mapping", None)


def link_states(optimizer: Any) -> None:
    """Link parameters to their existing optimizer states, unless they are linked."""
    optimizer._lazy_init_hp_params_optimizer_state()


def release_gradient_buckets(optimizer: Any) -> None:
    """Drop ZeRO-1/2's buckets for reducing gradients."""
    optimizer._release_ipg_buffers()


def discard_accumulated_ids(optimizer: Any) -> None:
    """Discard ZeRO-1/2's ids of parameters with offloaded gradients, if it keeps any."""
    getattr(optimizer, "_offload_accumulated_param_ids", set()).clear()


def discard_boundary_ids(optimizer: Any) -> None:
    """Discard ZeRO-3's ids of parameters with gradients to offload, if it keeps any."""
    getattr(optimizer, "_offload_boundary_param_ids", set()).clear()


def reset_backward_count(engine: Any) -> None:
    """Reset an engine's count of backward passes since its last step, if it has one."""
    if hasattr(engine, "_unmanaged_backward_count"):
        engine._unmanaged_backward_count = 0


def updates_offloaded_momentum(optimizer: Any) -> bool:
    """Whether a release updates Muon's momentum on the host, in ZeRO-1/2 with offload."""
    return hasattr(optimizer, "_apply_muon_updates_cpu_offload")


def drop_staged_momentum(optimizer: Any) -> None:
    """Drop the momentum of Muon that ZeRO-1/2 has staged for a step, if its release does."""
    getattr(optimizer, "_muon_pending_momentum", {}).clear()


def module_of(optimizer: Any) -> ModuleType:
    """Return the module that defines a wrapper's class."""
    return sys.modules[type(optimizer).__module__]


def initial_micro_step(optimizer: Any) -> int:
    """Return ZeRO-1/2's number of the first micro-batch of a window."""
    first: int = module_of(optimizer).INITIAL_MICRO_STEP_ID
    return first


def write_weights(optimizer: Any, sub_group: int) -> None:
    """Write the masters of a ZeRO-3 sub-group in memory into its low-precision weights."""
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)


def is_swapped(optimizer: Any, sub_group: int) -> bool:
    """Whether a ZeRO-3 sub-group with offload to NVMe is in files between steps."""
    return bool(optimizer._swappable_optimizer_subgroup(sub_group))


def swap_in(optimizer: Any, sub_group: int) -> None:
    """Read the masters, states and gradients of a sub-group from its files into memory."""
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)


def swap_out(optimizer: Any, sub_group: int) -> None:
    """Write the masters and states of a sub-group to files, and free their memory."""
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)


Purposes = Mapping[str, str]
"""Names, each with the purpose for which this library needs it: "to ..."."""

PRECISION = "determine the type in which forward computes"
CUTTING_GROUP = "determine the ranks over which a group is partitioned"
COUNTED = "continue the counters of the saved run"
STEPS_INSIDE = "access the optimizer that steps"
LINKS = "have DeepSpeed link parameters to restored states"
OFFLOADED_GRADIENTS = "drop offloaded gradients of a window that a load interrupts"
GRADIENTS = "drop the gradients of a window that a load interrupts"
MUON_TYPE = "restore Muon's momentum in the type of its stage"
OFFLOADED_WEIGHTS = "read weights that offload_states() has moved to the host"
HOST_STATES = "determine the states that offload_states() has moved to the host"
SCALER = "restore the loss scale"
GRAD_SCALER = "restore the scale of torch's GradScaler"
LOSS_SCALE = "read the loss scale"
REPLACED = "remove links to replaced states"
MUON_MEMORY = "determine where ZeRO-3 keeps Muon's momentum"
SHARED_MEMORY = "start if DeepSpeed's shared-memory collectives do not compile"
SHARED_MEMORY = "start where DeepSpeed's shared-memory collectives do not compile"

ENGINE_NAMES: dict[str, str] = {
    "bfloat16_enabled": PRECISION,
    "curriculum_learning_enabled": "refuse a curriculum, whose sampler has state",
    "fp16_enabled": PRECISION,
    "global_rank": "determine the pieces of this rank",
    "global_samples": COUNTED,
    "global_steps": COUNTED,
    "gradient_accumulation_steps": "resume at the start of a window of micro-batches",
    "has_moe_layers": "refuse expert parallelism",
    "lr_scheduler": "save and restore the schedule that DeepSpeed steps",
    "micro_steps": "resume at the start of a window of micro-batches",
    "module": "name the parameters and buffers",
    "mp_world_size": "refuse tensor parallelism",
    "optimizer": "access masters and states",
    "random_ltd_enabled": "refuse random-LTD, whose scheduler has state",
    "seq_dp_world_size": "determine the number of ranks that ZeRO partitions over",
    "set_gradient_accumulation_boundary": "end the last window of an epoch with a step",
    "skipped_steps": COUNTED,
    "train_batch_size": "record the global batch size",
    "zero_load_from_fp32_weights": "determine whether masters are restored or rounded",
    "zero_optimization_stage": "determine how the state is partitioned",
    "zero_partial_offload": "determine whether a second optimizer steps some weights",
    "zero_quantized_nontrainable_weights": "refuse quantized frozen weights",
}
"""Of ``DeepSpeedEngine``, since 0.16 or earlier."""

OPTIMIZER_NAMES: dict[str, dict[str, str]] = {
    "DeepSpeedZeroOptimizer": {
        "_hp_optimizer_states_linked": LINKS,
        "_lazy_init_hp_params_optimizer_state": LINKS,
        "_release_ipg_buffers": GRADIENTS,
        "averaged_gradients": GRADIENTS,
        "bit16_groups": "determine the original order of the parameters in a group",
        "bit16_groups_flat": OFFLOADED_WEIGHTS,
        "cpu_offload": "determine whether gradients and Muon's momentum are on the host",
        "dtype": MUON_TYPE,
        "gradient_accumulation_dtype": MUON_TYPE,
        "loss_scale": LOSS_SCALE,
        "loss_scaler": SCALER,
        "micro_step_id": GRADIENTS,
        "optimizer": STEPS_INSIDE,
        "parallel_partitioned_bit16_groups": "access the weights of all ranks in a flat buffer",
        "params_in_partition": "determine which whole momenta Muon keeps on this rank",
        "partition_size": OFFLOADED_WEIGHTS,
        "real_dp_process_group": CUTTING_GROUP,
        "round_robin_bit16_groups": "determine the order of the parameters in a flat buffer",
        "single_partition_of_fp32_groups": "access this rank's masters",
        "use_grad_accum_attribute": MUON_TYPE,
        "zero_grad": GRADIENTS,
    },
    "BF16_Optimizer": {
        "_hp_optimizer_states_linked": LINKS,
        "_lazy_init_hp_params_optimizer_state": LINKS,
        "bf16_groups": "determine the order of the parameters in a flat buffer",
        "bf16_partitioned_groups": "access the weights of all ranks in a flat buffer",
        "fp32_groups_flat_partition": "access this rank's masters",
        "optimizer": STEPS_INSIDE,
        "real_dp_process_group": CUTTING_GROUP,
        "using_real_optimizer": "recognize an engine that evaluates",
    },
    "FP16_Optimizer": {
        "fp16_groups": "determine the order of the parameters in a flat buffer",
        "fp16_groups_flat": "access the weights in a flat buffer",
        "fp32_groups_flat": "access the masters",
        "loss_scale": LOSS_SCALE,
        "optimizer": STEPS_INSIDE,
        "zero_grad": GRADIENTS,
    },
    "FP16_UnfusedOptimizer": {
        "fp16_groups": "access the weights",
        "fp32_groups": "access the masters",
        "loss_scale": LOSS_SCALE,
        "optimizer": STEPS_INSIDE,
        "zero_grad": GRADIENTS,
    },
    "DeepSpeedZeroOptimizer_Stage3": {
        "_reassign_or_swap_out_partitioned_parameters": "write restored masters into the weights",
        "averaged_gradients": GRADIENTS,
        "checkpoint_event_prologue": "partition gathered weights before they are read",
        "communication_data_type": MUON_TYPE,
        "fp16_groups": "determine the order of the parameters in a sub-group",
        "fp16_partitioned_groups_flat": "access this rank's weights",
        "fp32_partitioned_groups_flat": "access this rank's masters",
        "grad_partitions_flat_buffer": GRADIENTS,
        "loss_scale": LOSS_SCALE,
        "loss_scaler": SCALER,
        "offload_optimizer": "determine whether gradients are on the host",
        "offload_param": "determine whether weights are on the host",
        "offloaded_states": HOST_STATES,
        "optimizer": STEPS_INSIDE,
        "params_in_nvme_and_cpu": "refuse weights in files",
        "persistent_parameters": "gather the persistent weights again",
        "sub_group_to_group_id": "determine the parameter group of a sub-group",
        "zero_grad": GRADIENTS,
    },
    "DeepSpeedZeRoOffload": {
        "partition_all_parameters": "partition gathered weights before they are read",
    },
}
"""Of each optimizer wrapper, and of its replacement in a ZeRO-3 run without an optimizer, since
0.16 or earlier."""

PARAMETER_NAMES: dict[str, str] = {
    "ds_id": "identify swapped state and placeholders of weights",
    "ds_numel": "determine the size of the whole parameter",
    "ds_process_group": CUTTING_GROUP,
    "ds_secondary_tensor": "drop hpZ's copies of weights that are replaced",
    "ds_shape": "determine the whole parameter's shape",
    "ds_tensor": "access this rank's piece of a weight",
    "partition_numel": "determine the size of a rank's piece",
}
"""Of a parameter that ZeRO-3 has partitioned, since 0.16 or earlier."""

SWAPPER_NAMES: dict[str, str] = {
    "dtype": "determine the type of the files",
    "purge_state": "discard the states in files before others are written (since 0.16.4)",
    "swap_folder": "receive state in files of the same folder",
    "swap_params_info": "find the files of a sub-group",
}
"""Of the optimizer swapper, with offload to NVMe: since 0.16.4. Older releases are refused."""

OPTION_NAMES: dict[str, dict[str, str]] = {
    "swap_optimizer": {
        "_optimizer_states_and_gradient_swap_in": "write restored state to files",
        "_optimizer_states_and_gradient_swap_out": "write restored state to files",
        "_swappable_optimizer_subgroup": "determine which sub-groups are in files",
        "fp16_partitioned_groups_flat_numel": "determine the size of a file",
        "optimizer_swapper": "find the files of a sub-group",
    },
    "backup_optimizer": {"subgroup_to_device": "determine which optimizer steps a sub-group"},
    "cpu_offload": {
        "accumulated_grads_in_cpu": OFFLOADED_GRADIENTS,
        "reset_cpu_buffers": OFFLOADED_GRADIENTS,
    },
    "offload_optimizer": {"reset_cpu_buffers": OFFLOADED_GRADIENTS},
}
"""Of an optimizer wrapper with a true attribute of the name on the left."""

FILE_NAMES: dict[str, dict[str, str]] = {
    "a sub-group in files": {
        "swapped_gradients": "discard gradients being written to files",
        "tensors": "find the files of a sub-group",
    },
    "a file of a sub-group": {
        "compute_tensor": "determine the state in a file",
        "swap_path": "find the files of a sub-group",
    },
}
"""Of the swapper's record of its first sub-group in files."""

PARTIAL_OFFLOAD_NAMES: dict[str, str] = {
    "backup_optimizer": "save the state of the second optimizer of partial offload",
}
"""Of ZeRO-3's wrapper with ``offload_optimizer.ratio`` below 1."""

RESIDENT_NAMES: dict[str, str] = {"lp_param_buffer": OFFLOADED_WEIGHTS}
"""Of ZeRO-3's wrapper without ``offload_param``. With it there is no such buffer, and DeepSpeed
refuses ``offload_states()``."""

MUON_MEMORY_NAMES: dict[str, str] = {
    "muon_momentum_buffer_partitioned_groups_flat": "restore momentum that is kept in memory",
}
"""Of ZeRO-3's wrapper with Muon and ``save_muon_momentum_buffer_in_memory``, since 0.18.9."""

LINK_NAMES: dict[str, dict[str, str]] = {
    "a parameter of ZeRO-1/2": {"_hp_mapping": REPLACED},
    "a parameter's link to its master": {"optim_fragment": REPLACED},
}
"""Of a parameter that ZeRO-1/2 or BF16_Optimizer trains: None if another rank has it, and while
states are on the host. Of the link, if there is one: None until the optimizer has states."""

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
            "round_robin_bit16_padding": "determine the padding of parameter_alignment",
        },
        "DeepSpeedZeroOptimizer_Stage3": {"_offload_boundary_param_ids": OFFLOADED_GRADIENTS},
    },
}
"""By the first release, of those verified, that always sets them in its constructors. Older ones
work without them; newer ones are refused if they lack them. 0.17.5 sets torch's scalers only with
``torch_autocast``."""

LATER_OPTION_NAMES: dict[str, dict[str, dict[str, str]]] = {
    "0.19.8": {"cpu_offload": {"_offload_accumulated_param_ids": OFFLOADED_GRADIENTS}},
}
"""As ``OPTION_NAMES``, by release."""

OLDER_NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "BF16_Optimizer": ("zero_grad", {"clear_hp_grads": GRADIENTS}),
    "FP16_Optimizer": ("loss_scale_config", {"cur_scale": SCALER}),
    "FP16_UnfusedOptimizer": ("loss_scale_config", {"cur_scale": SCALER}),
}
"""Of a wrapper that lacks the later name on the left: its predecessor."""

UNASKED: dict[str, str] = {
    "_apply_muon_updates_cpu_offload": "refuse other places of offloaded momentum",
    "losses": "drop the sum of a window's losses",
}
"""Names that are not checked. ``support`` refuses Muon with offload in ZeRO-1/2 by the first. The
second is a sum that older releases log; in 0.19.8 it is unused."""

OPS_NAMES: dict[str, str] = {"__compatible_ops__": SHARED_MEMORY}
"""Of ``deepspeed.ops``, on CPU ranks: since 0.19 a table created on access."""

ACCELERATOR_NAMES: dict[str, str] = {"create_op_builder": SHARED_MEMORY}
"""Of DeepSpeed's accelerator, on CPU ranks. It returns None for an unknown operator, so a release
without "ShareMemCommBuilder" has no build that could fail."""

BUILDER_NAMES: dict[str, str] = {"NAME": SHARED_MEMORY, "load": SHARED_MEMORY}
"""Of the builder of that operator, if any."""


def parameter_paddings(optimizer: Any, group: int) -> tuple[int, ...]:
    """Return the elements of padding after each parameter of a ZeRO-1/2 group; empty if none.

    0.19.7 introduced ``parameter_alignment``.
    """
    paddings = getattr(optimizer, "round_robin_bit16_padding", None)
    return tuple(paddings[group]) if paddings and any(paddings[group]) else ()


@dataclass(frozen=True, slots=True)
class LossScalerAccess:
    """The loss scaler of a DeepSpeed wrapper."""

    name: str
    """Name of its class."""
    holder: Any
    """The object with its fields."""
    fields: tuple[str, ...]
    """Names of its fields."""


SCALE_FIELDS = (
    "cur_iter",
    "cur_scale",
    "dynamic_loss_scale",
    "last_overflow_iter",
    "min_loss_scale",
    "scale_factor",
    "scale_window",
)
"""Fields of stage 0's scaler."""


def loss_scaler(optimizer: Any) -> LossScalerAccess | None:
    """Return a wrapper's loss scaler, or None.

    Stage 0 has had a ``LossScaleConfig`` since 0.18.9 or earlier; in 0.18.4 the wrapper itself had
    its fields.
    """
    if (scaler := getattr(optimizer, "loss_scaler", None)) is not None:
        return LossScalerAccess(type(scaler).__name__, scaler, tuple(vars(scaler)))
    if type(optimizer).__name__ not in {"FP16_Optimizer", "FP16_UnfusedOptimizer"}:
        return None
    holder = getattr(optimizer, "loss_scale_config", optimizer)
    fields = tuple(name for name in SCALE_FIELDS if hasattr(holder, name))
    return LossScalerAccess("LossScaleConfig", holder, fields)


def zero_grad(optimizer: Any) -> None:
    """Drop the gradients of a wrapper's parameters.

    ``BF16_Optimizer`` got ``zero_grad`` after 0.16; before, the engine cleared its fp32 gradients.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.zero_grad()  # In stage 0; DeepSpeed's own optimizers take no argument.
    elif hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad(set_to_none=True)
    else:
        optimizer.clear_hp_grads()


ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"


def check_names(engine: Any, wrapper: str, found: str) -> Iterator[str]:
    """Yield a sentence for each object that lacks names in the installed release.

    Args:
        engine: A live engine.
        wrapper: Class name of its optimizer wrapper; empty without one.
        found: The installed release.
    """
    for owner, live, names in asked_names(engine, wrapper, found):
        if sentence := _missing(owner, live, names, found):
            yield sentence


def check_ops(ops: object, accelerator: object, found: str) -> None:
    """Refuse a release in which operators that do not compile cannot be disabled.

    Raises:
        UnsupportedError: A name is missing.
    """
    _refuse("deepspeed.ops", ops, OPS_NAMES, found)
    _refuse(type(accelerator).__name__, accelerator, ACCELERATOR_NAMES, found)


def check_builder(builder: object, found: str) -> None:
    """Refuse a release whose operator builder lacks a name.

    Raises:
        UnsupportedError: A name is missing.
    """
    _refuse(type(builder).__name__, builder, BUILDER_NAMES, found)


def asked_names(engine: Any, wrapper: str, found: str) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield each checked object: its description, the live object, and its required names.

    Args:
        engine: A live engine.
        wrapper: Class name of its optimizer wrapper; empty without one.
        found: The installed release.
    """
    optimizer = getattr(engine, "optimizer", None)
    yield type(engine).__name__, engine, ENGINE_NAMES
    yield from _later(engine, "DeepSpeedEngine", found)
    yield from _of_optimizer(engine, wrapper, found)
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        yield from _of_swapper(swapper)
    module = getattr(engine, "module", None)
    parameters = module.parameters() if module is not None else ()
    cut = next((p for p in parameters if hasattr(p, "ds_id")), None)
    if cut is not None:
        yield "a partitioned parameter", cut, PARAMETER_NAMES


def _of_optimizer(engine: Any, wrapper: str, found: str) -> Iterator[tuple[str, Any, Purposes]]:
    optimizer = getattr(engine, "optimizer", None)
    kind = wrapper or type(optimizer).__name__
    if kind not in OPTIMIZER_NAMES or not (wrapper or kind == "DeepSpeedZeRoOffload"):
        return
    yield kind, optimizer, OPTIMIZER_NAMES[kind]
    yield from _later(optimizer, kind, found)
    later, older = OLDER_NAMES.get(kind, ("", {}))
    if older and not hasattr(optimizer, later):
        yield kind, optimizer, older
    options = [OPTION_NAMES, *_since(found, LATER_OPTION_NAMES)]
    for option, names in ((o, names) for table in options for o, names in table.items()):
        if getattr(optimizer, option, None):
            yield kind, optimizer, names
    if kind == ZERO_3:
        yield from _of_zero_3(engine)
    if kind == "DeepSpeedZeroOptimizer":
        yield f"the module of {kind}", module_of(optimizer), MODULE_NAMES
    yield from _of_links(optimizer, kind)


def _of_zero_3(engine: Any) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield ZeRO-3's wrapper with the names that depend on the configuration."""
    optimizer = engine.optimizer
    if not getattr(optimizer, "offload_param", False):
        yield ZERO_3, optimizer, RESIDENT_NAMES
    in_memory = getattr(optimizer, "save_muon_momentum_buffer_in_memory", False)
    if in_memory and getattr(optimizer, "use_muon", False):
        yield ZERO_3, optimizer, MUON_MEMORY_NAMES
    partial_offload = getattr(engine, "zero_partial_offload", lambda: 1.0)()
    if (partial_offload or 1.0) < 1.0:
        yield ZERO_3, optimizer, PARTIAL_OFFLOAD_NAMES


def _of_links(optimizer: Any, kind: str) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield a parameter that ZeRO-1/2 or BF16_Optimizer trains, and a link to its master."""
    lists = {"DeepSpeedZeroOptimizer": "bit16_groups", "BF16_Optimizer": "bf16_groups"}
    groups = getattr(optimizer, lists.get(kind, ""), ())
    parameters = [parameter for group in groups for parameter in group]
    linked, link_names = LINK_NAMES.items()
    if parameters:
        yield linked[0], parameters[0], linked[1]
    links = (link_to_master(parameter) for parameter in parameters)
    link = next((link for link in links if link is not None), None)
    if link is not None:
        yield link_names[0], link, link_names[1]


def _of_swapper(swapper: Any) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield the swapper and its records of the first sub-group and file."""
    yield type(swapper).__name__, swapper, SWAPPER_NAMES
    in_files, of_file = FILE_NAMES.items()
    for swapped in [*getattr(swapper, "swap_params_info", {}).values()][:1]:
        yield in_files[0], swapped, in_files[1]
        for file in getattr(swapped, "tensors", [])[:1]:
            yield of_file[0], file, of_file[1]


def _later(live: Any, owner: str, found: str) -> Iterator[tuple[str, Any, Purposes]]:
    """Yield an object with the names that releases up to the installed one added."""
    for table in _since(found, LATER_NAMES):
        if owner in table:
            yield owner, live, table[owner]


def _since(
    found: str, tables: dict[str, dict[str, dict[str, str]]]
) -> Iterator[dict[str, dict[str, str]]]:
    """Yield the tables of releases up to the installed one."""
    for release, table in tables.items():
        if DEEPSPEED.is_at_least(found, release):
            yield table


def _missing(owner: str, live: object, names: Purposes, found: str) -> str | None:
    """Return a sentence with the names that an object lacks, or None."""
    lost = [f"{name} (to {names[name]})" for name in missing_names(live, names)]
    return DEEPSPEED.missing_names_message(found, owner, lost)


def _refuse(owner: str, live: object, names: Purposes, found: str) -> None:
    if sentence := _missing(owner, live, names, found):
        raise UnsupportedError(sentence)
