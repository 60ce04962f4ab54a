"""The trainer's state: plain data kept open, objects kept apart, rank differences kept small.

``client_state`` is the dictionary that Lightning (or the user of a plain engine) hands over:
nested dicts, lists and tuples. What in it is plain data goes into the model states file. What is
not is pickled into a file of its own, which is read only when it is known to be harmless, or when
the user allows it. Where ranks hand over different values, rank 0's are everybody's, and the
others keep what differs.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import xxhash

from lightning_elastic_zero.errors import SaveError

Path: TypeAlias = "tuple[str | int, ...]"
"""Keys and indices that lead to a value in the tree."""

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_HASHED_BYTES = 1 << 24
"""Tensor bytes hashed at a time."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """A client state, parted."""

    plain: dict[str, Any]
    """The tree with None in place of each object."""
    objects: tuple[tuple[Path, object], ...]
    """What is not plain data, and where it belongs."""


def split_objects(state: Mapping[str, Any]) -> SplitState:
    """Part a client state into plain data and other objects."""
    objects: list[tuple[Path, object]] = []
    plain = {key: _plain_part(value, (key,), objects) for key, value in state.items()}
    return SplitState(plain, tuple(objects))


def _plain_part(value: object, path: Path, objects: list[tuple[Path, object]]) -> object:
    """Give the plain part of a value, noting the objects in it."""
    if type(value) in (dict, OrderedDict) and all(isinstance(k, (str, int)) for k in value):  # type: ignore[attr-defined]
        items = [(k, _plain_part(v, (*path, k), objects)) for k, v in value.items()]  # type: ignore[attr-defined]
        return type(value)(items)  # type: ignore[call-arg]
    if type(value) is list:
        return [_plain_part(v, (*path, i), objects) for i, v in enumerate(value)]
    if is_plain(value):
        return value
    objects.append((path, value))
    return None


def is_plain(value: object) -> bool:
    """Tell whether ``torch.load(weights_only=True)`` gives back just this value."""
    if type(value) in _LEAVES or type(value) in _TENSORS:
        return True
    if type(value) in (list, tuple, set):
        return all(is_plain(v) for v in value)  # type: ignore[attr-defined]
    if type(value) in (dict, OrderedDict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())  # type: ignore[attr-defined]
    return False


def join_objects(plain: dict[str, Any], objects: tuple[tuple[Path, object], ...]) -> dict[str, Any]:
    """Put objects (or what differs on a rank) back where they belong, in place."""
    for path, value in objects:
        node: Any = plain
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
    return plain


def dotted(path: Path) -> str:
    """Give a path as a person writes it: ``callbacks.EarlyStopping.best``."""
    return ".".join(str(key) for key in path)


def fingerprints(state: Mapping[str, Any]) -> dict[str, str]:
    """Give a digest of each leaf of a client state, by its path: to compare ranks."""
    return {dotted(path): _digest(value, path) for path, value in _leaves(state, ())}


def differing(state: Mapping[str, Any], first: Mapping[str, str]) -> tuple[tuple[Path, Any], ...]:
    """Give what differs from rank 0's state.

    Args:
        state: this rank's.
        first: the ``fingerprints`` of rank 0's.

    Returns:
        The differing leaves; whole top-level entries where the trees have other shapes.
    """
    leaves = dict(_leaves(state, ()))
    names = {dotted(path): path for path in leaves}
    changed = {
        path[:1] if _shape(names, path[0]) != _shape(first, path[0]) else path
        for name, path in names.items()
        if first.get(name) != _digest(leaves[path], path)
    }
    tops = {path for path in changed if len(path) == 1}
    kept = [path for path in names.values() if path in changed and path[:1] not in tops]
    return tuple((p, state[str(p[0])]) for p in sorted(tops, key=str)) + tuple(
        (p, leaves[p]) for p in kept
    )


def _shape(names: Mapping[str, object], top: str | int) -> frozenset[str]:
    """Give the dotted paths under one top-level entry."""
    return frozenset(n for n in names if n == str(top) or n.startswith(f"{top}."))


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, Any]]:
    """Walk dicts and lists; everything else is a leaf, as are empty ones."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif type(value) is list and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif path:
        yield path, value


def _digest(value: object, path: Path) -> str:
    """Digest a leaf: tensors by their bytes, the rest by its pickle."""
    digest = xxhash.xxh3_128()
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().contiguous().view(-1).view(torch.uint8) if value.numel() else None
        for start in range(0, 0 if flat is None else flat.numel(), _HASHED_BYTES):
            digest.update(flat[start : start + _HASHED_BYTES].cpu().numpy().data)  # type: ignore[index]
        return digest.hexdigest()
    digest.update(pickled(value, path))
    return digest.hexdigest()


def pickled(value: object, path: Path) -> bytes:
    """Pickle an object of the client state.

    Raises:
        SaveError: it cannot be pickled; the message says where it sits.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        msg = (
            f"the trainer's state holds {dotted(path)}, a {type(value).__name__} that cannot be "
            f"pickled ({error}): keep it out of save_hyperparameters(ignore=[...]) or of the "
            "callback's state_dict()"
        )
        raise SaveError(msg) from error
