"""Replaces methods of ``ModelCheckpoint`` instances during a run.

- A name is also in use if a background save is writing it, or if this library must not replace what
  is there, such as another strategy's checkpoint or one that contains a user's file.
- A link (``save_last="link"``) is replaced in one step, once its checkpoint is published, and only
  by a callback that saves in this step: another one may share it.
- If a save was due but the best k kept nothing of this step, the last checkpoint is saved instead
  of linking one that can be epochs old.
- A name contains rank 0's metrics on all ranks.
- In an object store or on nodes too, a checkpoint of another folder is not deleted when a run has
  moved to a new one.
- A save that becomes due inside an accumulation window waits for its end
  (``train_time_interval``).

The replacements last from the strategy's setup to its teardown. ``_save_checkpoint`` is replaced
while the saves of a loaded checkpoint are continued.

With a ``dirpath`` in an object store or on nodes, ``save_last="link"``, which Lightning refuses
there, makes a link of this library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.core.manifest import TrainingProgress, manifest_from_json
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, is_on_nodes, parse_path
from lightning_elastic_zero.trainer.accumulation import pending_micro_batches
from lightning_elastic_zero.trainer.lightning import (
    BATCH_END,
    EPOCH_END,
    VALIDATION_END,
    is_fitting,
    running_hook,
)

T = TypeVar("T")

_WARNS = "_ModelCheckpoint__warn_if_dir_not_empty"

_REPLACED = "elastic_zero_replaced"
"""Attribute of a callback: the checkpoint that its last save replaces."""

_ANY = "(?s:.*)"
_NUMBER = r"(?:[-+]?(?:[\d.]+(?:e[-+]?\d+)?|inf)|nan)"
"""Patterns of a metric in a name: of any value, and of a number."""


def _save_at_step(callback: ModelCheckpoint, trainer: pl.Trainer, *of_batch: Any) -> None:
    """Save if it is due, unless the batch is inside an accumulation window."""
    if not pending_micro_batches(trainer):
        ModelCheckpoint.on_train_batch_end(callback, trainer, *of_batch)


def _warn(warns: Callable[[str], None], dirpath: str) -> None:
    """Look into the folder as Lightning does, on rank 0 only, where errors would hang the others.

    This library's check of the folder raises them on all ranks.
    """
    with suppress(Exception):
        warns(dirpath)


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]


def _folder(callback: ModelCheckpoint) -> Folder | None:
    return folder_at(callback.dirpath) if callback.dirpath else None


class ModelCheckpointHooks:
    """Replaces file methods of the trainer's ``ModelCheckpoint`` callbacks."""

    def __init__(
        self, manager: CheckpointManager, link: Callable[[pl.Trainer, str, str], None]
    ) -> None:
        self._manager = manager
        self._link = link
        self._given: list[tuple[ModelCheckpoint, str]] = []
        self._linking: list[ModelCheckpoint] = []
        self._has_warned_of_names = False
        self._loaded: LoadedSaves | None = None
        """While the saves of its moment are made."""
        self._loaded_ns = 0
        """When it was published."""

    def prepare(self, trainer: pl.Trainer) -> None:
        """Prepare callbacks that do not save on a disk.

        Their setup refuses ``save_last="link"``, so that is hidden from it until ``begin``.
        """
        for callback in _model_checkpoints(trainer):
            folder = _folder(callback)
            if folder is None or folder.local is not None:
                continue
            if warns := getattr(callback, _WARNS, None):
                vars(callback)[_WARNS] = partial(_warn, warns)
            if callback.save_last == "link":
                callback.save_last = True
                self._linking.append(callback)

    def begin(self, trainer: pl.Trainer) -> None:
        """Replace the methods that the user has not overridden; collective."""
        self.end()
        for callback in _model_checkpoints(trainer):
            self._refuse_overwriting(trainer, callback)
            for name, answer in {
                "_link_checkpoint": partial(self._link_checkpoint, callback),
                "file_exists": partial(self._file_exists, callback),
                "_should_remove_checkpoint": partial(_should_remove, callback),
                "_get_metric_interpolated_filepath_name": partial(self._free_name, callback),
                BATCH_END: partial(_save_at_step, callback),
            }.items():
                if _is_lightnings_own(callback, name):
                    vars(callback)[name] = answer
                    self._given.append((callback, name))

    @property
    def repeated_hook(self) -> str:
        """The hook whose saves are made again now; empty in others."""
        return self._loaded.hook if self._loaded is not None else ""

    def _link_checkpoint(
        self, callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, linkpath: str
    ) -> None:
        """Link the last checkpoint, or save it if the best k did not keep it."""
        hook = running_hook(trainer) if self._loaded is None else self._loaded.hook
        if _is_missing(callback, trainer, hook):
            callback._save_checkpoint(trainer, linkpath)
            return
        is_new = callback._last_global_step_saved == trainer.global_step
        if not is_new and _on_rank_zero(trainer, lambda: _is_there(linkpath)):
            return  # Another callback may have moved it to a newer checkpoint.
        self._link(trainer, filepath, linkpath)
        trainer.strategy.barrier()

    def _file_exists(self, callback: ModelCheckpoint, filepath: str, trainer: pl.Trainer) -> bool:
        def look() -> tuple[bool, str]:
            # In this order, because it may be published in between.
            there = self._manager.is_being_written(filepath) or _is_there(filepath)
            there = there and not self._is_made(trainer, callback, filepath)
            return there, _refusal_reason(filepath) if there else ""

        there, why = _on_rank_zero(trainer, look)
        if why and filepath == callback.last_model_path:
            # The callback assumes that it may overwrite its own last checkpoint.
            rank_zero_warn(f"{filepath} is kept and the next one gets another name: it {why}")
            callback.last_model_path = ""
        return bool(there)

    def _free_name(
        self,
        callback: ModelCheckpoint,
        monitor_candidates: dict[str, Any],
        trainer: pl.Trainer,
        del_filepath: str | None = None,
    ) -> str:
        """Name a checkpoint as rank 0 does, but not like the one to be replaced if that is kept."""
        why = _refusal_reason(del_filepath) if trainer.is_global_zero and del_filepath else ""
        own_name = callback.format_checkpoint_name(dict(monitor_candidates))
        # All of it from rank 0: for another name or deletion, ranks would look for other files.
        candidates = {name: torch.as_tensor(v).cpu() for name, v in monitor_candidates.items()}
        why, candidates, del_filepath = trainer.strategy.broadcast((why, candidates, del_filepath))
        name = callback.format_checkpoint_name(dict(candidates))
        differs = trainer.strategy.reduce_boolean_decision(name != own_name, all=False)
        if differs and not self._has_warned_of_names:
            self._has_warned_of_names = True
            rank_zero_warn(
                f"ModelCheckpoint(filename={callback.filename!r}): the ranks log other values. The "
                f"checkpoint is named by rank 0's, {name}. Log them with sync_dist=True."
            )
        path = ModelCheckpoint._get_metric_interpolated_filepath_name(
            callback, candidates, trainer, None if why else del_filepath
        )
        vars(callback)[_REPLACED] = del_filepath if callback.save_top_k > 0 else ""
        return path

    def resume(self, trainer: pl.Trainer, loaded: LoadedSaves) -> None:
        """Continue the saves of the moment of a loaded checkpoint; collective.

        Lightning asks the callbacks in turn. So the checkpoint of one callback does not contain the
        saves of the next ones in the same hook, and a preempted run ends before them all. Those
        that exist are recorded, and the others are made. A callback repeats no save of this step,
        and one that was deferred to a validation is made after that validation.
        """
        if trainer.global_step != loaded.step:
            return  # on_load_checkpoint of the module lets this run count from 0.
        self._loaded = loaded
        # Now, as a save may replace the link that was loaded, and not by each rank.
        checkpoint = folder_at(loaded.path)
        self._loaded_ns = _on_rank_zero(trainer, lambda: checkpoint.follow_links().published_ns())
        for callback in _model_checkpoints(trainer):
            _ready_last(trainer, callback)
            saved = loaded.saves.get(callback.state_key, {})
            every, step = callback._every_n_train_steps, trainer.global_step
            # Not those of an earlier fit in this process, which may have saved later steps.
            callback._last_global_step_saved = saved.get("step", 0)
            callback._defer_save_until_validation = saved.get("deferred", False)
            is_same_folder = saved.get("dirpath") == str(callback.dirpath)
            if is_same_folder and is_on_nodes(parse_path(str(callback.dirpath))):
                replaced = saved.get("replaced", "")
                _on_rank_zero(trainer, partial(self._delete_leftovers, trainer, callback, replaced))
            if callback._last_global_step_saved == step:
                if is_same_folder:
                    self._find_last(trainer, callback)
            elif is_same_folder and self._can_repeat(callback, loaded.hook):
                self._repeat_hook(trainer, callback, loaded.hook)
            is_deferred = callback._defer_save_until_validation
            if every >= 1 and step % every == 0 and not is_deferred:
                # Not again inside the next accumulation window.
                callback._last_global_step_saved = step
        self._loaded = None

    def _delete_leftovers(
        self, trainer: pl.Trainer, callback: ModelCheckpoint, replaced: str
    ) -> None:
        """Delete what a callback has saved on nodes and nothing needs; on rank 0.

        Their memory is small. A run that was killed between a save and a deletion leaves the
        checkpoint that the loaded one has ``replaced``. Others stay, unless they have lost files.
        So do those of other names: the user's, or of a callback that is not here any more.
        """
        if callback.save_top_k <= 0:
            return
        known = {
            parse_path(path) for each in _model_checkpoints(trainer) for path in _recorded_by(each)
        }
        pattern = _names(callback, _NUMBER)[0]
        for entry in folder_at(str(callback.dirpath)).entries():
            is_own = re.fullmatch(pattern, entry.path.name) and entry.path not in known
            if is_own and entry.is_checkpoint() and not entry.is_link():
                was_replaced = str(entry) == replaced and entry.published_ns() < self._loaded_ns
                if was_replaced or not entry.can_replace(entry):
                    self._manager.remove(str(entry))

    def _find_last(self, trainer: pl.Trainer, callback: ModelCheckpoint) -> None:
        """Record the last checkpoint of a callback whose first save was loaded."""
        if not callback.save_last or callback.last_model_path:
            return
        candidates, name = callback._monitor_candidates(trainer), callback.CHECKPOINT_NAME_LAST
        numbers = count(callback.STARTING_VERSION) if callback._enable_version_counter else ()

        def find() -> str:
            for version in chain([None], numbers):
                path = callback.format_checkpoint_name(candidates, name, version)
                if self._is_made(trainer, callback, path):
                    return path
                if not _is_there(path):
                    break
            return ""

        callback.last_model_path = _on_rank_zero(trainer, find)

    def _can_repeat(self, callback: ModelCheckpoint, hook: str) -> bool:
        """Whether a hook can be called again: a user's may need the batch, which is gone."""
        return (callback, hook) in self._given if hook == BATCH_END else bool(hook)

    def _repeat_hook(self, trainer: pl.Trainer, callback: ModelCheckpoint, hook: str) -> None:
        """Make the saves of a callback in a hook."""
        # The next epoch has begun after on_train_epoch_end.
        epochs_since = int(hook == EPOCH_END)

        def save(_: pl.Trainer, path: str) -> None:
            if _on_rank_zero(trainer, lambda: self._is_made(trainer, callback, path)):
                callback._last_global_step_saved = trainer.global_step
                callback._last_checkpoint_saved = path
                return
            with _shown_epoch(trainer, epochs_since):
                type(callback)._save_checkpoint(callback, trainer, path)

        vars(callback)["_save_checkpoint"] = save
        try:
            with _shown_epoch(trainer, -epochs_since):
                batch = (None, None, trainer.fit_loop.batch_idx)
                of_hook = batch if hook == BATCH_END else ()
                getattr(callback, hook)(trainer, trainer.lightning_module, *of_hook)
        finally:
            del vars(callback)["_save_checkpoint"]

    def _is_made(self, trainer: pl.Trainer, callback: ModelCheckpoint, path: str) -> bool:
        """Whether this callback saved a checkpoint in the loaded run, after the loaded one.

        A checkpoint that another callback has recorded is not its own: that callback may just have
        made its save again. On rank 0.
        """
        loaded = self._loaded
        others = (c for c in _model_checkpoints(trainer) if c is not callback)
        if loaded is None or not _is_there(path) or any(path in _recorded_by(c) for c in others):
            return False
        checkpoint = folder_at(path).follow_links()
        with suppress(ElasticZeroError, FileNotFoundError, NotADirectoryError, ValueError):
            manifest = manifest_from_json(checkpoint.read_manifest().decode(), str(checkpoint))
            expected = loaded.progress
            if callback.save_weights_only:  # It records the engine's progress alone.
                batch = manifest.progress.global_batch_size
                expected = replace(expected, sampler={}, global_batch_size=batch)
            is_same = manifest.progress == expected
            return is_same and checkpoint.published_ns() >= self._loaded_ns
        return False

    def _refuse_overwriting(self, trainer: pl.Trainer, callback: ModelCheckpoint) -> None:
        """Refuse names in use at the start if ``enable_version_counter=False`` would overwrite."""
        if (
            getattr(callback, "_enable_version_counter", True)
            or not callback.dirpath
            or not is_fitting(trainer)
        ):
            return
        folder = folder_at(callback.dirpath)

        def look() -> dict[str, str]:
            nested = folder.entries_below((callback.filename or "").count("/"))
            entries = (*folder.entries(), *nested)
            matching = [p for p in entries if _is_name(callback, str(p).removeprefix(f"{folder}/"))]
            return {str(path): why for path in matching if (why := _refusal_reason(str(path)))}

        if wrong := _on_rank_zero(trainer, look):
            path, why = min(wrong.items())
            msg = (
                f"ModelCheckpoint(enable_version_counter=False) would replace {path}, which {why}. "
                "Move it away, or pass another dirpath to the callback (and a full path as "
                "ckpt_path to resume from here), or omit enable_version_counter so that names in "
                "use are numbered."
            )
            raise SaveError(msg)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Remove a checkpoint that could not be saved from the callbacks' records."""
        try:
            yield
        except ElasticZeroError:
            with suppress(OSError):  # Of the store: that of the save is raised.
                for callback in {callback for callback, _ in self._given}:
                    _forget_what_is_not_there(callback)
            raise

    def end(self) -> None:
        """Restore the callbacks' methods."""
        for callback in self._linking:
            callback.save_last = "link"
        self._linking = []
        for callback, name in self._given:
            vars(callback).pop(name, None)
        self._given = []


