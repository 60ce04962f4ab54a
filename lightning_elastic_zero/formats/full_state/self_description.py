"""The description of a checkpoint of whole tensors without a live model, for tools.

Weights have names. An optimizer's state has them too, or positions, which a model's order and
shapes explain where there is only one way to. Weights that no optimizer owns may be frozen ones or
buffers: nothing tells, and both are called weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats.full_state.torch_optimizer import with_dimensions
from lightning_elastic_zero.formats.shared_tensors import duplicate_names
from lightning_elastic_zero.manifest import Group, Manifest, Parameter
from lightning_elastic_zero.tensor_state import dtype_name

Members: TypeAlias = "tuple[tuple[str, ...], ...]"
"""The names of each parameter group's members."""

_Shaped: TypeAlias = "Sequence[tuple[str, tuple[int, ...]]]"


def describe_alone(weights: Mapping[str, torch.Tensor], members: Members) -> Manifest:
    """Describe the model that a checkpoint would fit: its own weights, with their first names."""
    aliases: dict[str, tuple[str, ...]] = {}
    for other, first in duplicate_names(weights).items():
        aliases[first] = (*aliases.get(first, ()), other)
    again = {name for names in aliases.values() for name in names}
    group_of = {name: index for index, names in enumerate(members) for name in names}
    return Manifest(
        save_id="",
        stage=0,
        world_size=1,
        precision="fp32",
        master_dtype="float32",
        parameters=tuple(
            Parameter(name, tuple(t.shape), dtype_name(t.dtype), group_of.get(name), others)
            for name, t in weights.items()
            if name not in again
            for others in [aliases.get(name, ())]
        ),
        groups=tuple(Group(names, {}, ()) for names in members),
        buffers=(),
        module_buffers=(),
        files=(),
    )


def members_of(saved: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Members:
    """Return the names of the members of a state dict's groups.

    Args:
        saved: a torch optimizer's state dict; its tensors need no values.
        weights: of the model that it was saved with, in the model's order.

    Raises:
        CheckpointMismatchError: positions, or names, could mean several parameters, or none.
    """
    groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    ids = [tuple(group["params"]) for group in groups]
    if all("param_names" in group for group in groups):
        return _known([tuple(group["param_names"]) for group in groups], weights)
    if all(isinstance(key, str) for group in ids for key in group):
        return _known(ids, weights)
    again = duplicate_names(weights)
    candidates = [
        (name, tuple(t.shape))
        for name, t in weights.items()
        if name not in again and (t.is_floating_point() or t.is_complex())
    ]
    elementwise = with_dimensions(saved["state"].values())
    wanted = [_shape_of(saved["state"].get(key), elementwise) for group in ids for key in group]
    first = _in_order(wanted, candidates)
    last = _in_order(wanted[::-1], candidates[::-1])[::-1]
    if len(first) < len(wanted) or first != last:
        msg = (
            f"the optimizer's state is kept by position, and the {len(wanted)} positions could "
            f"mean {'several' if first else 'none'} of the {len(candidates)} weights: only the "
            "model's code can tell them apart"
        )
        raise CheckpointMismatchError(msg)
    names = iter(first)
    return tuple(tuple(next(names) for _ in group) for group in ids)


def _known(members: Sequence[tuple[str, ...]], weights: Mapping[str, torch.Tensor]) -> Members:
    """Return names as the weights have them: given without a submodule's name, they lack that.

    Raises:
        CheckpointMismatchError: they are of other weights.
    """
    given = [name for group in members for name in group]
    if not given or all(name in weights for name in given):
        return tuple(members)
    prefixes = [n.removesuffix(given[0]) for n in weights if n.endswith(f".{given[0]}")]
    fitting = [p for p in prefixes if all(p + name in weights for name in given)]
    if len(fitting) != 1:
        strange = next(name for name in given if name not in weights)
        msg = f"the optimizer's state is of {strange}, and no weight has that name"
        raise CheckpointMismatchError(msg)
    return tuple(tuple(fitting[0] + name for name in group) for group in members)


def _shape_of(state: object, elementwise: frozenset[str]) -> tuple[int, ...] | None:
    """Return the shape of a parameter that has this state; None where nothing tells."""
    items = state.items() if isinstance(state, Mapping) else ()
    shapes = [
        tuple(value.shape)
        for key, value in items
        if key in elementwise and isinstance(value, torch.Tensor)
    ]
    return next((shape for shape in shapes if shape), shapes[0] if shapes else None)


def _in_order(wanted: Sequence[tuple[int, ...] | None], candidates: _Shaped) -> list[str]:
    """Return the first candidates, in order, that have the shapes; too few where there are."""
    found: list[str] = []
    for name, shape in candidates:
        if len(found) < len(wanted) and wanted[len(found)] in (None, shape):
            found.append(name)
    return found
