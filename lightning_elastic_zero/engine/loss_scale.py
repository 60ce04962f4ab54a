"""Loss scaling: DeepSpeed's own scalers in fp16, and torch's with ``torch_autocast``."""

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
"""The entry of torch's scaler, beside the fields of DeepSpeed's own."""

MOMENTUM_SCALE = "momentum_scale"
"""The entry of what the gradients were multiplied by that Muon's momentum is an average of."""

LEARNED = ("cur_scale", "cur_iter", "last_overflow_iter")
"""What both of DeepSpeed's dynamic scalers, ZeRO's and that of stage 0, know of the run so far."""

HYSTERESIS, FULL_HYSTERESIS = "cur_hysteresis", "delayed_shift"
"""How many overflows ZeRO's scaler lets pass before it lowers the scale: from now, at first."""


def loss_scale(engine: Any) -> float:
    """Return what DeepSpeed multiplies a loss by."""
    grad_scaler = _grad_scaler(engine)
    if grad_scaler is not None:
        return float(grad_scaler.get_scale())
    # None in stage 0 with bf16.
    return float(getattr(engine.optimizer, "loss_scale", None) or 1.0)


@contextmanager
def ensure_scaled(engine: Any, loss: torch.Tensor) -> Iterator[None]:
    """Make the gradients of a loss those of the scaled one, by which stage 0 divides them in fp16.

    For one backward pass, inside the context: the graph may be kept for another one, by when the
    scale can have changed, or the loss may be a part of another loss.

    DeepSpeed 0.19.8 scales a loss for ZeRO only, and divides all the same: each gradient would be
    as many times too small. Releases that do scale it are left alone: what comes back to the loss
    is then the scale, and else one.

    Args:
        engine: DeepSpeed's.
        loss: that is handed to its ``backward``; a scalar.
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
    """Return the class and the numbers of an engine's loss scalers; empty without any."""
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
    """Continue with a saved scale: as it was, or between two kinds, with what both know.

    A scale that is fixed does not become one that changes, or the other way round, and none is
    taken from a run that did not scale. Where settings are not those configured here, a warning
    names them.

    Args:
        engine: DeepSpeed's.
        saved: ``loss_scaler_fields`` of the run that was saved.
        settings: take the saved settings too, which a fixed scale is one of. torch's scaler has its
            own among its state.
    """
    scaler = loss_scaler(engine.optimizer)
    if scaler and _kind(_numbers(scaler)) == _kind(saved):
        changed = _restore_fields(scaler, saved, settings=settings)
        if changed and engine.global_rank == 0:
            log.warning(
                "the loss scale goes on with settings that were saved, and not with those "
                "configured here: %s; load_hyperparameters=False takes those configured here, for "
                "the optimizer's groups too",
                ", ".join(changed),
            )
    grad_scaler, state = _grad_scaler(engine), saved.get(GRAD_SCALER)
    if grad_scaler is not None and state:
        grad_scaler.load_state_dict(state)


def warn_of_momentum_scale(engine: Any, saved: Mapping[str, Any]) -> None:
    """Warn where Muon's restored momentum is one of gradients of another scale than those here.

    DeepSpeed lets Muon average the scaled gradients in ZeRO, and unscaled ones with offload and in
    stage 0; an average of the one outweighs the other, by the scale.

    Args:
        engine: DeepSpeed's, its scale restored.
        saved: ``loss_scaler_fields`` of the run that was saved.
    """
    was, now = saved.get(MOMENTUM_SCALE), _momentum_scale(engine)
    if was is None or now is None or was == now or engine.global_rank != 0:
        return
    effect = (
        "it outweighs them for as many steps as it takes to decay"
        if was > now
        else "it counts as little as a fresh one"
    )
    log.warning(
        "Muon's momentum was saved as an average of gradients that the loss scale multiplies by "
        "%s, and here they are multiplied by %s, so that %s: resume in the precision of the save, "
        "with its offload_optimizer, or pass load_optimizer_state=False to start a fresh one",
        was,
        now,
        effect,
    )


def _momentum_scale(engine: Any) -> float | None:
    """Return by what the gradients are multiplied that Muon averages; None without Muon."""
    scaled = momentum_is_scaled(engine.optimizer)
    if scaled is None:
        return None
    return loss_scale(engine) if scaled else 1.0


def _restore_fields(
    scaler: LossScalerAccess, saved: Mapping[str, Any], *, settings: bool
) -> list[str]:
    """Restore the fields of a scaler of the same kind; return the settings that have changed."""
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
    """Return the fields of a scaler of DeepSpeed's that are numbers."""
    held = numpy_to_python({key: getattr(scaler.holder, key) for key in scaler.fields})
    return {k: v for k, v in held.items() if isinstance(v, (bool, int, float))}


def _kind(fields: Mapping[str, object]) -> tuple[bool, bool]:
    """Whether a scale changes by itself, and whether there is one."""
    changes = bool(fields.get("dynamic", fields.get("dynamic_loss_scale", False)))
    return changes, changes or fields.get("cur_scale", 1.0) != 1.0


def _grad_scaler(engine: Any) -> Any:
    """Return torch's scaler, of the engine in stage 0 and of the optimizer else; or None."""
    of_engine = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if of_engine is not None:
        return of_engine
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None)
