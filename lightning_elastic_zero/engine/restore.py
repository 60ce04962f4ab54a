"""Commit of received state to a live optimizer: masters, states, groups and counters.

A commit must not fail: shapes, dtypes and memory are checked before it. It must leave no gradients
of the interrupted accumulation window and no references to old optimizer state.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_elastic_zero.core.group_matching import MEMBER_KEYS, OWN_GROUP, regrouped
from lightning_elastic_zero.core.layout import Fragment, spans
from lightning_elastic_zero.core.manifest import Group, Manifest, StateKey
from lightning_elastic_zero.core.tensors import (
    RestoreValues,
    Scalar,
    cast_like,
    host_zeros,
    same_bits,
    tensors_of,
    unplain,
    with_copies,
)
from lightning_elastic_zero.engine.addresses import COMPARE_ELEMENTS, bounded_runs
from lightning_elastic_zero.engine.buffers import (
    LiveFlatBuffer,
    forget_swapped_states,
    inner_optimizer,
    live_flat_buffers,
    optimizer_wrapper,
    refresh_low_precision,
)
from lightning_elastic_zero.engine.deepspeed import discard_gradients, swapped_in
from lightning_elastic_zero.engine.loss_scale import restore_loss_scaler, warn_of_momentum_scale
from lightning_elastic_zero.engine.muon import MOMENTUM_KEY, place_momentum
from lightning_elastic_zero.engine.optimizer import (
    BACKUP_KEY,
    EXECUTION_KEYS,
    SCHEDULER_KEYS,
    adam_of_muon,
    converts_adam_states,
    group_counters,
    keys_of_state,
    place_scalar,
    probe_after_a_step,
    restore_backup_hyperparameters,
    stepping_optimizer,
)
from lightning_elastic_zero.engine.tensor_parallel import samples_overcount
from lightning_elastic_zero.errors import CheckpointMismatchError

log = logging.getLogger(__name__)


def initial_values(inner: Any, index: int, held: Group) -> dict[str, float]:
    """Return each element-wise state's value for a parameter whose gradients were all zero.

    Raises CheckpointMismatchError if a value depends on the weights or cannot be determined.
    """
    name = type(inner).__name__
    # Weights that are not zero would decay.
    settings = {**held.hyperparameters, "weight_decay": 0.0}
    try:
        states = probe_after_a_step(inner, index, settings)
    except Exception as error:
        raise _refusal(name, index, f"a trial step of another {name} failed ({error!r})") from error
    found: dict[str, float] = {}
    for key in held.elementwise:
        state = states.get(key.name)
        if not isinstance(state, torch.Tensor) or state.ndim != 1:
            why = f"{name} does not keep {key.name!r} from its first step on"
            raise _refusal(name, index, why)
        if not torch.equal(state[:1], state[1:]):
            why = f"{key.name!r} starts with a value that depends on the weights"
            raise _refusal(name, index, why)
        found[key.name] = float(state[0])
    return found


def _refusal(name: str, index: int, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"parameter group {index} mixes parameters with and without saved state, and the initial "
        f"state of {name} cannot be determined: {why}; {OWN_GROUP}"
    )


@dataclass(frozen=True, slots=True)
class FlatTarget:
    """Where the masters and states of one flat buffer are received."""

    buffer: LiveFlatBuffer
    fragments: tuple[Fragment, ...]
    master: torch.Tensor
    """The live masters, or a tensor of their shape on the host."""
    in_place: bool
    """Whether ``master`` is the live tensor."""
    states: Mapping[str, torch.Tensor]
    """Element-wise optimizer states, separate from the live ones."""


def flat_target(
    buffer: LiveFlatBuffer,
    fragments: tuple[Fragment, ...],
    states: Mapping[str, torch.Tensor],
    *,
    whole: bool,
) -> FlatTarget:
    """Choose where a flat buffer's masters are received.

    To save a copy, they are received in place if the low-precision weights can rebuild them, as in
    a fresh engine or one that trains in fp32. Unless the ``whole`` buffer is received, the rest
    keeps its values.
    """
    live, low = buffer.values, buffer.low.data
    if not (buffer.swapped or buffer.low is buffer.master) and all(
        same_bits(live[at:end], low[at:end].to(live)) for _, at, end in bounded_runs(fragments)
    ):
        return FlatTarget(buffer, fragments, live, in_place=True, states=states)
    swapped = buffer.swapped
    master = swapped.empty(live.dtype) if swapped else host_zeros(live.shape, live.dtype)
    if not whole:
        master.copy_(live)
    return FlatTarget(buffer, fragments, master, in_place=False, states=states)


def rebuild_masters(targets: Iterable[FlatTarget]) -> None:
    """Undo receiving in place."""
    for target in targets:
        if target.in_place:
            target.buffer.master.data.copy_(target.buffer.low.data)


def round_masters(targets: Iterable[FlatTarget]) -> tuple[torch.Tensor, ...]:
    """Return the received masters in the dtype of the module's weights, on the host.

    They are empty if the weights are the masters.
    """
    rounded = []
    for target in targets:
        buffer = target.buffer
        low = host_zeros(buffer.low.shape if buffer.has_masters else (0,), buffer.low.dtype)
        for start, stop in spans(0, low.numel(), COMPARE_ELEMENTS):
            low[start:stop].copy_(target.master.detach()[start:stop])
        rounded.append(low)
    return tuple(rounded)


def allocate_states(
    inner: Any,
    buffer: LiveFlatBuffer,
    fragments: Iterable[Fragment],
    source: Manifest,
    momentum_dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate the zeroed element-wise states of one flat buffer.

    Parameters that the saved group does not name get the initial values of a fresh state.

    The states are on the host if the live ones can take the values in their own memory, so that the
    device never holds them twice. Otherwise they are on the device, so that a full device is
    detected before ``commit``. Swapped states are received in files.
    """
    master, live = buffer.values, inner.state.get(buffer.state_key, {})
    targets: dict[str, torch.Tensor] = {}
    for key in source.groups[buffer.group].elementwise:
        stepping = adam_of_muon(inner, inner.param_groups[buffer.group])
        dtype = _state_dtype(stepping, key, source, master)
        if key.name == MOMENTUM_KEY and momentum_dtype is not None:
            dtype = momentum_dtype
        if buffer.swapped:
            targets[key.name] = buffer.swapped.empty(dtype)
            continue
        on_host = _has_place(live.get(key.name), buffer.state_key, dtype)
        targets[key.name] = (
            host_zeros((master.numel(),), dtype)
            if on_host or master.device.type == "cpu"
            else torch.zeros(master.numel(), dtype=dtype, device=master.device)
        )
    known = set(source.groups[buffer.group].names)
    fresh = [fragment for fragment in fragments if fragment.name not in known]
    if targets and fresh:
        values = initial_values(inner, buffer.group, source.groups[buffer.group])
        for name, target in targets.items():
            for fragment in fresh:
                end = fragment.offset + fragment.stop - fragment.start
                target[fragment.offset : end] = values[name]
    return targets


