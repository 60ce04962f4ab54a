"""Saves of a trainer's run: their content, and when they are written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint import (
    TRIAL_BYTES,
    CheckedDirectory,
    CheckpointManager,
    EngineHandle,
    LoadOptions,
    SaveOptions,
    check_directories,
)
from lightning_elastic_zero.coordination import Ranks, Timeouts
from lightning_elastic_zero.data_progress import with_loader_states
from lightning_elastic_zero.engine import LiveEngine
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.option_checks import check_count, check_flag
from lightning_elastic_zero.trainer.checkpoint_events import CheckpointEvents
from lightning_elastic_zero.trainer.last_fit import LastFit
from lightning_elastic_zero.trainer.lightning_internals import is_fitting, is_interrupted
from lightning_elastic_zero.trainer.model_checkpoint_hooks import ModelCheckpointHooks
from lightning_elastic_zero.trainer.progress_bars import checkpoint_bar
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.run_record import STATE_KEY
from lightning_elastic_zero.trainer.state_dict_tracker import StateDictTracker
from lightning_elastic_zero.trainer.weight_averaging import add_averages


class CheckpointSaver:
    """Saves a trainer's run, now or in the background, through the manager of its checkpoints."""

    def __init__(
        self,
        manager: CheckpointManager,
        get_ranks: Callable[[], Ranks],
        resumer: RunResumer,
        last_fit: LastFit,
        load_options: LoadOptions,
        *,
        save_module_weights: bool,
    ) -> None:
        """Begin without a run; a save warns of objects where a load will not build any of them.

        Raises:
            ValueError: an option has a value that it cannot have.
        """
        self._manager = manager
        self._get_ranks = get_ranks
        self._resumer = resumer
        self._last_fit = last_fit
        self._fingerprint = load_options.fingerprint
        self._save_module_weights = check_flag("save_module_weights", save_module_weights)
        self._warned_objects: set[str] | None = None if load_options.allow_pickle else set()
        self._state_dict_tracker = StateDictTracker()
        self._made_directories: list[str] = []
        self._world_size = 1
        self._device = torch.device("cpu")
        self._hooks = ModelCheckpointHooks(
            self._link, manager.is_being_written, manager.refusal_reason
        )

    def start(self, trainer: pl.Trainer, engine: Any, rank: int) -> None:
        """Begin a run; collective.

        Raises:
            UnsupportedError: weights of a rank lie elsewhere in DeepSpeed's buffers than computed.
            SaveError: a ``ModelCheckpoint`` would replace what this library did not write, or saves
                where not all ranks can.
        """
        # The module may belong to another Trainer by the time of a save.
        self._world_size, self._device = trainer.world_size, trainer.strategy.root_device
        callbacks = trainer.checkpoint_callbacks if is_fitting(trainer) else []
        dirpaths = [getattr(callback, "dirpath", None) for callback in callbacks]
        used = [] if trainer.fast_dev_run else [c.dirpath for c in callbacks if _saves(c)]  # type: ignore[attr-defined]
        for checked in check_directories(used, self._get_ranks()):
            _tell(checked)
            self._made_directories += checked.made if rank == 0 else ()
        # Only one rank's may differ, of a layout that this library does not know.
        self._get_ranks().run_all(
            "compare where weights lie", lambda: LiveEngine(engine).verify_addresses(fresh=True)
        )
        self._manager.start(engine_handle(engine, places_checked=True), rank, dirpaths)
        self._hooks.begin(trainer)

    def stop(self, trainer: pl.Trainer | None) -> ElasticZeroError | None:
        """End a run; no collective, since ranks may be gone.

        Returns:
            The failure of the last save, where it was not raised or logged so far.
        """
        self._hooks.end()
        if is_fitting(trainer):
            self._last_fit.end(trainer)
            if not is_interrupted(trainer):
                self._resumer.recorder.end(trainer)
        failure = self._manager.stop(interrupted=is_interrupted(trainer))
        for made in reversed(self._made_directories):
            with suppress(OSError):  # Something was saved there.
                Path(made).rmdir()
        self._made_directories = []
        return failure

    def track(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights that hooks see, and remember them: the engine saves its own."""
        return self._state_dict_tracker.track(weights)

    def wait(self) -> None:
        """Wait until the last save is published; collective.

        Raises:
            ElasticZeroError: it failed; the checkpoint published before is intact.
        """
        with self._hooks.saving():
            self._manager.wait_until_finished(self._get_ranks())

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        live: Any,
        trainer: pl.Trainer | None,
        *,
        exclude_frozen: bool,
    ) -> None:
        """Write a directory with what Lightning's trainer passes and the engine holds; collective.

        After an evaluation the live engine is not the one that trained, and that one is written.
        """
        trained = self._last_fit.engine(live, path, self._get_ranks)
        engine = engine_handle(trained, places_checked=True)
        weights_only = "optimizer_states" not in checkpoint or not self._last_fit.is_whole
        if weights_only and trainer is not None:
            add_averages(trainer, checkpoint)
        client_state, left_out = self._state_dict_tracker.remove_tracked(checkpoint)
        options = SaveOptions(
            weights_only=weights_only,
            exclude_frozen=exclude_frozen,
            left_out=left_out,
            fingerprint=self._fingerprint,
            step=trainer.global_step if trainer is not None else None,
            warned_objects=self._warned_objects,
            module_weights=self._save_module_weights,
        )
        with self._hooks.saving():
            if trainer is not None and not weights_only:
                options = self._with_progress(options, client_state, trainer, str(path))
            self._write(engine, path, client_state, options, trainer)

    def _write(
        self,
        engine: EngineHandle,
        path: str | os.PathLike[str],
        client_state: dict[str, Any],
        options: SaveOptions,
        trainer: pl.Trainer | None,
    ) -> None:
        """Save at once or in the background, as this moment allows."""
        manager, interrupted = self._manager, is_interrupted(trainer)
        if interrupted or is_slurm_requeue(path):
            # A rank that failed alone saves alone: the others will not come. SLURM's signal may
            # come in the midst of another save, and the job ends as soon as this returns.
            manager.drain_local()
            with manager.exit_ranks(path, interrupted=interrupted) as ranks:
                manager.save(engine, path, ranks, client_state, options)
            return
        saved = (engine, path, self._get_ranks(), client_state)
        if not manager.save_async(*saved, options):
            manager.wait_until_finished(self._get_ranks())
            with checkpoint_bar(trainer) as show:
                manager.save(*saved, replace(options, show=show))

    def _with_progress(
        self, options: SaveOptions, client_state: dict[str, Any], trainer: pl.Trainer, path: str
    ) -> SaveOptions:
        """Add where the run stands, in samples, and what of this moment only the trainer has."""
        if (loops := client_state.get("loops", {}).get("fit_loop")) is None:
            return options
        of = self._resumer.recorder
        with self._resumer.settings.reapplied(trainer):
            record = of.record(trainer, loops, self._world_size)
            own = of.state_dict(trainer, record, self._device, path)
            client_state[STATE_KEY] = own
            if not is_fitting(trainer):
                self._last_fit.put_back(own)
            states, buffers = of.loader_states(trainer), of.buffers(trainer)
        client_state["loops"] = with_loader_states(client_state["loops"], states)
        return replace(options, sampler=record.to_plain(), module_buffers=buffers)

    def _link(self, trainer: pl.Trainer, path: str, link: str) -> None:
        """Make a link such as ``last.ckpt`` to a checkpoint when it is published; collective."""
        interrupted = is_interrupted(trainer)
        end = self._manager.exit_ranks(link, interrupted=True) if interrupted else None
        with end or nullcontext(self._get_ranks()) as ranks:
            self._manager.link(path, link, ranks)


def make_manager(
    events: CheckpointEvents, times: Timeouts, max_snapshot_bytes: int | None, *, async_save: bool
) -> CheckpointManager:
    """Return the manager of a strategy's checkpoints, by the strategy's options.

    Raises:
        ValueError: one has a value that it cannot have.
    """
    size = check_count("max_snapshot_bytes", max_snapshot_bytes, least=0, unit="bytes")
    return CheckpointManager(
        times,
        background=check_flag("async_save", async_save),
        max_snapshot_bytes=size,
        on_published=events.on_published,
    )


def is_slurm_requeue(path: str | os.PathLike[str]) -> bool:
    """Whether SLURM ends the job right after this save, by Lightning's name for it."""
    return Path(path).name.startswith("hpc_ckpt_")


def _saves(callback: Callback) -> bool:
    """Whether a callback is known to save through the strategy, into its ``dirpath``."""
    if isinstance(callback, ModelCheckpoint):
        in_an_exception = getattr(callback, "save_on_exception", False)  # since Lightning 2.6
        return callback.save_top_k != 0 or bool(callback.save_last) or bool(in_an_exception)
    return isinstance(callback, OnExceptionCheckpoint)


def _tell(checked: CheckedDirectory) -> None:
    """Report what was found of a directory on several hosts."""
    if checked.hosts > 1:
        text = f"{checked.path} is one directory on all {checked.hosts} hosts"
        if checked.write_s:
            size = f"{TRIAL_BYTES >> 20} MiB"
            text += f"; the slowest wrote and synced {size} there in {checked.write_s:.2g} s"
        rank_zero_info(f"{text}.")
