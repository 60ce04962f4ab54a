"""DeepSpeed's private names, which only this module uses, and their check at setup.

``NAMES`` lists each name that the library relies on, and the first release that has it. It was
verified in the sources of 0.16.0, 0.16.9, 0.17.0, 0.17.5, 0.18.4, 0.18.9, 0.19.0 and 0.19.8, and
applies from the construction of an engine to its ``destroy()``: between steps, within a window of
micro-batches, and while ``offload_states()`` has moved states to the host.
``tests/house/test_deepspeed_names.py`` finds names that are used elsewhere or not listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.core.requirements import DEEPSPEED, missing_names

PLAIN = "torch.optim.Optimizer"
"""Replaces the wrapper's class name if the optimizer is not wrapped."""

ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"

OFFLOADED_COPY_SUFFIX = "_offload_buffer"
"""Suffix of the keys of host copies in ZeRO-3's optimizer states."""

NAMES: Mapping[str, dict[str, str]] = {
    "DeepSpeedEngine": {
        "": "_is_gradient_accumulation_boundary bfloat16_enabled curriculum_learning_enabled "
        "fp16_enabled global_rank global_samples global_steps gradient_accumulation_steps "
        "has_moe_layers lr_scheduler micro_steps module mpu "
        "mp_world_size optimized_linear_base_weight_sharding optimizer random_ltd_enabled "
        "seq_dp_world_size set_gradient_accumulation_boundary skipped_steps train_batch_size "
        "train_micro_batch_size_per_gpu "
        "zero_load_from_fp32_weights zero_optimization_stage zero_partial_offload "
        "zero_quantized_nontrainable_weights zero_quantized_weights",
        "0.17.5": "zenflow",
        "0.18.4": "torch_autocast_z0_gradscaler",
        "0.19.8": "_unmanaged_backward_count autotp_size managed_gradient_accumulation "
        "sequence_parallel_size",
    },
    "DeepSpeedZeroOptimizer": {
        "": "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state _release_ipg_buffers "
        "_update_model_bit16_weights averaged_gradients bit16_groups bit16_groups_flat cpu_offload "
        "dtype gradient_accumulation_dtype loss_scale loss_scaler micro_step_id optimizer "
        "parallel_partitioned_bit16_groups params_in_partition partition_size "
        "real_dp_process_group round_robin_bit16_groups single_partition_of_fp32_groups "
        "use_grad_accum_attribute zero_grad",
        "0.18.4": "all_grad_tensors offloaded_states torch_autocast_gradscaler",
        "0.19.8": "_muon_pending_momentum round_robin_bit16_padding",
    },
    "the module of DeepSpeedZeroOptimizer": {"": "INITIAL_MICRO_STEP_ID"},
    "BF16_Optimizer": {
        "": "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state "
        "_update_storage_to_flattened_tensor bf16_groups bf16_groups_flat bf16_partitioned_groups "
        "fp32_groups_flat_partition optimizer real_dp_process_group using_real_optimizer",
        "0.16.9": "zero_grad",
        "0.18.9": "torch_autocast_gradscaler",
    },
    "BF16_Optimizer without zero_grad": {"": "clear_hp_grads"},
    "FP16_Optimizer": {
        "": "fp16_groups fp16_groups_flat fp32_groups_flat loss_scale optimizer zero_grad",
        "0.18.9": "loss_scale_config",
    },
    "FP16_UnfusedOptimizer": {
        "": "fp16_groups fp32_groups loss_scale optimizer zero_grad",
        "0.18.9": "loss_scale_config",
    },
    "an optimizer without loss_scale_config": {"": "cur_scale"},
    "DeepSpeedZeroOptimizer_Stage3": {
        "": "_reassign_or_swap_out_partitioned_parameters averaged_gradients "
        "checkpoint_event_prologue communication_data_type fp16_groups "
        "fp16_partitioned_groups_flat fp32_partitioned_groups_flat grad_partitions_flat_buffer "
        "loss_scale loss_scaler micro_step_id offload_optimizer offload_param offloaded_states "
        "optimizer "
        "params_in_nvme_and_cpu persistent_parameters sub_group_to_group_id zero_grad",
        "0.18.4": "torch_autocast_gradscaler",
        "0.18.9": "save_muon_momentum_buffer_in_memory use_muon",
        "0.19.8": "_offload_boundary_param_ids",
    },
    # Engines with offload_param have no such buffer, and DeepSpeed refuses offload_states().
    "an optimizer without offload_param": {"": "lp_param_buffer"},
    # With offload_optimizer.ratio below 1.
    "an optimizer with partial offload": {"": "backup_optimizer subgroup_to_device"},
    "an optimizer with save_muon_momentum_buffer_in_memory": {
        "": "muon_momentum_buffer_partitioned_groups_flat"
    },
    "an optimizer with swap_optimizer": {
        "": "_optimizer_states_and_gradient_swap_in _optimizer_states_and_gradient_swap_out "
        "_swappable_optimizer_subgroup fp16_partitioned_groups_flat_numel optimizer_swapper"
    },
    "an optimizer with cpu_offload": {
        "": "accumulated_grads_in_cpu reset_cpu_buffers",
        "0.19.8": "_offload_accumulated_param_ids",
    },
    "an optimizer with offload_optimizer": {"": "reset_cpu_buffers"},
    # In a ZeRO-3 run without an optimizer.
    "DeepSpeedZeRoOffload": {"": "partition_all_parameters"},
    # None if another rank has the parameter, and while states are on the host.
    "a parameter of ZeRO-1/2": {"": "_hp_mapping"},
    # None until the optimizer has states.
    "a parameter's link to its master": {"": "optim_fragment"},
    "a parameter of ZeRO-3": {
        "": "ds_id ds_numel ds_process_group ds_secondary_tensor ds_shape ds_tensor partition_numel"
    },
    # With offload to NVMe. purge_state exists since 0.16.4: older releases are refused.
    "the optimizer swapper": {"": "dtype purge_state swap_folder swap_params_info"},
    "a sub-group in files": {"": "swapped_gradients tensors"},
    "a file of a sub-group": {"": "compute_tensor swap_path"},
    # On CPU ranks, to start if DeepSpeed's shared-memory collectives do not compile.
    "deepspeed.ops": {"": "__compatible_ops__"},
    "the accelerator": {"": "create_op_builder"},
    "an operator's builder": {"": "NAME load"},
}
"""Names of each object, separated by spaces, by the first release of those verified that always
sets them in its constructors (``""``: all supported ones). Older releases work without them; newer
ones are refused if they lack them."""

