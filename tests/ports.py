"""Ports that nobody else takes meanwhile, also where several processes run tests side by side."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# Below those that Linux gives to whoever connects or asks for any: these are taken at any time.
_FIRST, _LAST = 10_000, 32_000

_draw = random.SystemRandom()
_drawn: set[int] = set()

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where DeepSpeed's operator for CPU ranks has its own


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        port = _draw.randrange(_FIRST, _LAST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                _drawn.add(port)
                return port
        except OSError:
            continue


def remove_shared_memory() -> None:
    """Remove what killed worlds of this process have left: 69 MB of memory each, until a reboot.

    DeepSpeed names it by the world's port.
    """
    for port in _drawn:
        for left in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)
