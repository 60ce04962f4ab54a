"""Checks of users' options."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T", bound=str)
F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D")

_NOT_OPTIONS = {"self", "args", "kwargs"}


def check_flag(name: str, value: object) -> bool:
    """Return an option that is True or False.

    Strings and numbers are refused: ``"false"`` would count as True.
    """
    if isinstance(value, bool):
        return value
    raise _refusal(name, value, "True or False")


def check_count(name: str, value: object, *, least: int, unit: str) -> int | None:
    """Return an option that is None or a whole number, Python's or NumPy's, of at least ``least``.

    ``unit`` is the counted thing, for the message.
    """
    if value is None:
        return None
    with suppress(TypeError):
        if not isinstance(value, bool) and (number := operator.index(value)) >= least:  # type: ignore[arg-type]
            return number
    raise _refusal(name, value, f"a whole number of {unit}, at least {least}, or None")


def check_choice(name: str, value: object, choices: Sequence[T]) -> T:
    """Return an option that is one of several words."""
    for known in choices:
        if isinstance(value, str) and value == known:
            return known
    raise _refusal(name, value, " or ".join(map(repr, choices)))


def check_rename(value: object) -> dict[str, str]:
    """Return the ``rename`` option as a dictionary."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(type(n) is str for pair in value.items() for n in pair):
        return dict(value)
    msg = f"rename={value!r}: expected a dictionary of names in the checkpoint to names here"
    raise ValueError(msg)


def check_known_options(of: type, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown options and suggest a similar one.

    ``known`` has the options that the constructor of ``of`` passes on to its parents.
    """
    parents = set(known)
    if not (strange := [name for name in given if name not in parents]):
        return
    signatures = [
        inspect.signature(vars(c)["__init__"]) for c in of.__mro__ if "__init__" in vars(c)
    ]
    names = parents.union(*(signature.parameters for signature in signatures)) - _NOT_OPTIONS
    like = difflib.get_close_matches(strange[0], sorted(names), n=1)
    hint = f". Did you mean {like[0]!r}?" if like else ""
    msg = f"{of.__name__} has no option {strange[0]!r}{hint}"
    raise TypeError(msg)


def takes(options: type) -> Callable[[F], F]:
    """Show the fields of a dataclass as keywords of a function that has ``**kwargs`` for them.

    ``help``, the API reference and LightningCLI read the signature.
    """

    def show(function: F) -> F:
        own = inspect.signature(function)
        *before, rest = own.parameters.values()
        after = [rest] if rest.name == "kwargs" else []  # Options that are not fields.
        types = get_type_hints(options)
        fields = inspect.signature(options).parameters.values()
        shown = [field.replace(annotation=types[field.name]) for field in fields]
        function.__signature__ = own.replace(parameters=[*before, *shown, *after])  # type: ignore[attr-defined]
        return function

    return show


def take(options: type[D], given: dict[str, Any]) -> D:
    """Move keywords that are fields of a dataclass into an instance of it."""
    known = inspect.signature(options).parameters
    return options(**{name: given.pop(name) for name in known if name in given})


def check_client_state(name: str, value: object) -> Mapping[str, Any]:
    """Return an option for state as a dictionary.

    Refuses other types, such as the tag that ``engine.save_checkpoint`` takes.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    msg = (
        f"{name}={value!r}: expected a dictionary or None. There is no tag: each "
        "checkpoint has its own path"
    )
    raise ValueError(msg)


def _refusal(name: str, value: object, allowed: str) -> ValueError:
    quoted = isinstance(value, str) and not allowed.startswith("'")
    hint = ", without quotes" if quoted else ""
    return ValueError(f"{name}={value!r}: expected {allowed}{hint}")
