"""A callback that logs what each save and load has cost."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_elastic_zero.checkpoint.types import CheckpointStats
from lightning_elastic_zero.trainer.lightning import is_fitting
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

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
        """Warn if there is nothing to log."""
        if not isinstance(trainer.strategy, ElasticDeepSpeedStrategy):
            found = type(trainer.strategy).__name__
            rank_zero_warn(
                f"CheckpointMonitor logs nothing: the strategy is {found}, expected "
                "ElasticDeepSpeedStrategy; see docs/getting-started.md."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the load from which the run was resumed."""
        _log_events(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Log the saves that were published since the last batch."""
        _log_events(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the saves that were published before a failure."""
        _log_events(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log the last save, or the load of an evaluation."""
        _log_events(trainer)


def _log_events(trainer: pl.Trainer) -> None:
    if not isinstance(trainer.strategy, ElasticDeepSpeedStrategy):
        return
    for event in trainer.strategy.checkpoint_events.take():
        of_fit = event.kind == "load" and is_fitting(trainer)
        # A new run on saved weights starts at step 0.
        step = trainer.global_step if of_fit else event.stats.step
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                _log(logger, event.kind, event.stats, step)


def _log(logger: Logger, kind: Literal["save", "load"], stats: CheckpointStats, step: int) -> None:
    metrics: dict[str, Any] = {
        f"checkpoint/{name}": value for name, value in figures(kind, stats).items()
    }
    if stats.fingerprint and isinstance(logger, CSVLogger):
        metrics[FINGERPRINT] = stats.fingerprint
    logger.log_metrics(metrics, step)
    if stats.fingerprint and isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(FINGERPRINT, stats.fingerprint, step)


def _peak_bytes() -> float:
    """Return the peak resident memory of this process.

    ``VmHWM`` is preferred, because ``ru_maxrss`` includes the peak of the parent before a fork.
    Both are in KiB.
    """
    with suppress(OSError), Path("/proc/self/status").open(encoding="utf-8") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def figures(kind: Literal["save", "load"], stats: CheckpointStats) -> dict[str, float]:
    """Return the metrics of a save or load, by name without the prefix ``checkpoint/``."""
    memory = {"host_memory_peak_bytes": _peak_bytes()}
    size = float(stats.bytes)
    if kind == "load":
        rate = size / 1e9 / max(stats.seconds, 1e-9)
        return {"load_s": stats.seconds, "load_bytes": size, "load_gb_per_s": rate, **memory}
    return {
        "save_stall_s": stats.waited_s,
        "save_s": stats.seconds,
        "save_write_s": stats.write_s,
        "save_publish_s": stats.publish_s,
        "save_bytes": size,
        "save_gb_per_s": size / 1e9 / max(stats.write_s + stats.publish_s, 1e-9),
        **memory,
    }
