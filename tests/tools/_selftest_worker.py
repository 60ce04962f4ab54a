"""A worker of ``selftest`` with one stage only, in which the load of one checkpoint is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero import load_checkpoint, selftest
from lightning_elastic_zero.selftest import _run_rank as run_rank


def _load_with_a_flipped_bit(engine: Any, path: Path) -> object:
    """Load; on the last rank, flip the last bit of one element."""
    result = load_checkpoint(engine, path)
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if "background" in path.name and is_last:
        (state,) = [s for p, s in engine.optimizer.optimizer.state.items() if p.numel() > 99]
        state["exp_avg"][:1].view(torch.int32)[0] ^= 1
    return result


def broken_rank(rank: int, *given: Any) -> None:
    vars(selftest).update(_NEXT_STAGE={1: 2}, load_checkpoint=_load_with_a_flipped_bit)
    run_rank(rank, *given)