def _on_rank_zero(trainer: pl.Trainer, look: Callable[[], T]) -> T:
    """Look at files on one rank; return the result, or raise the error, on all."""
    result: T | None = None
    failure = ""
    cause: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = look()
        except OSError as error:
            failure, cause = f"{error.filename} cannot be read: {error.strerror}", error
        except Exception as error:  # noqa: BLE001 (raised on all ranks, which wait for the result)
            failure, cause = f"{type(error).__name__}: {error}", error
    result, failure = trainer.strategy.broadcast((result, failure))
    if failure:
        raise SaveError(failure) from cause
    return cast("T", result)


def _forget_what_is_not_there(callback: ModelCheckpoint) -> None:
    """Reset the best and last checkpoint to those that exist."""
    scores = {path: s for path, s in callback.best_k_models.items() if _is_there(path)}
    callback.best_k_models = scores
    if not _is_there(callback.last_model_path):
        callback.last_model_path = ""
    if not _is_there(callback.best_model_path):
        best = min if callback.mode == "min" else max
        path = best(scores, key=scores.__getitem__) if scores else ""
        callback.best_model_path, callback.best_model_score = path, scores.get(path)


def _is_missing(callback: ModelCheckpoint, trainer: pl.Trainer, hook: str) -> bool:
    """Whether a save is due in a hook and nothing of this step was kept.

    Lightning creates a link also at the end of an epoch or validation in which no save is due.
    """
    if callback._last_global_step_saved == trainer.global_step:
        return False
    is_deferred = getattr(callback, "_defer_save_until_validation", False)
    if hook == BATCH_END or (hook == VALIDATION_END and is_deferred):
        return True
    epochs = callback._every_n_epochs
    return epochs >= 1 and (trainer.current_epoch + 1) % epochs == 0