def _state_dtype(inner: Any, key: StateKey, source: Manifest, master: torch.Tensor) -> torch.dtype:
    """Return the type in which the live optimizer keeps an element-wise state.

    DeepSpeed's CPU optimizers have an option for fp32. Otherwise Adam's family uses the masters'
    type, and other optimizers do so for states that were saved in the masters' type.
    """
    keeps_fp32 = getattr(inner, "fp32_optimizer_states", None)
    if keeps_fp32:
        return torch.float32
    follows = keeps_fp32 is False or converts_adam_states(inner)
    if follows or key.dtype == source.master_dtype:
        return master.dtype
    dtype: torch.dtype = getattr(torch, key.dtype)
    return dtype


def _has_place(live: object, stepped: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        isinstance(live, torch.Tensor)
        and not live.is_inference()
        and live.shape == stepped.shape
        and live.dtype == dtype
        and live.device == stepped.device
    )


def commit_masters(target: FlatTarget, *, keep_fp32: bool) -> None:
    """Commit masters and zero the padding, which is uninitialised memory in a live engine.

    ``keep_fp32=False`` (DeepSpeed's ``load_from_fp32_weights: false``) rounds the masters to the
    type of the low-precision weights.
    """
    master = target.buffer.master.data
    if not target.in_place:
        master.copy_(target.master)
    if not keep_fp32:  # In bounded parts, as the device may be full.
        for start, stop in spans(0, master.numel(), COMPARE_ELEMENTS):
            master[start:stop] = master[start:stop].to(target.buffer.low.dtype)
    reached = 0
    for fragment in target.fragments:
        master[reached : fragment.offset].zero_()
        reached = fragment.offset + fragment.stop - fragment.start
    master[reached:].zero_()
    target.buffer.write_back()


