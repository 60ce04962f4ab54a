"""The states of a parameter that has none yet, in a flat buffer whose others are restored."""

from __future__ import annotations

from typing import Any

import torch

from lightning_elastic_zero.engine.probe_optimizer import probe_after_a_step
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.group_matching import OWN_GROUP
from lightning_elastic_zero.manifest import Group


def initial_values(
    inner: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
    index: int,
    held: Group,
) -> dict[str, float]:
    """Return what each element-wise state is in a parameter whose gradients were zero so far.

    Args:
        inner: the live optimizer.
        index: of its parameter group.
        held: the saved group that it goes on with.

    Raises:
        CheckpointMismatchError: it depends on the weights, or cannot be found out.
    """
    name = type(inner).__name__
    # Weights that are not zero would decay.
    settings = {**held.hyperparameters, "weight_decay": 0.0}
    try:
        states = probe_after_a_step(inner, index, settings)
    except Exception as error:
        why = f"cannot be found out by a step of another {name} ({error!r})"
        raise CheckpointMismatchError(_refusal(name, index, why)) from error
    found: dict[str, float] = {}
    for key in held.state:
        if key.kind != "elementwise":
            continue
        state = states.get(key.name)
        if not isinstance(state, torch.Tensor) or state.ndim != 1:
            why = f"is not known: {name} does not keep {key.name!r} from its first step on"
            raise CheckpointMismatchError(_refusal(name, index, why))
        if not torch.equal(state[:1], state[1:]):
            why = f"is not one value: {key.name!r} begins with the weights"
            raise CheckpointMismatchError(_refusal(name, index, why))
        found[key.name] = float(state[0])
    return found


def _refusal(name: str, index: int, why: str) -> str:
    return (
        f"parameter group {index} has parameters without a saved state beside others with one, and "
        f"what {name} begins with {why}; {OWN_GROUP}"
    )