def _recorded_by(callback: ModelCheckpoint) -> set[str]:
    """Return the paths of the checkpoints that a callback has saved, or is saving now."""
    return {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}


def _should_remove(
    callback: ModelCheckpoint, trainer: pl.Trainer, previous: str, current: str
) -> bool:
    """Whether to remove a checkpoint: only below the callback's folder, as Lightning on a disk."""
    if not ModelCheckpoint._should_remove_checkpoint(callback, trainer, previous, current):
        return False
    return str(parse_path(previous)).startswith(f"{parse_path(str(callback.dirpath))}/")


def _is_there(path: str) -> bool:
    return bool(path) and folder_at(path).exists()


def _refusal_reason(path: str) -> str:
    """Return why the path must not be replaced; empty if it may."""
    try:
        return folder_at(path).inspect().refusal_reason
    except OSError as error:
        return f"cannot be inspected ({error.strerror or error})"


def _is_lightnings_own(callback: ModelCheckpoint, name: str) -> bool:
    lightnings = getattr(ModelCheckpoint, name, None)
    of_its_class = getattr(type(callback), name, None)
    return lightnings is not None and of_its_class is lightnings and name not in vars(callback)


def _names(callback: ModelCheckpoint, metric: str = _ANY) -> list[str]:
    """Return regular expressions of the names that a callback may use in its folder.

    ``metric``: the pattern of a value. That of the last checkpoint is the last one.
    """
    given = [callback.filename or "{epoch}-{step}"] if callback.save_top_k else []
    if callback.save_last:
        given.append(callback.CHECKPOINT_NAME_LAST)
    return [
        "".join(_pattern(part, callback, metric) for part in re.split(r"(\{[^}]*\})", name))
        + re.escape(callback.FILE_EXTENSION)
        for name in given
    ]


