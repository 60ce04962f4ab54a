"""The trainer's state: plain data and objects.

The state is a dictionary that Lightning (or the user of a plain engine) passes: nested dicts, lists
and tuples. Rank 0's ``client_state`` is saved for all ranks: plain data in the model file, other
objects in a separate file. The ``rank_state`` of each rank is saved in its shard.

Objects of known classes (paths, namespaces, NumPy values, collections) are stored as plain data: a
dict with one entry, the name of the class and the parts that the object is built of. So a load
calls the functions of ``_KINDS`` and nothing else. Objects of other classes are pickled, and loaded
only with ``allow_pickle``.
"""

from __future__ import annotations

import argparse
import collections
import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PosixPath
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

from lightning_elastic_zero.core.tensors import (
    LEAVES,
    MOST_LEVELS,
    in_order,
    is_on_device,
    measure,
    tensors_of,
    with_copies,
)
from lightning_elastic_zero.core.text import TreePath, format_tree_path
from lightning_elastic_zero.errors import CheckpointFormatError, SaveError
from lightning_elastic_zero.formats.torch_read import PLAIN_DATA, unpickle, unsupported_class
from lightning_elastic_zero.formats.torch_write import piecewise

_LEAVES = (*LEAVES, torch.Size, torch.dtype, torch.device)
_NUMBERS = {type(None), bool, int, float}
"""Types whose pickles depend only on the values. Long lists of them are pickled fast."""

_TENSORS = (torch.Tensor, torch.nn.Parameter)

_INT_BYTES = 255
"""Longer integers are pickled by an opcode that ``torch.load(weights_only=True)`` refuses."""


_SAVED_LEVELS = MOST_LEVELS - 10
"""Levels of a value that is saved. A file has some more around it."""

Objects: TypeAlias = "tuple[tuple[TreePath, object], ...]"
"""Objects that are not plain data, and where in the tree each belongs."""

_MOST_INNER = 64
"""Entries of a dictionary that are compared one by one."""

_Kind: TypeAlias = "tuple[Callable[[Any], Any], Callable[[Any], Any]]"
"""Returns the parts of an instance; builds an instance of the parts."""

_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, list, dict, set, str)}
"""Factories of a ``defaultdict``."""

_PROTOCOL = 2
"""Pickle protocol of ``torch.save``."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """A part of the trainer's state, split for files."""

    plain: dict[str, Any] = field(default_factory=dict)
    """The tree of plain data, with None in place of each object."""
    objects: Objects = ()
    """The objects that are not plain data, with their paths."""

    def only(self, key: str) -> SplitState:
        """Return one entry; nothing if there is none."""
        plain = {key: self.plain[key]} if key in self.plain else {}
        return SplitState(plain, tuple(item for item in self.objects if item[0][0] == key))

    def __or__(self, other: SplitState) -> SplitState:
        """Return the entries of both, which have no common key."""
        return SplitState({**self.plain, **other.plain}, (*self.objects, *other.objects))


def split_objects(state: Mapping[str, Any]) -> SplitState:
    """Split a state into plain data and other objects."""
    if strange := [key for key in state if type(key) not in (str, int)]:
        msg = (
            f"the trainer's state has the key {strange[0]!r}, a {type(strange[0]).__name__}, "
            "expected a string"
        )
        raise SaveError(msg)
    objects: list[tuple[TreePath, object]] = []
    plain = {}
    for key, value in state.items():
        try:
            plain[key] = _plain_part(value, (key,), objects)
            measure(plain[key], _SAVED_LEVELS)
        except (RecursionError, ValueError) as error:
            msg = f"the trainer's state has {key!r}, which contains itself or is nested too deep"
            raise SaveError(msg) from error
    return SplitState(plain, tuple(objects))


def _plain_part(value: Any, path: TreePath, objects: list[tuple[TreePath, object]]) -> object:
    """Return the plain part of a value; add the objects in it to ``objects``."""
    is_dict = type(value) in (dict, OrderedDict) and all(type(k) in (str, int) for k in value)
    if is_dict and _has_plain_fields(value):
        plain = copy.copy(value)  # With its attributes: state dicts have ``_metadata``.
        plain.update((k, _plain_part(v, (*path, k), objects)) for k, v in value.items())
        return plain
    if type(value) is list:
        return [_plain_part(v, (*path, i), objects) for i, v in enumerate(value)]
    if is_plain(value):
        return to_host(value)
    objects.append((path, value))
    return None


