"""The cuts of parameters in the description of DeepSpeed's AutoTP (since 0.19.8).

DeepSpeed keeps it on each parameter, and in its checkpoints: for each tensor rank, boxes of
elements with their offsets and strides in the shard and in the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_elastic_zero.core.cuts import Cut


def autotp_cut(
    name: str, about: Mapping[str, Any], size: int
) -> tuple[Cut, tuple[int, ...]] | None:
    """Return a parameter's cut and its whole shape; None if each tensor rank has all of it.

    ``about`` is DeepSpeed's description for ``size`` tensor ranks. Raises ValueError if it is
    another layout; the message says why.
    """
    if reason := about.get("unsupported_reason"):
        raise ValueError(reason)
    if (layout := about.get("affine_map")) is None:
        msg = "DeepSpeed does not describe its layout"
        raise ValueError(msg)
    ranks, whole = [layout["ranks"][r] for r in range(size)], tuple(layout["logical_shape"])
    if any(piece.get("scale", 1.0) != 1.0 for rank in ranks for piece in rank["pieces"]):
        msg = "each tensor rank has it divided by a factor, which depends on their number"
        raise ValueError(msg)
    shapes = [tuple(rank["shard_shape"]) for rank in ranks]
    if all(shape == whole for shape in shapes):
        return None
    if any(0 in shape for shape in shapes):
        msg = (
            f"of {size} tensor ranks, some have none of its elements: use fewer, at most the "
            "number of key-value heads"
        )
        raise ValueError(msg)
    cut = _slices(name, ranks, shapes, whole)
    if cut is None:
        msg = "tensor ranks have neither slices of one dimension nor copies"
        raise ValueError(msg)
    return cut, whole


def _slices(
    name: str,
    ranks: Sequence[Mapping[str, Any]],
    shapes: Sequence[tuple[int, ...]],
    whole: tuple[int, ...],
) -> Cut | None:
    """Return the cut that has exactly these boxes, if there is one."""
    size = len(ranks)
    pairs = [pair for shape in shapes for pair in enumerate(zip(shape, whole, strict=True))]
    dimension = next(index for index, (ours, all_of) in pairs if ours != all_of)
    parts = [[piece["shape"][dimension] for piece in rank["pieces"]] for rank in ranks]
    if len({len(of_rank) for of_rank in parts}) != 1:
        return None
    cut = Cut(name, dimension, tuple(n for part in zip(*parts, strict=True) for n in part))
    same = all(rank["pieces"] == _boxes(cut, i, size, whole) for i, rank in enumerate(ranks))
    return cut if same else None


def _boxes(cut: Cut, rank: int, size: int, whole: Sequence[int]) -> list[dict[str, object]]:
    """Return DeepSpeed's description of a tensor rank's part of each fused parameter."""
    at, boxes, start = cut.dimension, [], 0
    inner, shard = math.prod(whole[at + 1 :]), cut.shape_on(rank, size, whole)
    for first in range(rank, len(cut.widths), size):
        boxes.append(
            {
                "shape": [*whole[:at], cut.widths[first], *whole[at + 1 :]],
                "source": [sum(cut.widths[:first]) * inner, _strides(whole)],
                "dest": [start * inner, _strides(shard)],
                "locations": [rank],
            }
        )
        start += cut.widths[first]
    return boxes


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
