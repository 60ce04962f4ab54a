"""The fingerprint of a running engine: each rank adds up what it holds, and the sums are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from lightning_elastic_zero.checkpoint.device_streams import can_pin
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.layout import spans
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.state_fingerprint import (
    STEP,
    Fingerprint,
    FingerprintPart,
    TensorId,
    add_up,
    run_part,
    scalars_part,
)
from lightning_elastic_zero.storage import ignore_progress
from lightning_elastic_zero.tensor_state import FlatState, RankState, Scalar, is_on_device

PIECE_BYTES = 8 << 20
"""What is added up between two signs of life: some 0.3 ms."""

_Run: TypeAlias = "tuple[TensorId, int, torch.Tensor]"
"""Whose elements, the place of the first one, and they themselves."""


def live_fingerprint(
    manifest: Manifest,
    state: RankState,
    ranks: Ranks,
    step: str = "fingerprint",
    on_piece: Callable[[], None] | None = None,
) -> Fingerprint:
    """Compute the number that a checkpoint of a state would have. Collective; 16 bytes per rank.

    What is on the host is read where it is, what is on a device by way of a small buffer.

    Args:
        manifest: what the engine says of itself, with what a save leaves out.
        state: what this rank holds, by reference.
        ranks: who agree.
        step: what they do, in words.
        on_piece: called now and then in the place of ``ranks.report_progress``, which
            shows that this rank lives.
    """

    def own_part() -> list[int]:
        tell = on_piece or ranks.report_progress
        return rank_part(manifest, state, ranks.rank, tell).to_plain()

    # By way of rank 0: of a thousand ranks none is told what each has added.
    parts = ranks.gather(step, own_part)
    return Fingerprint.from_text(
        ranks.broadcast(f"{step}: add up", lambda: str(add_up(parts or []).total()))
    )


@torch.no_grad()
def rank_part(
    manifest: Manifest,
    state: RankState,
    rank: int,
    on_progress: Callable[[], None] = ignore_progress,
) -> FingerprintPart:
    """Return what one rank adds: its flat buffers, its pieces of frozen weights; rank 0 buffers.

    Args:
        manifest: what the engine says of itself.
        state: what this rank holds.
        rank: this one.
        on_progress: called now and then.
    """
    total = FingerprintPart()
    for index, flat in enumerate(state.flats):
        group = manifest.groups[manifest.buffers[index].group]
        step = group.hyperparameters.get(STEP)
        kept_apart = STEP not in flat.scalars and group.state and not manifest.weights_only
        apart = step if kept_apart and isinstance(step, int | float) else None
        firsts = (f.name for f in flat.fragments if f.start == 0 and not manifest.weights_only)
        for name in firsts:
            total += scalars_part(name, _scalars(flat, apart))
    buffer = _HostBuffer()
    for which, start, values in _runs(manifest, state, rank):
        for at, stop in spans(0, values.numel(), PIECE_BYTES // values.dtype.itemsize):
            total += run_part(which, start + at, buffer.on_host(values[at:stop]))
            on_progress()
    return total


def _runs(manifest: Manifest, state: RankState, rank: int) -> Iterator[_Run]:
    """Yield all that a rank adds element by element."""
    shapes = {p.name: p.shape for p in manifest.parameters}
    for flat in state.flats:
        for fragment in flat.fragments:
            name, shape = fragment.name, shapes[fragment.name]
            where = slice(fragment.offset, fragment.offset + fragment.stop - fragment.start)
            master = flat.master[where]
            yield _weight(name, master, shape), fragment.start, master
            for key, values in ({} if manifest.weights_only else flat.elementwise).items():
                which = TensorId("optimizer", name, key, values.dtype, shape)
                yield which, fragment.start, values[where]
    for fragment in manifest.frozen_layout().on_rank(rank):
        piece = state.frozen[fragment.name]
        which = _weight(fragment.name, piece, shapes[fragment.name])
        yield which, fragment.start, piece.reshape(-1)
    for name, tensor in ({} if rank else state.module_buffers).items():
        if tensor.numel():
            yield _weight(name, tensor, tuple(tensor.shape)), 0, tensor.reshape(-1)


class _HostBuffer:
    """Host memory for one piece of a tensor on a device; pinned where that makes copies fast."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def on_host(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a piece on the host, until the next one is asked for."""
        if not is_on_device(piece):
            return piece
        if self._memory is None:
            pins = can_pin(piece.device)
            self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pins)
        return self._memory[: piece.nbytes].view(piece.dtype).copy_(piece)


def _scalars(flat: FlatState, step: float | None) -> Iterator[tuple[str, Scalar]]:
    yield from flat.scalars.items()
    if step is not None:
        yield STEP, step


def _weight(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> TensorId:
    return TensorId("weights", name, "", values.dtype, shape)