UNCHECKED = (
    "_apply_muon_updates_cpu_offload",
    "compression_scheduler",
    "ds_autotp_universal_checkpoint_meta",
    "first_dataloader_check",
    "losses",
    "swap_optimizer",
    "zeropp_loco_param",
)
"""Other names. ``support`` refuses Muon with offload in ZeRO-1/2 by the first, and options of older
releases by the second and the last; AutoTP sets the third on parameters, the fourth on engines; the
fifth is a sum that older releases log; ZeRO-1/2 lacks ``swap_optimizer``."""


def compatible_operators(ops: Any) -> dict[str, bool]:
    """Return DeepSpeed's table of the operators that it may build."""
    table: dict[str, bool] = ops.__compatible_ops__
    return table


def relink_states(
    optimizer: Any, parameters: Iterable[torch.nn.Parameter] = (), *, has_state: bool = True
) -> None:
    """Make ZeRO-1/2 or BF16_Optimizer recreate its links from parameters to optimizer states.

    The links of the given parameters are removed, because they would keep old states alive. Without
    state, DeepSpeed links parameters at the next step.
    """
    if not hasattr(optimizer, "_hp_optimizer_states_linked"):
        return
    optimizer._hp_optimizer_states_linked = False
    for parameter in parameters:
        if (link := _link_to_master(parameter)) is not None:
            link.optim_fragment = None
    if has_state:
        optimizer._lazy_init_hp_params_optimizer_state()


def relink_weights(optimizer: Any) -> None:
    """Make the weights of ZeRO-1/2 or BF16_Optimizer views of its flat buffers again.

    DeepSpeed's gathering of tensor ranks' shards, and users, may have moved them.
    """
    if hasattr(optimizer, "_update_model_bit16_weights"):
        for group in range(len(optimizer.bit16_groups)):
            optimizer._update_model_bit16_weights(group)
    else:
        for weights, flat in zip(optimizer.bf16_groups, optimizer.bf16_groups_flat, strict=True):
            optimizer._update_storage_to_flattened_tensor(weights, flat)


def _link_to_master(parameter: torch.nn.Parameter) -> Any:
    return getattr(parameter, "_hp_mapping", None)


