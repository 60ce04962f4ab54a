"""Shows saves and loads: by a progress bar while they run, and by logged metrics of their cost.

The bar is of the same kind as the Trainer's own. It is shown on rank 0 if the Trainer shows a tqdm
or rich bar, standard error is a terminal, and the work takes longer than two seconds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import CheckpointStats
from lightning_elastic_zero.core.progress import (
    Bar,
    ShowBytes,
    ShowDone,
    is_terminal,
    showing,
    tqdm_bar,
)
from lightning_elastic_zero.trainer.lightning import is_fitting


class CheckpointMonitor(Callback):
    """Logs the cost of each save and load to all loggers of the Trainer, on rank 0.

    All names begin with ``checkpoint/``:

    - ``save_stall_s``: seconds for which rank 0's training was stopped
    - ``save_s``: seconds from the call until publication
    - ``save_write_s`` and ``save_publish_s``: seconds until all ranks had written and synced
      their files, and seconds after that
    - ``save_bytes`` and ``save_gb_per_s``: bytes that all ranks wrote, and their rate over the two
      times above
    - ``load_s``, ``load_bytes`` and ``load_gb_per_s``: the same for a load; bytes that all ranks
      read
    - ``host_memory_peak_bytes``: peak resident memory of rank 0's process

    A save is logged after publication, under the global step at which it was called. A save after
    the end of ``fit``, or one that finishes after the run has failed, is not logged.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Literal["save", "load"], CheckpointStats]] = []
        """Those that were not logged yet."""
        self._manager: CheckpointManager | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._manager = getattr(trainer.strategy, "checkpoint_manager", None)
        if self._manager is None:
            strategy = type(trainer.strategy).__name__
            rank_zero_warn(
                f"CheckpointMonitor logs nothing: the strategy is {strategy}, expected "
                "ElasticDeepSpeedStrategy; see docs/getting-started.md."
            )
        elif self._note not in self._manager.listeners:
            self._manager.listeners.append(self._note)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._log(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        self._log(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._log(trainer)
        if self._manager is not None and self._note in self._manager.listeners:
            self._manager.listeners.remove(self._note)

    def _note(self, kind: Literal["save", "load"], stats: CheckpointStats) -> None:
        self._events.append((kind, stats))

    def _log(self, trainer: pl.Trainer) -> None:
        if self._manager is not None:
            self._manager.collect()
        events, self._events = self._events, []
        for kind, stats in events if trainer.is_global_zero else ():
            of_fit = kind == "load" and is_fitting(trainer)
            # A new run on saved weights starts at step 0.
            step = trainer.global_step if of_fit else stats.step
            for logger in trainer.loggers:
                _log(logger, kind, stats, step)


def _log(logger: Logger, kind: Literal["save", "load"], stats: CheckpointStats, step: int) -> None:
    if kind == "load":
        rate = stats.bytes / 1e9 / max(stats.seconds, 1e-9)
        figures = {"load_s": stats.seconds, "load_bytes": stats.bytes, "load_gb_per_s": rate}
    else:
        figures = {
            "save_stall_s": stats.waited_s,
            "save_s": stats.seconds,
            "save_write_s": stats.write_s,
            "save_publish_s": stats.publish_s,
            "save_bytes": stats.bytes,
            "save_gb_per_s": stats.bytes / 1e9 / max(stats.write_s + stats.publish_s, 1e-9),
        }
    figures["host_memory_peak_bytes"] = _peak_bytes()
    logger.log_metrics({f"checkpoint/{name}": float(v) for name, v in figures.items()}, step)


def _peak_bytes() -> int:
    """Return the peak resident memory of this process.

    ``VmHWM`` is preferred, because ``ru_maxrss`` includes the peak of the parent before a fork.
    Both are in KiB.
    """
    with suppress(OSError), Path("/proc/self/status").open(encoding="utf-8") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _rich_bar(doing: str, total_bytes: int) -> Iterator[ShowDone]:
    """Open a line below those of ``RichProgressBar``.

    It is not a task of that bar's display, which addresses its own tasks by their index. Before
    rich 14.1, a console has one display only: nothing is shown while Lightning's is live.
    """
    from rich import get_console, progress
    from rich.errors import LiveError

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
    trainer: pl.Trainer, clock: Callable[[], float] = time.monotonic
) -> Iterator[ShowBytes]:
    """Yield a function that shows the bytes of a save or load, in the style of a trainer's bar."""
    kind = _kind_of_bar(trainer)
    try:
        with showing(kind, clock) as show:
            yield show
    finally:
        if kind is _rich_bar:
            trainer.progress_bar_callback.refresh(hard=True)  # type: ignore[union-attr]


def _kind_of_bar(trainer: pl.Trainer) -> Bar | None:
    if not trainer.is_global_zero or not is_terminal():
        return None
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return tqdm_bar
    return _rich_bar if isinstance(shown, RichProgressBar) and shown.is_enabled else None
