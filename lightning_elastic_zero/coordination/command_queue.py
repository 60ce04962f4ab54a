"""A queue of commands to one thread, which finalizers too may fill.

Not ``queue.SimpleQueue``: in CPython 3.10 to 3.13 its ``get(timeout)`` waits for good where its
thread is held up for longer than the timeout, between its first try and the wait for what is left
of it: that is negative then, and taken for no limit (``Modules/_queuemodule.c``). With a timeout of
a millisecond, on a machine under load, that ended a rank's heartbeats now and then.
And not ``queue.Queue``, whose ``put`` takes a lock: a finalizer that the garbage collector runs
while its own thread holds that lock would never return.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

Command: TypeAlias = Callable[[], None]


class CommandQueue:
    """Orders of many threads for one, in their order."""

    def __init__(self) -> None:
        """Begin empty."""
        self._commands: deque[Command] = deque()
        self._none_given = threading.Lock()
        self._none_given.acquire()

    def put(self, command: Command) -> None:
        """Append an order; never waits, and may be called within another call of it."""
        self._commands.append(command)
        with suppress(RuntimeError):  # released already
            self._none_given.release()

    def get(self, timeout_s: float) -> Command | None:
        """Return the next order; None if there is none within so many seconds, or now and then."""
        if not self._commands:
            self._none_given.acquire(timeout=timeout_s)
        return self._commands.popleft() if self._commands else None
