"""What a kill would leave: files are looked at before each of a process's own system calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_looks: list[Callable[[], None]] = []
_hooked: list[Callable[[str, object], None]] = []
_looking = threading.local()
_one_at_a_time = threading.Lock()
_KINDS = ("open", "os.", "shutil.", "ctypes.")


def _on_event(event: str, _: object) -> None:
    if not _looks or not event.startswith(_KINDS) or getattr(_looking, "now", False):
        return
    _looking.now = True
    try:
        with _one_at_a_time:
            for look in tuple(_looks):
                look()
    finally:
        _looking.now = False


@contextmanager
def before_each_syscall(look: Callable[[], None]) -> Iterator[None]:
    """Look before each system call that Python tells of, in whatever thread, and at the end."""
    if _on_event not in _hooked:
        # A process cannot take it back; without looks it does nothing.
        sys.addaudithook(_on_event)
        _hooked.append(_on_event)
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)
    look()


class InterruptAtCall:
    """Raises what Ctrl-C raises, before the n-th system call, and before the m-th after that."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.seen = list(calls), 0

    def __call__(self) -> None:
        """Count a system call."""
        if not self.calls:
            return
        self.seen += 1
        if self.seen > self.calls[0]:
            self.seen = 0
            del self.calls[0]
            raise KeyboardInterrupt
