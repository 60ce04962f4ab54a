"""Saves and loads of a trainer's run.

A save splits Lightning's checkpoint dictionary into weights, which the engine saves from its fp32
masters, and the state that is saved with them: loops, callbacks, averages and whatever hooks put
into ``state_dict``. A load restores the engine and returns that state.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_elastic_zero.checkpoint.directory_check import check_directories
from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.nodes import check_room_to_train
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    LoadOptions,
    LoadResult,
    SaveOptions,
    SaveRequest,
)
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.grid import RankGrid
from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.data_progress.counters import with_loader_states
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import ElasticZeroError, SaveError, UnsupportedError
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.trainer.batches import UserSettings
from lightning_elastic_zero.trainer.fit_warnings import (
    configured_rates,
    warn_of_other_schedulers,
    warn_of_replaced_rates,
)
from lightning_elastic_zero.trainer.last_checkpoint import answer_last
from lightning_elastic_zero.trainer.last_fit import LastFit
from lightning_elastic_zero.trainer.lightning import (
    callbacks_of,
    end_following,
    follow_exchanges,
    has_average,
    is_fitting,
    is_interrupted,
)
from lightning_elastic_zero.trainer.loaded_run import counted_loops, saved_position
from lightning_elastic_zero.trainer.model_checkpoint import LoadedSaves, ModelCheckpointHooks
from lightning_elastic_zero.trainer.module_weights import (
    WEIGHTS,
    averaging_callbacks,
    extra_weights,
    with_module_weights,
    with_trained_weights,
    without_weights,
)
from lightning_elastic_zero.trainer.monitor import checkpoint_bar
from lightning_elastic_zero.trainer.recorder import is_inside_window
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.run_state import STATE_KEY, RunState
from lightning_elastic_zero.trainer.schedulers import (
    resume_as_configured,
    resume_as_saved,
    with_new_groups,
)
from lightning_elastic_zero.trainer.tensor_parallel import grid_of

VERSION_KEY = "pytorch-lightning_version"
"""Entry that Lightning requires in every checkpoint."""


_NOT_REQUEUED = (
    "The job is not requeued: Lightning would resume it from an older hpc_ckpt_*.ckpt, or begin "
    "anew. Submit it again with ckpt_path='last', or let PreemptionCheckpoint save after the step."
)


class RunCheckpoints:
    """Saves a trainer's run, synchronously or in the background, and loads it."""

    def __init__(
        self,
        manager: CheckpointManager,
        get_ranks: Callable[[], Ranks],
        settings: UserSettings,
        resumer: RunResumer,
        load_options: LoadOptions,
        save_options: SaveOptions,
    ) -> None:
        self._manager = manager
        self._get_ranks = get_ranks
        self._settings = settings
        self._resumer = resumer
        self._load_options = load_options
        self._save_options = save_options
        self._weights: dict[str, Any] = {}
        """Those handed to Lightning for the next checkpoint, by reference."""
        self._made_directories: list[str] = []
        self._grid = RankGrid(1)
        self._device = torch.device("cpu")
        self._is_resumed = False
        self._begun_step = ""
        """Position of the last optimizer step that has begun to change weights."""
        self._loaded_saves: LoadedSaves | None = None
        """Set by a load until training begins."""
        self._hooks = ModelCheckpointHooks(manager, self._link)
        self.last_fit = LastFit()
        self.last_load: CheckpointStats | None = None

    def prepare(self, trainer: pl.Trainer, connect: Callable[[], Ranks]) -> None:
        """Prepare callbacks before Lightning looks for the last checkpoint.

        ``connect`` returns the ranks, which are not connected yet; collective.
        """
        self._hooks.prepare(trainer)
        answer_last(trainer, connect)

    def start(self, trainer: pl.Trainer, engine: Any, *, partitioned: bool) -> None:
        """Begin a run; collective. ``partitioned``: ZeRO-3 has partitioned the weights.

        Raises:
            UnsupportedError: DeepSpeed's buffers have an unknown layout on some rank, or a callback
                would average weights that are partitioned or cut.
            SaveError: A ``ModelCheckpoint`` would replace files that this library did not write, or
                its ``dirpath`` is not writable, or not shared by all ranks.
        """
        fitting, is_cut = is_fitting(trainer), grid_of(trainer).tensor > 1
        for callback in averaging_callbacks(trainer) if (partitioned or is_cut) and fitting else ():
            why = "tensor parallelism cuts them" if is_cut else "ZeRO-3 partitions them"
            use = "one tensor rank" if is_cut else "stage 1 or 2"
            msg = (
                f"{type(callback).__name__} averages whole weights, but {why}: use {use}, or keep "
                "the average in a separate module"
            )
            raise UnsupportedError(msg)
        if fitting:
            self.last_fit.trained = engine
            for callback in averaging_callbacks(trainer):
                follow_exchanges(callback)
        self._is_resumed, self._loaded_saves = False, None
        # The module may belong to another Trainer by the time of a save.
        self._grid, self._device = grid_of(trainer), trainer.strategy.root_device
        callbacks = trainer.checkpoint_callbacks if fitting else []
        dirpaths = [getattr(callback, "dirpath", None) for callback in callbacks]
        used = [callback.dirpath for callback in _savers(trainer)] if fitting else []
        made = check_directories(used, self._get_ranks(), self._save_options.node_copies)
        self._made_directories += made if trainer.is_global_zero else ()
        # An unknown layout may occur on one rank only.
        self._get_ranks().run_all(
            "compare the places of the weights",
            lambda: LiveEngine(engine).verify_addresses(fresh=True),
        )
        handle = LiveEngine(engine, places_checked=True)
        self._manager.start(handle, trainer.global_rank, dirpaths)
        if fitting:
            self._watch_steps(handle)  # after the manager's hook, which may wait and be interrupted
        self._hooks.begin(trainer)

    def check_room(self, trainer: pl.Trainer, engine: Any) -> None:
        """Refuse to train if nodes have no room for the checkpoints of a callback; collective."""
        live = LiveEngine(engine, places_checked=True)
        for callback in _savers(trainer):
            if callback.dirpath and _may_save(callback):
                folder = folder_at(str(callback.dirpath)).path
                weights_only = getattr(callback, "save_weights_only", False)
                check_room_to_train(folder, live, self._get_ranks(), weights_only=weights_only)

    def _watch_steps(self, live: LiveEngine) -> None:
        """Note when an optimizer step begins to change weights; see ``_is_omitted``."""
        self._begun_step = ""

        def begin() -> None:
            self._begun_step = live.at_step()

        with suppress(UnsupportedError):  # Not an optimizer of torch: it has no hooks.
            live.add_step_pre_hook(begin)

    def track(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Remember the weights handed to Lightning, to detect changes by hooks; return them."""
        self._weights = dict(weights)
        return weights

    def stop(self, trainer: pl.Trainer) -> ElasticZeroError | None:
        """End a run; no collective, since ranks may be gone.

        Returns:
            The failure of the last save, if it was not raised or logged yet.
        """
        self._hooks.end()
        for callback in averaging_callbacks(trainer):
            end_following(callback)
        if is_fitting(trainer):
            self.last_fit.end(trainer)
            if not is_interrupted(trainer):
                self._resumer.recorder.end(trainer)
        failure = self._manager.stop(interrupted=is_interrupted(trainer))
        for made in reversed(self._made_directories):
            with suppress(OSError):  # not empty: something was saved
                Path(made).rmdir()
        self._made_directories = []
        return failure

    def wait(self) -> None:
        """Wait until the last save is published; collective.

        Raises:
            ElasticZeroError: It failed. The checkpoint before it is intact.
        """
        with self._hooks.saving():
            self._manager.wait_until_finished(self._get_ranks())

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        live: Any,
        trainer: pl.Trainer,
        *,
        exclude_frozen: bool,
    ) -> None:
        """Save the trainer's checkpoint dictionary and the engine's state; collective.

        After an evaluation, the engine that trained is saved instead of the live one.
        """
        if self._is_omitted(trainer, path):
            return
        if self._resumer.is_resuming and "optimizer_states" in checkpoint:
            msg = (
                f"{os.fspath(path)} cannot be saved: this run has loaded a checkpoint, and not "
                "begun to train, so data, metrics and random numbers are not restored yet. Save in "
                "on_train_batch_start or later, or copy the checkpoint that was loaded"
            )
            raise UnsupportedError(msg)
        trained = self.last_fit.engine(live, path, self._get_ranks)
        engine = LiveEngine(trained, places_checked=True)
        weights_only = "optimizer_states" not in checkpoint or self.last_fit.trained is None
        if weights_only:
            # Lightning does not call callbacks for these, so an average would be lost.
            for callback in filter(has_average, averaging_callbacks(trainer)):
                callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        given, self._weights = self._weights, {}
        client_state, left_out = without_weights(checkpoint, given)
        options = replace(
            self._save_options,
            weights_only=weights_only,
            exclude_frozen=exclude_frozen,
            left_out=left_out,
            step=trainer.global_step,
        )
        with self._hooks.saving(), with_trained_weights(trainer) as is_exchanged:
            if not weights_only:
                options = self._with_progress(options, client_state, trainer, str(path))
            rank_state = declared_rank_state(client_state, trainer)
            request = SaveRequest(engine, path, client_state, options, rank_state)
            self._write(request, trainer, blocking=is_exchanged)

    def _is_omitted(self, trainer: pl.Trainer, path: str | os.PathLike[str]) -> bool:
        """Whether a save that ends the run is omitted, with a warning. Collective if it is.

        Before training, there is nothing new to save, and the state of a loaded run is not
        complete: a checkpoint of it would repeat data, and could replace the one from which the run
        was to resume. After an exception inside an optimizer step, some weights are those before
        the step and others those after it.

        Raises:
            SaveError: Lightning requeues the job after this save.
        """
        if not is_fitting(trainer):
            return False
        reason = "" if self._resumer.has_begun else "the run ended before its first batch"
        # DeepSpeed counts a step when it is complete.
        is_inside_step = self._begun_step == LiveEngine(trainer.strategy.model).at_step()
        if is_inside_step:
            reason = "an optimizer step has begun to change weights, but is not complete"
        if reason and _ends_run(trainer, path):
            text = f"{os.fspath(path)} is not saved: {reason}."
            interrupted = is_interrupted(trainer)

            def omit() -> None:
                if is_inside_step and not interrupted:  # SLURM's signal
                    msg = f"{text} {_NOT_REQUEUED}"
                    raise SaveError(msg)

            warnings.warn(text, stacklevel=2)  # on the rank that failed, not only on rank 0
            self._manager.omit_save()
            # A rank that failed alone must not go on to Lightning's barrier.
            with self._manager.exit_ranks(path, interrupted=interrupted) as ranks:
                ranks.run_all(f"omit {path}", omit)
            return True
        return False

    def _write(self, request: SaveRequest, trainer: pl.Trainer, *, blocking: bool) -> None:
        manager, interrupted = self._manager, is_interrupted(trainer)
        if _ends_run(trainer, request.path):
            # A rank that failed alone saves alone: the others do not take part. SLURM's signal may
            # arrive during another save.
            manager.drain_local()
            with manager.exit_ranks(request.path, interrupted=interrupted) as ranks:
                manager.save(request, ranks)
            return
        bar = checkpoint_bar(trainer)
        manager.save_async(request, self._get_ranks(), bar, blocking=blocking)

    def _with_progress(
        self, options: SaveOptions, client_state: dict[str, Any], trainer: pl.Trainer, path: str
    ) -> SaveOptions:
        """Add the position in the data and the state that only the trainer has."""
        if (loops := client_state.get("loops", {}).get("fit_loop")) is None:
            return options
        of = self._resumer.recorder
        with self._settings.reapplied(trainer):
            record = of.position(trainer, loops, self._grid)
            hook = self._hooks.repeated_hook
            run_state = of.run_state(trainer, record, self._device, path, repeated_hook=hook)
            if not is_fitting(trainer):
                run_state = self.last_fit.with_metrics(run_state)
            client_state[STATE_KEY] = run_state.to_plain()
            states = of.loader_states(trainer)
            if of.has_uncounted_step(trainer):
                rank_zero_warn(
                    f"{path} is saved inside a batch, after an optimizer step. It contains the "
                    "weights after this step and the position before the batch, so a resumed run "
                    "takes the step again. To continue exactly, save in on_train_batch_end."
                )
            elif is_inside_window(trainer):
                rank_zero_warn(
                    f"{path} is saved inside an accumulation window. It contains the weights and "
                    "the position of the last optimizer step, so a resumed run repeats the window. "
                    "Random numbers, buffers, frozen weights that change, metrics and callbacks "
                    "are those of this moment. To continue exactly, save after an optimizer step."
                )
        client_state["loops"] = with_loader_states(client_state["loops"], states)
        progress = {
            "global_batch_size": record.settings.global_batch_size,
            "sampler": record.to_plain(),
        }
        return replace(options, progress=progress)

    def _link(self, trainer: pl.Trainer, path: str, link: str) -> None:
        """Create a link such as ``last.ckpt`` once the checkpoint is published; collective."""
        if self._is_omitted(trainer, link):
            return
        interrupted = is_interrupted(trainer)
        end = self._manager.exit_ranks(link, interrupted=True) if interrupted else None
        with end or nullcontext(self._get_ranks()) as ranks:
            self._manager.link(path, link, ranks)

    def load(
        self, path: str | os.PathLike[str], engine: Any, trainer: pl.Trainer
    ) -> dict[str, Any]:
        """Restore a checkpoint into DeepSpeed's engine; collective.

        Returns:
            The state from which Lightning restores loops, callbacks and schedulers.
        """
        fitting = is_fitting(trainer)
        options = replace(
            self._load_options,
            strict=trainer.lightning_module.strict_loading,
            # An evaluation of another checkpoint than the given one would be useless.
            fallback=self._load_options.fallback and fitting,
            folders=tuple(str(folder) for folder in self._manager.dirpaths if folder),
        )
        live = trainer.optimizers if fitting else []
        configured = configured_rates(live) if options.hyperparameters else None
        live_engine = LiveEngine(engine, places_checked=True)
        with checkpoint_bar(trainer) as show:
            loaded = load_engine(live_engine, path, self._get_ranks(), replace(options, show=show))
        self._is_resumed, self._begun_step = True, ""
        if not fitting:
            self.last_fit.forget()
        self.last_load = loaded.stats
        self._manager.on_loaded(loaded.stats)
        # In an evaluation, all ranks have rank 0's, whose values are None.
        rank_state = loaded.rank_state if fitting and not trainer.is_global_zero else {}
        state = with_rank_state(loaded.client_state, rank_state)
        fresh = fitting and not options.optimizer_state
        line = _format_loaded(loaded, grid_of(trainer), fitting=fitting, fresh_optimizer=fresh)
        rank_zero_info(line)
        if not fitting:
            extra = extra_weights(state)
            if extra and grid_of(trainer).tensor > 1:
                msg = (
                    f"{loaded.stats.path}: callbacks or on_save_checkpoint put weights into "
                    f"state_dict ({next(iter(extra))}, ...), such as an average, which an "
                    "evaluation with tensor parallelism cannot use: evaluate with one tensor rank"
                )
                raise UnsupportedError(msg)
            copy = partial(LiveEngine(engine).copy_full_weights, extra)
            taken = self._get_ranks().run_all("load: weights of callbacks", copy)
            if taken:
                rank_zero_info(
                    f"{loaded.stats.path}: the evaluation uses the weights that callbacks or "
                    "on_save_checkpoint put into state_dict, such as an average "
                    f"({len(taken)} parameters: {taken[0]}, ...), instead of the trained "
                    "weights"
                )
        module = trainer.lightning_module
        if is_overridden("load_state_dict", module, nn.Module):
            rank_zero_warn(
                f"{type(module).__name__}.load_state_dict was not called, because a load "
                "writes into DeepSpeed's buffers. Use the strategy's option rename for renamed "
                "layers, and on_load_checkpoint for everything else."
            )
        strict = options.strict and options.strict_optimizer
        state = with_module_weights(state, module, fitting=fitting, strict=strict)
        if VERSION_KEY not in state:
            rank_zero_info(
                "The checkpoint was not saved by Lightning: loops, callbacks and schedulers start "
                "from the beginning"
            )
            state = {**state, VERSION_KEY: version_of("lightning"), "lr_schedulers": []}
        return self._resume(state, loaded, trainer, configured) if fitting else state

    def _resume(
        self,
        state: dict[str, Any],
        loaded: LoadResult,
        trainer: pl.Trainer,
        configured: Sequence[Mapping[str, float]] | None,
    ) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint, adapted to this run.

        ``configured``: learning rates of this run's groups: schedulers continue as saved. None:
        they continue as configured now.
        """
        manifest, path = loaded.manifest, loaded.stats.path
        if manifest.weights_only:
            rank_zero_info("The checkpoint contains weights only: a new run starts at step 0")
            data = type(getattr(trainer, "datamodule", None)).__qualname__
            kept = {k: v for k, v in state.items() if k not in {"loops", "callbacks", data}}
            return {**kept, "epoch": 0, "global_step": 0, "lr_schedulers": []}
        run_state = RunState.from_plain(state.pop(STATE_KEY, {}))
        if counted_loops(state) is not None:
            self._loaded_saves = LoadedSaves(
                parse_path(path),
                manifest.progress,
                int(state.get("global_step", 0)),
                run_state.saves,
                run_state.hook,
            )
        self._resumer.resume_from(state, run_state, manifest, trainer, path)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        origins, count = loaded.group_origins, len(manifest.groups)
        groups = [Group((), {}, ()) if o is None else manifest.groups[o] for o in origins]
        states, as_saved = state.get("lr_schedulers", []), configured is not None
        if counted_loops(state) is not None:
            warn_of_other_schedulers(schedulers, states, as_saved=as_saved)
        saved = with_new_groups(schedulers, states, origins, count, as_saved=as_saved)
        if configured is None:
            state["lr_schedulers"] = resume_as_configured(schedulers, saved, groups)
            return state
        warn_of_replaced_rates(configured, groups, scheduled=bool(schedulers or saved))
        state["lr_schedulers"] = resume_as_saved(schedulers, saved)
        return state

    def resume_saves(self, trainer: pl.Trainer) -> None:
        """Continue the saves of a loaded run when training begins; collective."""
        loaded, self._loaded_saves = self._loaded_saves, None
        if loaded is not None:
            self._hooks.resume(trainer, loaded)

    def check_all_ranks_resumed(self, trainer: pl.Trainer) -> None:
        """Fail if some ranks loaded a checkpoint and others did not; collective.

        Each rank resolves ``ckpt_path="last"`` separately, before any hook of a strategy. A rank
        that found nothing calls this while the others are still loading: their steps differ.
        """
        self._get_ranks().run_all("continue without loading a checkpoint", lambda: None)
        if is_fitting(trainer) and not self._is_resumed:
            text, has_checkpoints = _format_not_resumed(self._manager.dirpaths)
            (rank_zero_warn if has_checkpoints else rank_zero_info)(text)


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint | OnExceptionCheckpoint]:
    """Return the callbacks that save through the strategy."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return []
    callbacks = trainer.checkpoint_callbacks
    return [c for c in callbacks if isinstance(c, (ModelCheckpoint, OnExceptionCheckpoint))]


def _may_save(callback: ModelCheckpoint | OnExceptionCheckpoint) -> bool:
    """Whether a callback is not one of those that save nothing (``save_top_k=0``)."""
    options = ("save_top_k", "save_last", "save_on_exception")
    is_any = any(getattr(callback, option, False) for option in options)
    return is_any or not isinstance(callback, ModelCheckpoint)


def _ends_run(trainer: pl.Trainer, path: str | os.PathLike[str]) -> bool:
    """Whether the run ends after a save: an exception's, or one before SLURM requeues the job."""
    # Lightning's name of the latter.
    return is_interrupted(trainer) or Path(path).name.startswith("hpc_ckpt_")


