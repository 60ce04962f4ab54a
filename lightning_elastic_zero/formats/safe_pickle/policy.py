"""The policy of unpickling: names that a pickle may use, and the refusal of others."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.formats.deepspeed.class_stubs import CLASS_STUBS

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
