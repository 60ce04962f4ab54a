"""Weights in the checkpoint dictionary, beside the engine's: averages, and what hooks do there.

The engine's weights are saved from its masters. Lightning's hooks, and users', look for them in
the dictionary: ``on_save_checkpoint`` finds them there as with other strategies, takes frozen ones
out, or puts others in their place, such as an average that validation was done with. Those are
saved with the trainer's state, and an evaluation is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.trainer.lightning_internals import WEIGHT_AVERAGING, has_average

WEIGHTS = "state_dict"
"""Where Lightning keeps a module's weights."""

CURRENT = "current_model_state"
"""Where ``WeightAveraging`` keeps the weights that are trained, beside their average."""

AVERAGING = "averaging_state"
"""Where it keeps how many weights have been averaged."""


def _averaging(trainer: pl.Trainer) -> list[Any]:
    """Return the trainer's callbacks that average weights."""
    all_of = trainer.callbacks  # type: ignore[attr-defined]
    return [c for c in all_of if WEIGHT_AVERAGING is not None and isinstance(c, WEIGHT_AVERAGING)]


def check_averaging(trainer: pl.Trainer, *, cut_up: bool) -> None:
    """Refuse to average weights that ZeRO-3 has cut up.

    Raises:
        UnsupportedError: the callback would average empty tensors.
    """
    if not cut_up or trainer.state.fn != TrainerFn.FITTING:
        return
    for callback in _averaging(trainer):
        msg = (
            f"{type(callback).__name__} averages whole weights, and ZeRO-3 leaves each device "
            "a part: use stage 1 or 2, or keep the average in a module of its own"
        )
        raise UnsupportedError(msg)


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
        """Part a checkpoint's dictionary: what the trainer saves of it, and what was taken out.

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
            f"{path}: evaluated are the weights that callbacks or on_save_checkpoint had put into "
            f"its state_dict, such as an average ({len(taken)} parameters: {taken[0]}, ...), as "
            "they were validated, and not those that training goes on with"
        )


def with_module_weights(
    state: Mapping[str, Any], module: pl.LightningModule, *, fitting: bool
) -> dict[str, Any]:
    """Return a state with the loaded weights where hooks look for them.

    They were saved as masters, not in this dictionary, and are in the module by now: what hooks
    change here changes nothing. ``WeightAveraging`` loads the trained ones once more; its own load
    is strict, and comes when the engine has been changed. Where no average was saved, it begins one
    with them.

    Args:
        state: what Lightning restores itself from.
        module: with the weights.
        fitting: whether it goes on training; an evaluation averages nothing.
    """
    live = module.state_dict()
    beside = extra_weights(state)
    if not module.strict_loading:
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
