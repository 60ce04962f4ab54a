"""The weights in Lightning's checkpoint dictionary: averages, and weights that hooks add or remove.

The engine saves and restores the module's weights from its fp32 masters. Hooks and callbacks expect
them in the dictionary, and may change them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.trainer.lightning import (
    WEIGHT_AVERAGING,
    callbacks_of,
    exchange_average,
    has_exchanged,
)

WEIGHTS = "state_dict"
"""Lightning's entry for the module's weights."""

CURRENT = "current_model_state"
"""Entry in which ``WeightAveraging`` saves the trained weights; the average is in ``WEIGHTS``."""

AVERAGING = "averaging_state"
"""Entry in which ``WeightAveraging`` saves the number of averaged updates."""


def without_weights(
    checkpoint: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Remove the entries that the engine saves from a checkpoint dictionary.

    ``on_save_checkpoint`` finds the weights in the checkpoint dictionary as with other strategies.
    It may remove frozen ones or replace them, for example by an average.

    Args:
        checkpoint: the dictionary, after the hooks.
        given: the weights that were handed to Lightning for it.

    Returns:
        The dictionary without these weights and without optimizer states; and the names of the
        weights that a hook has removed from ``state_dict``. They are saved all the same if the hook
        removed all weights or may have renamed them.
    """
    # Also under another name. With ZeRO-3, partitioned weights and their copies are empty.
    handed_out = {id(weight) for weight in given.values()}
    kept = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
    for key in {WEIGHTS, CURRENT} & kept.keys():
        if isinstance(kept[key], dict):
            kept[key] = {
                name: value
                for name, value in kept[key].items()
                if id(value) not in handed_out
                and not (name in given and isinstance(value, torch.Tensor) and not value.numel())
            }
    if not kept.get(WEIGHTS):
        kept.pop(WEIGHTS, None)
    return kept, _removed_names(given, checkpoint.get(WEIGHTS))


def _removed_names(given: Mapping[str, Any], back: object) -> frozenset[str]:
    """Return the names that a hook has removed and not added under other names."""
    if not isinstance(back, Mapping) or not back.keys() & given.keys():
        return frozenset()
    added = {name: value for name, value in back.items() if name not in given}
    same = {id(value) for value in added.values()}
    missing = {n: v for n, v in given.items() if n not in back and id(v) not in same}
    # A copy under another name can only be recognized by its shape.
    shapes = {v.shape: name for name, v in added.items() if isinstance(v, torch.Tensor)}
    alike = [n for n, v in missing.items() if isinstance(v, torch.Tensor) and v.shape in shapes]
    if alike:
        rank_zero_warn(
            f"on_save_checkpoint removed {', '.join(alike)} from state_dict and added tensors of "
            f"the same shape under new names ({alike[0]} may be {shapes[given[alike[0]].shape]} "
            "now): the removed weights are saved all the same. To leave them out, put the new "
            "tensors into another entry of the checkpoint."
        )
    return frozenset(missing).difference(alike)


def averaging_callbacks(trainer: pl.Trainer) -> list[Any]:
    """Return the ``WeightAveraging`` callbacks; none in releases of Lightning without it."""
    cls = WEIGHT_AVERAGING
    return [c for c in callbacks_of(trainer) if cls is not None and isinstance(c, cls)]


@contextmanager
def with_trained_weights(trainer: pl.Trainer) -> Iterator[bool]:
    """Put the trained weights back for a save inside a validation of averaged weights.

    ``WeightAveraging`` exchanges the two in place for a validation. Yields whether they are
    exchanged after this context, so that the save must be complete by then.
    """
    averaging = [callback for callback in averaging_callbacks(trainer) if has_exchanged(callback)]
    for callback in averaging:
        exchange_average(callback, trainer)
    try:
        yield bool(averaging)
    finally:
        for callback in averaging:
            exchange_average(callback, trainer)


def extra_weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a loaded state: averages, and weights added by hooks."""
    weights = state.get(WEIGHTS)
    if not isinstance(weights, Mapping):
        return {}
    return {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def with_module_weights(
    state: Mapping[str, Any], module: pl.LightningModule, *, fitting: bool, strict: bool
) -> dict[str, Any]:
    """Return a state with the loaded weights in the entries where hooks look for them.

    The module already has its weights, so changes by hooks have no effect. ``WeightAveraging``
    loads the trained weights again, strictly, after the engine has changed. If no average was
    saved, it starts one from them; an evaluation averages nothing.
    """
    live = module.state_dict()
    extra = extra_weights(state)
    if not strict:  # drop averages of removed parameters
        extra = {name: value for name, value in extra.items() if name in live}
    completed = {**state, WEIGHTS: {**live, **extra}}
    if fitting and AVERAGING in state:
        averages = averaging_callbacks(module.trainer)
        if extra and not averages:
            rank_zero_warn(
                "The checkpoint contains an average of the weights, but this run has no "
                "WeightAveraging callback: training continues from the trained weights and no "
                "longer saves an average. Add the callback of the saved run to continue the "
                "average."
            )
        elif averages and not extra:
            rank_zero_warn(
                "The saved run averaged its weights, but the average is not in the checkpoint, "
                "because Lightning's own DeepSpeedStrategy does not save it. A new average starts "
                "from the trained weights."
            )
            completed = {k: v for k, v in completed.items() if k not in {CURRENT, AVERAGING}}
    return {**completed, CURRENT: live} if CURRENT in completed else completed
