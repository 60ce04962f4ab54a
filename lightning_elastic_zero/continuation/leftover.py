"""What is left of a fit when it is over, and an evaluation has put its own engine in the place."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn


class LeftOfFit:
    """The engine of the last fit, for a save after ``test`` or ``validate``.

    Lightning's strategy keeps its optimizer, and so the training state, until the next fit anyway.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._metrics: dict[str, Any] = {}

    def begin(self, engine: Any) -> None:  # noqa: ANN401 (DeepSpeed is untyped)
        """Take the engine of a fit."""
        self._engine = engine

    def end(self, trainer: pl.Trainer) -> None:
        """Note at the end of a fit what an evaluation overwrites."""
        self._metrics = dict(trainer._logger_connector._callback_metrics)  # noqa: SLF001 - see releases

    def forget(self) -> None:
        """Let go of it: another fit begins, or its weights are overwritten by a load."""
        self._engine, self._metrics = None, {}

    def engine(self, live: Any, path: str | os.PathLike[str]) -> Any:  # noqa: ANN401 (untyped)
        """Return the engine that is to be saved: the one that trained, or else the live one."""
        if self._engine is not None:
            return self._engine
        rank_zero_warn(
            f"{os.fspath(path)}: nothing was trained here, or a checkpoint was loaded since into "
            "an evaluation. Saved are the weights as the module has them, in its precision, and "
            "no optimizer state; load_optimizer_state=False starts a run on them"
        )
        return live

    @property
    def is_whole(self) -> bool:
        """Whether a training state is there."""
        return self._engine is not None

    def put_back(self, state: dict[str, Any]) -> None:
        """Put what was noted at the end of the fit into what is saved of this moment."""
        state["metrics"] = {name: value.detach().cpu() for name, value in self._metrics.items()}
