"""Addresses of fragments in the flat buffers of a live engine: computed, then compared.

``partition`` computes the places from the order, the sizes and the paddings of the parameters.
DeepSpeed's own tensors show them a second time, without any formula: each of its weights is a view
of the flat buffer that it partitions, so that the weight's address says where its elements lie.
Masters lie as the low-precision weights do: DeepSpeed's step copies the one into the other.

The engine's module: names, shapes, ties, buffers, weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import distributed

from lightning_elastic_zero.core.layout import Fragment, Layout, spans
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS, Parameter
from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    piece_numel,
    replicated_layout,
    zero_layout,
)
from lightning_elastic_zero.core.tensors import FlatState, dtype_name, is_writable, same_bits
from lightning_elastic_zero.engine.buffers import LiveFlatBuffer
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)


def parameter_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Return every name of every parameter, by identity; a tied weight has several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def parameter_table(
    module: torch.nn.Module, groups: Mapping[torch.nn.Parameter, int]
) -> tuple[Parameter, ...]:
    """Return the manifest's parameter table, in the module's order.

    Args:
        module: the engine's module.
        groups: the optimizer group of each parameter that the optimizer owns.
    """
    return tuple(
        Parameter(
            name=names[0],
            shape=full_shape(parameter),
            dtype=dtype_name(parameter.dtype),
            group=groups.get(parameter),
            aliases=tuple(names[1:]),
        )
        for parameter, names in parameter_names(module).items()
    )


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the whole parameter's shape, whether ZeRO-3 has cut it or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def weight_piece(parameter: Any) -> tuple[int, torch.Tensor]:
    """Return this rank's piece of a module weight: its first element, and a 1-D view of it.

    Of a weight whose elements do not lie in order (a frozen one in ``channels_last``) it is a copy;
    ``write_piece`` writes either. Under ZeRO-3 the piece is the rank's partition without padding,
    which may be empty; the parameter must be partitioned, not gathered. Otherwise it is the whole
    parameter.
    """
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.data.reshape(-1)
    piece = parameter.partition_numel()
    start = distributed.get_rank(group=parameter.ds_process_group) * piece
    count = max(0, min(piece, parameter.ds_numel - start))
    return start, parameter.ds_tensor.data[:count]


def write_piece(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Write this rank's piece of a module weight."""
    if hasattr(parameter, "ds_tensor") or parameter.is_contiguous():
        weight_piece(parameter)[1].copy_(values)
    else:
        parameter.data.copy_(values.view(parameter.shape))


def check_not_inference(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that can be neither changed nor trained.

    Args:
        weights: by name, or for trained ones the memory in which they lie.

    Raises:
        CheckpointMismatchError: some were assigned under ``torch.inference_mode``.
    """
    if unfit := [name for name, weight in weights.items() if weight.is_inference()]:
        msg = (
            "weights that were assigned under torch.inference_mode() can be neither changed nor "
            f"trained: {', '.join(unfit[:20])}; use torch.no_grad() there, or assign clones that "
            "were made outside of it"
        )
        raise CheckpointMismatchError(msg)


def allocate_pieces(
    parameters: Mapping[str, torch.nn.Parameter], held: Collection[str], rank: int, first: int = 0
) -> dict[Fragment, torch.Tensor]:
    """Allocate a tensor on the host for this rank's piece of each weight that a checkpoint holds.

    Args:
        parameters: partitioned, by name.
        held: names of the weights that the checkpoint holds.
        rank: this one.
        first: number of the first tensor, as ``Fragment.buffer`` has it.

    Raises:
        CheckpointMismatchError: a weight cannot be written.
    """
    wanted = {name: p for name, p in parameters.items() if name in held}
    check_not_inference({name: getattr(p, "ds_tensor", p) for name, p in wanted.items()})
    if unfit := [n for n, p in wanted.items() if not is_writable(getattr(p, "ds_tensor", p))]:
        msg = (
            "frozen weights that cannot be written (expanded views, sparse, or on the meta "
            f"device): {', '.join(unfit[:20])}; clone them: each element needs memory of its own"
        )
        raise CheckpointMismatchError(msg)
    pieces: dict[Fragment, torch.Tensor] = {}
    for name, parameter in wanted.items():
        start, piece = weight_piece(parameter)
        if piece.numel():
            fragment = Fragment(name, start, start + piece.numel(), rank, first + len(pieces), 0)
            pieces[fragment] = torch.empty_like(piece, device="cpu")
    return pieces


def commit_pieces(
    parameters: Mapping[str, torch.nn.Parameter], pieces: Mapping[Fragment, torch.Tensor]
) -> None:
    """Copy what was received into this rank's pieces of weights."""
    for fragment, values in pieces.items():
        write_piece(parameters[fragment.name], values)


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong into a checkpoint, by name; shared ones under each name."""
    return {name: buffer for name, buffer in _buffers(module, "") if buffer is not None}


def _buffers(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Walk the modules: torch has no public list of the non-persistent buffers' full names."""
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001 (torch's)
            yield prefix + name, buffer
    for name, child in module.named_children():
        yield from _buffers(child, f"{prefix}{name}.")


def write_buffers(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the module's persistent buffers.

    A buffer that was assigned under ``torch.inference_mode`` cannot be changed outside of it, nor
    be trained with: a normal tensor takes its place, under all its names.
    """
    normal: dict[torch.Tensor, torch.Tensor] = {}
    for name, buffer in persistent_buffers(module).items():
        if name not in values:
            continue
        target = buffer
        if buffer.is_inference():
            target = normal.setdefault(buffer, torch.empty_like(buffer))
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, target)
        target.copy_(values[name])


def drop_secondary_tensors(module: torch.nn.Module) -> None:
    """Drop hpZ's second copy of each weight, which forward would gather in the place of a new one.

    DeepSpeed makes it anew when it next partitions the weight. Its own way to drop them
    (``invalidate_secondary_tensor``) leaves out the weights that no optimizer owns, and is not
    there without an optimizer.
    """
    for parameter in module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def module_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the low-precision weights as the module has them, under all their names.

    Under ZeRO-3 they are the empty placeholders that DeepSpeed itself writes.
    """
    return {
        name: parameter.detach() if not hasattr(parameter, "ds_id") else torch.empty(0)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def engine_precision(engine: Any) -> str:
    """Return ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


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


def _is_view(parameter: Any, flat: torch.Tensor) -> bool:
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
