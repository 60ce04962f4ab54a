"""Unpicklers for trees of ``torch.save``.

They are read as by ``torch.load(weights_only=True)``, with stand-ins for a few classes. With
``allow_pickle``, Python's own unpickler is used.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch
from torch import _weights_only_unpickler

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.deepspeed_files import CLASS_STUBS

LEGACY_MARK = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that ``torch.save`` wrote before it wrote zips: a pickled number."""

DAMAGED = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
    ImportError,
    OverflowError,
)
"""Exceptions that damaged or foreign data raises in unpicklers, and sometimes ``MemoryError``."""


def unsupported_class(where: object, what: str, more: str = "") -> UnsupportedError:
    """Return the error for a class that is built only with ``allow_pickle``."""
    return UnsupportedError(
        f"{where} contains {what}. Building it can run code. If you trust this checkpoint, pass "
        f"allow_pickle=True (to ElasticDeepSpeedStrategy, or to load_checkpoint){more}"
    )


@dataclass(frozen=True, slots=True)
class PicklePolicy:
    """The classes that a pickle may contain besides those of ``torch.load(weights_only=True)``."""

    stubs: Mapping[str, type] = field(default_factory=dict)
    """The classes to build instead of others, by the full names of those."""
    any_class: bool = False
    """Build objects of any class, which can run code."""

    def with_any_class(self, allow_pickle: bool) -> PicklePolicy:  # noqa: FBT001 (its one meaning)
        """Return a copy with another ``any_class``."""
        return replace(self, any_class=allow_pickle)


PLAIN_DATA = PicklePolicy()
"""For files of this library."""

FOREIGN_TREE = PicklePolicy(CLASS_STUBS)
"""For files of other software, with DeepSpeed's few classes."""


class _AnyClassUnpickler(pickle.Unpickler):
    """Builds objects of any class, except those with a stub."""

    def __init__(self, data: bytes, policy: PicklePolicy, storage_of: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._policy = policy
        self._storage_of = storage_of

    def persistent_load(self, pid: Any) -> Any:
        return self._storage_of(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if stub := self._policy.stubs.get(f"{module_name}.{global_name}"):
            return stub
        if module_name == "torch" and global_name.endswith("Storage"):
            # As in torch.load: the storage classes themselves are deprecated, and warn.
            return torch.serialization.StorageType(global_name)
        return super().find_class(module_name, global_name)


_ASKED_FOR = re.compile(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.[\w.]+)")
"""The class that torch's restricted unpickler refuses, in its message."""

# torch keeps the allowed classes per process. Only one file is unpickled at a time, so that no
# thread removes classes that another one still needs.
_allowing = threading.RLock()


@contextmanager
def _allowed(policy: PicklePolicy) -> Iterator[None]:
    """Allow the policy's stubs to torch's restricted unpickler, within this context."""
    pairs: Any = [(stub, name) for name, stub in policy.stubs.items()]
    with _allowing, torch.serialization.safe_globals(pairs):
        yield


def unpickle(data: bytes, storage_of: Callable[[Any], Any], policy: PicklePolicy) -> Any:
    """Unpickle a tree, with storages from ``storage_of``."""
    if policy.any_class:
        return _AnyClassUnpickler(data, policy, storage_of).load()
    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = storage_of  # type: ignore[method-assign]
    with _allowed(policy):
        return unpickler.load()


def load_stream(stream: IO[bytes], policy: PicklePolicy, where: object) -> Any:
    """Load a whole file of ``torch.save``, with tensors on the host."""
    try:
        with _allowed(policy):
            return torch.load(stream, map_location="cpu", weights_only=not policy.any_class)
    except pickle.UnpicklingError as error:
        refuse_class(error, where)
        raise


def refuse_class(error: Exception, where: object) -> None:
    """Raise an error with the remedy if an unpickler refused a class; else return."""
    asked_for = _ASKED_FOR.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if asked_for:
        what = f"a Python object of {asked_for[1]}, which is not plain data"
        more = ", or allow this one class with torch.serialization.add_safe_globals"
        raise unsupported_class(where, what, more) from error
