"""The files that a rank writes, and the elements in them.

A plan follows from the manifest and needs no tensors. In ZeRO-1/2, masters and states are stored
like a partition of DeepSpeed's flat buffer, without the padding at the end of the whole buffer. In
ZeRO-3, masters are stored like the rank's flat buffer, and a state as one part per parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_elastic_zero.core.layout import Fragment, TensorKey
from lightning_elastic_zero.core.manifest import MODULE_WEIGHTS, STAGE_WEIGHTS, Manifest
from lightning_elastic_zero.core.partition import FlatBuffer, piece_numel
from lightning_elastic_zero.core.save_files import (
    FROZEN,
    OPTIMIZER,
    OURS,
    STATES,
    fp32_key,
    model_file,
    optimizer_file,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a tensor of the rank's state, or zeros."""

    source: TensorKey | None
    """The tensor; None: zeros."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Item:
    """A stored tensor: runs, one after the other."""

    file: str
    entry: tuple[str | int, ...]
    """Keys that lead to it in the tree of the file."""
    dtype: str
    runs: tuple[Run, ...]
    shape: tuple[int, ...] | None = None
    """None: one dimension."""
    cuts: tuple[int, ...] | None = None
    """Sizes of the parts of which the entry is a list; None: the entry is the tensor."""


def plan_files(
    manifest: Manifest, rank: int, changed: Collection[int] = (), tensor_rank: int = 0
) -> list[Item]:
    """Return the tensors in a data rank's files that grow with the model.

    ``manifest`` is that of the tensor rank's shards; ``changed`` are the flat buffers of which the
    module's weights are written, too.
    """
    optimizer = optimizer_file(rank, manifest.precision, tensor_rank)
    model = model_file(rank, manifest.stage, tensor_rank)
    held: list[list[Fragment]] = [[] for _ in manifest.buffers]
    for fragment in manifest.layout().on_rank(rank):
        held[fragment.buffer].append(fragment)
    items = [
        item
        for index, fragments in enumerate(held)
        for item in _of_buffer(
            manifest, rank, index, fragments, optimizer, with_module=index in changed
        )
    ]
    return [*items, *_frozen(manifest, rank, model)] if writes_weights(manifest, rank) else items


def writes_weights(manifest: Manifest, rank: int) -> bool:
    """Whether a data rank writes frozen and low-precision weights; in ZeRO-3 it writes its part."""
    return rank == 0 or manifest.stage == STAGE_WEIGHTS


def lean_numel(buffer: FlatBuffer, rank: int) -> int:
    """Return the elements of a rank's partition without final padding (ZeRO-1/2)."""
    end = sum((*buffer.numels, *buffer.paddings[:-1]))
    start, stop = buffer.partition_range(rank)
    return max(0, min(end, stop) - start)


def _of_buffer(
    manifest: Manifest,
    rank: int,
    index: int,
    fragments: Sequence[Fragment],
    file: str,
    *,
    with_module: bool,
) -> Iterator[Item]:
    """Yield the items of a flat buffer: masters, states, and the module's weights."""
    buffer = manifest.buffers[index]
    zero_3 = manifest.stage == STAGE_WEIGHTS
    pieces = [piece_numel(numel, manifest.world_size) for numel in buffer.numels]
    end = sum(pieces) if zero_3 else lean_numel(buffer, rank)
    numels = dict.fromkeys(buffer.names, 0)
    numels.update((f.name, f.stop - f.start) for f in fragments)
    cuts = tuple(numels.values())

    def in_place(source: TensorKey) -> Iterator[Run]:
        """Yield runs with each element at its offset in the flat buffer."""
        reached = 0
        for f in fragments:
            stop = f.offset + f.stop - f.start
            yield from (Run(None, reached, f.offset), Run(source, f.offset, stop))
            reached = stop
        yield Run(None, reached, end)

    masters = (OPTIMIZER, fp32_key(manifest.stage), index)
    yield Item(file, masters, manifest.master_dtype, tuple(in_place(TensorKey("master", index))))
    for key in () if manifest.weights_only else manifest.groups[buffer.group].elementwise:
        source, entry = TensorKey("state", index, key.name), (OPTIMIZER, STATES, index, key.name)
        if zero_3:
            parts = tuple(Run(source, f.offset, f.offset + f.stop - f.start) for f in fragments)
            yield Item(file, entry, key.dtype, parts, cuts=cuts)
        else:
            yield Item(file, entry, key.dtype, tuple(in_place(source)))
    if with_module:
        dtypes = {p.name: p.dtype for p in manifest.optimized}
        parts = tuple(Run(TensorKey("module", f.name), 0, f.stop - f.start) for f in fragments)
        yield Item(file, (OURS, MODULE_WEIGHTS, index), dtypes[buffer.names[0]], parts, cuts=cuts)


def _frozen(manifest: Manifest, rank: int, file: str) -> Iterator[Item]:
    """Yield the frozen weights: whole with their shapes, or in ZeRO-3 padded 1-D pieces."""
    zero_3 = manifest.stage == STAGE_WEIGHTS
    ranks = manifest.world_size if zero_3 else 1
    held = {f.name: f.stop - f.start for f in manifest.frozen_layout().on_rank(rank)}
    for p in manifest.frozen:
        numel = held.get(p.name, 0)
        padding = Run(None, numel, piece_numel(p.numel, ranks))
        runs = (Run(TensorKey("frozen", p.name), 0, numel), padding)
        yield Item(file, (FROZEN, p.name), p.dtype, runs, None if zero_3 else p.shape)