def cut_by_autotp(parameter: torch.nn.Parameter) -> Mapping[str, Any] | None:
    """Return AutoTP's description of a parameter's cut, or None if it has not touched it."""
    about: Mapping[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None) or {}
    return about.get("conversion")


def discard_gradients(engine: Any, wrapper: str) -> None:
    """Discard all gradients of a window except those of offloaded masters."""
    optimizer = engine.optimizer
    # Of the parameters, of BF16_Optimizer's fp32 copies, and ZeRO-3's count of micro-batches.
    if wrapper == PLAIN:
        optimizer.zero_grad()  # DeepSpeed's own optimizers take no argument.
    elif hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad(set_to_none=True)
    else:  # BF16_Optimizer of 0.16.
        optimizer.clear_hp_grads()
    for parameter in engine.module.parameters():
        parameter.grad = None
    if wrapper == "DeepSpeedZeroOptimizer":
        _discard_gradients_of_zero_1_2(optimizer)
    elif wrapper == ZERO_3:
        optimizer.averaged_gradients = {}
        if optimizer.grad_partitions_flat_buffer is not None:  # A step reads views of it.
            optimizer.grad_partitions_flat_buffer.zero_()
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()
        getattr(optimizer, "_offload_boundary_param_ids", set()).clear()
    # Counters and sums of the engine until the next step, in the releases that have them.
    if hasattr(engine, "_unmanaged_backward_count"):
        engine._unmanaged_backward_count = 0
    if hasattr(engine, "losses"):
        engine.losses = None


def _discard_gradients_of_zero_1_2(optimizer: Any) -> None:
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = module_of(optimizer).INITIAL_MICRO_STEP_ID
    for gradients in (optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})):
        for group in gradients:
            gradients[group] = None
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        for gradient in optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()
        getattr(optimizer, "_offload_accumulated_param_ids", set()).clear()


def remove_gradient_hooks(module: torch.nn.Module) -> None:
    """Remove the hooks of engines that trained a module before.

    DeepSpeed removes them only if its engine is destroyed. Otherwise both engines reduce each
    gradient.
    """
    for parameter in module.parameters():
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in [*hooks.items()]:
            if str(getattr(hook, "__module__", "")).partition(".")[0] == "deepspeed":
                del hooks[key]


def counts_micro_batches(engine: Any) -> bool:
    """Whether the engine ends a window by its count.

    Else the caller sets the boundary, or, since 0.19.8, each step may end a window.
    """
    if engine._is_gradient_accumulation_boundary is not None:
        return False
    return bool(getattr(engine, "managed_gradient_accumulation", lambda: True)())


def micro_batches_since_step(engine: Any) -> int:
    """Return the micro-batches of an unfinished window; 0 if the caller sets its boundary."""
    if counts_micro_batches(engine):
        return int(engine.micro_steps % engine.gradient_accumulation_steps())
    return int(getattr(engine, "_unmanaged_backward_count", 0))


def holds_gradients(parameter: Any) -> bool:
    """Whether a parameter itself holds gradients until the next micro-batch."""
    return parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None


def has_cleared_window(engine: Any, holder: torch.nn.Parameter | None) -> bool:
    """Whether ``zero_grad`` has dropped the gradients of a window's earlier micro-batches.

    ``holder``: a parameter that held gradients before. ZeRO-2 and BF16_Optimizer have other places.
    """
    if engine.zero_optimization_stage() == STAGE_WEIGHTS:  # adds gradients to others from 1 on
        return bool(engine.optimizer.micro_step_id == 0)
    return holder is not None and not holds_gradients(holder)


def updates_offloaded_momentum(optimizer: Any) -> bool:
    """Whether a release updates Muon's momentum on the host, in ZeRO-1/2 with offload."""
    return hasattr(optimizer, "_apply_muon_updates_cpu_offload")


def drop_staged_momentum(optimizer: Any) -> None:
    """Drop the momentum of Muon that ZeRO-1/2 has staged for a step, if its release does."""
    getattr(optimizer, "_muon_pending_momentum", {}).clear()


def module_of(optimizer: Any) -> ModuleType:
    """Return the module that defines a wrapper's class."""
    return sys.modules[type(optimizer).__module__]


def write_weights(optimizer: Any, sub_group: int) -> None:
    """Write the masters of a ZeRO-3 sub-group in memory into its low-precision weights."""
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)


def is_swapped(optimizer: Any, sub_group: int) -> bool:
    """Whether a ZeRO-3 sub-group with offload to NVMe is in files between steps."""
    return bool(optimizer._swappable_optimizer_subgroup(sub_group))


