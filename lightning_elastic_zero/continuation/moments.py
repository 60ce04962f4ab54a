"""What belongs to the last optimizer step, while a window of micro-batches is under way.

Weights change at optimizer steps; buffers and random numbers at every micro-batch. A checkpoint
taken inside a window goes back to the last step, so it needs theirs of that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_elastic_zero.progress import random_state


@dataclass(frozen=True, slots=True)
class Moment:
    """Random numbers and buffers, as they were between two steps."""

    random: Mapping[str, Any]
    buffers: Mapping[str, torch.Tensor]
    """Copies, by the names that the module's ``named_buffers`` gives."""

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> Moment:
        """Copy what is there now."""
        buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        return cls(random_state(device), buffers)
