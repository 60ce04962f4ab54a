"""Each private name of Lightning's that is relied upon, and the releases that have it.

Read in 2.5.0, 2.5.6 and 2.6.6. What only some of them have is asked for here or, for callbacks that
average weights, in ``averages``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from inspect import signature
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.requirements import LIGHTNING, missing_names

FIT_LOOP_NAMES = (
    "_combined_loader",
    "_combined_loader_states_to_load",
    "_data_fetcher",
    "_data_source",
    "_restarting",
    "_should_accumulate",
)
EPOCH_LOOP_NAMES = ("_batches_that_stepped", "_should_check_val_fx")
COMBINED_LOADER_NAMES = ("_mode", "_state_dicts")
CONNECTOR_NAMES = ("_callback_metrics",)
CALL_NAMES = ("_call_lightning_module_hook",)
CHECKPOINT_NAMES = (
    "_every_n_epochs",
    "_every_n_train_steps",
    "_last_global_step_saved",
    "_link_checkpoint",
    "_save_checkpoint",
    "file_exists",
)
STRATEGY_NAMES = (
    "_auto_select_batch_size",
    "_format_batch_size_and_grad_accum_config",
    "_init_config_if_needed",
    "_parallel_devices",
)
"""All since 2.5 or before."""

EXCLUDE_FROZEN = "exclude_frozen_parameters"
"""An argument of ``DeepSpeedStrategy`` since 2.5.5; before it, this library takes it itself."""


def check_release(trainer: pl.Trainer) -> None:
    """Refuse a release of Lightning that this library does not work with.

    Raises:
        UnsupportedError: it is outside the range that is wanted, or lacks a private name.
    """
    found = release()
    reasons = [reason] if (reason := LIGHTNING.refuses(found)) else [*_missing(trainer, found)]
    if reasons:
        raise UnsupportedError("\n".join(reasons))


def release() -> str:
    """Return the installed release of Lightning; empty where it is not known."""
    try:
        return metadata.version(LIGHTNING.package)
    except metadata.PackageNotFoundError:
        return ""


def _missing(trainer: pl.Trainer, found: str) -> Iterator[str]:
    """Yield the names that are not there, a sentence for each owner."""
    fit = trainer.fit_loop
    connector = getattr(trainer, "_logger_connector", None)
    owners: tuple[tuple[str, object, tuple[str, ...]], ...] = (
        ("the fit loop", fit, FIT_LOOP_NAMES),
        ("the training epoch loop", fit.epoch_loop, EPOCH_LOOP_NAMES),
        ("CombinedLoader", CombinedLoader([]), COMBINED_LOADER_NAMES),
        ("the logger connector", connector, CONNECTOR_NAMES),
        ("lightning.pytorch.trainer.call", call, CALL_NAMES),
        ("ModelCheckpoint", ModelCheckpoint(), CHECKPOINT_NAMES),
        ("DeepSpeedStrategy", trainer.strategy, STRATEGY_NAMES),
    )
    for owner, live, names in owners:
        if sentence := LIGHTNING.lacks(found, owner, missing_names(live, names)):
            yield sentence


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take out of a strategy's options those that its parent does not know yet."""
    known = signature(DeepSpeedStrategy.__init__).parameters
    if EXCLUDE_FROZEN in known:
        return {}
    return {EXCLUDE_FROZEN: options.pop(EXCLUDE_FROZEN, False)}
