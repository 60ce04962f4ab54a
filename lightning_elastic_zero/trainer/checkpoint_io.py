"""Saves of a trainer's run: their content, and when they are written.

Costs of saves and loads of a run, kept until a callback has logged them.

Changes that hooks make to the weights in the checkpoint dictionary.

The engine's weights are saved from its masters. Lightning's hooks, and users', look for them in
the dictionary: ``on_save_checkpoint`` finds them there as with other strategies, takes frozen ones
out, or puts others in their place, such as an average that validation was done with.

Weights in the checkpoint dictionary beside the engine's: averages, and what hooks put there.

They are saved with the trainer's state, and an evaluation is one of them.

The engine of the last fit, kept for saves after an evaluation has set up its own.

Loads a checkpoint into a trainer's run, or sees that no rank did.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint.directory_check import (
    TRIAL_BYTES,
    CheckedDirectory,
    check_directories,
)
from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import (
    CheckpointStats,
    EngineHandle,
    LoadOptions,
    LoadResult,
    SaveOptions,
)
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import Group
from lightning_elastic_zero.core.options import check_count, check_flag
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.data_progress.batches import infer_progress, with_loader_states
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import ElasticZeroError, UnsupportedError
from lightning_elastic_zero.storage.publish import STAGING_PREFIX
from lightning_elastic_zero.trainer.checks import configured_rates, replaced_rates_warnings
from lightning_elastic_zero.trainer.lightning import (
    WEIGHT_AVERAGING,
    callbacks_of,
    displayed_metrics,
    has_average,
    is_fitting,
    is_interrupted,
    known_callback_metrics,
)
from lightning_elastic_zero.trainer.metrics import RESULTS, RESULTS_BY_RANK
from lightning_elastic_zero.trainer.model_checkpoint import ModelCheckpointHooks
from lightning_elastic_zero.trainer.progress import checkpoint_bar
from lightning_elastic_zero.trainer.resume import STATE_KEY, RunResumer, counted_loops
from lightning_elastic_zero.trainer.schedulers import (
    resume_as_configured,
    resume_as_saved,
    with_new_groups,
)

KEPT = 1000
"""Events that are kept where nobody takes them: more than ever come between two batches."""


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """One save that was published, or one load."""

    kind: Literal["save", "load"]
    stats: CheckpointStats


class CheckpointEvents:
    """The saves and loads of a trainer since somebody asked; saves may end in any thread."""

    def __init__(self) -> None:
        """Begin with none."""
        self._events: deque[CheckpointEvent] = deque(maxlen=KEPT)
        self._listeners: list[Callable[[CheckpointStats], None]] = []

    def subscribe(self, listener: Callable[[CheckpointStats], None]) -> Callable[[], None]:
        """Call a function with each save that is published from now on; on rank 0, in any thread.

        Returns:
            What ends that.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def on_published(self, stats: CheckpointStats) -> None:
        """Note a save that can be loaded now; on rank 0."""
        self._events.append(CheckpointEvent("save", stats))
        for listener in list(self._listeners):
            listener(stats)
        if stats.fingerprint:
            rank_zero_info(f"Saved {stats.path}: fingerprint {stats.fingerprint}")

    def on_loaded(self, stats: CheckpointStats) -> None:
        """Note a load."""
        self._events.append(CheckpointEvent("load", stats))

    def take(self) -> list[CheckpointEvent]:
        """Return what has ended since this was called last, in order, and forget it."""
        return [self._events.popleft() for _ in range(len(self._events))]


WEIGHTS = "state_dict"
"""Where Lightning keeps a module's weights."""

CURRENT = "current_model_state"
"""Where ``WeightAveraging`` keeps the weights that are trained, beside their average."""