@contextmanager
def swapped_in(optimizer: Any, sub_group: int) -> Iterator[None]:
    """Read a sub-group's files into memory, and write them back with its low-precision weights.

    Its states must be new to the swapper (``buffers.forget_swapped_states``).
    """
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    write_weights(optimizer, sub_group)
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)


def parameter_paddings(optimizer: Any, group: int) -> tuple[int, ...]:
    """Return the elements of padding after each parameter of a ZeRO-1/2 group; empty if none.

    0.19.7 introduced ``parameter_alignment``.
    """
    paddings = getattr(optimizer, "round_robin_bit16_padding", None)
    return tuple(paddings[group]) if paddings and any(paddings[group]) else ()


def check_names(engine: Any, wrapper: str, release: str) -> Iterator[str]:
    """Yield a sentence for each object of an engine that lacks names in the installed release.

    ``wrapper`` is the class name of its optimizer wrapper; empty without one.
    """
    for title, live in live_objects(engine, wrapper):
        yield from missing(title, live, release)


def missing(title: str, live: object, release: str) -> Iterator[str]:
    """Yield a sentence if an object of ``NAMES`` lacks names in the installed release."""
    for since, names in NAMES[title].items():
        if not since or DEEPSPEED.is_at_least(release, since):
            lost = missing_names(live, names.split())
            if sentence := DEEPSPEED.missing_names_message(release, title, lost):
                yield sentence


def live_objects(engine: Any, wrapper: str) -> Iterator[tuple[str, Any]]:
    """Yield each object of an engine to check, by its title in ``NAMES``."""
    yield "DeepSpeedEngine", engine
    optimizer = getattr(engine, "optimizer", None)
    kind = wrapper or type(optimizer).__name__
    if kind in NAMES and (wrapper or kind == "DeepSpeedZeRoOffload"):
        yield kind, optimizer
        yield from _by_option(optimizer, kind)
        yield from _links(optimizer, kind)
    if kind == ZERO_3 and (getattr(engine, "zero_partial_offload", lambda: 1.0)() or 1.0) < 1.0:
        yield "an optimizer with partial offload", optimizer
    if (swapper := getattr(optimizer, "optimizer_swapper", None)) is not None:
        yield "the optimizer swapper", swapper
        for swapped in [*getattr(swapper, "swap_params_info", {}).values()][:1]:
            yield "a sub-group in files", swapped
            for file in getattr(swapped, "tensors", [])[:1]:
                yield "a file of a sub-group", file
    module = getattr(engine, "module", None)
    for parameter in module.parameters() if module is not None else ():
        if hasattr(parameter, "ds_id"):
            yield "a parameter of ZeRO-3", parameter
            break


def _by_option(optimizer: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield a wrapper under the titles that depend on its configuration and release."""
    for option in ("swap_optimizer", "cpu_offload", "offload_optimizer"):
        if getattr(optimizer, option, None):
            yield f"an optimizer with {option}", optimizer
    if kind == "DeepSpeedZeroOptimizer":
        yield f"the module of {kind}", module_of(optimizer)
    elif kind == "BF16_Optimizer" and not hasattr(optimizer, "zero_grad"):
        yield f"{kind} without zero_grad", optimizer
    elif kind.startswith("FP16_") and not hasattr(optimizer, "loss_scale_config"):
        yield "an optimizer without loss_scale_config", optimizer
    elif kind == ZERO_3:
        if not getattr(optimizer, "offload_param", False):
            yield "an optimizer without offload_param", optimizer
        in_memory = getattr(optimizer, "save_muon_momentum_buffer_in_memory", False)
        if in_memory and getattr(optimizer, "use_muon", False):
            yield "an optimizer with save_muon_momentum_buffer_in_memory", optimizer


def _links(optimizer: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield a parameter that ZeRO-1/2 or BF16_Optimizer trains, and a link to its master."""
    lists = {"DeepSpeedZeroOptimizer": "bit16_groups", "BF16_Optimizer": "bf16_groups"}
    groups = getattr(optimizer, lists.get(kind, ""), ())
    parameters = [parameter for group in groups for parameter in group]
    if parameters:
        yield "a parameter of ZeRO-1/2", parameters[0]
    links = (_link_to_master(parameter) for parameter in parameters)
    if (link := next((link for link in links if link is not None), None)) is not None:
        yield "a parameter's link to its master", link
