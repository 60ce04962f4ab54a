"""Copies of frozen weights that training changes, such as those of a momentum encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.core.tensors import bit_sums, is_writable
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.addresses import weight_piece
from lightning_elastic_zero.engine.live import LiveEngine

_SAMPLED = 4096
"""Elements of each weight that are compared: an average in bf16 may change few of them per step."""


class FrozenCopies:
    """Copies changing frozen weights at the beginning of each accumulation window.

    Only those that change are copied, because a frozen base model can be larger than the trained
    part. They are found by the bits of some of their elements, since users write to ``.data``,
    which torch does not count as a change. The bits are compared at windows 1, 2, 4, 8, ... and by
    saves.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._frozen = LiveEngine(engine).frozen()
        self._windows = 0
        self._sums: dict[str, int] = {}
        self._copies: dict[str, torch.Tensor] = {}
        self._changing: set[str] = set()

    def begin_window(self) -> None:
        """Copy the weights, before the window's first micro-batch."""
        self._windows += 1
        if self._windows.bit_count() == 1:
            sums = self._sampled_sums()
            self._changing, self._sums = self._changed(sums), sums
        self._copies = {}  # not two copies at a time
        pieces = {name: weight_piece(self._frozen[name])[1] for name in self._changing}
        self._copies = {name: piece.detach().clone() for name, piece in pieces.items()}

    def at_step(self) -> dict[str, torch.Tensor]:
        """Return the copies for a save inside the window, and warn of changes without a copy."""
        self._changing |= self._changed(self._sampled_sums())
        if lacking := sorted(self._changing - self._copies.keys()):
            rank_zero_warn(
                f"Frozen weights have changed during training: {format_names(lacking, 5)}. This "
                "checkpoint inside an accumulation window contains their live values, so a run "
                "resumed from it repeats changes. Later checkpoints contain the values of the "
                "last optimizer step."
            )
        live = LiveEngine(self._engine).frozen()
        return {n: copy for n, copy in self._copies.items() if live.get(n) is self._frozen[n]}

    def _changed(self, sums: Mapping[str, int]) -> set[str]:
        return {name for name, total in sums.items() if self._sums.get(name, total) != total}

    def _sampled_sums(self) -> dict[str, int]:
        """Return a sum over the bits of a sample of each weight, with one transfer per device."""
        on: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, parameter in self._frozen.items():
            if is_writable(getattr(parameter, "ds_tensor", parameter)):
                piece = weight_piece(parameter)[1].detach()
                sample = piece[:: max(1, piece.numel() // _SAMPLED)].clone()
                on.setdefault(sample.device, {})[name] = sample
        sums: dict[str, int] = {}
        for samples in on.values():
            sums |= zip(samples, bit_sums([*samples.values()]), strict=True)
        return sums
