"""Whether any rank says yes, by a collective: before each batch, the store is too slow."""

from __future__ import annotations

import torch
import torch.distributed as dist


def any_rank(*, flag: bool, device: torch.device) -> bool:
    """Whether any rank's flag is set; collective over the default process group.

    Args:
        flag: this rank's.
        device: one whose tensors the group's backend can reduce.

    Raises:
        RuntimeError: a rank is gone, or the network.
    """
    flags = torch.tensor([int(flag)], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