def commit_state(inner: Any, target: FlatTarget, scalars: Mapping[str, Scalar]) -> None:
    """Commit a flat buffer's states; without any, reset them.

    Nothing is allocated here, as that could fail halfway: live states of the same type take the
    received values (``_take``). Scalars are new, since each buffer needs its own.
    """
    stepped = target.buffer.state_key
    if not target.states and not scalars:
        _reset_state(inner, stepped)
        return
    group = inner.param_groups[target.buffer.group]
    kept = inner.state.get(stepped, {})
    inner.state[stepped] = {
        **{key: _take(kept.get(key), value, stepped) for key, value in target.states.items()},
        **{k: place_scalar(k, v, inner, group, stepped.device) for k, v in scalars.items()},
    }


def _take(live: object, value: torch.Tensor, stepped: torch.Tensor) -> torch.Tensor:
    """Move received values into the live state if they fit; otherwise return a new state.

    On the host, the live tensor takes over the received memory without a copy.
    """
    if isinstance(live, torch.Tensor) and _has_place(live, stepped, value.dtype):
        if not _can_have_other_memory(live):
            return live.copy_(value.view(live.shape))
        live.data = value.view(live.shape)
        return live
    value = value.to(stepped.device)
    if stepped.is_contiguous():
        return value.view(stepped.shape)
    return torch.empty_like(stepped, dtype=value.dtype).copy_(value.view(stepped.shape))


def _can_have_other_memory(live: torch.Tensor) -> bool:
    """Whether nothing else depends on the memory of a live state.

    It may be pinned, shared with another process, or a view of a larger tensor. DeepSpeed's links,
    views of the state, are rebuilt (``refresh_low_precision``).
    """
    from deepspeed.accelerator import get_accelerator

    plain = type(live) is torch.Tensor and live.device.type == "cpu" and live.is_contiguous()
    return (
        plain
        and live.untyped_storage().nbytes() == live.nbytes
        and not live.is_shared()
        and not get_accelerator().is_pinned(live)
    )


def _reset_state(inner: Any, flat: torch.Tensor) -> None:
    """Drop a flat buffer's states, so that the optimizer starts fresh on it.

    torch's Adagrad creates its state only in the constructor, so it is reset in place.
    """
    state = inner.state.get(flat)
    if state and type(inner).__name__ == "Adagrad":
        state["step"].zero_()
        state["sum"].fill_(inner.defaults.get("initial_accumulator_value", 0.0))
    else:
        inner.state.pop(flat, None)


def commit_shared_state(inner: Any, values: RestoreValues, flats: Sequence[FlatTarget]) -> None:
    """Restore the optimizer's state under keys that are not parameters, on the masters' device."""
    live = [key for key in inner.state if not isinstance(key, torch.Tensor)]
    if values.optimizer_state is None:
        if live:
            log.warning(
                "%s: state under the keys %s is not restored and keeps its live values",
                type(inner).__name__,
                live,
            )
        return
    for key in live:
        del inner.state[key]
    device = flats[0].buffer.state_key.device if flats else torch.device("cpu")
    copies = {t: t.to(device) for t in tensors_of(values.optimizer_state)}
    inner.state.update(with_copies(values.optimizer_state, copies))


def commit_groups(inner: Any, values: RestoreValues) -> None:
    """Restore the groups' hyperparameters and counters in place; schedulers refer to the dicts.

    If the classes differ, keys that the live group lacks are ignored. Without the optimizer's
    state, its counters start over.
    """
    if not values.restores_state:
        for group, key in itertools.product(inner.param_groups, group_counters(inner)):
            if group.get(key) is not None:
                group[key] = inner.defaults[key] if key in inner.defaults else 0 * group[key]
    if not (values.restores_state or values.restores_hyperparameters):
        return
    same_class = values.optimizer == type(inner).__name__
    kept = EXECUTION_KEYS | MEMBER_KEYS | {BACKUP_KEY}
    of_state = keys_of_state(inner)
    kept |= frozenset() if values.restores_state else of_state
    for group, saved in zip(inner.param_groups, values.groups, strict=True):
        for key, value in saved.items():
            known = same_class or key in group or key in SCHEDULER_KEYS
            wanted = values.restores_hyperparameters or key in of_state
            if known and wanted and key not in kept:
                group[key] = unplain(value, group.get(key))


def check_scheduler(live: Any, saved: Mapping[str, Any] | None) -> str:
    """Return a warning if only the engine or only the checkpoint has a scheduler, else "".

    Raises CheckpointMismatchError if the saved state is that of another scheduler.
    """
    if live is None and saved is not None:
        return (
            "contains the state of a learning-rate scheduler, and this engine steps none: the "
            "rates stay at their saved values, unless other code sets them"
        )
    if live is None:
        return ""
    if saved is None:
        return (
            f"contains no state of {type(live).__name__}: the learning-rate schedule starts at its "
            "first step"
        )
    _check_same_scheduler(live, saved)
    return ""


