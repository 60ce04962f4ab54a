"""Where each of DeepSpeed's optimizer wrappers keeps its flat buffers (``releases``: since when).

DeepSpeed's ``_hp_mapping`` is never read: it is wrong with ``round_robin_gradients``, and empty in
several states. ``places`` computes what lies where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from lightning_elastic_zero.engine.releases import parameter_paddings

GATHER_ELEMENTS = 1 << 21
"""Elements that are gathered at once from all ranks together: bounds the memory of a refresh."""


@dataclass(frozen=True, slots=True)
class LiveFlatBuffer:
    """One flat buffer of a live engine, as this rank has it."""

    group: int
    """Index of its optimizer parameter group."""
    parameters: tuple[torch.nn.Parameter, ...]
    """In flat order."""
    paddings: tuple[int, ...]
    """Elements of padding after each parameter (``parameter_alignment``); empty without."""
    master: torch.Tensor
    """This rank's master weights, 1-D; the key of the optimizer's state."""
    low: torch.Tensor
    """This rank's low-precision weights, of the same shape."""


def live_flat_buffers(optimizer: Any, wrapper: str) -> list[LiveFlatBuffer]:  # noqa: ANN401 (untyped)
    """Enumerate the flat buffers of a wrapper of that class name."""
    readers = {
        "DeepSpeedZeroOptimizer": _zero_1_2,
        "BF16_Optimizer": _bf16,
        "DeepSpeedZeroOptimizer_Stage3": _zero_3,
    }
    return list(readers[wrapper](optimizer))


def group_parameters(optimizer: Any, wrapper: str) -> list[list[torch.nn.Parameter]]:  # noqa: ANN401
    """Return each group's trained parameters in the order in which the optimizer was given them.

    ``round_robin_gradients`` (ZeRO-1/2) changes the order in the flat buffers, not this one: other
    software's optimizer states are told apart by it.
    """
    if wrapper == "DeepSpeedZeroOptimizer":
        return [list(parameters) for parameters in optimizer.bit16_groups]
    groups: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.optimizer.param_groups]
    for buffer in live_flat_buffers(optimizer, wrapper):
        groups[buffer.group] += buffer.parameters
    return groups


def refresh_low_precision(optimizer: Any, wrapper: str, *, has_state: bool) -> None:  # noqa: ANN401
    """Write the masters into the low-precision weights of all ranks: collective.

    Args:
        optimizer: DeepSpeed's wrapper, with masters in place. For ZeRO-3 the parameters must be
            partitioned (``checkpoint_event_prologue``), and gathered again afterwards.
        wrapper: its class name.
        has_state: whether the optimizer has state now, for DeepSpeed's own links to it.
    """
    if wrapper == "DeepSpeedZeroOptimizer_Stage3":
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        return
    bf16 = wrapper == "BF16_Optimizer"
    partitions = (
        optimizer.bf16_partitioned_groups if bf16 else optimizer.parallel_partitioned_bit16_groups
    )
    partitioned = live_flat_buffers(optimizer, wrapper)
    for group, buffer in enumerate(partitioned):
        buffer.low.data.copy_(buffer.master.data)
        _gather_partitions(partitions[group], buffer.low, optimizer.real_dp_process_group[group])
    # DeepSpeed links each parameter to its optimizer state once; the tensors may be new now.
    optimizer._hp_optimizer_states_linked = False
    _unlink_states(parameter for members in partitioned for parameter in members.parameters)
    if has_state:
        optimizer._lazy_init_hp_params_optimizer_state()


def _unlink_states(parameters: Iterable[Any]) -> None:
    """Drop DeepSpeed's links to optimizer states: they would keep old ones from being freed."""
    for parameter in parameters:
        if getattr(parameter, "_hp_mapping", None) is not None:
            parameter._hp_mapping.optim_fragment = None


def _gather_partitions(
    partitions: Sequence[torch.Tensor],
    own: torch.Tensor,
    process_group: Any,  # noqa: ANN401
) -> None:
    """Gather all partitions of a flat buffer on every rank: collective.

    A bounded part at a time: DeepSpeed's own ``update_lp_params`` gathers the whole buffer at once,
    for which gloo holds a second copy of it.
    """
    from deepspeed import comm  # noqa: PLC0415 (DeepSpeed takes seconds to import)

    part = max(GATHER_ELEMENTS // len(partitions), 1)
    for start in range(0, own.numel(), part):
        count = min(part, own.numel() - start)
        parts = [partition.data.narrow(0, start, count) for partition in partitions]
        comm.all_gather(parts, own.data.narrow(0, start, count), group=process_group)


def _zero_1_2(optimizer: Any) -> Iterator[LiveFlatBuffer]:  # noqa: ANN401 (untyped)
    """ZeRO-1/2: one buffer per parameter group, equal partitions, offsets of its own."""
    for group, parameters in enumerate(optimizer.round_robin_bit16_groups):
        rank = distributed.get_rank(group=optimizer.real_dp_process_group[group])
        yield LiveFlatBuffer(
            group=group,
            parameters=tuple(parameters),
            paddings=parameter_paddings(optimizer, group),
            master=optimizer.single_partition_of_fp32_groups[group],
            low=optimizer.parallel_partitioned_bit16_groups[group][rank],
        )


def _bf16(optimizer: Any) -> Iterator[LiveFlatBuffer]:  # noqa: ANN401 (untyped)
    """BF16_Optimizer: as ZeRO-1, without alignment."""
    for group, parameters in enumerate(optimizer.bf16_groups):
        rank = distributed.get_rank(group=optimizer.real_dp_process_group[group])
        yield LiveFlatBuffer(
            group=group,
            parameters=tuple(parameters),
            paddings=(),
            master=optimizer.fp32_groups_flat_partition[group],
            low=optimizer.bf16_partitioned_groups[group][rank],
        )


def _zero_3(optimizer: Any) -> Iterator[LiveFlatBuffer]:  # noqa: ANN401 (untyped)
    """ZeRO-3: one buffer per sub-group, each parameter cut by itself."""
    for sub_group, parameters in enumerate(optimizer.fp16_groups):
        yield LiveFlatBuffer(
            group=optimizer.sub_group_to_group_id[sub_group],
            parameters=tuple(parameters),
            paddings=(),
            master=optimizer.fp32_partitioned_groups_flat[sub_group],
            low=optimizer.fp16_partitioned_groups_flat[sub_group],
        )
