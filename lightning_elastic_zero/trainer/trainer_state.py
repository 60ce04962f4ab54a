"""What Lightning's trainer restores of a loaded checkpoint, beside the engine's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_elastic_zero.checkpoint import LoadResult
from lightning_elastic_zero.engine import copy_full_weights, version_of
from lightning_elastic_zero.trainer import weight_averaging
from lightning_elastic_zero.trainer.configured_rates import warn_replaced_rates
from lightning_elastic_zero.trainer.epoch_metrics import RESULTS_BY_RANK
from lightning_elastic_zero.trainer.lightning_internals import is_fitting
from lightning_elastic_zero.trainer.lr_schedulers import resume_as_configured, resume_as_saved
from lightning_elastic_zero.trainer.resume import RunResumer
from lightning_elastic_zero.trainer.run_record import STATE_KEY

VERSION_KEY = "pytorch-lightning_version"
"""The entry by which Lightning knows its own checkpoints, and demands of every one."""


def trainer_state(
    loaded: LoadResult,
    trainer: pl.Trainer | None,
    engine: Any,
    resumer: RunResumer,
    schedulers: Sequence[Any],
    configured: Sequence[Mapping[str, float]] | None,
) -> dict[str, Any]:
    """Return what Lightning's loops, callbacks and schedulers restore themselves from.

    Args:
        loaded: the checkpoint; the engine's state is restored by now.
        trainer: of the run.
        engine: DeepSpeed's.
        resumer: is told where a fit is to be resumed.
        schedulers: the live ones.
        configured: the rates of this run's groups, where schedulers go on as saved; None: they go
            on as they are configured now.
    """
    state, manifest = loaded.client_state, loaded.manifest
    fitting = is_fitting(trainer)
    if trainer is not None:
        rank_zero_info(format_loaded(loaded, trainer.world_size))
        if not fitting:
            taken = copy_full_weights(engine, weight_averaging.extra_weights(state))
            weight_averaging.log_evaluated_averages(taken, loaded.stats.path)
        module = trainer.lightning_module
        state = weight_averaging.with_module_weights(state, module, fitting=fitting)
    if VERSION_KEY not in state:
        rank_zero_info("It is not of Lightning: loops, callbacks and schedulers start anew")
        state = {**state, VERSION_KEY: version_of("lightning"), "lr_schedulers": []}
    if trainer is None or not fitting:
        return state
    if manifest.weights_only:
        rank_zero_info("It holds weights only: a new run starts on them, at step 0")
        return _without_progress(state, trainer)
    state.setdefault(STATE_KEY, {})[RESULTS_BY_RANK] = loaded.of_ranks
    resumer.resume_from(state, manifest, trainer, loaded.stats.path, trainer.world_size)
    saved = state.get("lr_schedulers", [])
    if configured is None:
        state["lr_schedulers"] = resume_as_configured(schedulers, saved, manifest.groups)
    else:
        warn_replaced_rates(configured, manifest.groups, scheduled=bool(schedulers or saved))
        state["lr_schedulers"] = resume_as_saved(schedulers, saved)
    return state


def _without_progress(state: Mapping[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a new run takes over beside the weights: what the module itself had saved."""
    progress = {"loops", "callbacks", type(getattr(trainer, "datamodule", None)).__qualname__}
    kept = {key: value for key, value in state.items() if key not in progress}
    return {**kept, "epoch": 0, "global_step": 0, "lr_schedulers": []}


def format_loaded(loaded: LoadResult, world_size: int) -> str:
    """Return a line on what was loaded, on how many devices, of where in the run, and its cost."""
    manifest, stats = loaded.manifest, loaded.stats
    saved, here = (
        f"{count} device{'s' if count > 1 else ''}" for count in (manifest.world_size, world_size)
    )
    found = loaded.found or f"saved on {saved} with ZeRO-{manifest.stage}"
    cost = f"{stats.bytes / 1e6:.1f} MB in {stats.seconds:.2f} s"
    return f"Loaded {stats.path} ({found}) on {here}{_place_in_run(loaded)}: {cost}"


def _place_in_run(loaded: LoadResult) -> str:
    """Return at which step and epoch a run goes on; empty where that was not recorded."""
    match loaded.manifest.progress.sampler:
        case {"global_step": int(step), "epoch": int(epoch), "epoch_is_over": bool(is_over)}:
            return f" at step {step}, epoch {epoch + is_over}"
    return ""
