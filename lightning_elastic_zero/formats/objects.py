"""Objects in the trainer's state that are not plain data: read only when harmless, or allowed.

Harmless is a closed list of classes. It is not enough to look at what a pickle asks for by name:
one can also change a class that everybody uses, and a NumPy dtype that lies about itself lets
bytes be taken for pointers. So what a pickle may put into an object is checked too, and what can be
called to make arrays and tensors is replaced by functions that check what they are given.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    ElasticZeroError,
    UnsupportedError,
)

HARMLESS = frozenset(
    {
        *(f"builtins.{n}" for n in ("bool", "bytearray", "bytes", "complex", "dict", "float")),
        *(f"builtins.{n}" for n in ("frozenset", "int", "list", "range", "set", "slice", "str")),
        "builtins.tuple",
        *(f"collections.{n}" for n in ("Counter", "OrderedDict", "defaultdict", "deque")),
        *(f"datetime.{n}" for n in ("date", "datetime", "time", "timedelta", "timezone")),
        *(f"pathlib.{n}" for n in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
        "argparse.Namespace",
        "decimal.Decimal",
        "fractions.Fraction",
        "types.SimpleNamespace",
        "uuid.UUID",
        "torch.Size",
        "torch.device",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        *(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
    }
)
"""Globals that rebuild a value and run no code of anyone else's. Exact names, never modules."""

_MOVED = {"pathlib._local": "pathlib"}
"""Where Python 3.13 says that its paths are, which no other version does."""


def load_objects(data: bytes, where: str, *, allow_pickle: bool) -> object:
    """Unpickle the objects of a client state.

    Args:
        data: the pickle.
        where: the file and the places in the client state, for messages.
        allow_pickle: build whatever class it holds; that can run code from the checkpoint.

    Raises:
        UnsupportedError: it needs a class that is not known to be harmless and was not allowed.
        CheckpointFormatError: an object cannot be built here: its class cannot be imported, or
            does not take what was saved.
    """
    try:
        if allow_pickle:
            return _HostUnpickler(io.BytesIO(data)).load()
        return _HarmlessUnpickler(data, where).load()
    except ElasticZeroError:
        raise
    except Exception as error:
        msg = (
            f"{where}: an object cannot be built here ({error!r}): make its class importable, in "
            "the version that was saved"
        )
        raise CheckpointFormatError(msg) from error


class _Array:
    """Stands for ``numpy.ndarray``, which could be called to take bytes for pointers."""


def _empty_array(kind: object, shape: object, _: object) -> np.ndarray[Any, Any]:
    """Give what an array's pickle begins with: an empty array, whose state is set next."""
    if kind is not _Array or shape != (0,):
        msg = "a pickled array that does not begin empty"
        raise ValueError(msg)
    empty: np.ndarray[Any, Any] = np.ndarray((0,), "b")
    return empty


def _new_dtype(text: object, *_: object) -> np.dtype[Any]:
    """Give a dtype that nobody else has: setting its state changes no other one's."""
    if type(text) is not str:
        msg = f"a pickled dtype named {text!r}"
        raise ValueError(msg)
    made: np.dtype[Any] = np.dtype(text, copy=True)
    return made


def _load_storage(data: bytes, *, weights_only: bool = True) -> object:
    """Return the storage of a pickled tensor, on the host; torch itself would run what it holds."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


class _HostUnpickler(pickle.Unpickler):
    """Builds whatever is asked for, with tensors on the host: a saved device may not be here."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return partial(_load_storage, weights_only=False)
        found: object = super().find_class(module, name)
        return found


_GUARDED: dict[str, Callable[..., object]] = {
    "numpy.dtype": _new_dtype,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "torch.storage._load_from_bytes": _load_storage,
}
"""What pickles of arrays and tensors call, and what is called in its place."""


class _HarmlessUnpickler(pickle._Unpickler):  # noqa: SLF001 (the C one's steps cannot be checked)
    """Builds instances of the listed classes only, and changes no class."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._classes: set[object] = {np.ndarray}

    def find_class(self, module: str, name: str) -> object:
        """Give a global that the pickle asks for.

        Raises:
            UnsupportedError: it is not listed.
        """
        wanted = f"{_MOVED.get(module, module)}.{name}"
        if wanted in _GUARDED:
            return _GUARDED[wanted]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if wanted not in HARMLESS:
            self._refuse(f"a Python object of {module}.{name}")
        found: object = super().find_class(_MOVED.get(module, module), name)
        self._classes.add(found)
        return found

    def load_build(self) -> None:
        """Set an object's state: an instance's, never a class's; a dtype's only to what it is.

        Raises:
            UnsupportedError: it is another object's.
        """
        state, instance = self.stack[-1], self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(instance, np.dtype):
            if not _is_own_state(instance, state):
                self._refuse(f"a NumPy array of {instance} with a layout of its own")
        elif type(instance) not in self._classes:
            self._refuse(f"a pickle that changes {instance!r}")
        _SET_STATE(self)

    def _refuse(self, what: str) -> NoReturn:
        msg = (
            f"{self._where}: the trainer's state holds {what}. "
            "Building it can run code. If you trust this checkpoint, pass allow_pickle=True (to "
            "ElasticDeepSpeedStrategy, or to load_checkpoint)"
        )
        raise UnsupportedError(msg)

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]  # noqa: RUF012, SLF001


_SET_STATE: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]  # noqa: SLF001


def _is_own_state(dtype: np.dtype[Any], state: object) -> bool:
    """Tell whether a state says of a dtype what it is, but for its byte order and unit of time."""
    own: Any = dtype.__reduce__()
    if type(state) is not tuple or len(state) != len(own[2]):
        return False
    same_layout = (state[0], *state[2:8]) == (own[2][0], *own[2][2:8])
    return same_layout and (dtype.kind in "mM" or state[8:] == own[2][8:])
