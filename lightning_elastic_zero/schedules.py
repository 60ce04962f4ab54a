"""Schedulers' saved states, where the learning rate is to stay as it is configured now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

RATES = frozenset({"base_lrs", "_last_lr", "max_lrs", "min_lrs", "total_steps"})
"""What torch's schedulers keep of the configured rates; their position is in other fields."""


def keep_configured_rates(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take the rates out of schedulers' states, so that the position alone is restored.

    ``LRScheduler.load_state_dict`` updates the fields that it is given and keeps the others.
    Schedulers inside schedulers (``SequentialLR``, ``ChainedScheduler``) are treated alike.
    """
    return [_without_rates(state) for state in states]


def _without_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Take the rates out of one state, and out of the states inside it."""
    return {
        key: keep_configured_rates(value) if key == "_schedulers" else value
        for key, value in state.items()
        if key not in RATES
    }
