"""A flag of rank 0 for all ranks, by a collective: before each batch, the store is too slow."""

from __future__ import annotations

import torch
import torch.distributed as dist


def broadcast_flag(*, flag: bool, device: torch.device) -> bool:
    """Return rank 0's flag; collective over the default process group.

    Args:
        flag: of rank 0; those of other ranks do not count.
        device: one that the group's backend can broadcast from.

    Raises:
        RuntimeError: a rank is gone, or the network.
    """
    broadcast = torch.tensor([int(flag)], device=device)
    dist.broadcast(broadcast, src=0)
    return bool(broadcast.item())
