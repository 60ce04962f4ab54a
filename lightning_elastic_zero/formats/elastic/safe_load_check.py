"""Check, before publication, that ``torch.load(weights_only=True)`` can read what is saved."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.formats.elastic.client_state import is_plain
from lightning_elastic_zero.formats.safe_pickle.policy import PLAIN_DATA
from lightning_elastic_zero.formats.safe_pickle.torch_unpickler import unpickle
from lightning_elastic_zero.formats.tree_path import TreePath, format_tree_path

_PROTOCOL = 2
"""Of ``torch.save``."""


def check_loads_weights_only(parts: Mapping[str, Any]) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would not read.

    Args:
        parts: what is saved, by the words in which a message names it.

    Raises:
        SaveError: it would not; the message names the innermost value with which it fails.
    """
    for name, value in parts.items():
        if (why := _unreadable(value)) is None:
            continue
        path, found, why = _innermost((name,), value, why)
        msg = (
            f"{format_tree_path(path)} is a {type(found).__name__}, and what is saved has to be "
            f"plain data, which torch.load(weights_only=True) reads ({why}): no load could "
            "restore it. Let state_dict() give numbers, texts, tensors, and lists and dicts of them"
        )
        raise SaveError(msg)


def _innermost(path: TreePath, value: Any, why: str) -> tuple[TreePath, Any, str]:  # noqa: ANN401
    """Find the value itself in what holds it."""
    for key, inner in _inside(value):
        if (its := _unreadable(inner)) is not None:
            return _innermost((*path, key), inner, its)
    return path, value, why


def _inside(value: object) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def _unreadable(value: object) -> str | None:
    """Describe why a value could not be read; None where it can."""
    stream = io.BytesIO()
    try:
        _WithoutTensors(stream, _PROTOCOL).dump(value)
        unpickle(stream.getvalue(), lambda _: None, PLAIN_DATA)
    except Exception as error:  # noqa: BLE001 (whatever a pickle can raise)
        return str(error).partition(" Please use")[0].partition("\n")[0] or repr(error)
    return None


class _WithoutTensors(pickle.Pickler):
    """Pickles a value but the contents of its tensors."""

    def persistent_id(self, obj: Any) -> tuple[str] | None:  # noqa: ANN401
        """Return a name for a tensor, which is written in its place.

        Raises:
            ValueError: it is one of which no ranges of bytes can be read.
        """
        if not isinstance(obj, torch.Tensor):
            return None
        if not is_plain(obj):
            msg = f"a {type(obj).__name__} of {obj.layout} that is no plain tensor"
            raise ValueError(msg)
        return ("storage",)