def _is_name(callback: ModelCheckpoint, name: str) -> bool:
    """Whether a callback may use a name, or a path with slashes, in its folder."""
    return any(re.fullmatch(pattern, name) for pattern in _names(callback))


def _pattern(part: str, callback: ModelCheckpoint, metric: str) -> str:
    """Return the pattern for a part of a template: a metric in braces, or text."""
    if not part.startswith("{"):
        return re.escape(part)
    named = f"{part[1:-1].split(':', maxsplit=1)[0]}{callback.CHECKPOINT_EQUALS_CHAR}"
    return re.escape(named if callback.auto_insert_metric_name else "") + metric


def saves_of(trainer: pl.Trainer, path: str, hook: str) -> dict[str, dict[str, Any]]:
    """Return each ``ModelCheckpoint``'s last saved step and folder, and whether a save is deferred.

    Also the checkpoint that its last save replaces, which is deleted afterwards. Its own state does
    not contain the step. The callback that saves to ``path`` in ``hook`` now updates it afterwards.
    A deferral lasts until a save in ``on_validation_end``: Lightning does not end it if there are
    none, or if another save is due before.
    """
    saves = {}
    for callback in _model_checkpoints(trainer):
        is_saving = path in _recorded_by(callback)
        step = trainer.global_step if is_saving else callback._last_global_step_saved
        deferred = bool(getattr(callback, "_defer_save_until_validation", False))
        saves[callback.state_key] = {
            "step": step,
            "deferred": deferred and not (is_saving and hook == VALIDATION_END),
            "dirpath": str(callback.dirpath),
            "replaced": vars(callback).get(_REPLACED) or "",
        }
    return saves


