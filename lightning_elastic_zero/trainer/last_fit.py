"""The engine that trained, for a save after an evaluation has set up another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.trainer.lightning import displayed_metrics, known_callback_metrics
from lightning_elastic_zero.trainer.run_state import RunState


class LastFit:
    """The engine of the last fit, for a save after ``test`` or ``validate`` has set up its own.

    This keeps no additional memory: Lightning's strategy keeps the optimizer until the next fit.
    """

    def __init__(self) -> None:
        self.trained: Any = None
        """The engine of the last fit, or None if no training state exists."""
        self._metrics: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}

    def end(self, trainer: pl.Trainer) -> None:
        """Copy at the end of a fit the metrics that an evaluation overwrites."""
        self._metrics = known_callback_metrics(trainer)
        self._shown = displayed_metrics(trainer)

    def forget(self) -> None:
        """Drop the engine: another fit begins, or a load overwrites its weights."""
        self.trained, self._metrics, self._shown = None, {}, {}

    def engine(
        self, live: Any, path: str | os.PathLike[str], get_ranks: Callable[[], Ranks]
    ) -> Any:
        """Return the engine to save: the one that trained, or else the live one.

        The engine that trained is not used for another module, nor after other weights were loaded
        into its module. Collective if there are two engines.
        """
        if self.trained not in (None, live):
            engine, step = self.trained, "save: compare the module with the trained weights"
            is_same = engine.module is live.module
            if is_same:
                ranks = get_ranks()
                on_ranks = ranks.gather(step, lambda: LiveEngine(engine).weights_match_masters())
                is_same = ranks.broadcast(f"{step}, on all ranks", lambda: all(on_ranks or [False]))
            if not is_same:
                self.forget()
        if self.trained is not None:
            return self.trained
        rank_zero_warn(
            f"{os.fspath(path)}: saving weights only, in the module's precision, because nothing "
            "was trained here or other weights were loaded since (by an evaluation or "
            "load_state_dict). To train from this checkpoint, pass load_optimizer_state=False."
        )
        return live

    def with_metrics(self, state: RunState) -> RunState:
        """Return a state to be saved with the metrics of the end of the fit."""
        metrics = {name: value.detach().cpu() for name, value in self._metrics.items()}
        results = None if state.results is None else {**state.results, **self._shown}
        return replace(state, metrics=metrics, results=results)
