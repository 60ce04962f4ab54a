"""States that ``engine.offload_states`` has put on the host until ``engine.reload_states``.

Masters and optimizer states keep their tensors, on the host. DeepSpeed drops its views of the
low-precision weights, and makes them anew when it reloads: they are found in the buffers meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_elastic_zero.engine.deepspeed_internals import OFFLOADED_COPY_SUFFIX
from lightning_elastic_zero.errors import UnsupportedError


def refuse_offloaded(optimizer: Any) -> None:  # noqa: ANN401 (untyped library)
    """Refuse to load while states are on the host.

    Raises:
        UnsupportedError: some are.
    """
    if found := getattr(optimizer, "offloaded_states", None):
        names = ", ".join(sorted(state.value for state in found))
        msg = (
            f"engine.offload_states() has put {names} on the host, and a load writes to the "
            "device: call engine.reload_states() before it. Saving needs no reload"
        )
        raise UnsupportedError(msg)


def weights_are_offloaded(optimizer: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether the low-precision weights are on the host, where they are no views of a buffer."""
    found = getattr(optimizer, "offloaded_states", None) or ()
    return any(state.value == "lp_params" for state in found)


def weight_partitions(
    optimizer: Any,  # noqa: ANN401 (untyped library)
    group: int,
    partitions: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return the low-precision weights of all ranks of a ZeRO-1/2 group, offloaded or not.

    Args:
        optimizer: its wrapper.
        group: which one.
        partitions: where DeepSpeed keeps them; empty while they are offloaded.
    """
    if partitions or not weights_are_offloaded(optimizer):
        return tuple(partitions)
    return tuple(optimizer.bit16_groups_flat[group].split(int(optimizer.partition_size[group])))


def weight_sub_groups(optimizer: Any) -> list[torch.Tensor]:  # noqa: ANN401 (untyped library)
    """Return this rank's low-precision weights of each ZeRO-3 sub-group, offloaded or not."""
    if not weights_are_offloaded(optimizer):
        found: list[torch.Tensor] = optimizer.fp16_partitioned_groups_flat
        return found
    sizes = [sum(p.partition_numel() for p in members) for members in optimizer.fp16_groups]
    return list(optimizer.lp_param_buffer.split(sizes))


def without_copies(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's states without the host's copies of them."""
    suffix = OFFLOADED_COPY_SUFFIX
    copies = {key for key in state if key.removesuffix(suffix) in state and key.endswith(suffix)}
    return {key: value for key, value in state.items() if key not in copies} if copies else state
