"""Schedulers' saved states, where the learning rate is to stay as it is configured now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONFIGURED = frozenset(
    {
        *("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min"),
        *("base_momentums", "max_momentums", "cycle_momentum", "use_beta1"),
        *("step_size", "milestones", "_milestones", "T_max", "T_0", "T_mult"),
        *("gamma", "factor", "start_factor", "end_factor", "power", "total_iters"),
        *("total_steps", "_schedule_phases", "_anneal_func_type"),
        *("total_size", "step_ratio", "scale_mode", "anneal_epochs", "_anneal_strategy"),
        *("mode", "mode_worse", "patience", "cooldown", "threshold", "threshold_mode", "eps"),
    }
)
"""What torch's schedulers are configured with: rates, and the shape of their course."""


def keep_configured_rates(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take what is configured out of schedulers' states, so that the position alone is restored.

    ``LRScheduler.load_state_dict`` updates the fields that it is given and keeps the others. So
    what a scheduler of the user's own keeps under other names is restored as it was saved.
    Schedulers inside schedulers (``SequentialLR``, ``ChainedScheduler``) are treated alike.
    """
    return [_without_configured(state) for state in states]


def _without_configured(state: dict[str, Any]) -> dict[str, Any]:
    """Take what is configured out of one state, and out of the states inside it."""
    return {
        key: keep_configured_rates(value) if key == "_schedulers" else value
        for key, value in state.items()
        if key not in CONFIGURED
    }
