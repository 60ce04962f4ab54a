"""Python's own unpickler, for checkpoints that are trusted."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from lightning_elastic_zero.formats.safe_pickle.policy import PicklePolicy


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

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401 (of any format)
        """Return the storage that a pickle names."""
        return super().persistent_load(pid) if self._storage_of is None else self._storage_of(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401
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
