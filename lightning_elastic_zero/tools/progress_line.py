"""Progress of long work, in one line on a terminal; nothing elsewhere, nor for short work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO, TypeAlias

from lightning_elastic_zero.display_timer import DisplayTimer

OnBytes: TypeAlias = Callable[[int], None]
"""Told the number of bytes since it was last told."""


class ProgressLine:
    """Counts bytes, in any thread, and shows them where ``stream`` is a terminal.

    Attributes:
        done_bytes: how many there were.
    """

    def __init__(self, doing: str, total_bytes: int = 0, stream: TextIO | None = None) -> None:
        """Begin.

        Args:
            doing: such as ``"verifying"``.
            total_bytes: how many there will be; 0: nobody knows.
            stream: standard error, unless told otherwise.
        """
        self.done_bytes = 0
        self._doing = doing
        self._total_bytes = total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._timer = DisplayTimer()
        self._width = 0
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._timer.seconds

    def __call__(self, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self.done_bytes += count
            if self._is_terminal and self._timer.is_due():
                self._write(self._text())

    def _text(self) -> str:
        total = f" of {format_bytes(self._total_bytes)}" if self._total_bytes else ""
        return f"{self._doing}: {format_bytes(self.done_bytes)}{total}, {self.throughput()}"

    def throughput(self) -> str:
        """Return the bytes per second so far."""
        return f"{format_bytes(self.done_bytes / max(self.seconds, 1e-9))}/s"

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text.ljust(self._width)}")
        self._stream.flush()
        self._width = len(text)

    def __enter__(self) -> ProgressLine:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the line."""
        if self._width:
            self._write("")
            self._stream.write("\r")


def format_bytes(size_bytes: float) -> str:
    """Return a size as people read it: ``1.5 GB``, of powers of ten."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size_bytes) < 1000 or unit == "TB":  # noqa: PLR2004 (of one unit)
            break
        size_bytes /= 1000
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