@dataclass(frozen=True, slots=True)
class LoadedSaves:
    """The saves of the ``ModelCheckpoint`` callbacks at the moment of a loaded checkpoint."""

    path: AnyPath
    """The loaded checkpoint, or a link to it."""
    progress: TrainingProgress
    """Its progress."""
    step: int
    """The trainer's step."""
    saves: Mapping[str, Any]
    """Result of ``saves_of``; empty if other software saved the checkpoint."""
    hook: str
    """The hook of callbacks in which it was saved; empty if it was saved in another place."""


def _ready_last(trainer: pl.Trainer, callback: ModelCheckpoint) -> None:
    """Let ``save_last="link"`` follow saves that the best k do not keep, as before the load.

    Lightning needs the path of any save for it, and does not save one. That of the last checkpoint
    itself keeps the link as it is until a save is due.
    """
    best = callback.best_model_path
    callback._last_checkpoint_saved = ""  # of an earlier fit in this process
    if not best and not _on_rank_zero(trainer, lambda: _is_there(callback.last_model_path)):
        return  # As in a new run, Lightning saves the last checkpoint at the end.
    is_here = best.startswith(f"{callback.dirpath}/")
    callback._last_checkpoint_saved = callback.last_model_path or (best if is_here else "")


@contextmanager
def _shown_epoch(trainer: pl.Trainer, change: int) -> Iterator[None]:
    """Show callbacks another ``current_epoch``."""
    counts = trainer.fit_loop.epoch_progress.current
    counts.completed += change
    try:
        yield
    finally:
        counts.completed -= change
