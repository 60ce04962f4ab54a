"""The trainer's state: plain data, objects, and the differences between ranks.

``client_state`` is the dictionary that Lightning (or the user of a plain engine) passes: nested
dicts, lists and tuples. Plain data goes into the model file, other objects into a separate file
(``client_objects``). If ranks pass different values, rank 0's are saved for all, and other ranks
save their differences.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import xxhash

from lightning_elastic_zero.core.tensors import in_order, is_on_device, tensors_of
from lightning_elastic_zero.core.text import TreePath, format_tree_path
from lightning_elastic_zero.errors import SaveError

REMOVED = False
"""The end of a path to an entry that rank 0 has and this rank lacks; no key is a bool."""

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_NUMBERS = {type(None), bool, int, float}
"""Types whose pickles depend only on the values. Long lists of them are pickled fast."""

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_HASHED_BYTES = 1 << 24
"""Tensor bytes hashed at a time."""

_INT_BYTES = 255
"""Longer integers are pickled by an opcode that ``torch.load(weights_only=True)`` refuses."""


Objects: TypeAlias = "tuple[tuple[TreePath, object], ...]"
"""Objects that are not plain data, and where in the tree each belongs."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """The plain data and the objects of a client state."""

    plain: dict[str, Any]
    """The tree with None in place of each object."""
    objects: Objects


def split_objects(state: Mapping[str, Any]) -> SplitState:
    """Split a client state into plain data and other objects."""
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
        except RecursionError as error:
            msg = f"the trainer's state has {key!r}, which contains itself or is nested too deep"
            raise SaveError(msg) from error
    return SplitState(plain, tuple(objects))


def _plain_part(value: object, path: TreePath, objects: list[tuple[TreePath, object]]) -> object:
    """Return the plain part of a value; add the objects in it to ``objects``."""
    if isinstance(value, dict) and _is_node(value) and _has_plain_fields(value):
        items = [(k, _plain_part(v, (*path, k), objects)) for k, v in value.items()]
        return _like(value, items)
    if type(value) is list:
        return [_plain_part(v, (*path, i), objects) for i, v in enumerate(value)]
    if is_plain(value):
        return to_host(value)
    objects.append((path, value))
    return None


def _is_node(value: object) -> bool:
    """Whether a value is a dict or list whose items have paths of their own."""
    if type(value) in (dict, OrderedDict):
        return all(type(k) in (str, int) for k in value)  # type: ignore[attr-defined]
    return type(value) is list


def _like(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of the same type and attributes: state dicts have ``_metadata``."""
    made = type(value)(items)
    if fields := getattr(value, "__dict__", None):
        vars(made).update(fields)
    return made


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
    if type(value) is tuple:
        return tuple(to_host(v) for v in value)
    if type(value) in (dict, OrderedDict):
        return _like(value, [(k, to_host(v)) for k, v in value.items()])
    if type(value) is list:
        return [to_host(v) for v in value]
    return _compact_tensor(value) if type(value) in _TENSORS else value


def _compact_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host, without the rest of its storage."""
    if is_on_device(value):
        moved = _moved_to_host(value)
        vars(moved).update({key: to_host(field) for key, field in vars(value).items()})
        return moved
    if not _is_dense(value) or vars(value):
        return value
    if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
        return value
    copy = value.detach().clone(memory_format=torch.contiguous_format)
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_(value.requires_grad)


def _is_dense(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.device.type != "meta"


def join_objects(plain: dict[str, Any], objects: Objects) -> dict[str, Any]:
    """Put objects, or the differences of a rank, at their paths, in place."""
    for path, value in objects:
        gone = path[-1] is REMOVED
        *inner, last = path[:-1] if gone else path
        node: Any = plain
        for key in inner:
            node = node[key]
        if gone:
            del node[last]
        elif type(node) is list and last == len(node):
            node.append(value)
        else:
            node[last] = value
    return plain


def fingerprints(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each leaf and the type of each node of a client state, by path."""
    return {_text(path): _fingerprint(value, path) for path, value in _places(state, ())}