def declared_rank_state(client_state: Mapping[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
    """Return the entries of a run's state that each rank restores as it saved them.

    This library's own state (random states, metrics, generators of loaders), loops with the states
    of loaders, times measured by ``Timer``, and averages of buffers. Rank 0's are in the client
    state, which other numbers of ranks restore: here, its values are None.
    """
    declared = {key: client_state[key] for key in (STATE_KEY, "loops") if key in client_state}
    timers = {each.state_key for each in callbacks_of(trainer) if isinstance(each, Timer)}
    if of_timers := timers & client_state.get("callbacks", {}).keys():
        declared["callbacks"] = {key: client_state["callbacks"][key] for key in of_timers}
    weights = client_state.get(WEIGHTS, {})
    buffers = dict(trainer.lightning_module.named_buffers()).keys() & weights.keys()
    declared[WEIGHTS] = {name: weights[name] for name in buffers}
    return (
        {k: dict.fromkeys(v) for k, v in declared.items()} if trainer.is_global_zero else declared
    )


def with_rank_state(
    client_state: Mapping[str, Any], rank_state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a loaded state with the ``declared_rank_state`` of a rank other than 0."""
    merged = dict(client_state)
    for key, entries in rank_state.items():
        merged[key] = {**merged.get(key, {}), **entries}
    return merged


def _format_loaded(
    loaded: LoadResult, grid: RankGrid, *, fitting: bool, fresh_optimizer: bool
) -> str:
    """Return one line: the checkpoint, its origin, the position in the run, and the cost."""
    manifest, state, stats = loaded.manifest, loaded.client_state, loaded.stats
    saved = f"saved on {manifest.grid} with ZeRO-{manifest.stage}"
    origin = loaded.source_summary or saved
    counted = state.get("global_step")
    step = counted if type(counted) is int else stats.step
    is_new_run = manifest.weights_only or VERSION_KEY not in state or counted_loops(state) is None
    place = f" at step {step}" if step else ""
    if fitting and is_new_run:
        place = f" at step 0 (saved at step {step})" if step else " at step 0"
    elif fitting or manifest.progress.sampler:
        record = saved_position(state, manifest, stats.path)
        at = record.position
        place = f" at step {record.global_step}, epoch {at.epoch + at.is_over}"
    cost = f"{stats.bytes / 1e6:.1f} MB in {stats.seconds:.2f} s"
    fresh = ", with a fresh optimizer" if fresh_optimizer else ""
    return f"Loaded {stats.path} ({origin}) on {grid}{place}{fresh}: {cost}"


def _format_not_resumed(dirpaths: Iterable[object]) -> tuple[str, bool]:
    """Return a message that training starts at step 0, and whether there are checkpoints."""
    folders = sorted({str(place) for place in dirpaths if place})
    checkpoints = [path for folder in folders for path in _checkpoints_in(folder)]
    if not checkpoints:
        return "No checkpoint was loaded: training starts from step 0.", False
    example = checkpoints[-1].path
    reason = f", although {checkpoints[0].path.parent} contains checkpoints such as {example.name}"
    remedy = "To resume, pass the path of a checkpoint as ckpt_path"
    if any(each.path.name.startswith("last") for each in checkpoints):
        remedy += ', or "last".'
    else:
        remedy += '; "last" needs ModelCheckpoint(save_last="link") in the run that saves.'
    if dangling := [each for each in checkpoints if each.is_link() and not each.exists()]:
        reason = f": {dangling[0]} links to a checkpoint that does not exist"
        remedy = "Pass the path of another checkpoint as ckpt_path to resume."
    return f"Training starts from step 0{reason}. {remedy}", True


def _checkpoints_in(folder: str) -> list[Folder]:
    """Return the entries of a folder with Lightning's suffix; none if it cannot be listed."""
    with suppress(OSError, UnsupportedError):  # They are for a message only.
        entries = sorted(folder_at(folder).entries(), key=str)
        return [entry for entry in entries if entry.path.suffix == ".ckpt"]
    return []
