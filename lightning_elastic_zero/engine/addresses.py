"""The parameters and buffers of a live engine, and the addresses of their fragments.

``core.partition`` computes the addresses from the order, sizes and paddings of the parameters.
``verify_addresses`` compares them with DeepSpeed's weights, which are views of their flat buffers.
Masters have the layout of the low-precision weights, because DeepSpeed's step copies them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import distributed

from lightning_elastic_zero.core.layout import Fragment, Layout, spans
from lightning_elastic_zero.core.manifest import STAGE_WEIGHTS
from lightning_elastic_zero.core.partition import (
    FlatBuffer,
    piece_numel,
    replicated_layout,
    zero_layout,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import FlatState, is_writable, same_bits
from lightning_elastic_zero.engine.buffers import LiveFlatBuffer
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedError,
)

log = logging.getLogger(__name__)

COMPARE_ELEMENTS = 1 << 20
"""Elements compared at once: bounds the memory of comparing masters with weights."""


def parameter_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Return all names of each parameter; a tied weight has several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the whole parameter's shape, even if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def weight_piece(parameter: Any) -> tuple[int, torch.Tensor]:
    """Return the first element and a 1-D view of this rank's piece of a module weight.

    Under ZeRO-3, the piece is the rank's partition without padding, which may be empty; the
    parameter must not be gathered. Otherwise it is the whole parameter, copied if its elements are
    not contiguous (a frozen weight in ``channels_last``).
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
    """Raise CheckpointMismatchError if weights were assigned under ``torch.inference_mode``."""
    if unfit := [name for name, weight in weights.items() if weight.is_inference()]:
        msg = (
            "weights assigned under torch.inference_mode() can be neither changed nor trained: "
            f"{', '.join(unfit[:20])}. Use torch.no_grad() there, or assign clones made outside"
        )
        raise CheckpointMismatchError(msg)


