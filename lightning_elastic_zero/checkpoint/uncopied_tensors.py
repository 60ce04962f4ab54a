"""Tensors of training that are written from where they are, since there is no room for a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from lightning_elastic_zero.checkpoint.device_streams import on_stream, side_stream
from lightning_elastic_zero.formats.torch_file import ChunkedSource, PiecewiseSource
from lightning_elastic_zero.tensor_state import is_on_device

_GLANCE_S = 1.0


class UncopiedTensors:
    """What the writer still has to read before the optimizer may step. Used by two threads."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        numel: int,
        check_unchanged: Callable[[], None] = lambda: None,
    ) -> None:
        """Hold the tensors, as they are now; they must not change until ``wait`` has returned.

        Args:
            tensors: masters and optimizer states.
            numel: how many of their elements are written; the others are padding.
            check_unchanged: called when all have been read, before the optimizer may step; raises
                where one changed all the same.
        """
        self._check_unchanged = check_unchanged
        self._tensors = tensors  # Held, so that no other memory gets these addresses.
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._unread = numel
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
            self._unread = 0
            self._look()

    def source_of(self, piece: torch.Tensor) -> torch.Tensor | ChunkedSource:
        """Return what a contiguous piece is written from: one of these counts what is read of it.

        Each element is to be asked for once.
        """
        if piece.untyped_storage().data_ptr() not in self._memory:
            return piece
        return ChunkedSource(piece.numel(), piece.dtype, partial(self._read, piece))

    def _read(self, piece: torch.Tensor) -> Iterator[torch.Tensor]:
        for chunk in PiecewiseSource([piece], piece.dtype).chunks():
            yield chunk
            # The next one is asked for when this one has been written.
            self._unread -= chunk.numel()
            if self._unread <= 0:
                self._check_unchanged()
            self._look()

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Wait until all have been read, or need not be.

        Args:
            cancelled: tells whether what is still being written will not be published.
        """
        while not (self._over.wait(_GLANCE_S) or cancelled()):
            pass

    def _look(self) -> None:
        if self._unread <= 0:
            self._over.set()
