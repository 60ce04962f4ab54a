"""Trees of ``torch.save``: read by torch's own restricted unpickler, unless the file is trusted."""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import _weights_only_unpickler

from lightning_elastic_zero.formats.safe_pickle.any_class import AnyClassUnpickler
from lightning_elastic_zero.formats.safe_pickle.policy import PicklePolicy, unsupported_class

_ASKED_FOR = re.compile(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.[\w.]+)")
"""How torch's restricted unpickler names the class that it refuses."""


# What is allowed is the same for all threads of a process: one file is unpickled at a time, or a
# thread that ends takes away what another one still needs.
_allowing = threading.RLock()


@contextmanager
def _allowed(policy: PicklePolicy) -> Iterator[None]:
    """Allow the policy's names to torch's restricted unpickler, within this context."""
    pairs: Any = [(found, name) for name, (found, _) in policy.names.items()]
    with _allowing, torch.serialization.safe_globals(pairs):
        yield


def unpickle(data: bytes, storage_of: Callable[[Any], Any], policy: PicklePolicy) -> Any:  # noqa: ANN401
    """Unpickle a tree, with storages from ``storage_of``.

    Raises:
        pickle.UnpicklingError: it asks for a class that is not allowed; or anything else that
            damaged data can raise.
    """
    if policy.any_class:
        return AnyClassUnpickler(data, policy, storage_of).load()
    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = storage_of  # type: ignore[method-assign]
    with _allowed(policy):
        return unpickler.load()  # type: ignore[no-untyped-call]


def load_stream(stream: IO[bytes], policy: PicklePolicy, where: object) -> Any:  # noqa: ANN401
    """Load a whole file of ``torch.save``, with tensors on the host.

    Raises:
        UnsupportedError: it needs a class that is not allowed; or anything else that damaged data
            can raise.
    """
    try:
        with _allowed(policy):
            return torch.load(stream, map_location="cpu", weights_only=not policy.any_class)
    except pickle.UnpicklingError as error:
        refuse_class(error, where)
        raise


def refuse_class(error: Exception, where: object) -> None:
    """Raise what helps where an unpickler refused a class; return where it was something else.

    Raises:
        UnsupportedError: the file needs a class that is not plain data.
    """
    asked_for = _ASKED_FOR.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if asked_for:
        what = f"a Python object of {asked_for[1]}, which is no plain data"
        more = ", or allow this one class with torch.serialization.add_safe_globals"
        raise unsupported_class(where, what, more) from error
