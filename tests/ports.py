"""Ports that nobody else takes meanwhile, also where several processes run tests side by side."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to whoever connects or asks for any: these are taken at any time.
_FIRST, _LAST = 10_000, 32_000

_draw = random.SystemRandom()


def free_port() -> int:
    """Return a port that nobody listens on."""
    while True:
        port = _draw.randrange(_FIRST, _LAST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
