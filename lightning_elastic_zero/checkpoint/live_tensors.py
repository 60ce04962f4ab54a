"""Tensors of training that are written from where they are, since there is no room for a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

_GLANCE_S = 1.0


class LiveTensors:
    """What the writer still has to read before the optimizer may step. Used by two threads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the tensors, as they are now; they must not change until ``wait`` has returned."""
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._unread = set(self._tensors)
        self._over = threading.Event()
        self._streams = [
            _side_stream(device) for device in {t.device for t in tensors if t.is_cuda}
        ]
        self._look()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read in this thread, beside what the devices compute; afterwards, nothing is read."""
        try:
            with ExitStack() as streams:
                for stream in self._streams:
                    streams.enter_context(torch.cuda.stream(stream))
                yield
        finally:
            self._unread.clear()
            self._look()

    def on_read(self, tensor: torch.Tensor) -> None:
        """Note that all elements of a tensor have been read; others than these mean nothing."""
        self._unread.discard(id(tensor))
        self._look()

    def wait(self, in_vain: Callable[[], bool]) -> None:
        """Wait until all have been read, or need not be.

        Args:
            in_vain: tells whether what is still being written will not be published.
        """
        while not (self._over.wait(_GLANCE_S) or in_vain()):
            pass

    def _look(self) -> None:
        if not self._unread:
            self._over.set()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Give a stream for reading what the current one has computed so far."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
