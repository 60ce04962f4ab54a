"""Whether a save that runs beside training is given up or published."""

from __future__ import annotations

import threading

from lightning_elastic_zero.errors import SaveError


class Cancellation:
    """Whether a save is given up or published: decided once, never the one after the other."""

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._cancelled = False
        self.committed = False

    def cancel(self) -> bool:
        """Cancel the save. Return False where it is being published."""
        with self._deciding:
            self._cancelled = not self.committed
        return self._cancelled

    def check(self) -> None:
        """End a save that was given up.

        Raises:
            SaveError: it was.
        """
        if self._cancelled:
            msg = "it was given up before it was written: the run has ended"
            raise SaveError(msg)

    def commit(self) -> None:
        """Decide that the save is published, if it was not given up; see ``check``."""
        with self._deciding:
            self.check()
            self.committed = True