def is_plain(value: object) -> bool:
    """Whether ``torch.load(weights_only=True)`` returns exactly this value."""
    if type(value) is int:
        return value.bit_length() < 8 * _INT_BYTES
    if type(value) in _LEAVES:
        return value != b""  # torch.save pickles it as a call that weights_only refuses
    if type(value) in _TENSORS:
        # Ranges of bytes of other tensors cannot be read.
        tensor: Any = value
        return _has_plain_fields(value) and _is_dense(tensor) and not tensor.is_conj()
    if type(value) is set:
        return all(map(_is_plain_key, value))
    if type(value) in (list, tuple):
        return all(is_plain(v) for v in value)  # type: ignore[attr-defined]
    if type(value) in (dict, OrderedDict):
        items = value.items()  # type: ignore[attr-defined]
        return _has_plain_fields(value) and all(_is_plain_key(k) and is_plain(v) for k, v in items)
    return False


def _is_plain_key(value: object) -> bool:
    """Whether a key or a member of a set is plain: tensors as keys are compared by identity."""
    return is_plain(value) and next(tensors_of(value), None) is None


def _has_plain_fields(value: object) -> bool:
    """Whether the attributes of a tensor or an ``OrderedDict`` are plain: they are saved too."""
    fields = getattr(value, "__dict__", None)
    return not fields or is_plain(fields)


def to_host(value: Any) -> Any:
    """Return a plain value whose tensors are on the host and own only their bytes.

    torch saves a view with its whole storage, and a tensor with its device.
    """
    if type(value) in LEAVES:
        return value
    copies = {t: own for t in tensors_of(value) if (own := _compact(t)) is not t}
    return with_copies(value, copies) if copies else value


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the host, without the rest of its storage; or the tensor."""
    if is_on_device(tensor):
        return tensor.detach().cpu()
    if not _is_dense(tensor) or vars(tensor):
        return tensor
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _is_dense(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.device.type != "meta"


def join_objects(plain: dict[str, Any], objects: Objects) -> dict[str, Any]:
    """Put objects at their paths, in place."""
    for path, value in objects:
        *inner, last = path
        node: Any = plain
        for key in inner:
            node = node[key]
        node[last] = value
    return plain


def entry_digests(state: SplitState, declared: Mapping[str, Any]) -> dict[TreePath, str]:
    """Return a digest of each entry, by its path, except those that ``declared`` has too.

    An entry that is a small dictionary, such as ``callbacks``, has a digest for each of its
    entries, so that a message can name the callback.
    """
    found = {path: _digest(value, path) for path, value in _entries(state.plain)}
    for path, value in state.objects:
        entry = path[:2] if path[:2] in found else path[:1]
        found[entry] = _digest([found[entry], *path, _object_digest(value, path)], path)
    return {path: held for path, held in found.items() if not _is_declared(path, declared)}


def _entries(state: Mapping[Any, Any]) -> Iterator[tuple[TreePath, Any]]:
    for key, value in state.items():
        is_small = type(value) is dict and 0 < len(value) <= _MOST_INNER
        if is_small and all(type(inner) in (str, int) for inner in value):
            yield from (((key, inner), held) for inner, held in value.items())
        else:
            yield (key,), value


def _is_declared(path: TreePath, declared: Mapping[Any, Any]) -> bool:
    if path[0] not in declared:
        return False
    inner = declared[path[0]]
    return not isinstance(inner, dict) or path[1:] == () or path[1] in inner


def _object_digest(value: object, path: TreePath) -> str:
    try:
        return _digest(encode(value), path)
    except (_UnknownClassError, RecursionError, ValueError):
        return _digest(pickled(value, path), path)


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits."""
    return _digest(tensor, ())


def _digest(value: object, path: TreePath) -> str:
    digest = xxhash.xxh3_128()
    _feed(digest, value, path)
    return digest.hexdigest()


