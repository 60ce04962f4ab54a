"""Restricted unpicklers for the trainer's objects, ``.metadata`` and trees of ``torch.save``.

A list of allowed names is not enough: a pickle could also change a shared class, set the state of
an array that is in use, or copy a few bytes a million times. ``list(range(10**12))`` uses all
memory, and a dtype can claim that it contains no objects. So each call, state and key is checked,
and arrays and tensors are built by functions here that own their memory.

Trees of ``torch.save`` are read by torch's ``weights_only`` unpickler. With ``allow_pickle``,
Python's own unpickler is used.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import itertools
import math
import pickle
import pkgutil
import re
import struct
import threading
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import IO, Any, ClassVar, NoReturn, TypeAlias

import numpy as np
import torch
from torch import _weights_only_unpickler

from lightning_elastic_zero.core.text import TreePath, format_tree_path
from lightning_elastic_zero.errors import CheckpointFormatError, ElasticZeroError, UnsupportedError
from lightning_elastic_zero.formats.client_state import host_pickle
from lightning_elastic_zero.formats.deepspeed_files import CLASS_STUBS

Arguments: TypeAlias = "tuple[Any, ...]"

Global: TypeAlias = "tuple[Any, Callable[[Arguments], bool]]"
"""What stands for a name, and a check of the arguments that it may be called with."""

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
"""What damaged or foreign data can raise in a pickle reader, beside ``MemoryError``."""


def unsupported_class(where: object, what: str, more: str = "") -> UnsupportedError:
    """Return the error for what is built only with permission."""
    return UnsupportedError(
        f"{where} holds {what}. Building it can run code. If you trust this checkpoint, pass "
        f"allow_pickle=True (to ElasticDeepSpeedStrategy, or to load_checkpoint){more}"
    )


def _client_object(where: str, what: str, at: str) -> UnsupportedError:
    return unsupported_class(f"{where}: the trainer's state", f"{what}{f' ({at})' if at else ''}")


@dataclass(frozen=True, slots=True)
class PicklePolicy:
    """What pickles of one kind may ask for.

    ``torch.load(weights_only=True)`` has a table of its own, to which ``names`` are added;
    ``SafeUnpickler`` builds what stands here and nothing else.
    """

    names: Mapping[str, Global] = field(default_factory=dict)
    """What may be asked for, by its full name."""
    states: Mapping[type, Callable[[Any, object], None]] = field(default_factory=dict)
    """How an instance of a class is given its state."""
    hashed: tuple[type, ...] = ()
    """Classes whose instances are keys, hashed by their fields; each is given a state once."""
    refuse: Callable[[str, str, str], UnsupportedError] = _client_object
    """Makes the error from the file, what it holds, and the place in it."""
    any_class: bool = False
    """Build objects of any class, which can run code."""

    def with_any_class(self, allow_pickle: bool) -> PicklePolicy:  # noqa: FBT001 (its one meaning)
        """Return the policy of somebody who trusts the file, or not."""
        return replace(self, any_class=allow_pickle)


PLAIN_DATA = PicklePolicy()
"""What our own files hold: what ``torch.load(weights_only=True)`` takes."""

FOREIGN_TREE = PicklePolicy({name: (stub, lambda _: True) for name, stub in CLASS_STUBS.items()})
"""What files of other software hold: plain data, and the few classes of DeepSpeed's."""


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
    state: Any,
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


MAX_KEY_PARTS = 1_000_000
"""Parts of one key, those that stand in it several times counted each time."""

_NUMBERS = (bool, int, float)
_LEAVES = (type(None), *_NUMBERS, complex, str, bytes)
_FRACTION = re.compile(r"-?\d+(/\d+)?")


def _are(*kinds: type) -> Callable[[Arguments], bool]:
    """Return a check for arguments of exactly these types, of which the last may be left out."""

    def check(args: Arguments) -> bool:
        return len(args) in (len(kinds), len(kinds) - 1) and all(
            type(arg) is kind for arg, kind in zip(args, kinds, strict=False)
        )

    return check


