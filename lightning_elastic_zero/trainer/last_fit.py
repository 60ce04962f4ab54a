"""The engine of the last fit, kept for saves after an evaluation has set up its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.engine import LiveEngine
from lightning_elastic_zero.trainer.epoch_metrics import RESULTS
from lightning_elastic_zero.trainer.lightning_internals import known_callback_metrics
from lightning_elastic_zero.trainer.metric_internals import displayed_metrics


class LastFit:
    """The engine of the last fit, for a save after ``test`` or ``validate``.

    Lightning's strategy keeps its optimizer, and so the training state, until the next fit anyway.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._metrics: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}

    def begin(self, engine: Any) -> None:
        """Begin a fit with its engine."""
        self._engine = engine

    def end(self, trainer: pl.Trainer) -> None:
        """Note at the end of a fit what an evaluation overwrites."""
        self._metrics = known_callback_metrics(trainer)
        self._shown = displayed_metrics(trainer)

    def forget(self) -> None:
        """Drop the engine: another fit begins, or a load overwrites its weights."""
        self._engine, self._metrics, self._shown = None, {}, {}

    def engine(
        self, live: Any, path: str | os.PathLike[str], get_ranks: Callable[[], Ranks]
    ) -> Any:
        """Return the engine that is to be saved: the one that trained, or else the live one.

        The one that trained is not saved for another module, nor after its module has been given
        other weights: what was evaluated last would be lost. Collective where there are two.
        """
        if self._engine not in (None, live) and not self._is_of(live, get_ranks()):
            self.forget()
        if self._engine is not None:
            return self._engine
        rank_zero_warn(
            f"{os.fspath(path)}: nothing was trained here, or the module has other weights since, "
            "of a checkpoint that was evaluated or of load_state_dict. The weights are saved as "
            "the module has them, in its precision, without optimizer state; "
            "load_optimizer_state=False starts a run on them"
        )
        return live

    def _is_of(self, live: Any, ranks: Ranks) -> bool:
        """Whether a live engine's module is the one that was trained, with those weights."""
        if self._engine.module is not live.module:
            return False
        step = "save: compare the module with what was trained"
        on_ranks = ranks.gather(step, lambda: LiveEngine(self._engine).weights_match_masters())
        return ranks.broadcast(f"{step}, on all ranks", lambda: all(on_ranks or [False]))

    @property
    def is_whole(self) -> bool:
        """Whether a training state is there."""
        return self._engine is not None

    def put_back(self, state: dict[str, Any]) -> None:
        """Restore what was noted at the end of the fit in what is saved of this moment."""
        state["metrics"] = {name: value.detach().cpu() for name, value in self._metrics.items()}
        if RESULTS in state:
            state[RESULTS] = {**state[RESULTS], **self._shown}
