"""Muon's momentum, which DeepSpeed updates itself, in a different place in each wrapper.

ZeRO-3, BF16_Optimizer and offloaded ZeRO-1/2 keep a partition with the layout of the masters.
ZeRO-1/2 without offload concatenates the whole momenta of all parameters that overlap the rank's
partition. A save stores fragments, as for any other state; a load reassembles the whole momenta
from all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, spans
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.engine.buffers import GATHER_ELEMENTS, LiveFlatBuffer, inner_optimizer
from lightning_elastic_zero.engine.deepspeed import drop_staged_momentum

MOMENTUM_KEY = "momentum_buffer"

MOMENTUM_WRAPPERS = ("DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3")
"""The wrappers that update the momentum. Otherwise Muon does so itself."""


def uses_muon(optimizer: Any, group: int) -> bool:
    """Whether Muon trains a parameter group of a wrapper."""
    return bool(inner_optimizer(optimizer).param_groups[group].get("use_muon"))


def keeps_whole_momenta(optimizer: Any, wrapper: str, group: int) -> bool:
    """Whether a group's momentum is that of whole parameters, not of a partition."""
    in_memory = wrapper == "DeepSpeedZeroOptimizer" and not optimizer.cpu_offload
    return in_memory and uses_muon(optimizer, group)


def momentum_is_scaled(optimizer: Any) -> bool | None:
    """Whether the momentum averages gradients with loss scale; None without Muon.

    ZeRO passes gradients to Muon before it divides them by the scale. With offload and in stage 0
    it divides them first.
    """
    inner = inner_optimizer(optimizer)
    if not any(group.get("use_muon") for group in inner.param_groups):
        return None
    offloaded = any(
        getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer")
    )
    return type(optimizer).__name__ in MOMENTUM_WRAPPERS and not offloaded


def partitioned_momentum(
    optimizer: Any,
    buffer: LiveFlatBuffer,
    row: FlatBuffer,
    fragments: Sequence[Fragment],
    *,
    stepped: bool,
) -> dict[str, torch.Tensor]:
    """Return a copy of the momentum of whole parameters in the layout of the masters.

    A rank with only padding has no momentum, but must report the state keys of the others if the
    run has taken a step (``stepped``).
    """
    whole = inner_optimizer(optimizer).state.get(buffer.state_key, {}).get(MOMENTUM_KEY)
    if whole is None:
        if fragments or not stepped:
            return {}
        whole = buffer.master.data.new_empty(0, dtype=_gradient_dtype(optimizer))
    starts = _starts(optimizer.params_in_partition[buffer.group])
    parameters = dict(zip(row.names, buffer.parameters, strict=True))
    flat = whole.new_zeros(buffer.master.numel())
    for fragment in fragments:
        at = starts[parameters[fragment.name]] + fragment.start
        numel = fragment.stop - fragment.start
        flat[fragment.offset : fragment.offset + numel] = whole[at : at + numel]
    return {MOMENTUM_KEY: flat}


def momentum_dtype(optimizer: Any, wrapper: str, buffer: LiveFlatBuffer) -> torch.dtype | None:
    """Return the type in which the wrapper keeps a flat buffer's momentum; None without Muon."""
    if not uses_muon(optimizer, buffer.group):
        return None
    if wrapper not in MOMENTUM_WRAPPERS:  # Stage 0: gradients and momentum have the masters' type.
        return buffer.state_key.dtype
    dtype: torch.dtype = buffer.master.dtype
    if (kept := _momentum_in_memory(optimizer, buffer)) is not None:
        dtype = kept.dtype
    elif buffer.swapped:  # All files have one type, which DeepSpeed uses after the first step.
        dtype = buffer.swapped.dtype
    elif keeps_whole_momenta(optimizer, wrapper, buffer.group):
        dtype = _gradient_dtype(optimizer)
    elif wrapper == "DeepSpeedZeroOptimizer_Stage3":
        dtype = optimizer.communication_data_type
    return dtype


