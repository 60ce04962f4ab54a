"""Objects of the trainer's state as plain data: paths, dates, NumPy values, collections.

An object is a dict with one entry: the name of its class, and the parts that it is built of. So a
load calls the functions of ``_KINDS`` and nothing else. Objects of other classes are pickled, and
loaded only with ``allow_pickle``.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import pickle
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_elastic_zero.core.text import TreePath, format_tree_path
from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.client_state import (
    Objects,
    check_pickle,
    host_pickle,
    is_plain,
    to_host,
)
from lightning_elastic_zero.formats.pickles import unsupported_class

_Kind: TypeAlias = "tuple[Callable[[Any], Any], Callable[[Any], Any]]"
"""Returns the parts of an instance; builds an instance of the parts."""


class _UnknownClassError(Exception):
    """A value is not an instance of a known class; the message is the name of its class."""


def _items(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(value.items())


def _time_parts(value: Any) -> list[Any]:
    fields = ("year", "month", "day", "hour", "minute", "second", "microsecond", "tzinfo", "fold")
    return [getattr(value, name) for name in fields if hasattr(value, name)]


def _time_of(kind: Any) -> Callable[[Any], Any]:
    return lambda parts: kind(*parts[:-1], fold=parts[-1])


def _with_attributes(kind: Callable[[Any], Any]) -> _Kind:
    """Return the functions for a dict with attributes, such as the ``_metadata`` of state dicts."""

    def build(parts: Any) -> Any:
        made = kind(parts[0])
        vars(made).update(parts[1])
        return made

    return lambda value: [_items(value), vars(value)], build


def _plain_dtype(value: np.dtype[Any]) -> str:
    if value.names or value.subdtype or value.metadata or np.dtype(value.str) != value:
        raise _UnknownClassError(_full_name(type(value)))
    return str(value.str)


def _array_parts(value: np.ndarray[Any, Any]) -> list[Any]:
    dtype, is_fortran = _plain_dtype(value.dtype), value.flags.fnc
    flat = value.T.reshape(-1) if is_fortran else value.reshape(-1)
    if value.dtype.hasobject:
        return [dtype, value.shape, is_fortran, flat.tolist()]
    data = np.array(bytearray(flat.tobytes()), np.uint8)
    return [dtype, value.shape, is_fortran, torch.from_numpy(data)]


def _array(parts: Any) -> np.ndarray[Any, Any]:
    name, shape, is_fortran, data = parts
    dtype = np.dtype(name)
    flat: np.ndarray[Any, Any] = np.empty(len(data) if dtype.hasobject else 0, dtype)
    if dtype.hasobject:
        flat[:] = data
    elif dtype.kind == "b":
        flat = data.numpy() != 0  # NumPy relies on truth values being 0 or 1.
    elif len(data):
        flat = np.array(np.frombuffer(data.numpy().tobytes(), dtype))
    made: np.ndarray[Any, Any] = flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
    return made


def _scalar(parts: Any) -> Any:
    dtype, data = np.dtype(parts[0]), parts[1]
    values = np.frombuffer(data, dtype) if dtype.itemsize else np.zeros(1, dtype)
    return np.array(values)[0]


def _class_of(name: str) -> type:
    return _CLASSES[name]


_KINDS: dict[type, _Kind] = {
    int: (hex, lambda text: int(text, 16)),
    bytes: (list, bytes),
    bytearray: (bytes, bytearray),
    dict: (_items, dict),
    collections.OrderedDict: _with_attributes(collections.OrderedDict),
    collections.Counter: _with_attributes(lambda items: collections.Counter(dict(items))),
    collections.defaultdict: (
        lambda value: [value.default_factory, _items(value)],
        lambda parts: collections.defaultdict(*parts),
    ),
    collections.deque: (
        lambda value: [list(value), value.maxlen],
        lambda parts: collections.deque(*parts),
    ),
    set: (list, set),
    frozenset: (list, frozenset),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    slice: (lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (
        lambda value: [value.numerator, value.denominator],
        lambda parts: fractions.Fraction(*parts),
    ),
    dt.date: (_time_parts, lambda parts: dt.date(*parts)),
    dt.datetime: (_time_parts, _time_of(dt.datetime)),
    dt.time: (_time_parts, _time_of(dt.time)),
    dt.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: dt.timedelta(*parts),
    ),
    dt.timezone: (lambda value: value.__getinitargs__(), lambda parts: dt.timezone(*parts)),
    PosixPath: (str, PosixPath),
    PurePosixPath: (str, PurePosixPath),
    PureWindowsPath: (str, PureWindowsPath),
    argparse.Namespace: (vars, lambda fields: argparse.Namespace(**fields)),
    types.SimpleNamespace: (vars, lambda fields: types.SimpleNamespace(**fields)),
    uuid.UUID: (
        lambda value: [value.int, value.is_safe.value],
        lambda parts: uuid.UUID(int=parts[0], is_safe=uuid.SafeUUID(parts[1])),
    ),
    np.ndarray: (_array_parts, _array),
    np.generic: (lambda value: [_plain_dtype(value.dtype), value.tobytes()], _scalar),
    np.dtype: (_plain_dtype, np.dtype),
    type: (lambda value: value.__name__, _class_of),
}
"""The parts of instances of each known class, and the function that builds an instance of them."""

_BASES = (np.generic, np.dtype)
"""Known classes whose instances are of subclasses."""

_BUILD = {kind.__name__: build for kind, (_, build) in _KINDS.items()}

_CLASSES = {kind.__name__: kind for kind in (*_KINDS, bool, float, str, list, tuple, complex)}
"""Classes that may themselves be values, as the factory of a ``defaultdict``."""


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def encode(value: Any) -> Any:
    """Return plain data of which ``decode`` builds a value."""
    if type(value) in (list, tuple):
        return type(value)(map(encode, value))
    if type(value) is not dict and is_plain(value):
        return to_host(value)
    kind = next((base for base in _BASES if isinstance(value, base)), type(value))
    if kind not in _KINDS or (kind is type and value not in _CLASSES.values()):
        raise _UnknownClassError(_full_name(value if isinstance(value, type) else kind))
    return {kind.__name__: encode(_KINDS[kind][0](value))}


def decode(stored: Any) -> Any:
    """Build the value that ``encode`` was called with."""
    if type(stored) is dict:
        ((name, parts),) = stored.items()
        return _BUILD[name](decode(parts))
    if type(stored) in (list, tuple):
        return type(stored)(map(decode, stored))
    return stored


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Objects, encoded as far as their classes are known."""

    values: list[list[Any]]
    """Pairs of a path and plain data."""
    unknown: dict[str, str]
    """Classes of the other objects, by the place of the object in the state."""
    rest: list[tuple[TreePath, object]]
    """The other objects, with their paths."""


