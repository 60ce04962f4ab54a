"""The fingerprint of a running engine: each rank adds up what it holds, and the sums are added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

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
from lightning_elastic_zero.tensor_state import FlatState, RankState, Scalar, is_on_device

PIECE_ELEMENTS = 1 << 22
"""Elements that are added up between two signs of life, by one thread: some 10 ms."""

MOST_THREADS = 16
"""More would wait for memory."""

_SMALL_ELEMENTS = 1 << 14
"""Fewer take no longer than to hand them to a thread."""

_Run: TypeAlias = "tuple[TensorId, int, torch.Tensor]"
"""Whose elements, the place of the first one, and they themselves."""


def live_fingerprint(
    manifest: Manifest,
    state: RankState,
    ranks: Ranks,
    step: str = "fingerprint",
    on_piece: Callable[[], None] | None = None,
    threads: int = 1,
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
        threads: how many add up what this rank has on the host.
    """

    def own_part() -> list[int]:
        tell = on_piece or ranks.report_progress
        return rank_part(manifest, state, ranks.rank, tell, threads).to_plain()

    return add_up(ranks.all_gather(step, own_part)).total()


@torch.no_grad()
def rank_part(
    manifest: Manifest,
    state: RankState,
    rank: int,
    on_progress: Callable[[], None] = ignore_progress,
    threads: int = 1,
) -> FingerprintPart:
    """Return what one rank adds: its flat buffers, its pieces of frozen weights; rank 0 buffers.

    Args:
        manifest: what the engine says of itself.
        state: what this rank holds.
        rank: this one.
        on_progress: called now and then.
        threads: how many add up what lies on the host.
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
    for part in _sums(_pieces(_runs(manifest, state, rank)), threads):
        total += part
        on_progress()
    return total


def host_threads() -> int:
    """Return how many threads may add up while training waits: as many as torch itself takes."""
    return min(torch.get_num_threads(), MOST_THREADS)


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


def _pieces(runs: Iterable[_Run]) -> Iterator[_Run]:
    """Yield runs of any length in pieces."""
    for which, start, values in runs:
        for at, stop in spans(0, values.numel(), PIECE_ELEMENTS):
            yield which, start + at, values[at:stop]


def _sums(pieces: Iterable[_Run], threads: int) -> Iterator[FingerprintPart]:
    """Yield what each piece adds; those on the host by threads, where there are several.

    What lies on a device is left to this thread, whose stream knows what it waits for.
    """
    if threads == 1:
        yield from (run_part(*piece) for piece in pieces)
        return
    pool = ThreadPoolExecutor(threads, "elastic-zero fingerprint")
    try:
        large: list[Future[FingerprintPart]] = []
        for piece in pieces:
            if piece[2].numel() < _SMALL_ELEMENTS or is_on_device(piece[2]):
                yield run_part(*piece)
            else:
                large.append(pool.submit(run_part, *piece))
        yield from (future.result() for future in large)
    finally:
        pool.shutdown(cancel_futures=True)


def _scalars(flat: FlatState, step: float | None) -> Iterator[tuple[str, Scalar]]:
    yield from flat.scalars.items()
    if step is not None:
        yield STEP, step


def _weight(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> TensorId:
    return TensorId("weights", name, "", values.dtype, shape)