def place_momentum(optimizer: Any, wrapper: str, buffer: LiveFlatBuffer) -> None:
    """Move a momentum that was restored in the layout of the masters to the wrapper's place.

    Collective in ZeRO-1/2.
    """
    dtype = momentum_dtype(optimizer, wrapper, buffer)
    if dtype is None:
        return
    state = inner_optimizer(optimizer).state.get(buffer.state_key, {})
    restored = state.get(MOMENTUM_KEY)
    if (kept := _momentum_in_memory(optimizer, buffer)) is not None:
        # The optimizer's state refers to it; a fresh optimizer has no momentum.
        kept.zero_() if restored is None else kept.copy_(restored)
        inner_optimizer(optimizer).state[buffer.state_key][MOMENTUM_KEY] = kept
    elif keeps_whole_momenta(optimizer, wrapper, buffer.group):
        # DeepSpeed stages it again from the new state.
        drop_staged_momentum(optimizer)
        if restored is not None:
            _place_whole_momenta(optimizer, buffer, state)
    elif restored is not None:
        state[MOMENTUM_KEY] = restored.to(dtype)


def _momentum_in_memory(optimizer: Any, buffer: LiveFlatBuffer) -> torch.Tensor | None:
    """Return the momentum that ZeRO-3 keeps outside the optimizer, or None."""
    kept: Mapping[int | None, torch.Tensor]
    kept = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {})
    return kept.get(buffer.sub_group)


def _place_whole_momenta(optimizer: Any, buffer: LiveFlatBuffer, state: dict[str, Any]) -> None:
    """Reassemble whole momenta from the partitions of all ranks, in bounded parts."""
    from deepspeed import comm

    part = state.pop(MOMENTUM_KEY).to(_gradient_dtype(optimizer))
    members = optimizer.params_in_partition[buffer.group]
    starts, size = _starts(members), part.numel()
    whole = part.new_zeros(sum(p.numel() for p in members))
    flat_starts = _starts(buffer.parameters, buffer.paddings)
    wanted = [(at, p.numel(), starts[p]) for p, at in flat_starts.items() if p in starts]
    ranks = len(buffer.partitions)
    for start, stop in spans(0, size, max(GATHER_ELEMENTS // ranks, 1)):
        parts = [part.new_empty(stop - start) for _ in range(ranks)]
        process_group = optimizer.real_dp_process_group[buffer.group]
        comm.all_gather(parts, part[start:stop].contiguous(), group=process_group)
        for rank, values in enumerate(parts):
            _copy_overlaps(whole, wanted, values, rank * size + start)
    if members:
        state[MOMENTUM_KEY] = whole


def _copy_overlaps(
    whole: torch.Tensor, wanted: Sequence[tuple[int, int, int]], values: torch.Tensor, at: int
) -> None:
    """Copy the overlap of a run of the group's flat elements with some parameters.

    ``wanted``: each parameter's offset in the flat group, size, and offset in ``whole``. ``at``:
    offset of ``values`` in the flat group.
    """
    for first, numel, place in wanted:
        start, stop = max(first, at), min(first + numel, at + values.numel())
        if start < stop:
            whole[place + start - first : place + stop - first] = values[start - at : stop - at]


def _starts(
    members: Sequence[torch.nn.Parameter], paddings: Sequence[int] = ()
) -> dict[torch.nn.Parameter, int]:
    """Return the offset of each parameter if they are concatenated with paddings after them."""
    sizes = [sum(pair) for pair in zip_longest(map(torch.numel, members), paddings, fillvalue=0)]
    return dict(zip(members, accumulate(sizes, initial=0), strict=False))


def _gradient_dtype(optimizer: Any) -> torch.dtype:
    """Return the type of the gradients that ZeRO-1/2 passes to Muon, which the momentum uses."""
    accumulates = getattr(optimizer, "use_grad_accum_attribute", False)
    dtype: torch.dtype
    dtype = optimizer.gradient_accumulation_dtype if accumulates else optimizer.dtype
    return dtype