def allocate_pieces(
    parameters: Mapping[str, torch.nn.Parameter], held: Collection[str], rank: int, first: int = 0
) -> dict[Fragment, torch.Tensor]:
    """Allocate a host tensor for this rank's piece of each weight that a checkpoint contains.

    ``held`` names the weights in the checkpoint, ``first`` is ``Fragment.buffer`` of the first
    tensor. Raises CheckpointMismatchError if a weight cannot be written.
    """
    wanted = {name: p for name, p in parameters.items() if name in held}
    check_not_inference({name: getattr(p, "ds_tensor", p) for name, p in wanted.items()})
    if unfit := [n for n, p in wanted.items() if not is_writable(getattr(p, "ds_tensor", p))]:
        msg = (
            "frozen weights that cannot be written (expanded views, sparse, or on the meta "
            f"device): {', '.join(unfit[:20])}. Clone them to give each element its own memory"
        )
        raise CheckpointMismatchError(msg)
    pieces: dict[Fragment, torch.Tensor] = {}
    for name, parameter in wanted.items():
        start, piece = weight_piece(parameter)
        if piece.numel():
            fragment = Fragment(name, start, start + piece.numel(), rank, first + len(pieces), 0)
            pieces[fragment] = torch.empty_like(piece, device="cpu")
    return pieces


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name; shared ones appear under each name."""
    return {name: owner.get_buffer(leaf(name)) for name, owner in buffer_owners(module)}


def buffer_owners(
    module: torch.nn.Module, prefix: str = ""
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the names of the persistent buffers, each with the module that has it.

    torch has no public list of the non-persistent buffers' full names.
    """
    for name, _ in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001 (torch's)
            yield prefix + name, module
    for name, child in module.named_children():
        yield from buffer_owners(child, f"{prefix}{name}.")


def leaf(name: str) -> str:
    """Return the last part of a buffer's name: its name in the module that has it."""
    return name.rpartition(".")[2]


def write_buffers(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the module's persistent buffers.

    A buffer assigned under ``torch.inference_mode`` can be neither changed nor trained outside of
    it, so a normal tensor replaces it under all its names.
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


def adapt_buffers(
    module: torch.nn.Module, saved: Mapping[str, torch.Tensor], undo: ExitStack
) -> None:
    """Call the modules' own load hooks if a buffer takes its shape during training.

    ``load_state_dict`` calls ``_load_from_state_dict`` and pre-hooks, in which users create such a
    buffer (a queue, a memory bank) in its saved shape. Here they are called only for modules with a
    buffer of another shape, or without it, and they get the saved buffers without the weights.
    ``undo`` gets the rollback.
    """
    live_buffers = persistent_buffers(module)
    unlike = [
        n
        for n, saved_as in saved.items()
        if n not in live_buffers or live_buffers[n].shape != saved_as.shape
    ]
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if not any(n.startswith(prefix) for n in unlike) or not _loads_itself(part):
            continue
        for owner in part.modules():
            undo.callback(_restore_buffers, owner, dict(owner._buffers), _copies(owner))  # noqa: SLF001 (torch's)
        device = next((p.device for p in part.parameters()), None)
        state = {n: t.to(device, copy=True) for n, t in saved.items() if n.startswith(prefix)}
        version = {"version": getattr(part, "_version", None)}
        try:
            with torch.no_grad():
                part._load_from_state_dict(state, prefix, version, False, [], [], [])  # noqa: FBT003, SLF001 (torch's)
        except Exception as error:  # noqa: BLE001 (of the user's code)
            log.warning(
                "the load hook of %s failed: %r. A load calls it with the saved buffers only",
                name or type(part).__name__,
                error,
            )


def _loads_itself(module: torch.nn.Module) -> bool:
    method = type(module)._load_from_state_dict  # noqa: SLF001 (torch's)
    is_own = method is not torch.nn.Module._load_from_state_dict  # noqa: SLF001 (torch's)
    return is_own or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001 (torch's)


def _copies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    buffers = module.named_buffers(recurse=False)
    return {n: b.clone() for n, b in buffers if is_writable(b) and not b.is_inference()}


def _restore_buffers(
    module: torch.nn.Module,
    buffers: Mapping[str, torch.Tensor | None],
    values: Mapping[str, torch.Tensor],
) -> None:
    module._buffers.clear()  # noqa: SLF001 (torch's)
    module._buffers.update(buffers)  # noqa: SLF001 (torch's)
    with torch.no_grad():
        for name, value in values.items():
            module.get_buffer(name).copy_(value)


def drop_secondary_tensors(module: torch.nn.Module) -> None:
    """Drop hpZ's secondary copies of weights, which forward would gather instead of new ones.

    DeepSpeed recreates them when it next partitions the weight. Its own function for this,
    ``invalidate_secondary_tensor``, skips weights that no optimizer owns.
    """
    for parameter in module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def module_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's low-precision weights, under all their names.

    Under ZeRO-3 they are empty placeholders, as in DeepSpeed's own checkpoints.
    """
    return {
        name: parameter.detach() if not hasattr(parameter, "ds_id") else torch.empty(0)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def flat_buffer_row(
    buffer: LiveFlatBuffer, names: Mapping[torch.nn.Parameter, str], stage: int, world_size: int
) -> FlatBuffer:
    """Return a flat buffer's layout over all ranks; in stage 0, its layout in a save."""
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
    """Return a rank's fragments by flat buffer; in stage 0, all of them.

    Raises UnsupportedError if the flat buffers cannot hold their parameters.
    """
    try:
        if stage:
            return fragments_by_buffer(zero_layout(stage, rows, world_size), rank, len(rows))
        return fragments_by_buffer(replicated_layout(rows), 0, len(rows))
    except CheckpointFormatError as error:
        _refuse(str(error))


def fragments_by_buffer(layout: Layout, rank: int, count: int) -> tuple[tuple[Fragment, ...], ...]:
    """Return a layout's fragments on a rank for each of ``count`` flat buffers."""
    by_buffer: list[list[Fragment]] = [[] for _ in range(count)]
    for fragment in layout.on_rank(rank):
        by_buffer[fragment.buffer].append(fragment)
    return tuple(map(tuple, by_buffer))


def own_slices(
    flats: Sequence[FlatState], rows: Sequence[FlatBuffer], world_size: int, rank: int
) -> tuple[FlatState, ...]:
    """Return the part of the replicated state (stage 0) that a rank writes."""
    of_buffers = fragments_by_buffer(zero_layout(0, rows, world_size), rank, len(rows))
    slices = [slice(*row.partition_range(rank)) for row in rows]
    return tuple(
        replace(
            flat,
            fragments=fragments,
            master=flat.master[part],
            elementwise={key: values[part] for key, values in flat.elementwise.items()},
        )
        for flat, fragments, part in zip(flats, of_buffers, slices, strict=True)
    )


def verify_addresses(
    buffer: LiveFlatBuffer, row: FlatBuffer, fragments: Sequence[Fragment], *, fresh: bool
) -> None:
    """Refuse a flat buffer in which DeepSpeed's weights have other offsets than computed.

    ``fresh``: only DeepSpeed has touched the module, so a weight of ZeRO-1/2 that is not a view of
    the flat buffer is refused. Later, a user may have replaced it, which does not affect masters.
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
            there = "outside of it" if at is None else f"at element {at}"
            _refuse(
                f"{fragment.name}[{fragment.start}:{fragment.stop}] in a flat buffer of group "
                f"{row.group} is {there}, expected at element {fragment.offset}"
            )


def verify_pieces(parameters: Iterable[Any], rank: int, world_size: int) -> None:
    """Refuse parameters that ZeRO-3 has partitioned otherwise than ``core.partition``."""
    for parameter in parameters:
        if not hasattr(parameter, "ds_tensor"):
            continue
        rank_and_numel = (
            distributed.get_rank(group=parameter.ds_process_group),
            parameter.partition_numel(),
        )
        if rank_and_numel != (rank, piece_numel(parameter.ds_numel, world_size)):
            _refuse(
                f"of a parameter of {parameter.ds_numel} elements, rank {rank} of {world_size} has "
                f"piece {rank_and_numel[0]} with {rank_and_numel[1]} elements"
            )


def _is_view(parameter: Any, flat: torch.Tensor) -> bool:
    piece = getattr(parameter, "ds_tensor", parameter)
    is_view: bool = piece.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    return is_view


def _refuse(what: str) -> NoReturn:
    msg = (
        f"unknown layout of parameters in this release or configuration of DeepSpeed: {what}. If "
        "your code replaced the .data of weights, restore DeepSpeed's tensors; otherwise report "
        "this with your DeepSpeed config"
    )
    raise UnsupportedError(msg)


def bounded_runs(fragments: Iterable[Fragment]) -> Iterator[tuple[Fragment, int, int]]:
    """Yield runs of at most ``COMPARE_ELEMENTS`` elements as offsets in the flat buffer."""
    for fragment in fragments:
        end = fragment.offset + fragment.stop - fragment.start
        for at, stop in spans(fragment.offset, end, COMPARE_ELEMENTS):
            yield fragment, at, stop


def weight_pieces(
    buffer: LiveFlatBuffer, row: FlatBuffer, fragments: Iterable[Fragment], *, offloaded: bool
) -> tuple[torch.Tensor, ...]:
    """Return the module's weights of each fragment of a flat buffer, 1-D.

    They may be in other memory than the flat buffer's, if user code replaced ``.data``.
    """
    parameters = dict(zip(row.names, buffer.parameters, strict=True))
    pieces = []
    for fragment in fragments:
        first, piece = fragment.start - fragment.offset, buffer.low
        if not offloaded:
            first, piece = forward_piece(parameters[fragment.name])
        pieces.append(piece[fragment.start - first : fragment.stop - first])
    return tuple(pieces)


def forward_piece(parameter: Any) -> tuple[int, torch.Tensor]:
    """Return ``weight_piece`` of the tensor that forward reads.

    ZeRO-3 keeps small parameters gathered between steps. Then user code changes the whole weight.
    """
    start, piece = weight_piece(parameter)
    is_gathered = hasattr(parameter, "ds_tensor") and parameter.numel() == parameter.ds_numel
    if not is_gathered:
        return start, piece
    return start, parameter.data.reshape(-1)[start : start + piece.numel()]


def without_equal_weights(flat: FlatState, progress: Progress = NO_PROGRESS) -> FlatState:
    """Drop the module's weights of a flat buffer if they equal the rounded masters."""
    for fragment, piece in zip(flat.fragments, flat.weights, strict=bool(flat.weights)):
        for _, at, end in bounded_runs([fragment]):
            progress.check()
            weights = piece[at - fragment.offset : end - fragment.offset]
            if not same_bits(weights, flat.master[at:end].to(weights)):
                return flat
    return replace(flat, weights=())
