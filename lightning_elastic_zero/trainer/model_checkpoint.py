"""``ModelCheckpoint``'s methods about files, answered in its place while a run lasts.

It knows nothing of a checkpoint that is being written in the background: it would take its name for
free and give it to another one, and with ``save_last="link"`` it removes its link and makes it
anew, to what is not there yet, as soon as the save has returned; killed in between, there is none.
Nor does it know that nothing is replaced which this library did not write: a checkpoint of another
strategy's from which a run was resumed, say, or one into which a user put a file. Such a name is
taken, also where it is the callback's own, and the callback goes on to the next one.
And with ``save_last="link"`` it links the last checkpoint that the best k kept, which can be epochs
old: where a save was due and the best k kept nothing of this step, the last one is saved.
Nothing else of Lightning's stands between, so that these three methods are answered here: on the
instance, from the strategy's setup to its teardown.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.trainer.lightning import (
    EXISTS_HOOK,
    LINK_HOOK,
    NAME_HOOK,
    is_fitting,
    last_saved_step,
    name_checkpoint,
    numbers_names,
    save_intervals,
    save_now,
)


class ModelCheckpointHooks:
    """Answers the trainer's ``ModelCheckpoint`` callbacks."""

    def __init__(
        self,
        link: Callable[[pl.Trainer, str, str], None],
        is_being_written: Callable[[str], bool],
        refusal_reason: Callable[[str], str],
    ) -> None:
        """Begin without a run.

        Args:
            link: makes a link to a checkpoint: called on all ranks, with the trainer, the
                checkpoint's path and the link's.
            is_being_written: whether, on the first rank, a checkpoint of that path is being
                written.
            refusal_reason: why, on the first rank, what lies at a path must not be replaced;
                empty: it may.
        """
        self._link = link
        self._is_written = is_being_written
        self._keeps = refusal_reason
        self._given: list[tuple[ModelCheckpoint, str]] = []

    def begin(self, trainer: pl.Trainer) -> None:
        """Answer the trainer's callbacks; whoever has a way of his own keeps it. Collective.

        Raises:
            SaveError: a callback would replace what this library did not write.
        """
        self.end()
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            self._refuse_overwriting(trainer, callback)
            for name, answer in {
                LINK_HOOK: partial(self._link_checkpoint, callback),
                EXISTS_HOOK: partial(self._file_exists, callback),
                NAME_HOOK: partial(self._free_name, callback),
            }.items():
                if _is_lightnings_own(callback, name):
                    vars(callback)[name] = answer
                    self._given.append((callback, name))

    def _link_checkpoint(
        self, callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, linkpath: str
    ) -> None:
        """Link the last checkpoint; or save it there, where the best k did not."""
        if _is_missing(callback, trainer):
            save_now(callback, trainer, linkpath)
            return
        self._link(trainer, filepath, linkpath)
        trainer.strategy.barrier()

    def _file_exists(self, callback: ModelCheckpoint, filepath: str, trainer: pl.Trainer) -> bool:
        # In this order, since it may be published just now; and on one rank only.
        there = trainer.is_global_zero and (self._is_written(filepath) or _is_there(filepath))
        why = self._keeps(filepath) if there else ""
        there, why = trainer.strategy.broadcast((there, why))
        if why and filepath == callback.last_model_path:
            # The callback takes its own last one for free to overwrite.
            rank_zero_warn(f"{filepath} is kept, and the next one has another name: it {why}")
            callback.last_model_path = ""
        return bool(there)

    def _free_name(
        self,
        callback: ModelCheckpoint,
        monitor_candidates: dict[str, Any],
        trainer: pl.Trainer,
        del_filepath: str | None = None,
    ) -> str:
        """Name a checkpoint; not as the one that it is to replace, if that one has to stay."""
        why = self._keeps(del_filepath) if trainer.is_global_zero and del_filepath else ""
        replaced = None if trainer.strategy.broadcast(why) else del_filepath
        return name_checkpoint(callback, monitor_candidates, trainer, replaced)

    def _refuse_overwriting(self, trainer: pl.Trainer, callback: ModelCheckpoint) -> None:
        """Refuse at the start what would fail at a save, where names are not to be numbered.

        With ``enable_version_counter=False`` a callback overwrites whatever has a name of its own.
        """
        if numbers_names(callback) or not callback.dirpath or not is_fitting(trainer):
            return
        wrong: dict[str, str] = {}
        if trainer.is_global_zero:
            found = [
                path for name in _names(callback) for path in Path(callback.dirpath).glob(name)
            ]
            wrong = {str(path): why for path in found if (why := self._keeps(str(path)))}
        if wrong := trainer.strategy.broadcast(wrong):
            path, why = min(wrong.items())
            msg = (
                f"ModelCheckpoint(enable_version_counter=False) would replace {path}, which {why}. "
                "This library replaces only what it wrote: move that away, or give the callback "
                "another dirpath (to resume from here, pass ckpt_path as a full path), or leave "
                "enable_version_counter as it is by default: names in use are then numbered."
            )
            raise SaveError(msg)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keep callbacks from naming a checkpoint that could not be saved."""
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


def _is_missing(callback: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Whether a save was due at this moment, and nothing of this step was kept.

    Lightning asks for a link at the end of each epoch or validation, also where none was due.
    """
    if last_saved_step(callback) == trainer.global_step:
        return False
    steps, epochs = save_intervals(callback)
    by_steps = steps >= 1 and trainer.global_step % steps == 0
    return by_steps or (epochs >= 1 and (trainer.current_epoch + 1) % epochs == 0)


def _is_there(path: str) -> bool:
    return bool(path) and Path(path).exists()


def _is_lightnings_own(callback: ModelCheckpoint, name: str) -> bool:
    """Whether a callback does something the way that Lightning does."""
    lightnings = getattr(ModelCheckpoint, name, None)
    of_its_class = getattr(type(callback), name, None)
    return lightnings is not None and of_its_class is lightnings and name not in vars(callback)


def _names(callback: ModelCheckpoint) -> list[str]:
    """Return patterns of the names that a callback may use, in its folder."""
    given = [callback.filename or "{epoch}-{step}"] if callback.save_top_k else []
    if callback.save_last:
        given.append(callback.CHECKPOINT_NAME_LAST)
    return [
        "".join(_pattern(part, callback) for part in re.split(r"(\{[^}]*\})", name))
        + callback.FILE_EXTENSION
        for name in given
    ]


def _pattern(part: str, callback: ModelCheckpoint) -> str:
    """Return what matches a part of a template: a metric in braces, or a text."""
    if not part.startswith("{"):
        return glob.escape(part)
    named = f"{part[1:-1].split(':', maxsplit=1)[0]}{callback.CHECKPOINT_EQUALS_CHAR}"
    return glob.escape(named if callback.auto_insert_metric_name else "") + "*"
