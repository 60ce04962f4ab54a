"""Shows saves and loads: by a progress bar while they run, and by logged metrics of their cost.

The bar is of the same kind as the Trainer's own. It is shown on rank 0 if the Trainer shows a tqdm
or rich bar, standard error is a terminal, and the work takes longer than two seconds.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
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

CheckpointEvent: TypeAlias = tuple[Literal["save", "load"], CheckpointStats]
"""A save that was published, or a load."""


class CheckpointEvents:
    """Saves and loads of a trainer since the last ``take``."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        # Bounded for runs in which nobody calls take(); far more than occur between two batches.
        self._events: deque[CheckpointEvent] = deque(maxlen=1000)
        self._listeners: list[Callable[[CheckpointStats], None]] = []

    def subscribe(self, listener: Callable[[CheckpointStats], None]) -> Callable[[], None]:
        """Call a function with each save published from now on; on rank 0.

        Returns:
            A function that ends the subscription.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def collect(self) -> None:
        """Record the saves that were published since the last call; on rank 0."""
        for stats in self._manager.take_published():
            self._events.append(("save", stats))
            for listener in list(self._listeners):
                listener(stats)
            if stats.fingerprint:
                rank_zero_info(f"Saved {stats.path}: fingerprint {stats.fingerprint}")

    def on_loaded(self, stats: CheckpointStats) -> None:
        """Record a load."""
        self._events.append(("load", stats))

    def take(self) -> list[CheckpointEvent]:
        """Return and forget the events since the last call, in order."""
        self.collect()
        return [self._events.popleft() for _ in range(len(self._events))]


FINGERPRINT = "checkpoint/fingerprint"


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
    - ``fingerprint``: with ``fingerprint=True``, the checksum of the state, as a text in
      ``TensorBoardLogger`` and a column of ``CSVLogger``. Other loggers accept numbers only

    A save is logged after publication, under the global step at which it was called. A save after
    the end of ``fit`` is logged by the next ``fit`` of the same Trainer; a save that finishes after
    the run has failed is not logged.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if _events_of(trainer) is None:
            found = type(trainer.strategy).__name__
            rank_zero_warn(
                f"CheckpointMonitor logs nothing: the strategy is {found}, expected "
                "ElasticDeepSpeedStrategy; see docs/getting-started.md."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _log_events(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        _log_events(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        _log_events(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _log_events(trainer)


def _events_of(trainer: pl.Trainer) -> CheckpointEvents | None:
    events = getattr(trainer.strategy, "checkpoint_events", None)
    return events if isinstance(events, CheckpointEvents) else None


def _log_events(trainer: pl.Trainer) -> None:
    events = _events_of(trainer)
    for kind, stats in events.take() if events is not None else ():
        of_fit = kind == "load" and is_fitting(trainer)
        # A new run on saved weights starts at step 0.
        step = trainer.global_step if of_fit else stats.step
        if trainer.is_global_zero:
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
    metrics: dict[str, Any] = {f"checkpoint/{name}": float(v) for name, v in figures.items()}
    if stats.fingerprint and isinstance(logger, CSVLogger):
        metrics[FINGERPRINT] = stats.fingerprint
    logger.log_metrics(metrics, step)
    if stats.fingerprint and isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(FINGERPRINT, stats.fingerprint, step)


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
    trainer: pl.Trainer | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ShowBytes]:
    """Yield a function that shows the bytes of a save or load, in the style of a trainer's bar."""
    kind = _kind_of_bar(trainer)
    try:
        with showing(kind, clock) as show:
            yield show
    finally:
        if trainer is not None and kind is _rich_bar:
            trainer.progress_bar_callback.refresh(hard=True)  # type: ignore[union-attr]


def _kind_of_bar(trainer: pl.Trainer | None) -> Bar | None:
    if trainer is None or not trainer.is_global_zero or not is_terminal():
        return None
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled:
        return tqdm_bar
    return _rich_bar if isinstance(shown, RichProgressBar) and shown.is_enabled else None