def _feed(digest: xxhash.xxh3_128, value: Any, path: TreePath) -> None:
    """Add a value to a digest: tensors and floats by bits, sets and dicts without order."""
    kind = type(value).__name__
    if type(value) in _TENSORS and _is_dense(value):
        digest.update(f"{kind} {value.dtype} {tuple(value.shape)} {value.requires_grad} ".encode())
        for part in piecewise([in_order(value)], value.dtype).parts():
            digest.update(part)
        _feed(digest, vars(value), path)
    elif type(value) in (list, tuple) and not set(map(type, value)) <= _NUMBERS:
        digest.update(f"{kind} {len(value)} ".encode())
        for item in value:
            _feed(digest, item, path)
    elif type(value) in (dict, OrderedDict, set):
        items = value if type(value) is set else value.items()
        digest.update(f"{kind} {sorted(_digest(item, path) for item in items)} ".encode())
        if fields := getattr(value, "__dict__", None):
            _feed(digest, fields, path)
    else:
        data = pickled(list(value) if isinstance(value, tuple) else value, path)
        digest.update(f"{kind} {len(data)} ".encode() + data)


def _refusal(value: object, path: TreePath, what: str) -> SaveError:
    return SaveError(
        f"the trainer's state has {format_tree_path(path)}, a {type(value).__name__} that {what} "
        "keep it out of save_hyperparameters(ignore=[...]) or of the callback's state_dict()"
    )


def pickled(value: object, path: TreePath) -> bytes:
    """Pickle an object of the client state, with its tensors on the host."""
    try:
        return host_pickle(value)
    except Exception as error:
        raise _refusal(value, path, f"cannot be pickled ({error}):") from error


def host_pickle(value: object) -> bytes:
    """Pickle a value with tensors of devices as tensors of the host.

    Unpickling puts a tensor on its saved device, which may not exist or be another rank's.
    """
    file = io.BytesIO()
    _HostPickler(file).dump(value)
    return file.getvalue()


class _HostPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_on_device(value):
            moved = with_copies(value, {value: value.detach().cpu()})
            return moved.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


class _UnknownClassError(Exception):
    """A value is not an instance of a known class; the message is the name of its class."""