class StateDictTracker:
    """The weights that Lightning was handed for a checkpoint, to see what hooks made of them."""

    def __init__(self) -> None:
        self._weights: dict[str, Any] = {}

    def track(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Note what is handed out: a dictionary of names, by reference."""
        self._weights = dict(weights)
        return weights

    def remove_tracked(
        self, checkpoint: Mapping[str, Any]
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Split a checkpoint's dictionary: what the trainer saves of it, and what was taken out.

        Returns:
            The dictionary without the weights that were handed out, and without optimizer states,
            which the engine saves; and the names of those that a hook has taken out of
            ``state_dict``. One that has taken out all of them is not believed: a checkpoint without
            weights is none. Nor is one that may have renamed them.
        """
        given, self._weights = self._weights, {}
        kept = {
            key: self._own(value, given) if key in {WEIGHTS, CURRENT} else value
            for key, value in checkpoint.items()
            if key != "optimizer_states"
        }
        gone = _taken_out(given, checkpoint.get(WEIGHTS))
        if not kept.get(WEIGHTS):
            kept.pop(WEIGHTS, None)
        return kept, gone

    @staticmethod
    def _own(value: Any, given: Mapping[str, Any]) -> Any:
        """Return an entry without the weights in it that were handed out as they are."""
        if not isinstance(value, dict):
            return value
        # Also under another name. Of what ZeRO-3 has cut up, a copy is as empty as the original.
        handed_out = {id(weight) for weight in given.values()}
        return {
            name: of
            for name, of in value.items()
            if id(of) not in handed_out and not (_is_empty(of) and name in given)
        }


def _taken_out(given: Mapping[str, Any], back: object) -> frozenset[str]:
    """Return the names that a hook has taken out, and not put in under other names."""
    if not isinstance(back, Mapping) or not back.keys() & given.keys():
        return frozenset()
    missing = {name: given[name] for name in given if name not in back}
    added = {name: value for name, value in back.items() if name not in given}
    same = {id(value) for value in added.values()}
    missing = {name: value for name, value in missing.items() if id(value) not in same}
    # A copy under another name is known by its shape at most.
    shapes = {v.shape: name for name, v in added.items() if isinstance(v, torch.Tensor)}
    tensors = {name: v for name, v in missing.items() if isinstance(v, torch.Tensor)}
    alike = {name: shapes[v.shape] for name, v in tensors.items() if v.shape in shapes}
    if alike:
        name, other = next(iter(alike.items()))
        rank_zero_warn(
            f"on_save_checkpoint has taken {', '.join(alike)} out of state_dict and put tensors of "
            f"the same shape into it under new names ({name} may be {other} now): they are saved "
            "all the same. Put what is new into an entry of the checkpoint beside state_dict, and "
            "they are left out."
        )
    return frozenset(missing.keys() - alike.keys())


def _is_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


AVERAGING = "averaging_state"
"""Where it keeps how many weights have been averaged."""


def _averaging(trainer: pl.Trainer) -> list[Any]:
    """Return the trainer's callbacks that average weights."""
    cls = WEIGHT_AVERAGING
    return [c for c in callbacks_of(trainer) if cls is not None and isinstance(c, cls)]


def check_averaging(trainer: pl.Trainer, *, cut_up: bool) -> None:
    """Refuse to average weights that ZeRO-3 has cut up.

    Raises:
        UnsupportedError: the callback would average empty tensors.
    """
    for callback in _averaging(trainer) if cut_up and is_fitting(trainer) else ():
        msg = (
            f"{type(callback).__name__} averages whole weights, and ZeRO-3 leaves each device "
            "a part: use stage 1 or 2, or keep the average in a module of its own"
        )
        raise UnsupportedError(msg)


def add_averages(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Ask callbacks to add their averages to a checkpoint of weights alone.

    Lightning asks no callback there, and the average would be lost that the checkpoint was chosen
    for.
    """
    for callback in _averaging(trainer):
        if has_average(callback):
            callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)


def extra_weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights that a loaded trainer's state has beside the engine's."""
    found = state.get(WEIGHTS)
    if not isinstance(found, Mapping):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def log_evaluated_averages(taken: list[str], path: str) -> None:
    """Report that an evaluation is one of other weights than those that were trained."""
    if taken:
        rank_zero_info(
            f"{path}: the evaluation uses the weights that callbacks or on_save_checkpoint had put "
            f"into its state_dict, such as an average ({len(taken)} parameters: {taken[0]}, ...), "
            "as they were validated, and not those that training goes on with"
        )


def with_module_weights(
    state: Mapping[str, Any], module: pl.LightningModule, *, fitting: bool, strict: bool
) -> dict[str, Any]:
    """Return a state with the loaded weights where hooks look for them.

    They were saved as masters, not in this dictionary, and are in the module by now: what hooks
    change here changes nothing. ``WeightAveraging`` loads the trained ones once more; its own load
    is strict, and comes when the engine has been changed. Where no average was saved, it begins one
    with them; an evaluation averages nothing.
    """
    live = module.state_dict()
    beside = extra_weights(state)
    if not strict:  # what the model has no more is averaged no more
        beside = {name: value for name, value in beside.items() if name in live}
    found = {**state, WEIGHTS: {**live, **beside}}
    if fitting and AVERAGING in state:
        averages = _averaging(module.trainer)
        _warn_average_mismatch(is_saved=bool(beside), is_kept=bool(averages))
        if averages and not beside:
            found = {k: v for k, v in found.items() if k not in {CURRENT, AVERAGING}}
    return {**found, CURRENT: live} if CURRENT in found else found


def _warn_average_mismatch(*, is_saved: bool, is_kept: bool) -> None:
    """Warn where an average ends, or begins anew."""
    if is_saved and not is_kept:
        rank_zero_warn(
            "The checkpoint holds an average of the weights, and no callback here keeps it: "
            "training goes on from the trained weights, and saves no average from now on. Add the "
            "WeightAveraging callback that the saved run had to go on with it."
        )
    elif is_kept and not is_saved:
        rank_zero_warn(
            "The saved run averaged its weights, and the average is not in the checkpoint: "
            "Lightning's own DeepSpeedStrategy left it out. A new average begins here, with the "
            "trained weights."
        )


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


VERSION_KEY = "pytorch-lightning_version"
"""The entry by which Lightning knows its own checkpoints, and demands of every one."""


class CheckpointLoader:
    """Restores an engine and what Lightning's trainer restores itself from."""

    def __init__(
        self,
        manager: CheckpointManager,
        get_ranks: Callable[[], Ranks],
        resumer: RunResumer,
        last_fit: LastFit,
        events: CheckpointEvents,
        options: LoadOptions,
    ) -> None:
        """Begin without a run; what a load restores is as the user chose it in the options."""
        self._manager = manager
        self._get_ranks = get_ranks
        self._resumer = resumer
        self._last_fit = last_fit
        self._events = events
        self._options = options
        self._is_resumed = False
        self.last_load: CheckpointStats | None = None
        """What the last load cost."""

    def start(self) -> None:
        """Begin a run, for which nothing is loaded yet."""
        self._is_resumed = False

    def load(
        self, path: str | os.PathLike[str], engine: Any, trainer: pl.Trainer | None
    ) -> dict[str, Any]:
        """Restore a checkpoint into DeepSpeed's engine; collective.

        Returns:
            What Lightning's loops, callbacks and schedulers restore themselves from.
        """
        fitting = is_fitting(trainer)
        options = replace(
            self._options,
            strict=trainer is None or trainer.lightning_module.strict_loading,
            # An evaluation of another checkpoint than the one that was named is no use to anybody.
            fallback=self._options.fallback and fitting,
            rank_entry_path=(STATE_KEY, RESULTS) if fitting else (),
        )
        live = trainer.optimizers if is_fitting(trainer) else []
        configured = configured_rates(live) if options.hyperparameters else None
        handle = engine_handle(engine, places_checked=True)
        with checkpoint_bar(trainer) as show:
            loaded = load_engine(handle, path, self._get_ranks(), replace(options, show=show))
        self._is_resumed = True
        if not fitting:
            self._last_fit.forget()
        self.last_load = loaded.stats
        self._events.on_loaded(loaded.stats)
        self._manager.protect(loaded.stats.path)
        state = loaded.client_state
        if trainer is not None:
            rank_zero_info(format_loaded(loaded, trainer.world_size, fitting=fitting))
            if not fitting:
                extra = extra_weights(state)
                taken = LiveEngine(engine).copy_full_weights(extra)
                log_evaluated_averages(taken, loaded.stats.path)
            module = trainer.lightning_module
            if is_overridden("load_state_dict", module, nn.Module):
                rank_zero_warn(
                    f"{type(module).__name__}.load_state_dict was not called: a load writes into "
                    "DeepSpeed's buffers. Use the strategy's option rename for layers that had "
                    "other names, and on_load_checkpoint for everything else"
                )
            strict = options.strict and options.strict_optimizer
            state = with_module_weights(state, module, fitting=fitting, strict=strict)
        if VERSION_KEY not in state:
            rank_zero_info("It is not of Lightning: loops, callbacks and schedulers start anew")
            state = {**state, VERSION_KEY: version_of("lightning"), "lr_schedulers": []}
        return self._resume(state, loaded, trainer, configured) if is_fitting(trainer) else state

    def _resume(
        self,
        state: dict[str, Any],
        loaded: LoadResult,
        trainer: pl.Trainer,
        configured: Sequence[Mapping[str, float]] | None,
    ) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint as a fit goes on from it.

        Schedulers go on as saved where ``configured`` holds the rates of this run's groups; where
        it is None, as they are configured now.
        """
        manifest, path = loaded.manifest, loaded.stats.path
        if manifest.weights_only:
            rank_zero_info("It holds weights only: a new run starts on them, at step 0")
            return _without_progress(state, trainer)
        state.setdefault(STATE_KEY, {})[RESULTS_BY_RANK] = loaded.rank_entries
        self._resumer.resume_from(state, manifest, trainer, path)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        origins, count = loaded.group_origins, len(manifest.groups)
        groups = [Group((), {}, ()) if o is None else manifest.groups[o] for o in origins]
        saved = with_new_groups(schedulers, state.get("lr_schedulers", []), origins, count)
        if configured is None:
            state["lr_schedulers"] = resume_as_configured(schedulers, saved, groups)
            return state
        scheduled = bool(schedulers or saved)
        for text in replaced_rates_warnings(configured, groups, scheduled=scheduled):
            rank_zero_warn(text)
        state["lr_schedulers"] = resume_as_saved(schedulers, saved)
        return state

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


def _without_progress(state: Mapping[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a new run takes over beside the weights: what the module itself had saved."""
    progress = {"loops", "callbacks", type(getattr(trainer, "datamodule", None)).__qualname__}
    kept = {key: value for key, value in state.items() if key not in progress}
    return {**kept, "epoch": 0, "global_step": 0, "lr_schedulers": []}


def format_loaded(loaded: LoadResult, world_size: int, *, fitting: bool) -> str:
    """Return a line on what was loaded, on how many devices, of where in the run, and its cost."""
    manifest, stats = loaded.manifest, loaded.stats
    saved, here = (
        f"{count} device{'s' if count > 1 else ''}" for count in (manifest.world_size, world_size)
    )
    found = loaded.source_summary or f"saved on {saved} with ZeRO-{manifest.stage}"
    cost = f"{stats.bytes / 1e6:.1f} MB in {stats.seconds:.2f} s"
    told = f"; {loaded.fingerprint_result}" if loaded.fingerprint_result else ""
    place = _place_of_fit(loaded) if fitting else _place_of_save(loaded)
    return f"Loaded {stats.path} ({found}) on {here}{place}: {cost}{told}"


def _place_of_fit(loaded: LoadResult) -> str:
    """Return at which step and epoch a fit goes on: the step that the trainer has then."""
    manifest, state = loaded.manifest, loaded.client_state
    loops, step = counted_loops(state), _saved_step(loaded)
    if manifest.weights_only or VERSION_KEY not in state or loops is None:
        return f" at step 0 (saved at step {step})" if step else " at step 0"
    if manifest.progress.sampler:
        return _place_of_save(loaded)
    record = infer_progress(loops, manifest.progress, manifest.world_size, step)
    return f" at step {step}, epoch {record.position.epoch + record.position.is_over}"


def _place_of_save(loaded: LoadResult) -> str:
    """Return at which step and epoch it was saved; empty where nothing says."""
    match loaded.manifest.progress.sampler:
        case {"global_step": int(step), "epoch": int(epoch), "epoch_is_over": bool(is_over)}:
            return f" at step {step}, epoch {epoch + is_over}"
    step = _saved_step(loaded)
    return f" at step {step}" if step else ""


def _saved_step(loaded: LoadResult) -> int:
    """Return the step of the save as its trainer counted, or its engine; 0 where nothing says."""
    counted = loaded.client_state.get("global_step")
    return counted if type(counted) is int else loaded.stats.step


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
        text = f"No checkpoint was loaded: training starts from step 0.{_unpublished(folders)}"
    return text, bool(found)


def _unpublished(folders: Iterable[str]) -> str:
    """Return a sentence on saves in these folders that were never published; empty: none."""
    found = [place for place in folders if any(Path(place).glob(f"{STAGING_PREFIX}*"))]
    if not found:
        return ""
    return f" In {', '.join(found)} lie saves that were not published."
