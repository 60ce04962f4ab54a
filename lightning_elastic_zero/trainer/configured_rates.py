"""The learning rates of a run as configured, beside those that a checkpoint puts in their place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_elastic_zero.manifest import Group

_INITIAL, _LIVE = "initial_lr", "lr"


def configured_rates(optimizers: Iterable[Any]) -> list[dict[str, float]]:
    """Return each parameter group's rates, before a checkpoint is loaded.

    Args:
        optimizers: the engine's; of several, which it has not, only the first would be compared.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [_rates(group) for group in groups]


def warn_replaced_rates(
    configured: Sequence[Mapping[str, float]], saved: Sequence[Group], *, scheduled: bool
) -> None:
    """Warn of saved rates that differ from the configured ones where no scheduler explains it.

    With a scheduler the rate at its start is compared. A scheduler that does not keep that
    (``ReduceLROnPlateau``) may have led to any rate.

    Args:
        configured: the rates of this run's groups.
        saved: the groups of the checkpoint.
        scheduled: a scheduler is live, or was saved.
    """
    changes = []
    for index, (here, group) in enumerate(zip(configured, saved, strict=False)):
        was = _rates(group.hyperparameters)
        key = _INITIAL if _INITIAL in here or _INITIAL in was else _LIVE
        if key == _LIVE and scheduled:
            continue
        now, then = here.get(key, here.get(_LIVE)), was.get(key, was.get(_LIVE))
        if now is not None and then is not None and not math.isclose(now, then, rel_tol=1e-6):
            changes.append(f"group {index}: configured {now:g}, saved {then:g}")
    if changes:
        more = [f"and {len(changes) - _MOST} more"] if len(changes) > _MOST else []
        rank_zero_warn(
            f"The run goes on with the saved learning rate{' and schedule' if scheduled else ''}, "
            f"not with the configured one ({'; '.join(changes[:_MOST] + more)}). Pass "
            "load_hyperparameters=False to train with the configured one."
        )


_MOST = 4
"""Groups that are named."""


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of a live group, or of a saved one, which has a dictionary for a tensor."""
    values = {key: group[key] for key in (_INITIAL, _LIVE) if key in group}
    plain = {k: v.get("tensor") if isinstance(v, Mapping) else v for k, v in values.items()}
    # An optimizer that computes its own rate has None there.
    return {
        key: float(value)
        for key, value in plain.items()
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
