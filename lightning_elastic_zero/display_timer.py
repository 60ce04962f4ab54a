"""The times at which long work is displayed: not at once, and then not too often."""

from __future__ import annotations

import time
from collections.abc import Callable

QUIET_S = 2.0
"""Work that is over sooner shows nothing."""

EVERY_S = 0.2
"""How often what is shown changes."""


class DisplayTimer:
    """Tells when to show how far some work is that began when this was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin, by a clock that counts seconds."""
        self._clock = clock
        self._began = clock()
        self._shown = self._began + QUIET_S - EVERY_S

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._began

    def is_due(self) -> bool:
        """Whether to show it now; if so, not again for a while."""
        now = self._clock()
        due = now - self._shown >= EVERY_S
        if due:
            self._shown = now
        return due
