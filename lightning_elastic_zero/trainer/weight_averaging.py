"""Weights in the checkpoint dictionary beside the engine's: averages, and what hooks put there.

They are saved with the trainer's state, and an evaluation is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.lightning_internals import (
    WEIGHT_AVERAGING,
    callbacks_of,
    has_average,
    is_fitting,
)
from lightning_elastic_zero.trainer.state_dict_tracker import CURRENT, WEIGHTS

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
