"""The signals by which a selftest is ended: they clean up first, and wait while that goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a launcher that ends its ranks, a terminal that is gone."""

Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


@contextmanager
def terminable() -> Iterator[Callable[[], None]]:
    """Make each of the signals clean up as Ctrl-C does, once: after the first one, others wait.

    Yields:
        What has them ignored from then on, until the context ends.
    """
    with _handled() as handle:

        def interrupt(*_: object) -> None:
            handle(signal.SIG_IGN)
            raise KeyboardInterrupt

        handle(interrupt)
        yield lambda: handle(signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore the signals in here."""
    with _handled() as handle:
        handle(signal.SIG_IGN)
        yield


@contextmanager
def _handled() -> Iterator[Callable[[Handler], None]]:
    """Yield what sets a handler for all of them; the earlier ones come back in the end."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: None
        return
    earlier = {number: signal.getsignal(number) for number in INTERRUPTS}
    if earlier[signal.SIGHUP] == signal.SIG_IGN:  # nohup: it is to go on without its terminal.
        del earlier[signal.SIGHUP]
    # A handler that was not installed from Python could not be put back: it stays.
    earlier = {number: handler for number, handler in earlier.items() if handler is not None}

    def handle(handler: Handler) -> None:
        for number in earlier:
            signal.signal(number, handler)

    try:
        yield handle
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