def _all(*kinds: type) -> Callable[[Arguments], bool]:
    return lambda args: all(type(arg) in kinds for arg in args)


def takes_nothing(args: Arguments) -> bool:
    """Whether there are no arguments."""
    return not args


def _members(args: Arguments) -> bool:
    if len(args) != 1 or type(args[0]) not in (list, tuple):
        return not args
    return all(is_key(member) for member in args[0])


def _factory(args: Arguments) -> bool:
    # What can be called at all is on the list: the unpickler returns nothing else.
    return len(args) <= 1 and all(arg is None or isinstance(arg, type) for arg in args)


def _queue(args: Arguments) -> bool:
    begins_empty = not args or (type(args[0]) in (list, tuple) and not args[0])
    return begins_empty and all(type(length) in (type(None), int) for length in args[1:])


def _fraction(args: Arguments) -> bool:
    if len(args) == 1 and type(args[0]) is str:
        return bool(_FRACTION.fullmatch(args[0]))
    return _are(int, int)(args)


def _moment(kind: Any) -> Callable[[Arguments], bool]:
    """Return a check for a packed moment: the constructor takes bytes that are no date."""
    zoned = issubclass(kind, (dt.datetime, dt.time))

    def check(args: Arguments) -> bool:
        if not args or type(args[0]) is not bytes or len(args) > 1 + zoned:
            return False
        if any(type(zone) not in (type(None), dt.timezone) for zone in args[1:]):
            return False
        found = kind(*args)
        names = ("year", "month", "day", "hour", "minute", "second", "microsecond")
        fields = {name: getattr(found, name) for name in names if hasattr(found, name)}
        kind(**fields)
        return True

    return check


def takes_sizes(args: Arguments) -> bool:
    """Whether the arguments are those of a ``torch.Size``."""
    return len(args) == 1 and type(args[0]) is tuple and all(type(size) is int for size in args[0])


ALLOWED_CALLS: dict[str, Callable[[Arguments], bool]] = {
    **{f"builtins.{n}": takes_nothing for n in ("bool", "bytes", "dict", "float", "int", "list")},
    **{f"builtins.{n}": takes_nothing for n in ("str", "tuple")},
    **{f"builtins.{n}": _members for n in ("frozenset", "set")},
    "builtins.bytearray": _all(bytes),
    "builtins.complex": _are(float, float),
    "builtins.range": _all(int),
    "builtins.slice": _all(*_LEAVES),
    "collections.Counter": _are(dict),
    "collections.OrderedDict": takes_nothing,
    "collections.defaultdict": _factory,
    "collections.deque": _queue,
    "datetime.date": _moment(dt.date),
    "datetime.datetime": _moment(dt.datetime),
    "datetime.time": _moment(dt.time),
    "datetime.timedelta": _all(int),
    "datetime.timezone": _are(dt.timedelta, str),
    "pathlib.PosixPath": _all(str),
    "pathlib.PurePosixPath": _all(str),
    "pathlib.PureWindowsPath": _all(str),
    "pathlib.WindowsPath": _all(str),
    "argparse.Namespace": takes_nothing,
    "decimal.Decimal": _are(str),
    "fractions.Fraction": _fraction,
    "types.SimpleNamespace": takes_nothing,
    "uuid.UUID": takes_nothing,
    "torch.Size": takes_sizes,
    "torch.device": _are(str, int),
}
"""Classes whose instances run no code of anyone else's, and what they may be called with."""

INTERNED_CLASSES = (
    decimal.Decimal,
    fractions.Fraction,
    PosixPath,
    PurePosixPath,
    PureWindowsPath,
    WindowsPath,
)
"""Immutable classes that copy their text: equal ones in a pickle are made once."""

ATTRIBUTE_CLASSES = (
    argparse.Namespace,
    collections.Counter,
    collections.OrderedDict,
    types.SimpleNamespace,
)
"""Classes whose instances are given attributes."""


