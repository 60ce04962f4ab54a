"""A callback that reports checkpoints and metrics to Ray Train."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from lightning_elastic_zero.checkpoint.types import CheckpointStats
from lightning_elastic_zero.errors import CheckpointNotFoundError, UnsupportedError
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import real_path
from lightning_elastic_zero.trainer.strategy import ElasticDeepSpeedStrategy

_LAST = "last"
"""Checkpoints whose names begin so are replaced or deleted by callbacks, and not reported."""


class RayCheckpointReport(Callback):
    """Reports each checkpoint to Ray Train at its path, with the metrics of its step.

    A checkpoint is one directory that all ranks write below the run's folder in Ray's storage.
    Nothing is copied, and ``Result.checkpoint`` is that directory. It is reported after
    publication; with ``async_save``, at the next save or at the end. The metrics are
    ``trainer.callback_metrics`` at the save, ``step`` and ``epoch``; Ray keeps metrics only with
    checkpoints.

    Ray deletes checkpoints itself (``CheckpointConfig(num_to_keep=...)``) and does not restart in a
    folder where one is missing. So each ``ModelCheckpoint`` needs ``save_top_k=-1``, and
    ``save_last="link"`` if any. Not reported are names that begin with ``last``, and weights alone
    (``save_weights_only``).

    Raises:
        ImportError: Ray Train is not installed.
    """

    def __init__(self) -> None:
        _ray_train()  # raises if Ray is not installed
        self._metrics: dict[int, dict[str, Any]] = {}
        """Metrics of the saves that Ray does not know yet, by step."""
        self._published: list[tuple[str, CheckpointStats]] = []
        """Saves and loads since the last report, each with its kind; on rank 0."""
        self._known: dict[str, int] = {}
        """Steps of checkpoints that were reported to Ray, by path."""
        self._is_due = False
        """Whether a save was called since the last report; the same on all ranks."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move after the callbacks that save checkpoints.

        Raises:
            UnsupportedError: the strategy is another one.
        """
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, ElasticDeepSpeedStrategy):
            strategy = type(trainer.strategy).__name__
            msg = f"RayCheckpointReport needs ElasticDeepSpeedStrategy; the strategy is {strategy}"
            raise UnsupportedError(msg)
        _strategy(trainer).checkpoint_manager.listeners.append(self._note)
        # A new list: Lightning is iterating over the old one.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the folders of checkpoints, which are known now, and ask for earlier reports.

        Raises:
            UnsupportedError: Ray could not find or keep the checkpoints.
        """
        run = _run_folder()
        savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        reported = [callback for callback in savers if not callback.save_weights_only]
        for callback in reported:
            _check_model_checkpoint(callback, run)
        _check_last(reported)
        of_ray = _ray_train().get_all_reported_checkpoints() if trainer.is_global_zero else []
        known = {each.checkpoint.path: each.metrics.get("step", 0) for each in of_ray}
        self._known = trainer.strategy.broadcast(known)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the checkpoint from which the run was resumed, if its report was lost.

        Raises:
            CheckpointNotFoundError: the run has checkpoints, and was not resumed. Its first reports
                would make Ray delete them.
        """
        if self._known and not trainer.global_step:
            newest = max(self._known, key=self._known.__getitem__)
            msg = (
                f"{newest} of step {self._known[newest]} was reported to Ray Train, but this run "
                f"begins at step 0: no checkpoint was loaded, or weights only. Pass ckpt_path="
                f"{newest!r} to resume, also in a second fit of this run, or begin a new run with "
                "another RunConfig(name=...)"
            )
            raise CheckpointNotFoundError(msg)
        self._report(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the metrics of this step until its checkpoint is reported, maybe by a later run."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        step = trainer.global_step
        self._metrics[step] = {**metrics, "epoch": trainer.current_epoch, "step": step}
        checkpoint["callbacks"][self.state_key] = self._metrics[step]
        self._is_due = True

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the metrics of a checkpoint, whose report may be lost."""
        self._metrics[state_dict["step"]] = state_dict

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Report saves after this batch."""
        self._report_if_due(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report saves after the validation."""
        self._report_if_due(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report saves after the epoch."""
        self._report_if_due(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the last save and report it, before a preemption can end the run."""
        _strategy(trainer).wait_for_save()
        self._report(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last save, also if a restarted run had nothing left to train."""
        self._report(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop listening to saves."""
        if stage == "fit":
            _strategy(trainer).checkpoint_manager.listeners.remove(self._note)

    def _note(self, kind: str, stats: CheckpointStats) -> None:
        self._published.append((kind, stats))

    def _report_if_due(self, trainer: pl.Trainer) -> None:
        if self._is_due:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        """Report published saves; collective.

        Raises:
            UnsupportedError: a save has replaced a checkpoint that was reported.
        """
        self._is_due = False
        _strategy(trainer).checkpoint_manager.collect()
        ray_train = _ray_train()
        storage = ray_train.get_context().get_storage()
        published = self._take_published() if trainer.is_global_zero else []
        for kind, path, step in trainer.strategy.broadcast(published):
            if (known := self._known.get(path)) is not None:
                if known != step and kind == "save":
                    msg = (
                        f"{path} was reported to Ray Train at step {known}, and now contains step "
                        f"{step}, which Ray would delete as the older one. Give each checkpoint a "
                        "name of its own: put {step} into ModelCheckpoint(filename=...)"
                    )
                    raise UnsupportedError(msg)
                continue
            self._known[path] = step
            unknown = {"epoch": trainer.current_epoch, "step": step}
            metrics = self._metrics.get(step, unknown)
            # Another ModelCheckpoint may have saved at this step too; earlier steps are complete.
            self._metrics = {at: of for at, of in self._metrics.items() if at >= step}
            ray_train.report(
                metrics,
                ray_train.Checkpoint(path, storage.storage_filesystem),
                checkpoint_upload_mode=ray_train.CheckpointUploadMode.NO_UPLOAD,
            )

    def _take_published(self) -> list[tuple[str, str, int]]:
        """Return and forget the saves and loads since the last report: kind, path and step."""
        run = _run_folder()
        published, self._published = self._published, []
        return [
            (kind, path, stats.step)
            for kind, stats in published
            if (path := _path_in(run, stats.path)) is not None and _is_full(path)
        ]


def _path_in(run: Path, path: str) -> str | None:
    """Return a checkpoint's path below the run's folder; None: not to be reported."""
    real, folder = real_path(path), real_path(run)
    if real.name.startswith(_LAST) or folder not in real.parents:
        return None
    return str(run / real.relative_to(folder))


def _is_full(path: str) -> bool:
    """Whether a run resumes from a path; weights alone may have been deleted already."""
    recorded = folder_at(path).recorded()
    return not (recorded.problem or recorded.weights_only)


def _check_model_checkpoint(callback: ModelCheckpoint, run: Path) -> None:
    """Check that Ray can find and keep a callback's checkpoints.

    Raises:
        UnsupportedError: It cannot.
    """
    folder = real_path(str(callback.dirpath))
    if real_path(run) not in folder.parents:
        msg = (
            f"ModelCheckpoint saves to {folder}, but Ray Train keeps checkpoints below {run} only. "
            'Pass dirpath=f"{run}/checkpoints", with '
            "run = ray.train.get_context().get_storage().experiment_fs_path"
        )
        raise UnsupportedError(msg)
    if callback.save_top_k != -1:
        msg = (
            f"ModelCheckpoint(save_top_k={callback.save_top_k}) would delete checkpoints that Ray "
            "Train has registered, and Ray could not restart this run. Pass save_top_k=-1 and let "
            "Ray delete: RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2))"
        )
        raise UnsupportedError(msg)
    name = callback.filename
    if name is not None and "{step" not in name and "{epoch" not in name:
        msg = (
            f"ModelCheckpoint(filename={name!r}) would use a name again once Ray Train has deleted "
            "its checkpoint, and Ray would take the new one for the old one. Put {step} into it"
        )
        raise UnsupportedError(msg)
    if callback.save_last is True and not callback.CHECKPOINT_NAME_LAST.startswith(_LAST):
        msg = (
            f"ModelCheckpoint(save_last=True) with CHECKPOINT_NAME_LAST = "
            f"{callback.CHECKPOINT_NAME_LAST!r} would delete checkpoints that Ray Train has "
            f"registered. Begin the name with {_LAST!r}, or pass save_last='link'"
        )
        raise UnsupportedError(msg)


def _check_last(callbacks: Sequence[ModelCheckpoint]) -> None:
    """Check that ``ckpt_path="last"`` finds the checkpoints that Ray keeps.

    Raises:
        UnsupportedError: It finds those of some callbacks only.
    """
    if len({bool(callback.save_last) for callback in callbacks}) > 1:
        msg = (
            "Some ModelCheckpoints have save_last and others do not. Ray Train deletes the oldest "
            'checkpoints of all, and ckpt_path="last" may find none of those that are left. Pass '
            'save_last="link" to each ModelCheckpoint'
        )
        raise UnsupportedError(msg)


def _run_folder() -> Path:
    """Return the folder of this run in Ray's storage.

    Raises:
        UnsupportedError: It is not on a disk.
    """
    storage = _ray_train().get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        msg = (
            f"Ray's storage has type {storage.storage_filesystem.type_name!r}, expected 'local'. "
            "Pass RunConfig(storage_path=...) with a path on a disk that all ranks share"
        )
        raise UnsupportedError(msg)
    return Path(storage.experiment_fs_path)


def _strategy(trainer: pl.Trainer) -> ElasticDeepSpeedStrategy:
    return cast("ElasticDeepSpeedStrategy", trainer.strategy)


def _ray_train() -> Any:
    """Import Ray Train.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module("ray.train")
    except ImportError as error:
        msg = "RayCheckpointReport needs Ray Train: pip install 'ray[train]>=2.55'"
        raise ImportError(msg) from error
