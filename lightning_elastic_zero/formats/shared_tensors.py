"""One tensor under several names, told by where it lies in its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

StorageLocation: TypeAlias = "tuple[object, ...]"


def storage_location(tensor: torch.Tensor) -> StorageLocation:
    """Return what two tensors have in common that are one."""
    storage = tensor.untyped_storage()
    where = storage._cdata, tensor.storage_offset()  # noqa: SLF001 (which storage)
    return *where, tensor.shape, tensor.stride(), tensor.dtype


def duplicate_names(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of each tensor that has several; what has no place is left out.

    A module that is registered twice under one parent has two names in a state dict, and one in
    DeepSpeed's lists of buffers and of tied weights.
    """
    first: dict[StorageLocation, str] = {}
    again: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        known = first.setdefault(storage_location(tensor), name)
        if known != name:
            again[name] = known
    return again
