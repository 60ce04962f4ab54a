"""Changes that hooks make to the weights in the checkpoint dictionary.

The engine's weights are saved from its masters. Lightning's hooks, and users', look for them in
the dictionary: ``on_save_checkpoint`` finds them there as with other strategies, takes frozen ones
out, or puts others in their place, such as an average that validation was done with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

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
