"""A thread that does one thing now and then, such as showing that its process lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

END_S = 1.0
"""How long the end waits for the thread: a disk that does not answer must not hold a run's end."""


class PeriodicThread(threading.Thread):
    """Calls a function every ``interval_s``, and at once when it is asked to; until ``end``."""

    def __init__(self, call: Callable[[], object], interval_s: float, name: str) -> None:
        """Describe the thread; as a context, it runs within."""
        super().__init__(name=f"elastic-zero {name}", daemon=True)
        self._call, self._interval_s = call, interval_s
        self._asked, self._over = threading.Event(), False

    def run(self) -> None:
        """Call now and then."""
        while True:
            self._asked.wait(self._interval_s)
            self._asked.clear()
            if self._over:
                return
            self._call()

    def call_soon(self) -> None:
        """Request a call at once, in the thread."""
        self._asked.set()

    def end(self) -> None:
        """Call no more."""
        self._over = True
        self._asked.set()
        self.join(END_S)

    def __enter__(self) -> None:
        """Start."""
        self.start()

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()
