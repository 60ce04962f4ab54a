"""Calls that a pickle may make to build a value: exact names, and checked arguments.

A class that is harmless by itself is not so with any argument: ``list(range(10**12))`` takes all
memory, an array over someone else's bytes writes into them, and a dtype that lies about itself lets
bytes be taken for pointers. So each name stands beside what its own pickles call it with; arrays
and tensors are made by ``array_builders``, which own what they return.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import pkgutil
import re
import types
import uuid
from collections.abc import Callable, Iterable
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

from lightning_elastic_zero.formats.safe_pickle.array_builders import (
    BUILDERS,
    MAX_NESTING,
    require,
)
from lightning_elastic_zero.formats.safe_pickle.policy import Arguments, PicklePolicy

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


def _moment(kind: Any) -> Callable[[Arguments], bool]:  # noqa: ANN401 (date, datetime or time)
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
