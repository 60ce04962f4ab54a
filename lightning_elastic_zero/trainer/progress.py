"""A progress bar for long saves and loads, of the same kind as the Trainer's own bar.

It is shown on rank 0 if the Trainer shows a tqdm or rich bar, standard error is a terminal, and the
work takes longer than two seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from tqdm import tqdm

from lightning_elastic_zero.checkpoint.types import ShowBytes, show_nothing

QUIET_S = 2.0
"""Shorter work shows no bar."""

EVERY_S = 0.2
"""Interval between updates of the bar."""


class Bar(Protocol):
    """A bar on the terminal."""

    def show(self, done_bytes: int) -> None:
        """Show how many bytes are done."""
        ...

    def close(self) -> None:
        """Remove it, so that the terminal is as if it had not been there."""
        ...


class TqdmBar:
    """A line below those of ``TQDMProgressBar``, which tqdm keeps count of."""

    def __init__(self, doing: str, total_bytes: int) -> None:
        """Show it; 0 bytes: nobody knows how many."""
        self._bar: Any = tqdm(
            desc=doing,
            total=total_bytes or None,
            unit="B",
            unit_scale=True,
            leave=False,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def show(self, done_bytes: int) -> None:
        """Show how many bytes are done."""
        self._bar.n = min(done_bytes, self._bar.total or done_bytes)
        self._bar.refresh()

    def close(self) -> None:
        """Remove it."""
        self._bar.close()


class RichBar:
    """A line below those of ``RichProgressBar``, in its display where that is live.

    It is no task of that display, which finds its own tasks by their places among all. Before rich
    14.1 a console has one display only: nothing is shown then while Lightning's is live.
    """

    def __init__(self, doing: str, total_bytes: int) -> None:
        """Show it; 0 bytes: nobody knows how many."""
        from rich import get_console, progress  # noqa: PLC0415 (RichProgressBar's users have it)
        from rich.errors import LiveError  # noqa: PLC0415 (likewise)

        self._display = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            console=get_console(),
            auto_refresh=False,
            transient=True,
        )
        self._task = self._display.add_task(doing, total=total_bytes or None)
        self._is_live = True
        try:
            self._display.start()
        except LiveError:
            self._is_live = False

    def show(self, done_bytes: int) -> None:
        """Show how many bytes are done."""
        if self._is_live:
            self._display.update(self._task, completed=done_bytes, refresh=True)

    def close(self) -> None:
        """Remove it."""
        if self._is_live:
            self._display.stop()


class CheckpointBar:
    """Shows the bytes of one save or load after another bar's way, once it has taken long."""

    def __init__(self, make: Callable[[str, int], Bar], clock: Callable[[], float]) -> None:
        """Begin; the bar is made when there is something to show."""
        self._make, self._clock = make, clock
        self._due_s = clock() + QUIET_S
        self._bar: Bar | None = None
        self._doing, self._done_bytes = "", 0

    def __call__(self, doing: str, count: int, total_bytes: int) -> None:
        """Count bytes; see ``ShowBytes``."""
        if doing != self._doing:
            self.close()
            self._doing, self._done_bytes = doing, 0
        self._done_bytes += count
        if (now_s := self._clock()) >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._bar = self._bar or self._make(f"{doing.capitalize()} a checkpoint", total_bytes)
            self._bar.show(self._done_bytes)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


@contextmanager
def checkpoint_bar(
    trainer: pl.Trainer | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ShowBytes]:
    """Yield what shows the bytes of a save or load that goes on in here.

    Args:
        trainer: whose bar it is to fit.
        clock: counts seconds.
    """
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


def _kind_of_bar(trainer: pl.Trainer | None) -> type[TqdmBar | RichBar] | None:
    if trainer is None or not trainer.is_global_zero or not _is_terminal():
        return None
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return TqdmBar
    return RichBar if isinstance(shown, RichProgressBar) and shown.is_enabled else None


def _is_terminal() -> bool:
    """Whether standard error is a terminal, also while rich stands in for it."""
    stream: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream is not None and bool(stream.isatty())
