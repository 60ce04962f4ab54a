"""The live DeepSpeed engine as fragments and buffers: the only user of DeepSpeed's insides.

``support`` refuses what cannot be done; ``flat_buffers`` reads where each optimizer wrapper keeps
its flat buffers; ``places`` computes and verifies what lies where in them; ``module`` reads names,
shapes and buffers; ``live_state`` is what ``checkpoint`` saves and restores.
Nothing of DeepSpeed is patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import group_parameters
from lightning_elastic_zero.engine.gradients import drop_accumulation_window
from lightning_elastic_zero.engine.installation import recovery_script, use_accelerator
from lightning_elastic_zero.engine.live_state import LiveEngine
from lightning_elastic_zero.engine.step_hook import add_step_pre_hook, updates_state_before_step
from lightning_elastic_zero.engine.support import (
    check_config,
    check_supported,
    optimizer_wrapper,
)

__all__ = [
    "LiveEngine",
    "add_step_pre_hook",
    "check_config",
    "check_places",
    "check_supported",
    "copy_full_weights",
    "drop_accumulation_window",
    "live_engine",
    "recovery_script",
    "trained_parameters",
    "updates_state_before_step",
    "use_accelerator",
    "weights_match_masters",
]


def copy_full_weights(engine: Any, weights: Mapping[str, torch.Tensor]) -> list[str]:  # noqa: ANN401
    """Write whole weights and buffers into an engine without an optimizer; collective.

    Returns:
        The names of the parameters that were taken.
    """
    return LiveEngine(engine).copy_full_weights(weights) if weights else []


def trained_parameters(engine: Any) -> list[torch.nn.Parameter]:  # noqa: ANN401 (untyped library)
    """Return the parameters that an engine's ZeRO optimizer owns; none without one."""
    wrapper = optimizer_wrapper(engine)
    members = group_parameters(engine.optimizer, wrapper) if wrapper else []
    return [parameter for group in members for parameter in group]


def check_places(engine: Any) -> None:  # noqa: ANN401 (untyped library)
    """Refuse an engine, fresh from DeepSpeed, whose weights lie elsewhere than computed.

    Ranks may differ in that: it belongs into a step of all of them.

    Raises:
        UnsupportedError: this rank's do.
    """
    LiveEngine(engine).verify_places(fresh=True)


def weights_match_masters(engine: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether this rank's trained weights are its masters, rounded; True without masters."""
    return LiveEngine(engine).weights_match_masters()


def live_engine(
    engine: Any,  # noqa: ANN401 (untyped library)
    *,
    places_checked: bool = False,
) -> LiveEngine:
    """Return the engine's state, with or without an optimizer.

    Args:
        engine: DeepSpeed's.
        places_checked: whether ``check_places`` has passed for it. What differs since then are
            weights that a user has put elsewhere, which says nothing of the masters.

    Raises:
        UnsupportedError: the engine, or an option of it, is not supported.
    """
    check_supported(engine)
    live = LiveEngine(engine)
    if not places_checked:
        live.verify_places(fresh=False)
    return live
