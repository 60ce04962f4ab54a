"""Dataclasses from JSON, and a JSON text that vouches for itself.

JSON has no types of its own to trust: ``from_json`` takes a value for a field only where it is of
the field's type. The field ``digest`` of a sealed text is that of all its other bytes: everything
else in a checkpoint has its checksum in the manifest, and nothing but the manifest itself can say
whether one of its own numbers was changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R")

DIGEST_FIELD = "digest"
"""The field that holds it."""

_BLANK = "0" * hashlib.sha256().digest_size * 2
"""What stands in the digest's place while it is computed."""


def load_json(text: str | bytes) -> Any:  # noqa: ANN401 (as json.loads)
    """Return what a JSON text holds.

    Raises:
        ValueError: it is none, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        msg = "nested too deeply"
        raise ValueError(msg) from error


def from_json(cls: type[R], row: object, untag: Callable[[Any], Any] = lambda value: value) -> R:
    """Build a dataclass from JSON, with lists as tuples, ignoring fields that it does not have.

    Args:
        cls: the dataclass; its fields are of plain types, of dataclasses, or tuples of those.
        row: what ``load_json`` returned.
        untag: applied to what is in fields that hold any mapping, before its type is looked at.

    Raises:
        TypeError: a field has a value of another type, or is missing and has no default.
        ValueError: the dataclass refuses the values.
    """
    if not isinstance(row, dict):
        msg = f"{row!r} is no {cls.__name__}"
        raise TypeError(msg)
    values: dict[str, Any] = {}
    for known, kind in _fields_of(cls):  # type: ignore[arg-type]
        if known.name not in row:
            continue
        value, inner = row[known.name], get_args(kind)
        if is_dataclass(kind):
            values[known.name] = from_json(kind, value, untag)  # type: ignore[arg-type]
        elif inner and is_dataclass(inner[0]):
            values[known.name] = _rows(inner[0], value, untag)
        else:
            value = untag(value) if get_origin(kind) is Mapping else value
            value = tuple(value) if isinstance(value, list) else value
            if not _is(kind, value):
                msg = f"{cls.__name__}.{known.name} is {value!r}, not {known.type}"
                raise TypeError(msg)
            values[known.name] = value
    return cls(**values)


@cache
def _fields_of(cls: type[Any]) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in fields(cls)]


def _rows(cls: Any, rows: object, untag: Callable[[Any], Any]) -> tuple[Any, ...]:  # noqa: ANN401
    if not isinstance(rows, list):
        msg = f"{rows!r} is no table of {cls.__name__}"
        raise TypeError(msg)
    return tuple(from_json(cls, row, untag) for row in rows)


def _is(kind: Any, value: object) -> bool:  # noqa: ANN401 (of typing)
    """Whether a value is of a plain type, of one of several, a tuple of one, or a mapping."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return type(value) is tuple and all(type(item) is inner[0] for item in value)
    if origin is Mapping:
        return type(value) is dict
    return type(value) in (inner or (kind,))


def dump_with_digest(content: Mapping[str, Any]) -> str:
    """Return the text of a JSON object, sorted and indented, with its digest in it."""
    text = json.dumps({**content, DIGEST_FIELD: _BLANK}, indent=1, sort_keys=True) + "\n"
    mark = f'"{DIGEST_FIELD}": "{_BLANK}"'
    return text.replace(mark, mark.replace(_BLANK, _digest(text)), 1)


def has_valid_digest(text: str, content: Mapping[str, Any]) -> bool:
    """Whether a text, whose content was read already, has the digest that it names."""
    named = content.get(DIGEST_FIELD)
    if not isinstance(named, str) or len(named) != len(_BLANK):
        return False
    return _digest(text.replace(named, _BLANK)) == named


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
