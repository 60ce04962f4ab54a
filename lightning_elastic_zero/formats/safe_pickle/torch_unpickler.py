"""Which classes a file of ``torch.save`` may ask for when its tree is unpickled."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import _weights_only_unpickler

from lightning_elastic_zero.errors import UnsupportedError

_ASKED_FOR = re.compile(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.[\w.]+)")
"""How torch's restricted unpickler names the class that it refuses."""


@dataclass(frozen=True, slots=True)
class PickleRules:
    """What may be unpickled beside what ``torch.load(weights_only=True)`` takes."""

    class_stubs: Mapping[str, type] = field(default_factory=dict)
    """Classes that are built in the place of others, by the full names of those."""
    any_class: bool = False
    """Build objects of any class, which can run code."""

    def allowed(self) -> AbstractContextManager[Any]:
        """Give a context in which torch's restricted unpickler takes the stand-ins."""
        if not self.class_stubs:
            return nullcontext()
        pairs: Any = [(cls, name) for name, cls in self.class_stubs.items()]
        return torch.serialization.safe_globals(pairs)


PLAIN_DATA = PickleRules()
"""What our own files hold."""


def unpickle(data: bytes, storage_of: Callable[[Any], Any], rules: PickleRules) -> Any:  # noqa: ANN401
    """Unpickle a tree, with storages from ``storage_of``.

    Raises:
        pickle.UnpicklingError: it asks for a class that is not allowed; or anything else that
            damaged data can raise.
    """
    if rules.any_class:
        return _AnyClass(data, storage_of, rules.class_stubs).load()
    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = storage_of  # type: ignore[method-assign]
    with rules.allowed():
        return unpickler.load()  # type: ignore[no-untyped-call]


def refuse_class(error: Exception, where: object) -> None:
    """Raise what helps where an unpickler refused a class; return where it was something else.

    Raises:
        UnsupportedError: the file needs a class that is not plain data.
    """
    asked_for = _ASKED_FOR.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if asked_for:
        msg = (
            f"{where} holds a Python object of {asked_for[1]}, which is no plain data. Building it "
            "can run code. If you trust this checkpoint, pass allow_pickle=True (to "
            "ElasticDeepSpeedStrategy, or to load_checkpoint), or allow this one class with "
            "torch.serialization.add_safe_globals"
        )
        raise UnsupportedError(msg) from error


class _AnyClass(pickle.Unpickler):
    """Python's own unpickler, with the stand-ins."""

    def __init__(
        self, data: bytes, storage_of: Callable[[Any], Any], class_stubs: Mapping[str, type]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._storage_of = storage_of
        self._stand_ins = class_stubs

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401
        """Give the storage that a pickle names."""
        return self._storage_of(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401
        """Give a stand-in, or the class itself."""
        name = f"{module_name}.{global_name}"
        if name in self._stand_ins:
            return self._stand_ins[name]
        if module_name == "torch" and global_name.endswith("Storage"):
            # As in torch.load: the storage classes themselves are deprecated, and warn.
            return torch.serialization.StorageType(global_name)  # type: ignore[no-untyped-call]
        return super().find_class(module_name, global_name)
