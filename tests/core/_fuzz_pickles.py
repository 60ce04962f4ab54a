"""Pickles made of the parts of sound ones: the objects of a client state."""

from __future__ import annotations

import pickle
import pickletools
import struct
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from lightning_elastic_zero.errors import CheckpointFormatError, UnsupportedError
from lightning_elastic_zero.formats.pickles import load_objects
from tests.core._fuzz_runner import refuse_much_memory
from tests.core.test_safe_pickle import SAFE_VALUES

CANARIES = [np.full(n, 7, dtype=np.uint8) for n in (1, 8, 64, 1000, 4096)]
"""Memory of others."""


def parts_of(data: bytes) -> list[bytes]:
    """Cut a pickle into its opcodes, each with its argument; frames are left out."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    left_out = (pickle.PROTO, pickle.FRAME, pickle.STOP)
    return [part for part in parts if part[:1] not in left_out]


def called(name: str, *arguments: bytes) -> list[bytes]:
    """Make the parts of a call."""
    module, _, attribute = name.rpartition(".")
    return [
        b"c" + module.encode() + b"\n" + attribute.encode() + b"\n",
        pickle.MARK,
        *arguments,
        pickle.TUPLE,
        pickle.REDUCE,
    ]


def _memoized(value: object, protocol: int) -> list[bytes]:
    """Return the parts of a pickle, with memory by place, so that parts of several fit together."""
    return parts_of(pickle.dumps(value, protocol))


VALUES = [
    *SAFE_VALUES,
    np.arange(2000, dtype=np.float64),
    [np.zeros(3), np.zeros(3)],
    np.array([np.zeros(2), None], dtype=object),
    {(1, ("a", frozenset({2}))): 3},
]
SOUND = [_memoized(value, protocol) for value in VALUES for protocol in (4, 5)]
POOL = sorted({part for parts in SOUND for part in parts})

SINGLE = [
    *(pickle.DUP, pickle.POP, pickle.MARK, pickle.MEMOIZE, pickle.REDUCE, pickle.BUILD),
    *(pickle.NEWOBJ, pickle.APPENDS, pickle.SETITEM, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 33) + b"x", pickle.EMPTY_LIST),
]
DTYPES = [b"O8", b"f8", b"b1", b"u1", b"U3", b"V8", b"M8", b"O,f8", b"(2,2)O", b"T", b"U99999999"]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    16,
    255,
    1 << 31,
    (1 << 31) - 1,
    1 << 33,
    1 << 40,
    1 << 62,
    1 << 63,
]


def text(value: bytes) -> bytes:
    """Push a text."""
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value


def blob(value: bytes) -> bytes:
    """Push bytes."""
    return pickle.BINBYTES + struct.pack("<I", len(value)) + value


def dtype(name: bytes) -> list[bytes]:
    """Push a dtype of which only the name is known."""
    return called("numpy.dtype", text(name), pickle.NEWFALSE, pickle.NEWTRUE)


numbers = st.sampled_from(NUMBERS).map(lambda n: b"I%d\n" % n)
blobs = st.sampled_from([0, 1, 2, 8, 16, 24, 1001, 2000]).map(lambda n: blob(b"\x41" * n))
dtypes = st.sampled_from(DTYPES).map(dtype)
shapes = st.lists(numbers, max_size=3).map(lambda n: [pickle.MARK, *n, pickle.TUPLE])
memos = st.integers(0, 12)


@st.composite
def built_arrays(draw: st.DrawFn) -> list[bytes]:
    """Make an array, perhaps one that is known already, and set its state."""
    begin = draw(
        st.sampled_from(
            [
                called(
                    "numpy._core.multiarray._reconstruct",
                    b"cnumpy\nndarray\n",
                    pickle.MARK + b"I0\n" + pickle.TUPLE,
                    blob(b"b"),
                ),
                [],
            ]
        )
    )
    data = draw(st.one_of(blobs, memos.map(_get), st.just(pickle.EMPTY_LIST)))
    fields = [b"I1\n", *draw(shapes), *draw(dtypes), pickle.NEWFALSE, data]
    kept = [pickle.MEMOIZE] if draw(st.booleans()) else []
    return [*begin, *kept, pickle.MARK, *fields, pickle.TUPLE, pickle.BUILD]


@st.composite
def arrays_over(draw: st.DrawFn) -> list[bytes]:
    """Make an array over bytes, perhaps over those of something else."""
    data = draw(st.one_of(blobs, memos.map(_get)))
    over = b"cnumpy._core.numeric\n_frombuffer\n"
    order = text(draw(st.sampled_from([b"C", b"F", b"K", b"A"])))
    kept = [pickle.MEMOIZE] if draw(st.booleans()) else []
    fields = [data, *draw(dtypes), *draw(shapes), order]
    return [over, pickle.MARK, *fields, pickle.TUPLE, pickle.REDUCE, *kept]


@st.composite
def scalars(draw: st.DrawFn) -> list[bytes]:
    """Make a scalar of bytes."""
    return called("numpy._core.multiarray.scalar", *draw(dtypes), draw(blobs))


@st.composite
def tensors(draw: st.DrawFn) -> list[bytes]:
    """Make a tensor of any shape over a storage of six elements."""
    held = torch.arange(6.0)._typed_storage().__reduce__()[1][0]  # type: ignore[no-untyped-call]
    storage = called("torch.storage._load_from_bytes", blob(held))
    fields = [draw(numbers), *draw(shapes), *draw(shapes), pickle.NEWFALSE]
    hooks = called("collections.OrderedDict")
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    return [rebuild, pickle.MARK, *storage, *fields, *hooks, pickle.TUPLE, pickle.REDUCE]


def _get(index: int) -> bytes:
    return pickle.BINGET + bytes([index])


def _called_anyhow(draw: st.DrawFn) -> list[bytes]:
    names = ["builtins.bytearray", "builtins.list", "builtins.set", "builtins.range"]
    names += ["collections.deque", "collections.Counter", "builtins.bytes", "builtins.slice"]
    return called(draw(st.sampled_from(names)), *draw(st.lists(st.one_of(numbers, blobs))))


pieces = st.one_of(
    st.sampled_from(POOL).map(lambda part: [part]),
    st.sampled_from(SOUND),
    memos.map(lambda index: [_get(index)]),
    st.sampled_from(SINGLE).map(lambda part: [part]),
    built_arrays(),
    arrays_over(),
    scalars(),
    tensors(),
    st.composite(_called_anyhow)(),
)


@st.composite
def cases(draw: st.DrawFn) -> bytes:
    """Pickles: a sound one with parts put in, taken out and said twice, or parts alone."""
    parts = list(draw(st.one_of(st.just([]), st.sampled_from(SOUND))))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(parts)))
        taken = draw(st.integers(0, 2))
        parts[at : at + taken] = draw(pieces)
    return b"\x80\x04" + b"".join(parts) + pickle.STOP


# -- what must hold ------------------------------------------------------------------------------


def check(data: bytes) -> None:
    """Read a pickle; use what came of it; see that nothing else has changed."""
    before = bytes(bytearray(data))
    try:
        found = load_objects(data, "a case", allow_pickle=False)
    except (UnsupportedError, CheckpointFormatError) as error:
        refuse_much_memory(error)
    else:
        arrays: dict[int, Any] = {}
        _use(found, arrays, 0)
        _write(list(arrays.values()))
    assert data == before
    assert all((canary == 7).all() for canary in CANARIES)
    assert np.dtype("f8").isnative
    assert np.dtype("f8").itemsize == 8
    assert not {name for name in vars(PosixPath) if name not in _OF_PATHS}


_OF_PATHS = set(vars(PosixPath))


def _use(value: Any, arrays: dict[int, Any], depth: int) -> None:
    """Look at each byte of what was read."""
    if depth > 20 or id(value) in arrays:
        return
    inside: list[Any] = []
    if isinstance(value, np.ndarray):
        arrays[id(value)] = value
        repr(value.dtype)
        inside = list(value.reshape(-1)[:10]) if value.dtype.kind == "O" else [value.tobytes()]
    elif isinstance(value, torch.Tensor):
        _use_tensor(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)[:10]
    elif isinstance(value, dict):
        inside = list(value.values())[:10]
    elif isinstance(value, np.generic):
        value.tobytes()
    for item in inside:
        _use(item, arrays, depth + 1)


def _use_tensor(tensor: torch.Tensor) -> None:
    held = tensor.untyped_storage()
    assert tensor.storage_offset() * tensor.element_size() <= held.nbytes()
    assert sum(bytes(held)) >= 0
    if tensor.numel() < 1 << 20:
        tensor.detach().clone().sum()


def _write(arrays: list[Any]) -> None:
    """Write into each array: no other one may see it."""
    plain = [array for array in arrays if array.dtype.kind in "iufcbm" and array.flags.writeable]
    for array in plain:
        others = [(other, other.tobytes()) for other in arrays if other is not array]
        array.fill(0)
        array.fill(1)
        for other, was in others:
            assert other.dtype.kind == "O" or other.tobytes() == was, "two arrays share memory"
