"""Arrays and tensors from pickles: made by functions that check what they are given, and own it.

What NumPy and torch call for it trusts its arguments: an array takes the memory that it is handed,
a dtype can be told that it holds no objects, and a tensor enlarges a storage that is too small.
"""

from __future__ import annotations

import collections
import io
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MAX_NESTING = 100
"""How deep keys and arrays may be nested: both are walked by C code that does not count."""

_PLAIN_DTYPE = re.compile(r"b1|[iufcmMOSUV]\d+")
_DATETIME_UNITS = frozenset(b"Y M W D h m s ms us ns ps fs as generic".split())
_MAX_C_INT = 2**31 - 1
_MAX_DIMENSIONS = 32
LEGACY_MARK = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What a file of ``torch.save`` from before zips begins with, and so a storage's own pickle: a
number, pickled."""


def require(holds: object, what: str) -> None:
    """Refuse what no pickle of such a value does.

    Raises:
        ValueError: it does not hold.
    """
    if not holds:
        msg = f"a pickle with {what}"
        raise ValueError(msg)


class NdarrayStub:
    """Stands for ``numpy.ndarray``, which could be called to take bytes for pointers."""


def empty_array(kind: object, shape: object, _: object) -> np.ndarray[Any, Any]:
    """Return what an array's pickle begins with: an empty array, whose state is set next."""
    require(kind is NdarrayStub and shape == (0,), "an array that does not begin empty")
    empty: np.ndarray[Any, Any] = np.ndarray((0,), "b")
    return empty


def new_dtype(text: object, *_: object) -> np.dtype[Any]:
    """Return a dtype that nobody else has: setting its state changes no other one's."""
    plain = type(text) is str and _PLAIN_DTYPE.fullmatch(text)
    require(plain, f"a dtype named {text!r}")
    made: np.dtype[Any] = np.dtype(text, copy=True)  # type: ignore[call-overload]
    return made


def is_own_state(dtype: np.dtype[Any], state: object) -> bool:
    """Whether a state says of a dtype what it is, but for its byte order and unit of time."""
    own: Any = dtype.__reduce__()[2]
    if type(state) is not tuple or len(state) != len(own):
        return False
    same_layout = (state[0], *state[2:8]) == (own[0], *own[2:8])
    orders = ("<", ">") if own[1] in ("<", ">") else (own[1],)
    return same_layout and state[1] in orders and all(map(_is_unit, state[8:]))


def _is_unit(told: object) -> bool:
    """Whether this is what the state of a dtype of times ends with."""
    if type(told) is not tuple or len(told) != 2 or told[0] not in (None, {}):  # noqa: PLR2004
        return False
    unit = told[1]
    return (
        type(unit) is tuple
        and len(unit) == 4  # noqa: PLR2004 (unit, number, denominator, event)
        and unit[0] in _DATETIME_UNITS
        and all(type(number) is int and 1 <= number <= _MAX_C_INT for number in unit[1:])
    )


def array_state(
    state: Any,  # noqa: ANN401 (whatever a pickle gives)
    depth_of: Callable[[object], int],
) -> tuple[Any, ...]:
    """Check the state of an array, and copy its bytes: NumPy would go on using those it is given.

    Args:
        state: ``(version, shape, dtype, is_fortran, bytes or list)``.
        depth_of: how deep an object that is an array is nested.

    Raises:
        ValueError: it is no array's state.
    """
    require(type(state) is tuple and len(state) == 5, "an array of another state")  # noqa: PLR2004
    version, shape, dtype, fortran, data = state
    require(isinstance(dtype, np.dtype) and version == 1, "an array of no dtype")
    require(type(fortran) in (bool, int), "an array in no order")
    if dtype.kind == "O":
        require(type(data) is list and _numel(shape, 1) == len(data), "an array of other objects")
        require(all(depth_of(value) < MAX_NESTING for value in data), "arrays nested too deep")
        return (version, shape, dtype, fortran, data)
    require(type(data) is bytes, "an array of no bytes")
    _check_bytes(dtype, shape, data)
    return (version, shape, dtype, fortran, bytes(memoryview(data)))


def array_over(
    data: object, dtype: object, shape: object, order: object, axes: object = None
) -> np.ndarray[Any, Any]:
    """Return an array of its own bytes, as the pickles of protocol 5 have it."""
    require(
        type(data) in (bytes, bytearray) and isinstance(dtype, np.dtype), "an array of no bytes"
    )
    of_bytes: Any = data
    wanted: Any = dtype
    dimensions: Any = shape
    require(not wanted.hasobject, "objects for bytes")
    _check_bytes(wanted, shape, of_bytes)
    require(order in ("C", "F", "K"), "an array in no order")
    flat = np.frombuffer(of_bytes, dtype=wanted).copy() if of_bytes else np.empty(0, wanted)
    made: np.ndarray[Any, Any] = flat.reshape(dimensions, order="F" if order == "F" else "C")
    if order == "K" and axes is not None:
        require(type(axes) is tuple and all(type(axis) is int for axis in axes), "no axes")
        made = made.transpose(axes)  # type: ignore[call-overload]
    made.flags.writeable = type(data) is bytearray
    return made


