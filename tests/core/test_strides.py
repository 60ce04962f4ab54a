"""Tensors whose elements lie in another order than the logical one: runs of them, by blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.torch_read import StoredRun, TorchFile, blocks_of, is_dense
from lightning_elastic_zero.storage.files import RangeFile


@st.composite
def permuted(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor whose elements are numbered in the order in which they lie."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=5))
    order = draw(st.permutations(range(len(sizes))))
    numel = int(torch.Size(sizes).numel())
    return (
        torch.arange(numel)
        .view([sizes[d] for d in order])
        .permute([order.index(d) for d in range(len(sizes))])
    )


@settings(deadline=None)
@given(st.data())
def test_blocks_hold_a_run(data: st.DataObject) -> None:
    """Whatever the order of dimensions: each element of the run once, in logical order."""
    tensor = data.draw(permuted())
    assert is_dense(tensor)
    start = data.draw(st.integers(0, tensor.numel() - 1))
    stop = data.draw(st.integers(start + 1, tensor.numel()))
    most = data.draw(st.integers(1, tensor.numel()))
    found, reached = [], None
    for blocks in blocks_of(tensor, start, stop, most):
        assert reached in (None, blocks.start)
        reached = blocks.stop
        # Numbers are places: what lies there is the number itself.
        held = blocks.in_logical_order(torch.arange(blocks.start, blocks.stop))
        low, high = max(start, blocks.start), min(stop, blocks.stop)
        found.append(held[low - blocks.start : high - blocks.start])
    assert torch.equal(torch.cat(found), tensor.reshape(-1)[start:stop])


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3).t(), True),
        (torch.zeros(4, 6)[:, ::2], False),
        (torch.zeros(4, 6)[:, :3], False),
        (torch.zeros(1).expand(3), False),
        (torch.eye(3).to_sparse(), False),
    ],
)
def test_what_is_dense(tensor: torch.Tensor, *, dense: bool) -> None:
    """Gaps, elements in one place, and other layouts are told."""
    assert is_dense(tensor) == dense


def test_a_file_is_read_in_logical_order(tmp_path: Path) -> None:
    """Runs of several blocks, and of parts of them, bit for bit; what has gaps is refused."""
    conv = torch.randn(64, 70, 31, 31).to(memory_format=torch.channels_last)
    matrix = torch.randn(40, 30).t()
    gaps = torch.randn(4, 6)[:, ::2]
    torch.save({"conv": conv, "matrix": matrix, "gaps": gaps}, tmp_path / "file.pt")
    file = TorchFile(RangeFile(tmp_path / "file.pt"))
    for name, live, start, stop in (
        ("conv", conv, 0, conv.numel()),  # more than are read at a time
        ("conv", conv, 70 * 31 * 31 - 5, 3 * 70 * 31 * 31 + 7),
        ("matrix", matrix, 17, 1111),
    ):
        found = torch.empty(stop - start)
        told: list[int] = []
        file.read_into(
            [(found, StoredRun(file.tree[name], start, stop))], Progress(show=told.append)
        )
        assert torch.equal(found, live.reshape(-1)[start:stop])
        assert sum(told) >= found.nbytes
    run = StoredRun(file.tree["gaps"], 0, 12)
    with pytest.raises(UnsupportedError, match=r"gaps between its elements .*contiguous"):
        file.read_into([(torch.empty(12), run)])
    file.close()
