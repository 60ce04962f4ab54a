"""Threads, streams and events on the accelerator that torch has; nothing, where there is none.

CUDA is named here and in no other module, where torch's common interface does not do: its events
ignore ``blocking`` (read in torch 2.6 to 2.13), and pinning memory that torch did not allocate is
CUDA's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_CUDA = "cuda"
"""CUDA, and ROCm, which torch calls so too."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices."""


class Event(Protocol):
    """What ``torch.Event`` and ``torch.cuda.Event`` have in common here."""

    def record(self) -> None:
        """Note what the current stream has been given so far."""

    def synchronize(self) -> None:
        """Wait until that is done."""


def current_device() -> torch.device | None:
    """Return the device that this thread uses; None where no accelerator is in use."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:
        return None  # torch 2.6; later releases return None where they see no device.
    if accelerator is None:
        return None
    # Asking a device for its stream would start it; a run on the CPU must not.
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return torch.accelerator.current_stream().device


def use_device(device: torch.device | None) -> None:
    """Make the calling thread, a new one, work on a device.

    Every thread begins on device 0, and CUDA makes a context there (500 MB) at the first call that
    needs one, such as waiting for an event of another device.
    """
    if device is not None:
        # This sets the device as well, and its name is the same in all releases since 2.6.
        torch.accelerator.set_stream(torch.accelerator.current_stream(device))


def side_stream(device: torch.device) -> torch.Stream:
    """Return a stream that begins when the current one has done what it was given so far."""
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Enqueue work on a stream, on its device; ``torch.Stream`` itself can do this since 2.7."""
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
    """Record an event on the current stream, by which a thread waits without using a processor."""
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
    """Lock host memory in its place, so that devices copy into it by themselves.

    Returns:
        CUDA's error; 0 where it is done.
    """
    return int(_cudart().cudaHostRegister(address, size_bytes, _PORTABLE))


def unpin(address: int) -> None:
    """Release what ``pin`` has locked."""
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()
