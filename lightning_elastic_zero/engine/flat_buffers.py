"""Where each of DeepSpeed's optimizer wrappers keeps its flat buffers (``releases``: since when).

DeepSpeed's ``_hp_mapping`` is never read: it is wrong with ``round_robin_gradients``, and empty in
several states. ``places`` computes what lies where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import get_rank

from lightning_elastic_zero.engine.offloaded_states import weight_partitions, weight_sub_groups
from lightning_elastic_zero.engine.releases import parameter_paddings
from lightning_elastic_zero.engine.swapped_optimizer import SwappedSubGroup, swapped_sub_group
from lightning_elastic_zero.layout import spans

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
    """This rank's master weights, 1-D; the key of the optimizer's state. Empty where swapped."""
    low: torch.Tensor
    """This rank's low-precision weights, of the same shape."""
    partitions: tuple[torch.Tensor, ...] = ()
    """ZeRO-1/2: the low-precision weights of all ranks."""
    sub_group: int | None = None
    """ZeRO-3: which sub-group it is."""
    swapped: SwappedSubGroup | None = None
    """ZeRO-3: where masters and states are in files."""

    @property
    def values(self) -> torch.Tensor:
        """The master weights, wherever they are; those in files are to be read only."""
        return self.swapped.masters() if self.swapped else self.master.data


_CONTIGUOUS = {
    "DeepSpeedZeroOptimizer": (
        "round_robin_bit16_groups",
        "single_partition_of_fp32_groups",
        "parallel_partitioned_bit16_groups",
    ),
    "BF16_Optimizer": (
        "bf16_groups",
        "fp32_groups_flat_partition",
        "bf16_partitioned_groups",
    ),
}
"""Where ZeRO-1/2 keeps each group's parameters, its masters, and all ranks' low partitions."""


def live_flat_buffers(optimizer: Any, wrapper: str) -> list[LiveFlatBuffer]:  # noqa: ANN401 (untyped)
    """Enumerate the flat buffers of a wrapper of that class name.

    ZeRO-1/2 has one for each parameter group, in equal partitions; ZeRO-3 one for each sub-group,
    with each parameter cut by itself.
    """
    if wrapper == "DeepSpeedZeroOptimizer_Stage3":
        lows = weight_sub_groups(optimizer)
        return [
            LiveFlatBuffer(
                group=optimizer.sub_group_to_group_id[sub_group],
                parameters=tuple(parameters),
                paddings=(),
                master=optimizer.fp32_partitioned_groups_flat[sub_group],
                low=lows[sub_group],
                sub_group=sub_group,
                swapped=swapped_sub_group(optimizer, sub_group),
            )
            for sub_group, parameters in enumerate(optimizer.fp16_groups)
        ]
    groups, masters, live = (getattr(optimizer, name) for name in _CONTIGUOUS[wrapper])
    partitions = [weight_partitions(optimizer, group, held) for group, held in enumerate(live)]
    return [
        LiveFlatBuffer(
            group=group,
            parameters=tuple(parameters),
            paddings=parameter_paddings(optimizer, group),
            master=masters[group],
            low=partitions[group][get_rank(group=optimizer.real_dp_process_group[group])],
            partitions=partitions[group],
        )
        for group, parameters in enumerate(groups)
    ]


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
            if swapped_sub_group(optimizer, sub_group):
                continue  # Refreshed when its masters were written (``swapped_in``).
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        return
    buffers = live_flat_buffers(optimizer, wrapper)
    for buffer in buffers:
        buffer.low.data.copy_(buffer.master.data)
        _gather_partitions(buffer, optimizer.real_dp_process_group[buffer.group])
    # DeepSpeed links each parameter to its optimizer state once; the tensors may be new now.
    optimizer._hp_optimizer_states_linked = False
    for parameter in (p for buffer in buffers for p in buffer.parameters):
        if (link := getattr(parameter, "_hp_mapping", None)) is not None:
            link.optim_fragment = None  # It would keep the old ones from being freed.
    if has_state:
        optimizer._lazy_init_hp_params_optimizer_state()


def _gather_partitions(buffer: LiveFlatBuffer, process_group: Any) -> None:  # noqa: ANN401
    """Gather all partitions of a flat buffer on every rank: collective.

    A bounded part at a time: DeepSpeed's own ``update_lp_params`` gathers the whole buffer at once,
    for which gloo holds a second copy of it.
    """
    from deepspeed import comm  # noqa: PLC0415 (DeepSpeed takes seconds to import)

    for start, stop in spans(
        0, buffer.low.numel(), max(GATHER_ELEMENTS // len(buffer.partitions), 1)
    ):
        parts = [partition.data[start:stop] for partition in buffer.partitions]
        comm.all_gather(parts, buffer.low.data[start:stop], group=process_group)
