"""AutoTP's description of a parameter: a cut along one dimension, copies, or a named refusal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.core.autotp import autotp_cut
from lightning_elastic_zero.core.cuts import Cut


def box(whole: np.ndarray, shard: np.ndarray, ranks: Sequence[int]) -> dict[str, Any]:
    """Describe a view of the whole parameter and of a shard, whose values are their indices."""
    sides = {
        side: [
            int(view.flat[0]) if view.size else 0,
            [step // view.itemsize for step in view.strides],
        ]
        for side, view in (("source", whole), ("dest", shard))
    }
    return {"shape": [*whole.shape], "locations": [*ranks], **sides}


def counted(shape: Sequence[int]) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def described(
    whole: np.ndarray, dimension: int, borders: Sequence[int], size: int
) -> dict[str, Any]:
    """Describe a cut: tensor ranks take turns with the parts between borders."""
    ranks = {}
    parts = np.split(whole, borders, dimension)
    for rank in range(size):
        mine = parts[rank::size]
        shard = counted(np.concatenate(mine, dimension).shape)
        ends = np.cumsum([part.shape[dimension] for part in mine])[:-1]
        places = np.split(shard, ends, dimension)
        boxes = [box(*pair, [rank]) for pair in zip(mine, places, strict=True)]
        ranks[rank] = {"shard_shape": [*shard.shape], "pieces": boxes}
    return {"logical_shape": [*whole.shape], "ranks": ranks}


@given(st.data())
def test_a_cut_along_a_dimension_is_recognized(data: st.DataObject) -> None:
    """Also if it is uneven, or of several fused parameters."""
    size, fused = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dimension = data.draw(st.integers(0, len(shape) - 1))
    sizes = st.integers(1, 4)
    widths = data.draw(st.lists(sizes, min_size=size * fused, max_size=size * fused))
    shape[dimension] = sum(widths)
    borders = [*itertools.accumulate(widths)][:-1]
    layout = described(counted(shape), dimension, borders, size)
    found = autotp_cut("w", {"affine_map": layout}, size)
    assert found == (Cut("w", dimension, tuple(widths)), tuple(shape))


def copies(size: int, **changes: Any) -> dict[str, Any]:
    """Describe a parameter that every tensor rank has whole."""
    whole = counted((4, 6))
    one = {"shard_shape": [4, 6], "pieces": [box(whole, whole, range(size)) | changes]}
    return {"logical_shape": [4, 6], "ranks": dict.fromkeys(range(size), one)}


def blocks_in_turn() -> dict[str, Any]:
    """Describe two ranks with every second row: more parts than fused parameters."""
    whole, layout = counted((4, 6)), described(counted((4, 6)), 0, [1, 2, 3], 2)
    second = layout["ranks"][1]["pieces"]
    layout["ranks"][1]["pieces"] = [box(whole[1::2], counted((2, 6)), [1])]
    assert len(second) > 1
    return layout


def exchanged() -> dict[str, Any]:
    """Describe two ranks of which the first has the second half."""
    layout = described(counted((4, 6)), 1, [3], 2)
    of_ranks = layout["ranks"]
    of_ranks[0], of_ranks[1] = of_ranks[1], of_ranks[0]
    return layout


def shared_end() -> dict[str, Any]:
    """Describe two ranks with a half of the first rows each, and copies of the last ones."""
    whole, ranks = counted((6, 2)), {}
    for rank in range(2):
        shard = counted((4, 2))
        parts = [
            box(whole[2 * rank : 2 * rank + 2], shard[:2], [rank]),
            box(whole[4:], shard[2:], [0, 1]),
        ]
        ranks[rank] = {"shard_shape": [4, 2], "pieces": parts}
    return {"logical_shape": [6, 2], "ranks": ranks}


def test_a_parameter_that_all_tensor_ranks_have_is_not_cut() -> None:
    assert autotp_cut("w", {"affine_map": copies(3)}, 3) is None


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"unsupported_reason": "it interleaves heads"}, "it interleaves heads"),
        ({"partition_type": "column"}, "DeepSpeed does not describe its layout"),
        ({"affine_map": copies(2, scale=0.5)}, "divided by a factor"),
        ({"affine_map": described(counted((2, 6)), 0, [2], 2)}, "some have none of its elements"),
        ({"affine_map": shared_end()}, "neither slices of one dimension nor copies"),
        ({"affine_map": blocks_in_turn()}, "neither slices of one dimension nor copies"),
        ({"affine_map": exchanged()}, "neither slices of one dimension nor copies"),
    ],
)
def test_another_layout_is_refused(about: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        autotp_cut("w", about, 2)
