"""Addresses of fragments in the flat buffers of a live engine: computed, then compared.

``partition`` computes the places from the order, the sizes and the paddings of the parameters.
DeepSpeed's own tensors show them a second time, without any formula: each of its weights is a view
of the flat buffer that it partitions, so that the weight's address says where its elements lie.
Masters lie as the low-precision weights do: DeepSpeed's step copies the one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import distributed

from lightning_elastic_zero.engine.flat_buffers import LiveFlatBuffer
from lightning_elastic_zero.engine.module import full_shape, weight_piece
from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.layout import Fragment, Layout, spans
from lightning_elastic_zero.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.partition import (
    FlatBuffer,
    piece_numel,
    replicated_layout,
    zero_layout,
)
from lightning_elastic_zero.tensor_state import FlatState, same_bits

COMPARE_ELEMENTS = 1 << 20
"""Elements compared at a time: bounds the memory of comparing masters with weights."""


def flat_buffer_row(
    buffer: LiveFlatBuffer, names: Mapping[torch.nn.Parameter, str], stage: int, world_size: int
) -> FlatBuffer:
    """Return how a flat buffer is laid out over all ranks, or saved by them in stage 0."""
    numel = buffer.master.numel()
    part = {STAGE_WEIGHTS: 0, 0: piece_numel(numel, world_size)}.get(stage, numel)
    return FlatBuffer(
        group=buffer.group,
        names=tuple(names[p] for p in buffer.parameters),
        numels=tuple(math.prod(full_shape(p)) for p in buffer.parameters),
        paddings=buffer.paddings,
        partition_numel=part,
    )


def rank_fragments(
    stage: int, rows: Sequence[FlatBuffer], world_size: int, rank: int
) -> tuple[tuple[Fragment, ...], ...]:
    """Return what a rank holds, by flat buffer: in stage 0, everything.

    Raises:
        UnsupportedError: the flat buffers cannot hold their parameters.
    """
    try:
        if stage:
            return fragments_by_buffer(zero_layout(stage, rows, world_size), rank, len(rows))
        return fragments_by_buffer(replicated_layout(rows), 0, len(rows))
    except CheckpointFormatError as error:
        _refuse(str(error))


def fragments_by_buffer(layout: Layout, rank: int, count: int) -> tuple[tuple[Fragment, ...], ...]:
    """Return what a layout has on a rank, for each of so many flat buffers."""
    found: list[list[Fragment]] = [[] for _ in range(count)]
    for fragment in layout.on_rank(rank):
        found[fragment.buffer].append(fragment)
    return tuple(map(tuple, found))


def own_slices(
    flats: Sequence[FlatState], rows: Sequence[FlatBuffer], world_size: int, rank: int
) -> tuple[FlatState, ...]:
    """Return the part that a rank writes of what all ranks have (stage 0).

    Args:
        flats: all that it has.
        rows: how it is laid out over all ranks when it is saved.
        world_size: of them.
        rank: this one.
    """
    held = fragments_by_buffer(zero_layout(0, rows, world_size), rank, len(rows))
    slices = [slice(*row.partition_range(rank)) for row in rows]
    return tuple(
        FlatState(
            fragments,
            flat.master[part],
            {key: values[part] for key, values in flat.elementwise.items()},
            flat.scalars,
            in_module=flat.in_module,
        )
        for flat, fragments, part in zip(flats, held, slices, strict=True)
    )


def verify_addresses(
    buffer: LiveFlatBuffer, row: FlatBuffer, fragments: Sequence[Fragment], *, fresh: bool
) -> None:
    """Refuse a flat buffer in which DeepSpeed's own weights lie elsewhere than computed.

    Args:
        buffer: a live flat buffer.
        row: the same, as a table.
        fragments: what this rank holds of it, as computed.
        fresh: whether nothing but DeepSpeed has touched the module. A weight that is no view of
            the flat buffer is then refused in ZeRO-1/2. Later a user may have put another tensor
            in its place, which says nothing of the masters.

    Raises:
        UnsupportedError: one lies elsewhere.
    """
    if buffer.low.shape != buffer.values.shape:
        shapes = f"{tuple(buffer.values.shape)} masters for {tuple(buffer.low.shape)} weights"
        _refuse(f"a flat buffer of group {row.group} has {shapes}")
    if buffer.stepped is not None:  # A parameter that stands for itself: nothing is computed.
        return
    parameters = dict(zip(row.names, buffer.parameters, strict=True))
    for fragment in fragments:
        parameter = parameters[fragment.name]
        if _is_view(parameter, buffer.low):
            first, piece = weight_piece(parameter)
            at = (piece.data_ptr() - buffer.low.data_ptr()) // buffer.low.element_size()
            at += fragment.start - first
        elif fresh and not hasattr(parameter, "ds_tensor"):
            at = None
        else:
            continue
        if at != fragment.offset:
            there = "not there at all" if at is None else f"at {at}"
            _refuse(
                f"{fragment.name}[{fragment.start}:{fragment.stop}] should lie at element "
                f"{fragment.offset} of a flat buffer of group {row.group}, and is {there}"
            )


def verify_pieces(parameters: Iterable[Any], rank: int, world_size: int) -> None:
    """Refuse parameters that ZeRO-3 has cut otherwise than ``partition`` does.

    Raises:
        UnsupportedError: one is.
    """
    for parameter in parameters:
        if not hasattr(parameter, "ds_tensor"):
            continue
        held = distributed.get_rank(group=parameter.ds_process_group), parameter.partition_numel()
        if held != (rank, piece_numel(parameter.ds_numel, world_size)):
            _refuse(
                f"of a parameter of {parameter.ds_numel} elements, rank {rank} of {world_size} "
                f"holds piece {held[0]} of {held[1]} elements"
            )


def _is_view(parameter: Any, flat: torch.Tensor) -> bool:  # noqa: ANN401 (ZeRO-3 adds fields)
    held = getattr(parameter, "ds_tensor", parameter)
    there: bool = held.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    return there


def _refuse(what: str) -> NoReturn:
    msg = (
        "this release of DeepSpeed, or this configuration of it, lays parameters out in a way that "
        f"this library does not know: {what}. If code of yours has put other tensors into "
        "the .data of weights, put those back that DeepSpeed made; otherwise report it with your "
        "DeepSpeed config"
    )
    raise UnsupportedError(msg)


def bounded_runs(fragments: Iterable[Fragment]) -> Iterator[tuple[Fragment, int, int]]:
    """Yield the runs of a flat buffer, at most ``COMPARE_ELEMENTS`` long, as offsets in it."""
    for fragment in fragments:
        end = fragment.offset + fragment.stop - fragment.start
        for at, stop in spans(fragment.offset, end, COMPARE_ELEMENTS):
            yield fragment, at, stop


def weights_match(buffer: LiveFlatBuffer, row: FlatBuffer, fragments: Iterable[Fragment]) -> bool:
    """Whether this rank's part of the weights in a flat buffer is its masters, rounded."""
    parameters = dict(zip(row.names, buffer.parameters, strict=True))
    masters = buffer.values
    for fragment, at, end in bounded_runs(fragments):
        whole = buffer.stepped is not None
        first, piece = (0, buffer.low) if whole else weight_piece(parameters[fragment.name])
        skipped = fragment.start - first - fragment.offset
        weights = piece[at + skipped : end + skipped]
        if not same_bits(weights, masters[at:end].to(weights)):
            return False
    return True
