"""What a rank holds and what it is given, as tensors: the words between engine and formats.

``RankState`` is what one rank of a live engine holds, by reference. ``Receiving`` is what it is
to be given: buffers to fill, before anything live is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import Plain, Progress, StateKey

Scalar: TypeAlias = "torch.Tensor | int | float | bool | None"
"""An optimizer state that is one value per flat buffer: a 0-dimensional tensor or a number."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """One flat buffer of one rank: masters, and the states that share its fragments."""

    fragments: tuple[Fragment, ...]
    """What of which parameter lies where; what they leave out is padding."""
    master: torch.Tensor
    """Master weights, shape ``(partition elements,)``, usually fp32."""
    elementwise: Mapping[str, torch.Tensor]
    """Optimizer states of the same shape as ``master``."""
    scalars: Mapping[str, Scalar]
    """Optimizer states that are one value for the buffer."""


@dataclass(frozen=True, slots=True)
class RankState:
    """All that one rank holds of a run, by reference: nothing is copied."""

    flats: tuple[FlatState, ...]
    frozen: Mapping[str, torch.Tensor]
    """Weights that the optimizer does not own: this rank's piece, 1-D without padding."""
    module_buffers: Mapping[str, torch.Tensor]
    """Persistent module buffers, with their shapes. They may differ between ranks."""
    module_weights: Mapping[str, torch.Tensor]
    """Low-precision weights as the module has them; filled only where they are to be kept too."""
    loss_scaler: Mapping[str, Plain]
    """The fields of DeepSpeed's loss scaler, and its class."""
    lr_scheduler: Mapping[str, object] | None = None
    """State of a scheduler that the engine itself steps (not with Lightning)."""


@dataclass(frozen=True, slots=True)
class Receiving:
    """The buffers that a load fills; live state changes when they are committed."""

    fragments: tuple[Fragment, ...]
    """What is wanted of the weights; ``Fragment.buffer`` counts in ``weights``."""
    weights: tuple[torch.Tensor, ...]
    """1-D targets: masters per flat buffer, then frozen weights, one each."""
    states: tuple[Mapping[str, torch.Tensor], ...]
    """Per flat buffer: a 1-D target for each element-wise optimizer state."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a load brings beside the filled buffers: small, and committed with them."""

    scalars: tuple[Mapping[str, Scalar], ...]
    """Per flat buffer: the optimizer states that are one value; empty without optimizer state."""
    hyperparameters: tuple[Mapping[str, Plain], ...] | None
    """Per parameter group; None: the live ones stay."""
    module_buffers: Mapping[str, torch.Tensor]
    progress: Progress
    loss_scaler: Mapping[str, Plain] = field(default_factory=dict)
    lr_scheduler: Mapping[str, object] | None = None
    optimizer: str = ""
    """Class name of the optimizer that saved the hyperparameters."""


def state_key(name: str, value: object, *, elementwise: bool) -> StateKey:
    """Describe one optimizer state, by a value of it."""
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
    else:
        dtype = "None" if value is None else type(value).__name__
    return StateKey(name, "elementwise" if elementwise else "scalar", dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Give ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def loses_values(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a type cannot hold all of a tensor's values; NaN stays NaN."""
    if values.dtype == dtype:
        return False
    if values.is_complex() and not dtype.is_complex:
        return True
    found, kept = values, values.to(dtype).to(values.dtype)
    if values.is_floating_point():  # 8-bit types cannot be compared.
        found, kept = found.double(), kept.double()
    return bool(((found != kept) & ~((found != found) & (kept != kept))).any())  # noqa: PLR0124 (NaN)


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor lie in one place, as in an expanded view."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def plain(value: object, where: str) -> Plain:
    """Turn a hyperparameter into plain data; a 0-dimensional tensor becomes a tagged number.

    Raises:
        UnsupportedError: it is neither; ``where`` says which one it is.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, tuple):
        return tuple(plain(v, where) for v in value)
    if isinstance(value, list):
        return [plain(v, where) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: plain(v, where) for k, v in value.items()}
    msg = (
        f"{where} is a {type(value).__name__}: an optimizer's hyperparameters must be numbers, "
        "strings, or lists, tuples and dicts of them, to be saved as plain data"
    )
    raise UnsupportedError(msg)
