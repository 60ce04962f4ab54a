"""The engine's module: names, shapes, ties, buffers, weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import Parameter
from lightning_elastic_zero.tensor_state import dtype_name, is_writable


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


def weight_piece(parameter: Any) -> tuple[int, torch.Tensor]:  # noqa: ANN401 (ZeRO-3 adds fields)
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


def engine_precision(engine: Any) -> str:  # noqa: ANN401 (untyped library)
    """Return ``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"
