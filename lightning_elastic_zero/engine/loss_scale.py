"""Loss scaling: DeepSpeed's scalers in fp16, and torch's with ``torch_autocast``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_elastic_zero.core.manifest import Plain
from lightning_elastic_zero.core.tensors import numpy_to_python
from lightning_elastic_zero.engine.buffers import REPLICATED
from lightning_elastic_zero.engine.deepspeed import LossScalerAccess, loss_scaler
from lightning_elastic_zero.engine.muon import momentum_is_scaled

log = logging.getLogger(__name__)

GRAD_SCALER = "grad_scaler"
"""Key of the state of torch's scaler."""

MOMENTUM_SCALE = "momentum_scale"
"""Key of the scale of the gradients that Muon's momentum averages."""

LEARNED = ("cur_scale", "cur_iter", "last_overflow_iter")
"""Learned fields of both dynamic scalers of DeepSpeed, ZeRO's and that of stage 0."""

HYSTERESIS, FULL_HYSTERESIS = "cur_hysteresis", "delayed_shift"
"""Overflows until ZeRO's scaler lowers the scale: remaining and initial."""


def loss_scale(engine: Any) -> float:
    """Return the factor by which DeepSpeed multiplies a loss."""
    grad_scaler = _grad_scaler(engine)
    if grad_scaler is not None:
        return float(grad_scaler.get_scale())
    # None in stage 0 with bf16.
    return float(getattr(engine.optimizer, "loss_scale", None) or 1.0)


@contextmanager
def ensure_scaled(engine: Any, loss: torch.Tensor) -> Iterator[None]:
    """Scale the gradients of a loss if stage 0 in fp16 would only divide them.

    DeepSpeed 0.19.8 scales a loss only for ZeRO but divides in stage 0 too, so each gradient would
    be too small by the scale. In releases that scale the loss, the gradient at the loss is not one
    but the scale, and is not changed.

    The hook is active for one backward pass, inside the context: the graph may be kept for another
    pass after a change of the scale, or the loss may be a part of another loss.
    """
    replicated = type(engine.optimizer).__name__ in REPLICATED and loss.requires_grad
    scale = loss_scale(engine) if replicated else 1.0
    if scale == 1.0:
        yield
        return
    register: Any = loss.register_hook  # torch has no types for it
    hook = register(lambda grad: torch.where(grad == 1.0, grad * scale, grad))
    try:
        yield
    finally:
        hook.remove()


def loss_scaler_fields(engine: Any) -> dict[str, Plain]:
    """Return the class and the numeric fields of an engine's loss scalers; empty without any."""
    fields: dict[str, Plain] = {}
    if scaler := loss_scaler(engine.optimizer):
        fields = {"class": scaler.name, **_numbers(scaler)}
    grad_scaler = _grad_scaler(engine)
    if grad_scaler is not None:
        fields[GRAD_SCALER] = grad_scaler.state_dict()
    if (scale := _momentum_scale(engine)) is not None:
        fields[MOMENTUM_SCALE] = scale
    return fields


def restore_loss_scaler(engine: Any, saved: Mapping[str, Any], *, settings: bool) -> None:
    """Continue with a saved scale, converted between kinds of scalers where possible.

    A fixed scale does not become dynamic or the reverse, and a run without scaling provides none. A
    warning lists settings that differ from the configured ones. ``settings`` restores the saved
    settings too, including a fixed scale. The state of torch's scaler contains its settings.
    """
    scaler = loss_scaler(engine.optimizer)
    if scaler and _kind(_numbers(scaler)) == _kind(saved):
        changed = _restore_fields(scaler, saved, settings=settings)
        if changed and engine.global_rank == 0:
            log.warning(
                "loss scale: the saved settings replace the configured ones: %s. Pass "
                "load_hyperparameters=False to use the configured ones, for the optimizer's groups "
                "too",
                ", ".join(changed),
            )
    grad_scaler, state = _grad_scaler(engine), saved.get(GRAD_SCALER)
    if grad_scaler is not None and state:
        grad_scaler.load_state_dict(state)


def warn_of_momentum_scale(engine: Any, saved: Mapping[str, Any]) -> None:
    """Warn if Muon's restored momentum averages gradients of another scale than this run's.

    DeepSpeed lets Muon average scaled gradients in ZeRO, and unscaled ones with offload and in
    stage 0. Mixed averages are wrong by the factor of the scale.
    """
    was, now = saved.get(MOMENTUM_SCALE), _momentum_scale(engine)
    if was is None or now is None or was == now or engine.global_rank != 0:
        return
    effect = (
        "it outweighs new gradients until it has decayed"
        if was > now
        else "it has almost no weight"
    )
    log.warning(
        "the saved momentum of Muon averages gradients with loss scale %s, this run's have loss "
        "scale %s, so %s. Resume with the saved precision and offload_optimizer, or pass "
        "load_optimizer_state=False to start a fresh momentum",
        was,
        now,
        effect,
    )


def _momentum_scale(engine: Any) -> float | None:
    """Return the scale of the gradients that Muon averages; None without Muon."""
    scaled = momentum_is_scaled(engine.optimizer)
    if scaled is None:
        return None
    return loss_scale(engine) if scaled else 1.0


def _restore_fields(
    scaler: LossScalerAccess, saved: Mapping[str, Any], *, settings: bool
) -> list[str]:
    """Restore the fields of a scaler of the same kind; return the settings that changed."""
    live, changed = _numbers(scaler), []
    dynamic, _ = _kind(live)
    same_class = saved.get("class") == scaler.name
    learned = {*LEARNED, HYSTERESIS} if dynamic else set(LEARNED) - {"cur_scale"}
    if dynamic and not same_class and FULL_HYSTERESIS in live:
        setattr(scaler.holder, HYSTERESIS, live[FULL_HYSTERESIS])  # The other class has none.
    for key in sorted(live.keys() & saved.keys()):
        if key in learned or (settings and (same_class or key in LEARNED)):
            setattr(scaler.holder, key, saved[key])
            if key not in learned and live[key] != saved[key]:
                changed.append(f"{key} {saved[key]} (here {live[key]})")
    return changed


def _numbers(scaler: LossScalerAccess) -> dict[str, Plain]:
    """Return the numeric fields of DeepSpeed's scaler."""
    held = numpy_to_python({key: getattr(scaler.holder, key) for key in scaler.fields})
    return {k: v for k, v in held.items() if isinstance(v, (bool, int, float))}


def _kind(fields: Mapping[str, object]) -> tuple[bool, bool]:
    """Return whether the scale is dynamic, and whether there is one."""
    changes = bool(fields.get("dynamic", fields.get("dynamic_loss_scale", False)))
    return changes, changes or fields.get("cur_scale", 1.0) != 1.0


def _grad_scaler(engine: Any) -> Any:
    """Return torch's scaler, the engine's in stage 0 and otherwise the optimizer's, or None."""
    of_engine = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if of_engine is not None:
        return of_engine
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None)