def _check_same_scheduler(live: Any, saved: Mapping[str, Any]) -> None:
    state = live.state_dict()
    kept = state.keys()
    # Names with "_" and `verbose` depend on torch's release; nested schedulers do not.
    public, was_public = (
        {key for key in keys if not key.startswith("_")} - {"verbose"} for keys in (kept, saved)
    )
    differ = public - saved.keys() | (kept ^ saved.keys()) & {"_schedulers"}
    if type(live).__module__ == torch.optim.lr_scheduler.__name__:
        differ |= was_public - kept  # Its constructor creates all of them.
    chained, saved_chained = (len(held.get("_schedulers", [])) for held in (state, saved))
    if differ:
        was, now = f"keeps {sorted(saved)}", f"keeps {sorted(kept)}"
    elif chained != saved_chained:
        was, now = f"chains {saved_chained} schedulers", f"chains {chained}"
    else:
        return
    msg = (
        f"the saved learning-rate scheduler {was}, this run's {type(live).__name__} {now}: "
        "configure the saved scheduler, or pass load_hyperparameters=False to start a new one"
    )
    raise CheckpointMismatchError(msg)


def commit_counters(engine: Any, values: RestoreValues) -> None:
    """Restore DeepSpeed's counters, its loss scaler, and the scheduler that it steps."""
    progress = values.progress
    engine.global_steps = progress.global_steps
    engine.global_samples = progress.global_samples * samples_overcount(engine)
    engine.skipped_steps = progress.skipped_steps
    # Whole accumulation windows only: gradients inside a window are not saved.
    windows = progress.micro_steps // max(progress.gradient_accumulation_steps, 1)
    engine.micro_steps = windows * engine.gradient_accumulation_steps()
    restore_loss_scaler(engine, values.loss_scaler, settings=values.restores_hyperparameters)
    if values.lr_scheduler is not None and engine.lr_scheduler is not None:
        live = engine.lr_scheduler.state_dict()
        saved = regrouped(values.lr_scheduler, live, values.group_origins, values.saved_groups)
        engine.lr_scheduler.load_state_dict(cast_like(saved, live))


def commit_optimizer(
    engine: Any, wrapper: str, flats: Sequence[FlatTarget], values: RestoreValues
) -> None:
    """Commit masters, states, groups and counters. Collective; call after all ranks agreed.

    ZeRO-3's parameters must be partitioned.
    """
    optimizer = engine.optimizer
    keep_fp32 = bool(engine.zero_load_from_fp32_weights())
    # If a group starts without state, DeepSpeed links parameters to states at the next step.
    has_state = all(f.states or s for f, s in zip(flats, values.scalars, strict=True))
    forget_swapped_states(optimizer)
    try:
        for flat, scalars in zip(flats, values.scalars, strict=True):
            swapped = flat.buffer.swapped
            with swapped_in(optimizer, swapped.index) if swapped else nullcontext():
                commit_masters(flat, keep_fp32=keep_fp32)
                commit_state(stepping_optimizer(optimizer, flat.buffer.sub_group), flat, scalars)
                place_momentum(optimizer, wrapper, flat.buffer)
        commit_shared_state(inner_optimizer(optimizer), values, flats)
        commit_groups(inner_optimizer(optimizer), values)
        if values.restores_hyperparameters:
            restore_backup_hyperparameters(optimizer, values.groups)
    finally:  # Collective: other ranks wait here even if this one failed.
        refresh_low_precision(optimizer, wrapper, values.module_weights, has_state=has_state)
    commit_counters(engine, values)
    if any(MOMENTUM_KEY in flat.states for flat in flats):
        warn_of_momentum_scale(engine, values.loss_scaler)
    drop_gradients(engine, wrapper)


def drop_gradients(engine: Any, wrapper: str) -> None:
    """Make the next micro-batch the first of its window, as in a new engine."""
    discard_gradients(engine, wrapper)
    # With offload, the masters have gradients in reused memory.
    for buffer in live_flat_buffers(engine.optimizer, wrapper):
        if buffer.master.grad is not None:
            buffer.master.grad.zero_()


def drop_accumulation_window(engine: Any) -> None:
    """Drop the gradients of an incomplete window and count it as complete."""
    drop_gradients(engine, optimizer_wrapper(engine))
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