def _pairs(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(value.items())


def _with_attributes(kind: Callable[[Any], Any]) -> _Kind:
    """Return the functions for a dict with attributes, such as the ``_metadata`` of state dicts."""

    def build(parts: Any) -> Any:
        made = kind(parts[0])
        vars(made).update(parts[1])
        return made

    return lambda value: [_pairs(value), vars(value)], build


def _plain_dtype(value: np.dtype[Any]) -> str:
    is_composed = value.names or value.subdtype or value.metadata or value.hasobject
    if is_composed or np.dtype(value.str) != value:
        raise _UnknownClassError(_full_name(type(value)))
    return str(value.str)


def _array_parts(value: np.ndarray[Any, Any]) -> list[Any]:
    dtype, is_fortran = _plain_dtype(value.dtype), value.flags.fnc
    flat = value.T.reshape(-1) if is_fortran else value.reshape(-1)
    data = np.array(bytearray(flat.tobytes()), np.uint8)
    return [dtype, value.shape, is_fortran, torch.from_numpy(data)]


def _array(parts: Any) -> np.ndarray[Any, Any]:
    name, shape, is_fortran, data = parts
    dtype = np.dtype(name)
    flat: np.ndarray[Any, Any] = np.empty(0, dtype)
    if dtype.kind == "b":
        flat = data.numpy() != 0  # NumPy relies on truth values being 0 or 1.
    elif len(data):
        flat = np.array(np.frombuffer(data.numpy().tobytes(), dtype))
    made: np.ndarray[Any, Any] = flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
    return made


def _scalar(parts: Any) -> Any:
    dtype, data = np.dtype(parts[0]), parts[1]
    values = np.frombuffer(data, dtype) if dtype.itemsize else np.zeros(1, dtype)
    return np.array(values)[0]


def _default_dict_parts(value: collections.defaultdict[Any, Any]) -> list[Any]:
    factory = value.default_factory
    if factory is None:
        return [None, _pairs(value)]
    kind = factory if isinstance(factory, type) else type(factory)
    if kind not in _FACTORIES.values():
        raise _UnknownClassError(_full_name(kind))
    return [kind.__name__, _pairs(value)]


def _default_dict(parts: Any) -> collections.defaultdict[Any, Any]:
    name, pairs = parts
    return collections.defaultdict(name and _FACTORIES[name], pairs)


_KINDS: dict[type, _Kind] = {
    dict: (_pairs, dict),
    collections.OrderedDict: _with_attributes(collections.OrderedDict),
    # Of MultiStepLR's milestones.
    collections.Counter: _with_attributes(lambda items: collections.Counter(dict(items))),
    collections.defaultdict: (_default_dict_parts, _default_dict),
    collections.deque: (
        lambda value: [list(value), value.maxlen],
        lambda parts: collections.deque(*parts),
    ),
    PosixPath: (str, PosixPath),
    argparse.Namespace: (vars, lambda fields: argparse.Namespace(**fields)),
    np.ndarray: (_array_parts, _array),
    np.generic: (lambda value: [_plain_dtype(value.dtype), value.tobytes()], _scalar),
}
"""The parts of instances of each known class, and the function that builds an instance of them.

These are the classes that Lightning's hyperparameters, schedulers of torch, metrics and stateful
callbacks commonly contain; ``dict`` stands for dicts in an object."""

_BUILD = {kind.__name__: build for kind, (_, build) in _KINDS.items()}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def encode(value: Any) -> Any:
    """Return plain data of which ``decode`` builds a value."""
    if type(value) in (list, tuple):
        return type(value)(map(encode, value))
    if type(value) is not dict and is_plain(value):
        return to_host(value)
    kind = np.generic if isinstance(value, np.generic) else type(value)
    if kind not in _KINDS:
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


def _encode_all(
    objects: Objects,
) -> tuple[list[list[Any]], dict[str, str], list[tuple[TreePath, object]]]:
    """Encode objects of known classes; return them, and classes and values of the others."""
    values: list[list[Any]] = []
    unknown: dict[str, str] = {}
    rest: list[tuple[TreePath, object]] = []
    for path, value in objects:
        try:
            encoded = encode(value)
            measure(encoded, _SAVED_LEVELS)
            values.append([list(path), encoded])
        except (_UnknownClassError, RecursionError, ValueError) as error:
            is_unknown = isinstance(error, _UnknownClassError)
            name = str(error) if is_unknown else f"{_full_name(type(value))} (contains itself)"
            unknown[format_tree_path(path)] = name
            rest.append((path, value))
    return values, unknown, rest


def find_unknown(objects: Objects) -> dict[str, str]:
    """Return the classes that need ``allow_pickle``, by the place of the object in the state."""
    return _encode_all(objects)[1]


def store_objects(objects: Objects) -> dict[str, Any]:
    """Return the entries of a file for objects."""
    values, unknown, rest = _encode_all(objects)
    if not rest:
        return {"values": values}
    data = torch.frombuffer(bytearray(pickle_objects(tuple(rest))[0]), dtype=torch.uint8)
    return {"values": values, "unknown": unknown, "pickle": data}


def load_objects(stored: Mapping[str, Any], where: str, *, allow_pickle: bool) -> Objects:
    """Return the objects of ``store_objects``; ``where`` is the file, for messages.

    Raises UnsupportedError if a class is not known and ``allow_pickle`` is not set, and
    CheckpointFormatError if an object cannot be built.
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
            data = pickled(value, path)
            try:
                pickle.loads(data)  # noqa: S301 (just pickled)
            except Exception as error:
                why = f"can be pickled but not unpickled ({error}), so no load could restore it:"
                raise _refusal(value, path, why) from error
        raise


def check_loads_weights_only(parts: Mapping[str, Any]) -> None:
    """Refuse values that ``torch.load(weights_only=True)`` cannot read.

    ``parts`` are values by their title in messages.
    """
    for title, value in parts.items():
        if reason := _unreadable_reason(value):
            msg = (
                f"{title}: saved state has to be plain data that torch.load(weights_only=True) can "
                f"read ({reason}). Return numbers, strings, dense tensors, and lists and dicts of "
                "them from state_dict()."
            )
            raise SaveError(msg)


def _unreadable_reason(value: object) -> str:
    """Return why torch cannot read a value; empty if it can."""
    stream = io.BytesIO()
    try:
        _WithoutTensors(stream, _PROTOCOL).dump(value)
        unpickle(stream.getvalue(), lambda _: None, PLAIN_DATA)
    except Exception as error:  # noqa: BLE001 (whatever a pickle can raise)
        text = str(error).partition(" Please use")[0].partition("\n")[0]
        return text.rstrip(".") or repr(error)
    return ""


class _WithoutTensors(pickle.Pickler):
    """Pickles a value without the contents of its tensors."""

    def persistent_id(self, obj: Any) -> tuple[str] | None:
        """Return a placeholder for a tensor; raise ValueError if it is not a plain one."""
        if not isinstance(obj, torch.Tensor):
            return None
        if not is_plain(obj):
            msg = f"a {type(obj).__name__} with layout {obj.layout} is not a plain tensor"
            raise ValueError(msg)
        return ("storage",)
