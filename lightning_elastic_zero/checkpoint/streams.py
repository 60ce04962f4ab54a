"""Threads, streams and events on torch's current accelerator; no effect without one.

This is the only module that names CUDA. torch's common interface lacks two features: its events
ignore ``blocking`` (read in torch 2.6 to 2.13), and it cannot pin memory that torch did not
allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_CUDA = "cuda"
"""torch uses this name for ROCm too."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices."""


class Event(Protocol):
    """The common methods of ``torch.Event`` and ``torch.cuda.Event``."""

    def record(self) -> None:
        """Record all work enqueued on the current stream so far."""

    def synchronize(self) -> None:
        """Wait until the recorded work is done."""


def current_device() -> torch.device | None:
    """Return the device that this thread uses; None if no accelerator is in use."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:
        return None  # torch 2.6; later releases return None without a device.
    if accelerator is None:
        return None
    # Getting the stream initializes the device, which a run on the CPU must not do.
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return torch.accelerator.current_stream().device


def use_device(device: torch.device | None) -> None:
    """Select the device of the calling thread.

    Every new thread begins on device 0. CUDA creates a context there (500 MB) at the first call
    that needs one, such as waiting for an event of another device.
    """
    if device is not None:
        # This sets the device too, and has the same name in all releases since 2.6.
        torch.accelerator.set_stream(torch.accelerator.current_stream(device))


def finish_device_work() -> None:
    """Wait for all work that this process has enqueued on its device."""
    if current_device() is not None:
        torch.accelerator.synchronize()


def side_stream(device: torch.device) -> torch.Stream:
    """Return a stream that starts after all work enqueued on the current stream so far."""
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Enqueue work on a stream and its device; since torch 2.7, ``torch.Stream`` can do this."""
    before = torch.accelerator.current_stream()
    displaced = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(displaced)
        if before.device != displaced.device:
            torch.accelerator.set_stream(before)


def record_event(device: torch.device) -> Event:
    """Record an event on the current stream; waiting for it does not use the processor."""
    event: Event = (
        torch.cuda.Event(blocking=True)
        if device.type == _CUDA
        else torch.Event(device, blocking=True)
    )
    event.record()
    return event


def can_pin(device: torch.device) -> bool:
    """Whether memory that torch did not allocate can be pinned for copies from a device."""
    return device.type == _CUDA


def pin(address: int, size_bytes: int) -> int:
    """Lock host memory, so that devices can copy into it asynchronously.

    Returns CUDA's error code, 0 on success.
    """
    return int(_cudart().cudaHostRegister(address, size_bytes, _PORTABLE))


def unpin(address: int) -> None:
    """Unlock memory that ``pin`` has locked."""
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
