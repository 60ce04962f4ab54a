"""Metadata pickles of chunk directories, recombined from parts of valid ones."""

from __future__ import annotations

import pickle
import pickletools
import struct
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.formats.open import open_checkpoint
from tests.formats._fuzz_runner import refuse_much_memory


def parts_of(data: bytes) -> list[bytes]:
    """Cut a pickle into its opcodes, each with its argument, without frames."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    excluded = (pickle.PROTO, pickle.FRAME, pickle.STOP)
    return [part for part in parts if part[:1] not in excluded]


def call_opcodes(name: str, *arguments: bytes) -> list[bytes]:
    module, _, attribute = name.rpartition(".")
    return [
        b"c" + module.encode() + b"\n" + attribute.encode() + b"\n",
        pickle.MARK,
        *arguments,
        pickle.TUPLE,
        pickle.REDUCE,
    ]


SINGLE = [
    *(pickle.DUP, pickle.POP, pickle.MARK, pickle.MEMOIZE, pickle.REDUCE, pickle.BUILD),
    *(pickle.NEWOBJ, pickle.APPENDS, pickle.SETITEM, pickle.TUPLE1, pickle.TUPLE2),
    pickle.EMPTY_LIST,
]
NUMBERS = [0, 1, -1, 2, 3, 7, 8, 16, 255, (1 << 31) - 1, *(1 << n for n in (31, 33, 40, 62, 63))]


def text(value: bytes) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value


def blob(value: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(value)) + value


numbers = st.sampled_from(NUMBERS).map(lambda n: b"I%d\n" % n)

MODULE = "torch.distributed.checkpoint.metadata"


def valid_metadata(rows: int) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(rows)]
    weight = TensorStorageMetadata(TensorProperties(), torch.Size([rows, 3]), chunks)
    places = {
        MetadataIndex("model.weight", chunk.offsets, at): _StorageInfo("__0_0.distcp", at, 1)
        for at, chunk in enumerate(chunks)
    }
    return Metadata(
        {"model.weight": weight, "epoch": BytesStorageMetadata()},
        {"model.weight": ("model", "weight"), "epoch": ("epoch",)},
        {**places, MetadataIndex("epoch"): _StorageInfo("__0_0.distcp", rows, 1)},
        StorageMeta(Path("/saved/here"), "a save"),
    )


VALID = [
    parts_of(pickle.dumps(valid_metadata(rows), protocol))
    for rows in (1, 3)
    for protocol in (2, 4, 5)
]
POOL = sorted({part for parts in VALID for part in parts})
CLASSES = [getattr(torch_metadata, name) for name in (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)]  # fmt: skip
MEMBERS = list(torch_metadata._MEM_FORMAT_ENCODING)
BEFORE = [*(dict(vars(shared)) for shared in (*CLASSES, *MEMBERS))]

_names = st.sampled_from([cls.__name__ for cls in CLASSES]).map(lambda name: f"{MODULE}.{name}")
_values = st.one_of(
    numbers,
    st.sampled_from([text(b"model.weight"), blob(b"x" * 9), pickle.EMPTY_TUPLE, pickle.NONE]),
    st.integers(0, 40).map(lambda index: pickle.BINGET + bytes([index])),
)


@st.composite
def _instances(draw: st.DrawFn) -> list[bytes]:
    begin = call_opcodes(draw(_names), *draw(st.lists(_values, max_size=2)))
    fields = draw(st.lists(st.tuples(st.sampled_from(_FIELDS), _values), max_size=3))
    inside = [part for name, value in fields for part in (text(name), value)]
    return [*begin, pickle.EMPTY_DICT, pickle.MARK, *inside, pickle.SETITEMS, pickle.BUILD]


_FIELDS = [b"fqn", b"offset", b"chunks", b"size", b"_value_", b"__class__", b"relative_path"]

_pieces = st.one_of(
    st.sampled_from(POOL).map(lambda part: [part]),
    st.sampled_from(VALID),
    _values.map(lambda part: [part]),
    st.sampled_from(SINGLE).map(lambda part: [part]),
    _instances(),
)


@st.composite
def cases(draw: st.DrawFn) -> bytes:
    """A valid pickle with parts inserted, removed and repeated, or such parts alone."""
    parts = list(draw(st.one_of(st.just([]), st.sampled_from(VALID))))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(parts)))
        parts[at : at + draw(st.integers(0, 2))] = draw(_pieces)
    return b"\x80\x04" + b"".join(parts) + pickle.STOP


def check(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".metadata").write_bytes(data)
        (Path(folder) / "__0_0.distcp").write_bytes(b"0123")
        try:
            open_checkpoint(Path(folder)).close()
        except ElasticZeroError as error:
            refuse_much_memory(error)
    assert [*(dict(vars(shared)) for shared in (*CLASSES, *MEMBERS))] == BEFORE