def scalar(dtype: object, data: object) -> object:
    """Return a NumPy scalar of its own bytes."""
    require(isinstance(dtype, np.dtype) and type(data) is bytes, "a scalar of no bytes")
    kind: Any = dtype
    require(not kind.hasobject, "objects for bytes")
    _check_bytes(kind, (), data)  # type: ignore[arg-type]
    values = np.frombuffer(data, dtype=kind) if kind.itemsize else np.zeros(1, kind)  # type: ignore[call-overload]
    return values.copy()[0]


def _check_bytes(dtype: np.dtype[Any], shape: object, data: bytes | bytearray) -> None:
    """Refuse bytes that are not those of an array.

    Raises:
        ValueError: they are too many, too few, or no truth values.
    """
    require(_numel(shape, dtype.itemsize) * dtype.itemsize == len(data), "an array of other bytes")
    if dtype.kind == "b":
        # NumPy counts on 0 and 1 where it picks elements by a mask.
        require(np.frombuffer(data, np.uint8).max(initial=0) <= 1, "truth values beyond 1")


def _numel(shape: object, itemsize: int) -> int:
    require(type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS, "an array of no shape")
    sizes: Any = shape
    require(all(type(size) is int and size >= 0 for size in sizes), "an array of no shape")
    # NumPy multiplies the sizes that are not 0 in 64 bits.
    require(math.prod(filter(None, (*sizes, itemsize))) < 1 << 62, "an array of no shape")
    return math.prod(sizes)


# -- tensors -------------------------------------------------------------------------------------


def storage(data: bytes) -> torch.storage.TypedStorage:
    """Return the storage of a pickled tensor, on the host; torch itself would run what it holds."""
    require(type(data) is bytes and data.startswith(LEGACY_MARK), "a storage of another format")
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    require(isinstance(found, torch.storage.TypedStorage), f"a storage that is {type(found)}")
    held: torch.storage.TypedStorage = found
    return held


def rebuilt_tensor(
    held: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> torch.Tensor:
    """Return a tensor within its storage: torch would enlarge one that is too small."""
    require(isinstance(held, torch.storage.TypedStorage), "a tensor of no storage")
    storage_: Any = held
    numbers = (offset, *_integers(size), *_integers(stride))
    require(all(type(n) is int and 0 <= n < 1 << 62 for n in numbers), "a tensor of no shape")
    sizes: Any = size
    strides: Any = stride
    require(len(sizes) == len(strides), "a tensor of no shape")
    reach = sum((s - 1) * step for s, step in zip(sizes, strides, strict=True))
    numel = math.prod(sizes)
    last = offset + reach + 1 if numel else 0
    # TypedStorage's own methods warn that it is deprecated.
    elements = storage_._untyped_storage.nbytes() // storage_.dtype.itemsize  # noqa: SLF001
    require(numel < 1 << 62 and max(last, offset) <= elements, "a tensor beyond its storage")  # type: ignore[call-overload]
    _check_fields(requires_grad, hooks)
    if metadata is not None:
        require(type(metadata) is dict, "a tensor of no metadata")
        known: Any = metadata
        require(all(k in ("conj", "neg") and type(v) is bool for k, v in known.items()), "metadata")
    rebuild: Any = torch._utils._rebuild_tensor_v2  # noqa: SLF001 (what the pickle asks for)
    made: torch.Tensor = rebuild(
        storage_, offset, tuple(sizes), tuple(strides), requires_grad, hooks, metadata
    )
    return made


def rebuilt_parameter(data: object, requires_grad: object, hooks: object) -> torch.nn.Parameter:
    """Return a parameter."""
    require(type(data) is torch.Tensor, "a parameter of no tensor")
    _check_fields(requires_grad, hooks)
    tensor: Any = data
    return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))


def _integers(sizes: object) -> tuple[Any, ...]:
    require(type(sizes) in (tuple, torch.Size), "a tensor of no shape")
    return tuple(sizes)  # type: ignore[arg-type]


def _check_fields(requires_grad: object, hooks: object) -> None:
    require(type(requires_grad) is bool, "a tensor of other fields")
    require(isinstance(hooks, collections.OrderedDict) and not hooks, "a tensor with hooks")


BUILDERS: dict[str, Callable[..., object]] = {
    "numpy.dtype": new_dtype,
    "numpy.ndarray": NdarrayStub,
    **{
        f"numpy.{core}.{name}": builder
        for core in ("core", "_core")
        for name, builder in (
            ("multiarray._reconstruct", empty_array),
            ("multiarray.scalar", scalar),
            ("numeric._frombuffer", array_over),
        )
    },
    "torch.storage._load_from_bytes": storage,
    "torch._utils._rebuild_tensor_v2": rebuilt_tensor,
    "torch._utils._rebuild_parameter": rebuilt_parameter,
}
"""What pickles of arrays and tensors call, and what is called in its place."""
