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

SCALE_FIELDS = (
    *("cur_iter", "cur_scale", "dynamic_loss_scale", "last_overflow_iter", "min_loss_scale"),
    *("scale_factor", "scale_window"),
)
"""Fields of stage 0's scaler."""


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

    DeepSpeed 0.19.8 scales a loss only in ZeRO but divides gradients in stage 0 too. In releases
    that scale the loss, the gradient at the loss is the scale instead of 1, and is not changed.

    The hook is active only in the context, for one backward pass: the graph may be used again after
    a change of the scale, or the loss may be a part of another loss.
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
    name, _, numbers = _loss_scaler(engine.optimizer)
    fields: dict[str, Plain] = {"class": name, **numbers} if name else {}
    grad_scaler = _grad_scaler(engine)
    if grad_scaler is not None:
        fields[GRAD_SCALER] = grad_scaler.state_dict()
    if (scale := _momentum_scale(engine)) is not None:
        fields[MOMENTUM_SCALE] = scale
    return fields


def restore_loss_scaler(engine: Any, saved: Mapping[str, Any], *, settings: bool) -> None:
    """Continue with a saved scale, converted between classes of scalers where possible.

    Nothing is restored between a fixed and a dynamic scale, or from a run without scaling.
    ``settings`` restores the saved settings too, including a fixed scale, and warns of those that
    differ from the configured ones. The state of torch's scaler contains its settings.
    """
    name, holder, live = _loss_scaler(engine.optimizer)
    if name and _kind(live) == _kind(saved):
        dynamic, same_class = _kind(live)[0], saved.get("class") == name
        learned = {*LEARNED, HYSTERESIS} if dynamic else set(LEARNED) - {"cur_scale"}
        if dynamic and not same_class and FULL_HYSTERESIS in live:
            setattr(holder, HYSTERESIS, live[FULL_HYSTERESIS])  # The other class has none.
        changed = []
        for key in sorted(live.keys() & saved.keys()):
            if key in learned or (settings and (same_class or key in LEARNED)):
                setattr(holder, key, saved[key])
                if key not in learned and live[key] != saved[key]:
                    changed.append(f"{key} {saved[key]} (here {live[key]})")
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

    Mixed averages are wrong by the factor of the scale (``momentum_is_scaled``).
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
    scaled = momentum_is_scaled(engine.optimizer)
    if scaled is None:
        return None
    return loss_scale(engine) if scaled else 1.0


def _loss_scaler(optimizer: Any) -> tuple[str, Any, dict[str, Plain]]:
    """Return the class name of DeepSpeed's scaler ("" without one), its object, and its numbers.

    In stage 0 the object is a ``LossScaleConfig`` since 0.18.9 or earlier; in 0.18.4 it was the
    wrapper itself.
    """
    if (holder := getattr(optimizer, "loss_scaler", None)) is not None:
        name, fields = type(holder).__name__, vars(holder)
    elif type(optimizer).__name__ in {"FP16_Optimizer", "FP16_UnfusedOptimizer"}:
        name, holder = "LossScaleConfig", getattr(optimizer, "loss_scale_config", optimizer)
        fields = {key: getattr(holder, key) for key in SCALE_FIELDS if hasattr(holder, key)}
    else:
        return "", None, {}
    plain = numpy_to_python(dict(fields))
    return name, holder, {k: v for k, v in plain.items() if isinstance(v, (bool, int, float))}


def _kind(fields: Mapping[str, object]) -> tuple[bool, bool]:
    """Return whether the scale is dynamic, and whether there is one."""
    changes = bool(fields.get("dynamic", fields.get("dynamic_loss_scale", False)))
    return changes, changes or fields.get("cur_scale", 1.0) != 1.0


def _grad_scaler(engine: Any) -> Any:
    """Return torch's scaler, or None. In stage 0 the engine has it, otherwise the optimizer."""
    of_engine = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if of_engine is not None:
        return of_engine
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None)
