"""Progress of long work: one object that readers and writers call after each piece, and a bar."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

QUIET_S = 2.0
"""Shorter work shows no bar."""

EVERY_S = 0.2
"""Interval between updates of a bar."""

ShowBytes: TypeAlias = Callable[[str, int, int], None]
"""Called with the action (``"reading"``), the bytes since the last call, and the total bytes
(0 if unknown)."""

ShowDone: TypeAlias = Callable[[int], None]
"""Shows the number of bytes done."""

Bar: TypeAlias = Callable[[str, int], AbstractContextManager[ShowDone]]
"""Opens a bar with a description and the total bytes (0: unknown); its exit removes the bar."""


class Progress:
    """Reports the progress of long work, from any thread, and can cancel it.

    Args:
        check: Called while the work is alive; an exception that it raises ends the work.
        show: Called with the number of bytes read or written since its last call.
    """

    def __init__(
        self,
        check: Callable[[], None] = lambda: None,
        show: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._check = check
        self._show = show

    def advance(self, n_bytes: int) -> None:
        """Report a number of bytes read or written; raise the exceptions of ``check``."""
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


def show_nothing(_doing: str, _count: int, _total: int, /) -> None:
    """Show nothing."""


@contextmanager
def showing(make: Bar | None, clock: Callable[[], float] = time.monotonic) -> Iterator[ShowBytes]:
    """Yield a function that shows the bytes of long work, from any thread.

    Work that takes longer than ``QUIET_S`` gets a bar, and each action its own. None: no bar.
    """
    if make is None:
        yield show_nothing
        return
    bar, lock = ExitStack(), threading.Lock()
    due_s, action, done_bytes = clock() + QUIET_S, "", 0
    show_done: ShowDone | None = None

    def show(doing: str, count: int, total_bytes: int) -> None:
        nonlocal due_s, action, done_bytes, show_done
        with lock:
            if doing != action:
                bar.close()
                action, done_bytes, show_done = doing, 0, None
            done_bytes += count
            if (now_s := clock()) >= due_s:
                due_s = now_s + EVERY_S
                if show_done is None:
                    made = make(f"{doing.capitalize()} a checkpoint", total_bytes)
                    show_done = bar.enter_context(made)
                show_done(done_bytes)

    with bar:
        yield show


@contextmanager
def tqdm_bar(doing: str, total_bytes: int) -> Iterator[ShowDone]:
    """Open a line below those of other bars."""
    from tqdm import tqdm

    bar: Any
    with tqdm(
        desc=doing,
        total=total_bytes or None,
        unit="B",
        unit_scale=True,
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
    ) as bar:

        def show(done_bytes: int) -> None:
            bar.n = min(done_bytes, bar.total or done_bytes)
            bar.refresh()

        yield show


def is_terminal() -> bool:
    """Whether standard error is a terminal, also while rich redirects it."""
    stream: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream is not None and bool(stream.isatty())
