"""A progress bar for long saves and loads."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

from tqdm import tqdm

from lightning_elastic_zero.checkpoint.types import ShowBytes, show_nothing

QUIET_S = 2.0
"""Shorter work shows no bar."""

EVERY_S = 0.2
"""Interval between updates of the bar."""


ShowDone: TypeAlias = Callable[[int], None]
"""Shows the number of bytes done."""

Bar: TypeAlias = Callable[[str, int], AbstractContextManager[ShowDone]]
"""Opens a bar with a description and the total bytes (0: unknown); its exit removes the bar."""


@contextmanager
def tqdm_bar(doing: str, total_bytes: int) -> Iterator[ShowDone]:
    """Open a line below those of other bars."""
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


class CheckpointBar:
    """Shows the progress of a save or load that takes longer than ``QUIET_S``."""

    def __init__(self, make: Bar, clock: Callable[[], float]) -> None:
        self._make, self._clock = make, clock
        self._due_s = clock() + QUIET_S
        self._bar = ExitStack()
        self._show: ShowDone | None = None
        self._doing, self._done_bytes = "", 0

    def __call__(self, doing: str, count: int, total_bytes: int) -> None:
        """Count bytes; see ``ShowBytes``."""
        if doing != self._doing:
            self.close()
            self._doing, self._done_bytes = doing, 0
        self._done_bytes += count
        if (now_s := self._clock()) >= self._due_s:
            self._due_s = now_s + EVERY_S
            if self._show is None:
                made = self._make(f"{doing.capitalize()} a checkpoint", total_bytes)
                self._show = self._bar.enter_context(made)
            self._show(self._done_bytes)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        self._show = None
        self._bar.close()


@contextmanager
def showing(make: Bar | None, clock: Callable[[], float] = time.monotonic) -> Iterator[ShowBytes]:
    """Yield a function that shows the bytes of a save or load; None: it shows nothing."""
    if make is None:
        yield show_nothing
        return
    bar = CheckpointBar(make, clock)
    try:
        yield bar
    finally:
        bar.close()


def is_terminal() -> bool:
    """Whether standard error is a terminal, also while rich redirects it."""
    stream: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream is not None and bool(stream.isatty())
