"""A pseudo terminal in the place of the standard streams, and the screen that it would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

_STEPS = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|\x1b.|[\r\n]|[^\x1b\r\n]+")


class Terminal:
    """What was written to it."""

    def __init__(self) -> None:
        self.text = ""

    def screen(self) -> list[str]:
        """Return the lines as they stand at the end, without empty ones at the bottom."""
        lines, row, column = [""], 0, 0
        for step in _STEPS.finditer(self.text):
            text, count, kind = step[0], step[1], step[2]
            if text == "\n":
                row += 1
            elif text == "\r":
                column = 0
            elif kind == "A":
                row = max(0, row - int(count or 1))
            elif kind == "K":
                lines[row] = "" if count == "2" else lines[row][:column]
            elif not text.startswith("\x1b"):
                line = lines[row].ljust(column)
                lines[row] = line[:column] + text + line[column + len(text) :]
                column += len(text)
            lines += [""] * (row + 1 - len(lines))
        kept = [line.rstrip() for line in lines]
        while kept and not kept[-1]:
            kept.pop()
        return kept


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Make both standard streams be a terminal in here; what it showed is known afterwards."""
    shown = Terminal()
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # The other end is closed.
            while piece := os.read(leader, 1 << 16):
                found.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        with os.fdopen(follower, "w") as stream:
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            yield shown
    reader.join()
    os.close(leader)
    shown.text = b"".join(found).decode().replace("\r\n", "\n\r")
