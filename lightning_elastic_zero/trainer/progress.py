"""A progress bar for long saves and loads, of the same kind as the Trainer's own bar.

It is shown on rank 0 if the Trainer shows a tqdm or rich bar, standard error is a terminal, and the
work takes longer than two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_elastic_zero.checkpoint.bar import Bar, ShowDone, is_terminal, showing, tqdm_bar
from lightning_elastic_zero.checkpoint.types import ShowBytes


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


@contextmanager
def checkpoint_bar(
    trainer: pl.Trainer | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ShowBytes]:
    """Yield a function that shows the bytes of a save or load, in the style of a trainer's bar."""
    kind = _kind_of_bar(trainer)
    try:
        with showing(kind, clock) as show:
            yield show
    finally:
        if trainer is not None and kind is rich_bar:
            trainer.progress_bar_callback.refresh(hard=True)  # type: ignore[union-attr]


def _kind_of_bar(trainer: pl.Trainer | None) -> Bar | None:
    if trainer is None or not trainer.is_global_zero or not is_terminal():
        return None
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return tqdm_bar
    return rich_bar if isinstance(shown, RichProgressBar) and shown.is_enabled else None
