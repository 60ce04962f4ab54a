"""Values as text, down to their bits: what two values have to share to be the same one."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def bitwise_repr(value: object) -> str:
    """Spell a value out.

    NaN is not equal to itself, but 1, 1.0 and True are, and 0.0 and -0.0; here it is the other way
    round. The order of a dict or set does not show.
    """
    kind = type(value).__name__
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{kind} {_spelled_array(value)}"
    if isinstance(value, (float, complex)):
        number = complex(value) if isinstance(value, complex) else complex(value, 0)
        return f"{kind} {struct.pack('<dd', number.real, number.imag).hex()}"
    if isinstance(value, dict):
        items = sorted((bitwise_repr(key), bitwise_repr(item)) for key, item in value.items())
        fields = bitwise_repr(vars(value)) if type(value) is OrderedDict and vars(value) else ""
        return f"{kind} {items} {fields}"
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(map(bitwise_repr, value))}"
    if isinstance(value, (list, tuple)):
        return f"{kind} {[bitwise_repr(item) for item in value]}"
    return f"{kind} {value!r}"


def _spelled_array(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tolist()}"
    flat = value.detach().contiguous().reshape(-1)
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    what = f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {data.hex()}"
    return f"{what} {bitwise_repr(vars(value))}"