def rank_differences(
    state: Mapping[str, Any], first: Mapping[str, str]
) -> tuple[tuple[TreePath, Any], ...]:
    """Return the entries with which ``join_objects`` turns rank 0's state into this rank's.

    Args:
        state: the state of this rank.
        first: the ``fingerprints`` of rank 0.

    Returns:
        Leaves that differ, nodes and leaves that rank 0 lacks, and for entries that this rank
        lacks a path that ends in ``REMOVED``.
    """
    of_first: dict[TreePath, list[str | int]] = {}
    for text in first:
        *parent, key = json.loads(text) if text.startswith("[") else (text,)
        of_first.setdefault(tuple(parent), []).append(key)
    return tuple(_changes(state, (), first, of_first))


def _changes(
    node: Any,
    path: TreePath,
    first: Mapping[str, str],
    of_first: Mapping[TreePath, list[str | int]],
) -> Iterator[tuple[TreePath, Any]]:
    """Yield new and different entries of a node, then missing ones in reverse order."""
    keys = set()
    for key, value in _items(node):
        keys.add(key)
        at = (*path, key)
        if first.get(_text(at)) != _fingerprint(value, at):
            yield at, value
        elif _is_branch(value):
            yield from _changes(value, at, first, of_first)
    for key in reversed(of_first.get(path, [])):
        if key not in keys:
            yield (*path, key, REMOVED), None


def _places(node: Any, path: TreePath) -> Iterator[tuple[TreePath, Any]]:
    for key, value in _items(node):
        at = (*path, key)
        yield at, value
        if _is_branch(value):
            yield from _places(value, at)


def _items(node: Any) -> Iterator[tuple[str | int, Any]]:
    yield from node.items() if isinstance(node, Mapping) else enumerate(node)


def _is_branch(value: object) -> bool:
    """Whether entries of a value have paths; a list of only numbers and strings is one leaf."""
    if type(value) is list:
        # None may be the placeholder of an object, which needs a path.
        return any(v is None or type(v) not in _LEAVES for v in value)
    return _is_node(value) and bool(value) and not getattr(value, "__dict__", None)


def _fingerprint(value: object, path: TreePath) -> str:
    return type(value).__name__ if _is_branch(value) else _digest(value, path)


def _text(path: TreePath) -> str:
    """Return a path as unambiguous text: ``a.b`` is one key, ``["a", "b"]`` are two."""
    if len(path) == 1 and isinstance(path[0], str) and not path[0].startswith("["):
        return path[0]
    return json.dumps(path)


def _digest(value: object, path: TreePath) -> str:
    digest = xxhash.xxh3_128()
    _feed(digest, value, path)
    return digest.hexdigest()


def _feed(digest: xxhash.xxh3_128, value: Any, path: TreePath) -> None:
    """Add a value to a digest: tensors and floats by bits, sets and dicts without order."""
    kind = type(value).__name__
    if type(value) in _TENSORS and _is_dense(value):
        digest.update(f"{kind} {value.dtype} {tuple(value.shape)} {value.requires_grad} ".encode())
        for part in _bytes_of(value):
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
        data = _bits(value, path)
        digest.update(f"{kind} {len(data)} ".encode() + data)


def _bits(value: object, path: TreePath) -> bytes:
    """Return the bytes of a leaf that is not a dense tensor, or of a list of numbers."""
    if type(value) in (list, tuple, torch.Size):
        return pickle.dumps(list(value), protocol=4)  # type: ignore[call-overload]
    if type(value) is float:
        return struct.pack("<d", value)
    if type(value) is complex:
        return struct.pack("<dd", value.real, value.imag)
    if type(value) is str:
        return value.encode(errors="surrogatepass")
    if type(value) is bytes:
        return value
    return repr(value).encode() if type(value) in _LEAVES else pickled(value, path)


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a dense tensor on the host, in bounded parts."""
    flat = in_order(tensor)
    data = flat.view(torch.uint8) if flat.numel() else flat
    for start in range(0, data.numel(), _HASHED_BYTES):
        yield data[start : start + _HASHED_BYTES].cpu().numpy().data


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


def check_pickle(value: object, path: TreePath) -> None:
    """Refuse an object that cannot be unpickled."""
    data = pickled(value, path)
    try:
        pickle.loads(data)  # noqa: S301 - just pickled
    except Exception as error:
        why = f"can be pickled but not unpickled ({error}), so no load could restore it:"
        raise _refusal(value, path, why) from error


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
            moved: Any = _moved_to_host(value)
            return moved.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _moved_to_host(value: torch.Tensor) -> torch.Tensor:
    moved = value.detach().cpu()
    if isinstance(value, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=value.requires_grad)
    vars(moved).update(vars(value))
    return moved.requires_grad_(value.requires_grad)
