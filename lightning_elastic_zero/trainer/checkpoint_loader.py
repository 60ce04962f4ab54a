"""Loads a checkpoint into a trainer's run, or sees that no rank did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint import (
    CheckpointManager,
    CheckpointStats,
    LoadOptions,
    load_engine,
)
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.trainer.configured_rates import configured_rates
from lightning_elastic_zero.trainer.epoch_metrics import RESULTS
from lightning_elastic_zero.trainer.last_fit import LastFit
from lightning_elastic_zero.trainer.lightning_internals import is_fitting
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.run_record import STATE_KEY
from lightning_elastic_zero.trainer.trainer_state import trainer_state


class CheckpointLoader:
    """Restores an engine and what Lightning's trainer restores itself from."""

    def __init__(
        self,
        manager: CheckpointManager,
        get_ranks: Callable[[], Ranks],
        resumer: RunResumer,
        last_fit: LastFit,
        options: LoadOptions,
    ) -> None:
        """Begin without a run.

        Args:
            manager: of the run's checkpoints, which keeps the one that is loaded.
            get_ranks: returns the ranks of training's threads.
            resumer: is told where a fit is to be resumed.
            last_fit: the engine that trained last, which an evaluation of a checkpoint ends.
            options: what a load restores, as the user chose it.
        """
        self._manager = manager
        self._get_ranks = get_ranks
        self._resumer = resumer
        self._last_fit = last_fit
        self._options = options
        self._is_resumed = False
        self.last_load: CheckpointStats | None = None
        """What the last load cost."""

    def start(self) -> None:
        """Begin a run, for which nothing is loaded yet."""
        self._is_resumed = False

    def load(
        self,
        path: str | os.PathLike[str],
        engine: Any,
        trainer: pl.Trainer | None,
        schedulers: list[Any],
    ) -> dict[str, Any]:
        """Restore a checkpoint; collective.

        Args:
            path: the directory.
            engine: DeepSpeed's.
            trainer: of the run.
            schedulers: the live ones.

        Returns:
            The trainer's part.
        """
        fitting = is_fitting(trainer)
        options = replace(
            self._options,
            strict=trainer is None or trainer.lightning_module.strict_loading,
            # An evaluation of another checkpoint than the one that was named is no use to anybody.
            fallback=self._options.fallback and fitting,
            of_ranks=(STATE_KEY, RESULTS) if fitting else (),
        )
        live = trainer.optimizers if trainer is not None and fitting else []
        configured = configured_rates(live) if options.hyperparameters else None
        handle = engine_handle(engine, places_checked=True)
        loaded = load_engine(handle, path, self._get_ranks(), options)
        self._is_resumed = True
        if not fitting:
            self._last_fit.forget()
        self.last_load = loaded.stats
        self._manager.protect(loaded.stats.path)
        return trainer_state(loaded, trainer, engine, self._resumer, schedulers, configured)

    def check_all_ranks_resumed(self, trainer: pl.Trainer | None) -> None:
        """Fail at once where one rank found a checkpoint and another did not; collective.

        Each rank resolves ``ckpt_path="last"`` by itself, before any hook of a strategy. A rank
        that found nothing comes here while the others are still loading: their steps differ.
        """
        self._get_ranks().run_all("go on without loading a checkpoint (any more)", lambda: None)
        if is_fitting(trainer) and not self._is_resumed:
            # Training starts at step 0: loudly where there is something to resume.
            text, loud = format_not_resumed(self._manager.dirpaths)
            (rank_zero_warn if loud else rank_zero_info)(text)


def format_not_resumed(dirpaths: Iterable[object]) -> tuple[str, bool]:
    """Return that training starts at step 0; and whether to warn, since checkpoints are there.

    Args:
        dirpaths: the folders into which callbacks save; None for one that has none.
    """
    folders = sorted({str(place) for place in dirpaths if place})
    found = [p for folder in folders for p in sorted(Path(folder).glob("*.ckpt"))]
    if dangling := [p for p in found if p.is_symlink() and not p.exists()]:
        text = (
            f"Training starts from step 0: {dangling[0]} is a link to a checkpoint that is "
            "gone. Pass the checkpoint that you want as ckpt_path."
        )
    elif found:
        text = (
            f"Training starts from step 0, although {found[0].parent} holds {len(found)} "
            f'checkpoints ({found[-1].name}, ...). Pass ckpt_path="last" or a path to resume.'
        )
    else:
        text = "No checkpoint was loaded: training starts from step 0."
    return text, bool(found)