def _encode_all(objects: Objects) -> _Encoded:
    found = _Encoded([], {}, [])
    for path, value in objects:
        try:
            found.values.append([list(path), encode(value)])
        except (_UnknownClassError, RecursionError) as error:
            known = isinstance(error, RecursionError)
            name = f"{_full_name(type(value))} (contains itself)" if known else str(error)
            found.unknown[format_tree_path(path)] = name
            found.rest.append((path, value))
    return found


def find_unknown(objects: Objects) -> dict[str, str]:
    """Return the classes that need ``allow_pickle``, by the place of the object in the state."""
    return _encode_all(objects).unknown


def store_objects(objects: Objects) -> dict[str, Any]:
    """Return the entries of a file for objects."""
    found = _encode_all(objects)
    if not found.rest:
        return {"values": found.values}
    data = torch.frombuffer(bytearray(pickle_objects(tuple(found.rest))[0]), dtype=torch.uint8)
    return {"values": found.values, "unknown": found.unknown, "pickle": data}


def load_objects(stored: Mapping[str, Any], where: str, *, allow_pickle: bool) -> Objects:
    """Return the objects of ``store_objects``.

    Args:
        stored: the entries, with the values of their tensors.
        where: the file, for messages.
        allow_pickle: build objects of any class; that can run code from the checkpoint.

    Raises:
        UnsupportedError: a class is not known, and was not allowed.
        CheckpointFormatError: an object cannot be built.
    """
    if stored.get("unknown") and not allow_pickle:
        place, name = next(iter(stored["unknown"].items()))
        holder = f"{where}: the trainer's state"
        raise unsupported_class(holder, f"a Python object of {name} ({place})")
    try:
        objects = [(tuple(path), decode(value)) for path, value in stored["values"]]
        if "pickle" in stored:
            objects += pickle.loads(stored["pickle"].numpy())  # noqa: S301 (allowed)
    except Exception as error:
        msg = (
            f"{where}: an object cannot be built here ({error!r}): make its class importable, in "
            "the version that was saved"
        )
        raise CheckpointFormatError(msg) from error
    return tuple(objects)


def pickle_objects(objects: Objects) -> tuple[bytes, Objects]:
    """Pickle objects together, and unpickle them to check that a load can."""
    try:
        data = host_pickle(list(objects))
        return data, tuple(pickle.loads(data))  # noqa: S301 (just pickled)
    except Exception:
        for path, value in objects:
            check_pickle(value, path)
        raise
