"""Loads a checkpoint into a trainer's run, or sees that no rank did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint import (
    CheckpointManager,
    CheckpointStats,
    LoadOptions,
    LoadResult,
    load_engine,
)
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.data_progress import infer_progress
from lightning_elastic_zero.engine import LiveEngine
from lightning_elastic_zero.manifest import Group
from lightning_elastic_zero.requirements import version_of
from lightning_elastic_zero.storage import STAGING_PREFIX
from lightning_elastic_zero.trainer.checkpoint_events import CheckpointEvents
from lightning_elastic_zero.trainer.epoch_metrics import RESULTS, RESULTS_BY_RANK
from lightning_elastic_zero.trainer.last_fit import LastFit
from lightning_elastic_zero.trainer.lightning_internals import is_fitting
from lightning_elastic_zero.trainer.lr_schedulers import (
    resume_as_configured,
    resume_as_saved,
    with_new_groups,
)
from lightning_elastic_zero.trainer.progress_bars import checkpoint_bar
from lightning_elastic_zero.trainer.resume import RunResumer, counted_loops
from lightning_elastic_zero.trainer.run_record import STATE_KEY
from lightning_elastic_zero.trainer.start_warnings import configured_rates, replaced_rates_warnings
from lightning_elastic_zero.trainer.weight_averaging import (
    extra_weights,
    log_evaluated_averages,
    with_module_weights,
)

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
