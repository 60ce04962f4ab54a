"""Putting received state into a live optimizer: masters, states, groups, counters.

The states of a parameter that has none yet, in a flat buffer whose others are restored.

Commit of the optimizer's received state: every flat buffer, and all that goes with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, spans
from lightning_elastic_zero.core.manifest import Group, Manifest, StateKey
from lightning_elastic_zero.core.names import MEMBER_KEYS, OWN_GROUP, regrouped
from lightning_elastic_zero.core.tensors import (
    RestoreValues,
    Scalar,
    cast_like,
    host_zeros,
    same_bits,
    unplain,
)
from lightning_elastic_zero.engine.addresses import COMPARE_ELEMENTS, bounded_runs
from lightning_elastic_zero.engine.buffers import (
    LiveFlatBuffer,
    forget_swapped_states,
    inner_optimizer,
    refresh_low_precision,
    swapped_in,
)
from lightning_elastic_zero.engine.loss_scale import restore_loss_scaler, warn_of_momentum_scale
from lightning_elastic_zero.engine.muon import MOMENTUM_KEY, place_momentum
from lightning_elastic_zero.engine.optimizer import (
    ADAM_FAMILY,
    BACKUP_KEY,
    EXECUTION_KEYS,
    SCHEDULER_KEYS,
    place_scalar,
    probe_after_a_step,
    restore_backup_hyperparameters,
    stepping_optimizer,
)
from lightning_elastic_zero.engine.step import drop_gradients
from lightning_elastic_zero.errors import CheckpointMismatchError


def initial_values(
    inner: Any,
    index: int,
    held: Group,
) -> dict[str, float]:
    """Return what each element-wise state is in a parameter whose gradients were zero so far.

    Args:
        inner: the live optimizer.
        index: of its parameter group.
        held: the saved group that it goes on with.

    Raises:
        CheckpointMismatchError: it depends on the weights, or cannot be found out.
    """
    name = type(inner).__name__
    # Weights that are not zero would decay.
    settings = {**held.hyperparameters, "weight_decay": 0.0}
    try:
        states = probe_after_a_step(inner, index, settings)
    except Exception as error:
        why = f"cannot be found out by a step of another {name} ({error!r})"
        raise CheckpointMismatchError(_refusal(name, index, why)) from error
    found: dict[str, float] = {}
    for key in held.state:
        if key.kind != "elementwise":
            continue
        state = states.get(key.name)
        if not isinstance(state, torch.Tensor) or state.ndim != 1:
            why = f"is not known: {name} does not keep {key.name!r} from its first step on"
            raise CheckpointMismatchError(_refusal(name, index, why))
        if not torch.equal(state[:1], state[1:]):
            why = f"is not one value: {key.name!r} begins with the weights"
            raise CheckpointMismatchError(_refusal(name, index, why))
        found[key.name] = float(state[0])
    return found


def _refusal(name: str, index: int, why: str) -> str:
    return (
        f"parameter group {index} has parameters without a saved state beside others with one, and "
        f"what {name} begins with {why}; {OWN_GROUP}"
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlatTarget:
    """Where the masters and the states of one flat buffer are received."""

    buffer: LiveFlatBuffer
    fragments: tuple[Fragment, ...]
    """What this rank holds in it."""
    master: torch.Tensor
    """The live masters, or a tensor of their shape on the host."""
    in_place: bool
    """Whether it is the live ones."""
    states: Mapping[str, torch.Tensor]
    """Element-wise optimizer states, beside the live ones."""


def flat_target(
    buffer: LiveFlatBuffer,
    fragments: tuple[Fragment, ...],
    states: Mapping[str, torch.Tensor],
    *,
    whole: bool,
) -> FlatTarget:
    """Choose where a flat buffer's masters are received.

    In place, where the low-precision weights can rebuild what is overwritten: that is so in a
    fresh engine, and in one that trains in fp32. It saves one more copy of the masters.

    Args:
        buffer: the live one.
        fragments: what this rank holds in it.
        states: where its states are received.
        whole: whether all of it is received; else what is not stays as it is.
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


