"""Progress of long work: one object that readers and writers call after each piece."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Reports the progress of long work, and ends it if it was cancelled. Used by any thread."""

    def __init__(
        self,
        check: Callable[[], None] = lambda: None,
        show: Callable[[int], object] = lambda _: None,
    ) -> None:
        # check: shows the other ranks that this one is alive, or raises to cancel the work.
        # show: receives the number of bytes read or written since its last call.
        self._check = check
        self._show = show

    def advance(self, n_bytes: int) -> None:
        """Report bytes that were read or written; raises what ``check`` raises."""
        self._check()
        self._show(n_bytes)

    def check(self) -> None:
        """Report that the work is alive, for example between deletions of files."""
        self._check()


NO_PROGRESS = Progress()
"""Reports nothing."""


class ByteCount(Progress):
    """Counts the bytes of several threads, and forwards them to another progress."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress.check)
        self._counts: list[int] = []  # append() needs no lock.
        self._progress = progress

    def advance(self, n_bytes: int) -> None:
        self._counts.append(n_bytes)
        self._progress.advance(n_bytes)

    def total(self) -> int:
        return sum(self._counts)
