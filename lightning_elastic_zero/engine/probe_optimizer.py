"""An optimizer's state keys, found by a step of another optimizer of its class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from lightning_elastic_zero.engine.optimizer_state import EXECUTION_KEYS
from lightning_elastic_zero.manifest import Plain
from lightning_elastic_zero.tensor_state import unplain

WEIGHTS = (0.0, 1.0)
"""The twin's parameter: what differs between its states depends on the weights."""


def probe_after_a_step(
    inner: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
    index: int,
    saved: Mapping[str, Plain],
) -> dict[str, Any]:
    """Return the states of a parameter of two elements after a step with gradients of zero.

    Whatever the optimizer's class raises where another one cannot be made, or steps otherwise.

    Args:
        inner: the live optimizer, which is left as it is.
        index: of its parameter group.
        saved: hyperparameters that were saved, some of which (amsgrad) decide what is kept.
    """
    group = inner.param_groups[index]
    settings = {k: unplain(saved[k], v) if k in saved else v for k, v in group.items()}
    settings.update({k: group[k] for k in EXECUTION_KEYS & group.keys()})
    flats = [*group["params"], *(key for key in inner.state if isinstance(key, torch.Tensor))]
    device = flats[0].device if flats else "cpu"
    parameter = torch.nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float32, device=device))
    parameter.grad = torch.zeros_like(parameter)
    # Some look at what their constructor is told, and not at the group (Adagrad's first sums).
    asked = inspect.signature(type(inner)).parameters
    told = {key: value for key, value in inner.defaults.items() if key in asked}
    twin = type(inner)([{**settings, "params": [parameter]}], **told)
    twin.step()
    return dict(twin.state[parameter])