def is_key(value: object, hashed: tuple[type, ...] = ()) -> bool:
    """Whether a value may be a key: hashing it takes bounded time, and a bounded stack.

    Args:
        value: the key.
        hashed: classes whose instances are hashed by their fields.
    """
    level, parts = [value], 0
    for _ in range(MAX_NESTING):
        parts += len(level)
        if parts > MAX_KEY_PARTS:
            return False
        if any(type(part) is slice for part in level):
            return False
        level = [part for whole in level for part in _parts(whole, hashed)]
        if not level:
            return True
    return False


def _parts(key: object, hashed: tuple[type, ...]) -> Iterable[object]:
    if isinstance(key, hashed):
        return vars(key).values()
    return key if isinstance(key, (tuple, frozenset)) else ()


def size_of(arguments: Iterable[Any]) -> int:
    """Return what a value that is built from these copies of them, in bytes or in members."""
    sized = (bytes, bytearray, list, tuple, dict)
    return sum(len(argument) for argument in arguments if isinstance(argument, sized))


def set_fields(instance: object, state: object) -> None:
    """Set the attributes of an instance of ``ATTRIBUTE_CLASSES``, or of a UUID.

    Raises:
        ValueError: they are no attributes.
    """
    require(type(state) is dict and all(type(key) is str for key in state), "a state of no fields")
    fields: dict[str, Any] = state  # type: ignore[assignment]
    if type(instance) is uuid.UUID:
        require(
            type(fields.get("int")) is int and 0 <= fields["int"] < 1 << 128, "a UUID of no int"
        )
        instance.__setstate__(fields)  # type: ignore[attr-defined]
    else:
        vars(instance).update(fields)


CLIENT_OBJECTS_POLICY = PicklePolicy(
    {
        **{name: (pkgutil.resolve_name(name), rule) for name, rule in ALLOWED_CALLS.items()},
        **{name: (builder, lambda _: True) for name, builder in BUILDERS.items()},
    },
    dict.fromkeys((*ATTRIBUTE_CLASSES, uuid.UUID), set_fields),
)
"""What objects of the trainer's state may be made of."""


class AnyClassUnpickler(pickle.Unpickler):
    """Builds whatever is asked for, with tensors on the host: a saved device may not be here."""

    def __init__(
        self, data: bytes, policy: PicklePolicy, storage_of: Callable[[Any], Any] | None = None
    ) -> None:
        """Prepare reading a pickle.

        Args:
            data: the pickle.
            policy: what stands for some names, in the place of what they name.
            storage_of: returns a storage by what a file of ``torch.save`` calls it.
        """
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._policy = policy
        self._storage_of = storage_of

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that a pickle names."""
        return super().persistent_load(pid) if self._storage_of is None else self._storage_of(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a stand-in, or what the name means."""
        name = f"{module_name}.{global_name}"
        if name in self._policy.names:
            return self._policy.names[name][0]
        if name == "torch.storage._load_from_bytes":
            return _load_any_storage
        if self._storage_of and module_name == "torch" and global_name.endswith("Storage"):
            # As in torch.load: the storage classes themselves are deprecated, and warn.
            return torch.serialization.StorageType(global_name)  # type: ignore[no-untyped-call]
        return super().find_class(module_name, global_name)


