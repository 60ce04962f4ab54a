"""Files of ``torch.save`` with changed, inserted and removed bytes, in the zip and its pickle."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.formats.torch_read import PLAIN_DATA, StoredRun, TorchFile
from lightning_elastic_zero.storage.file_read import RangeFile
from tests.formats._fuzz_runner import refuse_much_memory


def _saved(tree: object) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


FLAT = torch.arange(24.0)
VALID = [
    _saved({"a": FLAT, "b": FLAT.view(4, 6).t(), "n": 3}),
    _saved(OrderedDict(w=torch.ones(3, dtype=torch.bfloat16), i=torch.arange(5), e=torch.zeros(0))),
    _saved([torch.nn.Parameter(torch.ones(2)), (torch.Size([2]), torch.tensor(1.5))]),
]
MARKS = [b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"data.pkl"]
"""Markers next to which a change is likely to matter."""

NUMBERS = [0, 1, 8, 255, (1 << 16) - 1, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 63) - 1]


@st.composite
def cases(draw: st.DrawFn) -> bytes:
    """A valid file with a few changes, after zip markers or at any position."""
    data = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        if draw(st.booleans()):
            found = bytes(data).find(draw(st.sampled_from(MARKS)), draw(st.sampled_from([0, at])))
            at = max(found, 0) + draw(st.integers(0, 60))
        width = draw(st.sampled_from([0, 1, 2, 4, 8]))
        number = draw(st.sampled_from(NUMBERS)) % (1 << 8 * width)
        taken = draw(st.sampled_from([0, width, width, width, 1, 64]))
        data[at : at + taken] = number.to_bytes(width, "little")
    return bytes(data[: draw(st.sampled_from([None, None, None, len(data) // 2, 30]))])


def check(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        path.write_bytes(data)
        try:
            with contextlib.closing(TorchFile(RangeFile(path), PLAIN_DATA)) as file:
                _read(file, len(data))
        except ElasticZeroError as error:
            refuse_much_memory(error)
        assert path.read_bytes() == data


def _read(file: TorchFile, size_bytes: int) -> None:
    """Read all tensors, and the last element of each; none takes more memory than the file has."""
    found: Any = file.load_tree(file.tree)
    inside = found.values() if isinstance(found, dict) else found
    for tensor in inside if isinstance(found, (dict, list, tuple)) else []:
        if isinstance(tensor, torch.Tensor):
            assert tensor.untyped_storage().nbytes() <= size_bytes
    file.verify()
    for tensor in file.tree.values() if isinstance(file.tree, dict) else []:
        if isinstance(tensor, torch.Tensor) and tensor.is_contiguous() and tensor.numel():
            target = torch.empty(1, dtype=tensor.dtype)
            file.read_into([(target, StoredRun(tensor, tensor.numel() - 1, tensor.numel()))])