def allocate_states(
    inner: Any,
    buffer: LiveFlatBuffer,
    fragments: Iterable[Fragment],
    source: Manifest,
    momentum_dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate the element-wise states of one flat buffer, zeroed: padding stays zero.

    Parameters that the saved group does not name get what a fresh one has, as far as the optimizer
    does not begin with zeros.

    On the host, where a live state will take the values in its own memory: the device never holds
    it twice. Otherwise on the device, so that one that is full is found out before ``commit``. In
    files, where the live ones are.

    Args:
        inner: the optimizer that steps the buffer.
        buffer: the live one.
        fragments: what this rank holds in it.
        source: the checkpoint, its groups in the order of the live ones.
        momentum_dtype: of Muon's momentum (``muon.momentum_dtype``): received in it, a number that
            is too large for it is refused while nothing has changed.
    """
    master, live = buffer.values, inner.state.get(buffer.key, {})
    targets: dict[str, torch.Tensor] = {}
    for key in source.groups[buffer.group].state:
        if key.kind == "elementwise":
            dtype = _state_dtype(inner, key, source, master)
            if key.name == MOMENTUM_KEY and momentum_dtype is not None:
                dtype = momentum_dtype
            if buffer.swapped:
                targets[key.name] = buffer.swapped.empty(dtype)
                continue
            has_place = _has_place(live.get(key.name), buffer.key, dtype)
            on_host = has_place or master.device.type == "cpu"
            targets[key.name] = (
                host_zeros((master.numel(),), dtype)
                if on_host
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


def _state_dtype(
    inner: Any,
    key: StateKey,
    source: Manifest,
    master: torch.Tensor,
) -> torch.dtype:
    """Return the type in which the live optimizer keeps an element-wise state.

    DeepSpeed's for the host say it; other kinds of Adam follow the masters, whatever saved the
    state. Of what else there is, one that was saved in the masters' type follows the live ones.
    """
    keeps_fp32 = getattr(inner, "fp32_optimizer_states", None)
    if keeps_fp32:
        return torch.float32
    follows = keeps_fp32 is False or type(inner).__name__ in ADAM_FAMILY
    if follows or key.dtype == source.master_dtype:
        return master.dtype
    dtype: torch.dtype = getattr(torch, key.dtype)
    return dtype


def _has_place(live: object, stepped: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a live state can take values of a type for each element that is stepped."""
    return (
        isinstance(live, torch.Tensor)
        and not live.is_inference()
        and live.shape == stepped.shape
        and live.dtype == dtype
        and live.device == stepped.device
    )


def commit_masters(target: FlatTarget, *, keep_fp32: bool) -> None:
    """Commit masters; padding, which is uninitialised memory in a live engine, is zeroed.

    Args:
        target: where they were received.
        keep_fp32: False is DeepSpeed's ``load_from_fp32_weights: false``: masters without what
            rounding to the low-precision weights takes away.
    """
    master = target.buffer.master.data
    if not target.in_place:
        master.copy_(target.master)
    if not keep_fp32:
        _round(master, target.buffer.low.dtype)
    reached = 0
    for fragment in target.fragments:
        master[reached : fragment.offset].zero_()
        reached = fragment.offset + fragment.stop - fragment.start
    master[reached:].zero_()
    target.buffer.write_back()


def _round(master: torch.Tensor, dtype: torch.dtype) -> None:
    """Round masters to a narrower type, a bounded part at a time: the device may be full."""
    for start, stop in spans(0, master.numel(), COMPARE_ELEMENTS):
        master[start:stop] = master[start:stop].to(dtype)


def commit_state(inner: Any, target: FlatTarget, scalars: Mapping[str, Scalar]) -> None:
    """Commit a flat buffer's states; without any the optimizer starts fresh on it.

    Nothing is allocated now, which could fail half-way: live states of the same type take what was
    received (``_take``). Scalars are new: each buffer needs its own.
    """
    stepped = target.buffer.key
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
    """Place received values in the live state if they fit; else return them instead of it.

    It stays the tensor that it is, for whoever holds it. On the host the memory in which the values
    were received becomes its own, and they are not copied once more.
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
    """Whether nobody needs the memory that a live state has now.

    Such are a device that reads or writes it (it is the device's, or pinned), another process, and
    a larger tensor of which it is a view. DeepSpeed's links, which are views of the state, are made
    anew (``refresh_low_precision``).
    """
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 (takes seconds to import)

    plain = type(live) is torch.Tensor and live.device.type == "cpu" and live.is_contiguous()
    return (
        plain
        and live.untyped_storage().nbytes() == live.nbytes
        and not live.is_shared()  # type: ignore[no-untyped-call]
        and not get_accelerator().is_pinned(live)
    )


def _reset_state(inner: Any, flat: torch.Tensor) -> None:
    """Drop a flat buffer's states, so that the optimizer starts fresh on it.

    Optimizers that make their state when they are constructed (torch's Adagrad) cannot make it
    again: theirs is set back to its start in place.
    """
    state = inner.state.get(flat)
    if state and type(inner).__name__ == "Adagrad":
        state["step"].zero_()
        state["sum"].fill_(inner.defaults.get("initial_accumulator_value", 0.0))
    else:
        inner.state.pop(flat, None)


def commit_shared_state(inner: Any, values: RestoreValues, flats: Sequence[FlatTarget]) -> None:
    """Restore what the optimizer keeps under keys that are not parameters, as it was saved.

    Tensors go to the device of the masters: where each was is not saved.
    """
    live = [key for key in inner.state if not isinstance(key, torch.Tensor)]
    if values.optimizer_state is None:
        if live:
            log.warning(
                "%s keeps state under the keys %s, which is not restored: it stays as it is",
                type(inner).__name__,
                live,
            )
        return
    for key in live:
        del inner.state[key]
    device = flats[0].buffer.key.device if flats else torch.device("cpu")
    inner.state.update(_on_device(values.optimizer_state, device))


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, _on_device(v, device)) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(v, device) for v in value)
    return value


def commit_groups(inner: Any, values: RestoreValues) -> None:
    """Restore the groups' hyperparameters in place: schedulers hold on to the dicts.

    Where another class of optimizer saved them, what only it has is left out.
    """
    if values.hyperparameters is None:
        return
    same_class = values.optimizer == type(inner).__name__
    for group, saved in zip(inner.param_groups, values.hyperparameters, strict=True):
        for key, value in saved.items():
            known = same_class or key in group or key in SCHEDULER_KEYS
            if known and key not in EXECUTION_KEYS | MEMBER_KEYS | {BACKUP_KEY}:
                group[key] = unplain(value, group.get(key))


_START_NEW_SCHEDULER = (
    "configure the scheduler that was saved, or pass load_hyperparameters=False to start a new one"
)


def check_scheduler(live: Any, saved: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of scheduler, which would fail when all else is restored.

    Args:
        live: the scheduler that the engine steps; None where it steps none.
        saved: the state of the one that was saved.

    Raises:
        CheckpointMismatchError: it lacks what the live one keeps.
    """
    if live is None:
        return
    state = live.state_dict()
    kept = state.keys()
    # What begins with "_" and `verbose` come and go with releases of torch; nested states do not.
    public = {key for key in kept if not key.startswith("_")} - {"verbose"}
    lacking = public - saved.keys() | (kept ^ saved.keys()) & {"_schedulers"}
    chained, saved_chained = (held.get("_schedulers", []) for held in (state, saved))
    if not lacking and len(chained) != len(saved_chained):
        msg = (
            f"the learning-rate scheduler that was saved was a chain of {len(saved_chained)} "
            f"schedulers; {type(live).__name__}, which this run has, is one of {len(chained)}: "
            f"{_START_NEW_SCHEDULER}"
        )
        raise CheckpointMismatchError(msg)
    if lacking:
        msg = (
            f"the learning-rate scheduler that was saved kept {sorted(saved)}; "
            f"{type(live).__name__}, which this run has, keeps {sorted(kept)}: "
            f"{_START_NEW_SCHEDULER}"
        )
        raise CheckpointMismatchError(msg)


def commit_counters(engine: Any, values: RestoreValues) -> None:
    """Restore what DeepSpeed counts, its loss scaler, and the scheduler that it steps itself."""
    progress = values.progress
    engine.global_steps = progress.global_steps
    engine.global_samples = progress.global_samples
    engine.skipped_steps = progress.skipped_steps
    # Whole accumulation windows only: gradients inside a window are in no checkpoint.
    windows = progress.micro_steps // max(progress.gradient_accumulation_steps, 1)
    engine.micro_steps = windows * engine.gradient_accumulation_steps()
    restore_loss_scaler(engine, values.loss_scaler, settings=values.hyperparameters is not None)
    if values.lr_scheduler is not None and engine.lr_scheduler is not None:
        scheduler = engine.lr_scheduler
        live = scheduler.state_dict()
        saved = regrouped(values.lr_scheduler, live, values.group_origins, values.saved_groups)
        scheduler.load_state_dict(cast_like(saved, live))


def commit_optimizer(
    engine: Any,
    wrapper: str,
    flats: Sequence[FlatTarget],
    values: RestoreValues,
) -> None:
    """Commit masters, states, groups and counters: collective, once all ranks agree.

    Args:
        engine: a live one, its parameters partitioned (ZeRO-3).
        wrapper: class name of its optimizer wrapper.
        flats: each flat buffer, with what was received for it.
        values: what comes beside it.
    """
    optimizer = engine.optimizer
    keep_fp32 = bool(engine.zero_load_from_fp32_weights())
    # Where a group begins without, DeepSpeed links parameters to states at the next step.
    has_state = all(f.states or s for f, s in zip(flats, values.scalars, strict=True))
    forget_swapped_states(optimizer)
    try:
        for flat, scalars in zip(flats, values.scalars, strict=True):
            with swapped_in(flat.buffer.swapped):
                commit_masters(flat, keep_fp32=keep_fp32)
                commit_state(stepping_optimizer(optimizer, flat.buffer.sub_group), flat, scalars)
                place_momentum(optimizer, wrapper, flat.buffer)
        commit_shared_state(inner_optimizer(optimizer), values, flats)
        commit_groups(inner_optimizer(optimizer), values)
        restore_backup_hyperparameters(optimizer, values.hyperparameters)
    finally:  # Other ranks wait in here for one that has failed.
        refresh_low_precision(optimizer, wrapper, has_state=has_state)
    commit_counters(engine, values)
    if any(MOMENTUM_KEY in flat.states for flat in flats):
        warn_of_momentum_scale(engine, values.loss_scaler)
    drop_gradients(engine)
