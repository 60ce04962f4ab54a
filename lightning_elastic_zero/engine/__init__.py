"""The live DeepSpeed engine as fragments and buffers: the only user of DeepSpeed's insides.

``support`` refuses what cannot be done; ``flat_buffers`` reads where each optimizer wrapper keeps
its flat buffers; ``fragment_addresses`` computes and verifies what lies where in them; ``module``
reads names, shapes and buffers; ``live_state`` is what ``checkpoint`` saves and restores. Nothing
of DeepSpeed is patched.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import PLAIN, group_parameters
from lightning_elastic_zero.engine.gradients import drop_accumulation_window
from lightning_elastic_zero.engine.installation import (
    recovery_script,
    report_abandoned_builds,
    use_accelerator,
)
from lightning_elastic_zero.engine.live_state import LiveEngine
from lightning_elastic_zero.engine.loss_scale import ensure_scaled, loss_scale
from lightning_elastic_zero.engine.step_hook import (
    add_step_pre_hook,
    before_change,
    updates_state_before_step,
)
from lightning_elastic_zero.engine.support import (
    check_config,
    check_optimizer,
    check_supported,
    optimizer_wrapper,
)

__all__ = [
    "LiveEngine",
    "add_step_pre_hook",
    "before_change",
    "check_config",
    "check_optimizer",
    "check_supported",
    "drop_accumulation_window",
    "ensure_scaled",
    "follows_requires_grad",
    "live_engine",
    "loss_scale",
    "recovery_script",
    "report_abandoned_builds",
    "trained_parameters",
    "updates_state_before_step",
    "use_accelerator",
]


def trained_parameters(engine: Any) -> list[torch.nn.Parameter]:  # noqa: ANN401 (untyped library)
    """Return the parameters that an engine's optimizer owns; none without one."""
    wrapper = optimizer_wrapper(engine)
    members = group_parameters(engine.optimizer, wrapper) if wrapper else []
    return [parameter for group in members for parameter in group]


def follows_requires_grad(engine: Any) -> bool:  # noqa: ANN401 (untyped library)
    """Whether freezing or unfreezing a parameter takes effect from then on.

    DeepSpeed's wrappers ask once what requires a gradient; torch's optimizers, at each step.
    """
    return optimizer_wrapper(engine) == PLAIN


def live_engine(
    engine: Any,  # noqa: ANN401 (untyped library)
    *,
    places_checked: bool = False,
) -> LiveEngine:
    """Return the engine's state, with or without an optimizer.

    Args:
        engine: DeepSpeed's.
        places_checked: whether ``LiveEngine.verify_addresses`` has passed for it. What differs
            since then are weights that a user has put elsewhere, which says nothing of the masters.

    Raises:
        UnsupportedError: the engine, or an option of it, is not supported.
    """
    check_supported(engine)
    live = LiveEngine(engine)
    if not places_checked:
        live.verify_addresses(fresh=False)
    return live
