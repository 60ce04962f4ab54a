"""A progress bar for long saves and loads, of the same kind as the Trainer's own bar.

It is shown on rank 0 if the Trainer shows a tqdm or rich bar, standard error is a terminal, and the
work takes longer than two seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
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
    """Open a line below those of ``TQDMProgressBar``."""
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


@contextmanager
def rich_bar(doing: str, total_bytes: int) -> Iterator[ShowDone]:
    """Open a line below those of ``RichProgressBar``.

    It is not a task of that bar's display, which addresses its own tasks by their index. Before
    rich 14.1, a console has one display only: nothing is shown while Lightning's is live.
    """
    from rich import get_console, progress  # noqa: PLC0415 (RichProgressBar's users have it)
    from rich.errors import LiveError  # noqa: PLC0415 (likewise)

    display = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        console=get_console(),
        auto_refresh=False,
        transient=True,
    )
    task = display.add_task(doing, total=total_bytes or None)
    try:
        display.start()
    except LiveError:
        yield lambda _: None
        return
    try:
        yield lambda done_bytes: display.update(task, completed=done_bytes, refresh=True)
    finally:
        display.stop()


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
def checkpoint_bar(
    trainer: pl.Trainer | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ShowBytes]:
    """Yield a function that shows the bytes of a save or load, in the style of a trainer's bar."""
    kind = _kind_of_bar(trainer)
    if kind is None:
        yield show_nothing
        return
    bar = CheckpointBar(kind, clock)
    try:
        yield bar
    finally:
        bar.close()
        if isinstance(shown := getattr(trainer, "progress_bar_callback", None), RichProgressBar):
            shown.refresh(hard=True)


def _kind_of_bar(trainer: pl.Trainer | None) -> Bar | None:
    if trainer is None or not trainer.is_global_zero or not _is_terminal():
        return None
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return tqdm_bar
    return rich_bar if isinstance(shown, RichProgressBar) and shown.is_enabled else None


def _is_terminal() -> bool:
    """Whether standard error is a terminal, also while rich redirects it."""
    stream: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream is not None and bool(stream.isatty())