def _load_any_storage(data: bytes) -> object:
    """Return the storage of a pickled tensor, on the host, whatever it holds."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


_MOVED = {"pathlib._local": "pathlib"}
"""Where Python 3.13 says that its paths are, which no other version does."""

_DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)

_BASE: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch  # noqa: SLF001

_OLDER = (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4)
"""Ways to call that pickles of these values do not use."""

_SPARE = 1024
"""What a pickle may copy beyond its own size, in bytes."""


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
            return AnyClassUnpickler(data, PLAIN_DATA).load()
        return SafeUnpickler(data, CLIENT_OBJECTS_POLICY, where).load()
    except ElasticZeroError:
        raise
    except Exception as error:
        msg = (
            f"{where}: an object cannot be built here ({error!r}): make its class importable, in "
            "the version that was saved"
        )
        raise CheckpointFormatError(msg) from error


def find_refused(objects: Iterable[tuple[TreePath, object]]) -> dict[str, str]:
    """Return what of a client state's objects a load refuses unless it is allowed, by its place.

    What cannot be pickled at all is not told: no save of it comes about.
    """
    found = {}
    for path, value in objects:
        try:
            unpickler = SafeUnpickler(host_pickle(value), CLIENT_OBJECTS_POLICY, "")
        except Exception:  # noqa: BLE001, S112 - whatever a user's class raises, the save names
            continue
        try:
            unpickler.load()
        except Exception:  # noqa: BLE001 - and whatever stands in the way of a load is an answer
            found[format_tree_path(path)] = unpickler.refused or f"a {type(value).__name__}"
    return found


class SafeUnpickler(pickle._Unpickler):  # noqa: SLF001 (the C one's steps cannot be checked)
    """Builds what a policy lists, as its own pickles do, and changes no class."""

    stack: list[Any]
    """What was read since the last mark."""
    metastack: list[list[Any]]
    """What was read before each mark."""

    def __init__(self, data: bytes, policy: PicklePolicy, where: str) -> None:
        """Prepare reading a pickle; ``where`` is for messages."""
        super().__init__(io.BytesIO(data))
        self._policy = policy
        self._where = where
        self.refused = ""
        """What was refused."""
        self._left = len(data) + _SPARE
        self._rules: dict[int, tuple[object, Callable[..., bool]]] = {}
        self._shared: dict[object, object] = {}
        self._begun: dict[int, object] = {}
        self._depths: dict[int, tuple[object, int]] = {}

    def find_class(self, module: str, name: str) -> object:
        """Return a global that the pickle asks for.

        Raises:
            UnsupportedError: it is not listed.
        """
        wanted = f"{_MOVED.get(module, module)}.{name}"
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if wanted not in self._policy.names:
            self._refuse(f"a Python object of {module}.{name}")
        found, rule = self._policy.names[wanted]
        self._rules[id(found)] = (found, rule)
        return found

    # -- what is called ------------------------------------------------------------------------

    def load_reduce(self) -> None:
        """Call what is listed."""
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args, lambda found: found(*args))

    def load_newobj(self) -> None:
        """Make an instance of what is listed."""
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args, lambda cls: cls.__new__(cls, *args))

    def _called(self, found: object, args: object, call: Callable[[Any], object]) -> object:
        """Call what is listed, with what its own pickles call it with.

        Raises:
            UnsupportedError: it is not listed.
        """
        _, rule = self._rules.get(id(found), (None, None))
        if rule is None:
            self._refuse(f"a pickle that calls {found!r}")
        require(type(args) is tuple and rule(args), f"a call of {found!r} that it does not take")
        if found in INTERNED_CLASSES:
            return self._once((found, args), call)
        self._spend(size_of(args))  # type: ignore[arg-type]
        made = call(found)
        if found is empty_array or isinstance(made, (np.dtype, *self._policy.hashed)):
            self._begun[id(made)] = made
        return made

    def _once(self, what: tuple[object, object], call: Callable[[Any], object]) -> object:
        """Make equal immutable values once: each copies what it is made of."""
        if what not in self._shared:
            self._shared[what] = call(what[0])
        return self._shared[what]

    def _spend(self, count: int) -> None:
        """Count what is copied: each byte of a pickle is used once, but for a few."""
        self._left -= count
        require(self._left >= 0, "more copies than it has bytes")

    def load_call(self) -> None:
        """Refuse the ways to call that pickles of values do not use."""
        require(holds=False, what="a call of an older protocol")

    # -- what is changed -----------------------------------------------------------------------

    def load_build(self) -> None:
        """Set an object's state: an instance's, once if it is of NumPy or a key; never a class's.

        Raises:
            UnsupportedError: it is another object's.
        """
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, (np.dtype, np.ndarray, *self._policy.hashed)):
            require(self._begun.pop(id(instance), None) is instance, "a second state of one object")
        if isinstance(instance, (np.dtype, np.ndarray)):
            self._build_array(instance, state)
        elif set_state := self._policy.states.get(type(instance)):
            set_state(instance, state)
        else:
            self._refuse(f"a pickle that changes {instance!r}")

    def _build_array(self, instance: Any, state: object) -> None:
        if isinstance(instance, np.dtype):
            if not is_own_state(instance, state):
                self._refuse(f"a NumPy array of {instance} with a layout of its own")
        else:
            state = array_state(state, self._depth_of)
            values = state[4]
            self._spend(len(values))
            depths = [self._depth_of(value) for value in values] if type(values) is list else [0]
            self._depths[id(instance)] = instance, 1 + max(depths, default=0)
        instance.__setstate__(state)

    def _depth_of(self, value: object) -> int:
        """Return how deep an array is nested; 0 for anything else."""
        known, depth = self._depths.get(id(value), (None, 0))
        return depth if known is value else 0

    def load_append(self) -> None:
        """Append to a list."""
        _check_target(self.stack[-2], collections.deque, list)
        _BASE[pickle.APPEND[0]](self)

    def load_appends(self) -> None:
        """Append to a list."""
        _check_target(self.metastack[-1][-1], collections.deque, list)
        _BASE[pickle.APPENDS[0]](self)

    def load_setitem(self) -> None:
        """Set an item of a dict."""
        _check_target(self.stack[-3], *_DICTS)
        self._check_keys(self.stack[-2:-1])
        _BASE[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        """Set items of a dict."""
        _check_target(self.metastack[-1][-1], *_DICTS)
        self._check_keys(self.stack[::2])
        _BASE[pickle.SETITEMS[0]](self)

    def load_additems(self) -> None:
        """Add to a set."""
        _check_target(self.metastack[-1][-1], set)
        self._check_keys(self.stack)
        _BASE[pickle.ADDITEMS[0]](self)

    def load_dict(self) -> None:
        """Make a dict of what is on the stack."""
        self._check_keys(self.stack[::2])
        _BASE[pickle.DICT[0]](self)

    def load_frozenset(self) -> None:
        """Make a frozenset of what is on the stack."""
        self._check_keys(self.stack)
        _BASE[pickle.FROZENSET[0]](self)

    def load_bytearray8(self) -> None:
        """Make a bytearray of what is there, not of what is said to be there."""
        size_bytes = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        require(size_bytes <= self._left, "fewer bytes than it says")
        data = bytearray(self.read(size_bytes))  # type: ignore[attr-defined]
        require(len(data) == size_bytes, "fewer bytes than it says")
        self.append(data)  # type: ignore[attr-defined]

    def _refuse(self, what: str) -> NoReturn:
        self.refused = what
        at = _place(itertools.chain(*self.metastack, self.stack))
        raise self._policy.refuse(self._where, what, at)

    def _check_keys(self, keys: Iterable[object]) -> None:
        """Refuse keys that cannot be hashed in bounded time."""
        hashed = self._policy.hashed
        require(all(is_key(key, hashed) for key in keys), "a key nested too deep")

    _checked: ClassVar[dict[int, Callable[[Any], None]]] = {
        **_BASE,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        **dict.fromkeys((opcode[0] for opcode in _OLDER), load_call),
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.DICT[0]: load_dict,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }
    dispatch = _checked


def _place(begun: Iterable[object]) -> str:
    """Return where in the client state the object sits that is being built.

    Args:
        begun: what an unpickler has on its stacks, the outermost first: pairs of a place and an
            object, which are complete, and then the place of this one.
    """
    for value in begun:
        if type(value) is tuple and value and all(type(key) in (str, int) for key in value):
            return format_tree_path(value)
    return ""


def _check_target(target: object, *kinds: type) -> None:
    """Refuse to fill what is no container: arrays and tensors take items too."""
    require(type(target) in kinds, f"a {type(target).__name__} that is filled")


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


def unpickle(data: bytes, storage_of: Callable[[Any], Any], policy: PicklePolicy) -> Any:
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


def load_stream(stream: IO[bytes], policy: PicklePolicy, where: object) -> Any:
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
