"""What ``ModelCheckpoint`` asks and does about files, answered in its place while a run lasts.

It knows nothing of a checkpoint that is being written in the background: it would take its name for
free and give it to another one, and with ``save_last="link"`` it removes its link and makes it
anew, to what is not there yet, as soon as the save has returned; killed in between, there is none.
Nothing else of Lightning's stands between, so that these two methods are answered here: on the
instance, from the strategy's setup to its teardown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_elastic_zero.errors import ElasticZeroError


class Answers:
    """Answers the trainer's ``ModelCheckpoint`` callbacks."""

    def __init__(self, link: Callable[[str, str], None], is_written: Callable[[str], bool]) -> None:
        """Take who knows.

        Args:
            link: lets a link name a checkpoint: called on all ranks, with the checkpoint's path and
                the link's.
            is_written: tells, on the first rank, whether a checkpoint of that path is being
                written.
        """
        self._link, self._is_written = link, is_written
        self._given: list[tuple[ModelCheckpoint, str]] = []

    def begin(self, trainer: pl.Trainer) -> None:
        """Answer the trainer's callbacks; whoever has a way of his own keeps it."""
        self.end()
        # The first is private, as of Lightning's 2.6.
        answers: Mapping[str, Callable[..., Any]] = {
            "_link_checkpoint": self._link_checkpoint,
            "file_exists": self._file_exists,
        }
        for callback in trainer.checkpoint_callbacks:
            for name, answer in answers.items():
                if isinstance(callback, ModelCheckpoint) and _is_lightnings_own(callback, name):
                    vars(callback)[name] = answer
                    self._given.append((callback, name))

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        self._link(filepath, linkpath)
        trainer.strategy.barrier()

    def _file_exists(self, filepath: str, trainer: pl.Trainer) -> bool:
        # In this order, since it may be published just now; and on one rank only.
        there = trainer.is_global_zero and (self._is_written(filepath) or _is_there(filepath))
        return trainer.strategy.broadcast(there)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let no callback go on naming a checkpoint that could not be saved."""
        try:
            yield
        except ElasticZeroError:
            for callback in {callback for callback, _ in self._given}:
                _forget_what_is_not_there(callback)
            raise

    def end(self) -> None:
        """Leave the callbacks as they were."""
        for callback, name in self._given:
            vars(callback).pop(name, None)
        self._given = []


def _forget_what_is_not_there(callback: ModelCheckpoint) -> None:
    """Go back to the best of what is there."""
    scores = {path: s for path, s in callback.best_k_models.items() if _is_there(path)}
    callback.best_k_models = scores
    if not _is_there(callback.last_model_path):
        callback.last_model_path = ""
    if not _is_there(callback.best_model_path):
        best = min if callback.mode == "min" else max
        path = best(scores, key=scores.__getitem__) if scores else ""
        callback.best_model_path, callback.best_model_score = path, scores.get(path)


def _is_there(path: str) -> bool:
    return bool(path) and Path(path).exists()


def _is_lightnings_own(callback: ModelCheckpoint, name: str) -> bool:
    """Tell whether a callback does something the way that Lightning does."""
    lightnings = getattr(ModelCheckpoint, name, None)
    of_its_class = getattr(type(callback), name, None)
    return lightnings is not None and of_its_class is lightnings and name not in vars(callback)
