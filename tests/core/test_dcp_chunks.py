from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_elastic_zero.formats.dcp_read import overlaps
from lightning_elastic_zero.formats.torch_read import StoredRun

Box = tuple[list[int], list[int], list[int], tuple[int, int]]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(0, n - at)) for n, at in zip(shape, starts, strict=True)]
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel - 1))
    return shape, starts, sizes, (start, draw(st.integers(start + 1, numel)))


@given(boxes())
def test_overlaps_of_a_box_and_a_run_are_found_once(case: Box) -> None:
    shape, starts, sizes, (start, stop) = case
    elements = torch.arange(torch.Size(shape).numel()).reshape(shape)
    box = elements[tuple(slice(o, o + n) for o, n in zip(starts, sizes, strict=True))].reshape(-1)
    wanted = {int(e): at for at, e in enumerate(box.tolist()) if start <= e < stop}
    found: dict[int, int] = {}
    run = StoredRun(torch.empty(0), start, stop)
    for at, low, high in overlaps(run, shape, starts, sizes):
        for shift in range(high - low):
            assert low + shift not in found
            found[low + shift] = at + shift
    assert found == wanted
