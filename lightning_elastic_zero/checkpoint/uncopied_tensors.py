"""Tensors of training that are written from where they are, since there is no room for a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from lightning_elastic_zero.checkpoint.device_streams import on_stream, side_stream
from lightning_elastic_zero.tensor_state import is_on_device

_GLANCE_S = 1.0


class UncopiedTensors:
    """What the writer still has to read before the optimizer may step. Used by two threads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold the tensors, as they are now; they must not change until ``wait`` has returned."""
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._unread = set(self._tensors)
        self._over = threading.Event()
        devices = {tensor.device for tensor in tensors if is_on_device(tensor)}
        self._streams = [side_stream(device) for device in devices]
        self._look()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read in this thread, beside what the devices compute; afterwards, nothing is read."""
        try:
            with ExitStack() as streams:
                for stream in self._streams:
                    streams.enter_context(on_stream(stream))
                yield
        finally:
            self._unread.clear()
            self._look()

    def on_read(self, tensor: torch.Tensor) -> None:
        """Note that all elements of a tensor have been read; others than these mean nothing."""
        self._unread.discard(id(tensor))
        self._look()

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Wait until all have been read, or need not be.

        Args:
            cancelled: tells whether what is still being written will not be published.
        """
        while not (self._over.wait(_GLANCE_S) or cancelled()):
            pass

    def _look(self) -> None:
        if not self._unread:
            self._over.set()
