"""The fingerprint of a running engine: each rank adds up what it holds, and the sums are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

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
from lightning_elastic_zero.tensor_state import FlatState, RankState, Scalar

PIECE_ELEMENTS = 1 << 24
"""Elements that are added up between two signs of life: a tenth of a second on a busy core."""


def live_fingerprint(
    manifest: Manifest,
    state: RankState,
    ranks: Ranks,
    step: str = "fingerprint",
    on_piece: Callable[[], None] | None = None,
) -> Fingerprint:
    """Compute the number that a checkpoint of a state would have. Collective; 32 bytes per rank.

    Masters and states are read where they are, on a device by the device.

    Args:
        manifest: what the engine says of itself, with what a save leaves out.
        state: what this rank holds, by reference.
        ranks: who agree.
        step: what they do, in words.
        on_piece: called now and then in the place of ``ranks.report_progress``, which
            shows that this rank lives.
    """

    def own_part() -> list[int]:
        return rank_part(manifest, state, ranks.rank, on_piece or ranks.report_progress).to_plain()

    return add_up(ranks.all_gather(step, own_part)).total()


@torch.no_grad()
def rank_part(
    manifest: Manifest,
    state: RankState,
    rank: int,
    on_progress: Callable[[], None] = ignore_progress,
) -> FingerprintPart:
    """Return what one rank adds: its flat buffers, its pieces of frozen weights; rank 0 buffers."""
    total = FingerprintPart()
    shapes = {p.name: p.shape for p in manifest.parameters}
    for index, flat in enumerate(state.flats):
        group = manifest.groups[manifest.buffers[index].group]
        step = group.hyperparameters.get(STEP)
        kept_apart = STEP not in flat.scalars and group.state and not manifest.weights_only
        apart = step if kept_apart and isinstance(step, int | float) else None
        with_states = not manifest.weights_only
        total += _flat_part(flat, shapes, apart, on_progress, with_states=with_states)
    for fragment in manifest.frozen_layout().on_rank(rank):
        piece = state.frozen[fragment.name]
        which = _weight(fragment.name, piece, shapes[fragment.name])
        total += _sum_up(which, fragment.start, piece.reshape(-1), on_progress)
    if rank == 0:
        for name, tensor in state.module_buffers.items():
            if tensor.numel():
                which = _weight(name, tensor, tuple(tensor.shape))
                total += run_part(which, 0, tensor.reshape(-1))
    return total


def _flat_part(
    flat: FlatState,
    shapes: dict[str, tuple[int, ...]],
    step: float | None,
    on_progress: Callable[[], None],
    *,
    with_states: bool,
) -> FingerprintPart:
    total = FingerprintPart()
    for fragment in flat.fragments:
        name, shape = fragment.name, shapes[fragment.name]
        stop = fragment.offset + fragment.stop - fragment.start
        master = flat.master[fragment.offset : stop]
        total += _sum_up(_weight(name, master, shape), fragment.start, master, on_progress)
        if not with_states:
            continue
        for key, values in flat.elementwise.items():
            which = TensorId("optimizer", name, key, values.dtype, shape)
            run = values[fragment.offset : stop]
            total += _sum_up(which, fragment.start, run, on_progress)
        if fragment.start == 0:
            total += scalars_part(name, _scalars(flat, step))
    return total


def _sum_up(
    tensor: TensorId, start: int, values: torch.Tensor, on_progress: Callable[[], None]
) -> FingerprintPart:
    """Return what a run of any length adds, piece by piece."""
    total = FingerprintPart()
    for at, stop in spans(0, values.numel(), PIECE_ELEMENTS):
        total += run_part(tensor, start + at, values[at:stop])
        on_progress()
    return total


def _scalars(flat: FlatState, step: float | None) -> Iterator[tuple[str, Scalar]]:
    yield from flat.scalars.items()
    if step is not None:
        yield STEP, step


def _weight(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> TensorId:
    return TensorId("weights", name, "", values.dtype, shape)
