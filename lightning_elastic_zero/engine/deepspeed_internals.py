"""DeepSpeed's private names: they are used here and nowhere else.

``releases`` lists them, with what each is for, and checks at setup those that every release has;
``tests/house/test_deepspeed_names.py`` finds any that is used elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

OFFLOADED_COPY_SUFFIX = "_offload_buffer"
"""How the key of the host's copy of an optimizer state ends, in ZeRO-3's optimizer states."""


def compatible_operators(ops: Any) -> dict[str, bool]:  # noqa: ANN401 (untyped library)
    """Return the table that says which operators DeepSpeed may build, of ``deepspeed.ops``."""
    table: dict[str, bool] = ops.__compatible_ops__
    return table


def links_states(optimizer: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether a wrapper links parameters to their optimizer states: ZeRO-1/2, BF16_Optimizer."""
    return hasattr(optimizer, "_hp_optimizer_states_linked")


def unlink_states(
    optimizer: Any,  # noqa: ANN401 (untyped library)
    parameters: Iterable[torch.nn.Parameter] = (),
) -> None:
    """Make a wrapper link parameters anew to their optimizer states, which it does once.

    Args:
        optimizer: one that ``links_states``.
        parameters: those whose links end now, as they would keep old states from being freed.
    """
    optimizer._hp_optimizer_states_linked = False
    for parameter in parameters:
        if (link := link_to_master(parameter)) is not None:
            link.optim_fragment = None


def link_to_master(parameter: torch.nn.Parameter) -> Any:  # noqa: ANN401 (untyped library)
    """Return what links a parameter to its master and states; None where nothing does."""
    return getattr(parameter, "_hp_mapping", None)


def link_states(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Link parameters to their optimizer states, which must be there, unless they are linked."""
    optimizer._lazy_init_hp_params_optimizer_state()


def release_gradient_buckets(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Drop the buckets in which ZeRO-1/2 reduces gradients."""
    optimizer._release_ipg_buffers()


def discard_accumulated_ids(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Discard the ids of parameters whose gradients ZeRO-1/2 has offloaded, where it keeps any."""
    getattr(optimizer, "_offload_accumulated_param_ids", set()).clear()


def discard_boundary_ids(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Discard the ids of parameters whose gradients ZeRO-3 has yet to offload, where it has any."""
    getattr(optimizer, "_offload_boundary_param_ids", set()).clear()


def reset_backward_count(engine: Any) -> None:  # noqa: ANN401 (untyped library)
    """Reset an engine's count of backward passes since its last step, where it has one."""
    if hasattr(engine, "_unmanaged_backward_count"):
        engine._unmanaged_backward_count = 0


def updates_offloaded_momentum(optimizer: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether a release brings Muon's momentum forward on the host, in ZeRO-1/2 with offload."""
    return hasattr(optimizer, "_apply_muon_updates_cpu_offload")


def drop_staged_momentum(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Drop the momentum of Muon that ZeRO-1/2 has staged for a step, where its release does."""
    getattr(optimizer, "_muon_pending_momentum", {}).clear()


def module_of(optimizer: Any) -> ModuleType:  # noqa: ANN401 (untyped library)
    """Return the module that a wrapper's class is defined in."""
    return sys.modules[type(optimizer).__module__]


def initial_micro_step(optimizer: Any) -> int:  # noqa: ANN401 (untyped library)
    """Return the number that ZeRO-1/2 gives the first micro-batch of a window."""
    first: int = module_of(optimizer).INITIAL_MICRO_STEP_ID
    return first


def write_weights(optimizer: Any, sub_group: int) -> None:  # noqa: ANN401 (untyped library)
    """Write the masters of a sub-group of ZeRO-3's, in memory, into its low-precision weights."""
    optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)


def is_swapped(optimizer: Any, sub_group: int) -> bool:  # noqa: ANN401 (untyped library)
    """Whether a sub-group of ZeRO-3's, with offload to NVMe, is in files between steps."""
    return bool(optimizer._swappable_optimizer_subgroup(sub_group))


def swap_in(optimizer: Any, sub_group: int) -> None:  # noqa: ANN401 (untyped library)
    """Read the masters, states and gradients of a sub-group from its files into memory."""
    optimizer._optimizer_states_and_gradient_swap_in(sub_group)


def swap_out(optimizer: Any, sub_group: int) -> None:  # noqa: ANN401 (untyped library)
    """Write the masters and states of a sub-group to files, and free their memory."""
    optimizer._optimizer_states_and_gradient_swap_out(sub_group)
