"""Putting received state into a live optimizer: masters, states, groups, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import LiveFlatBuffer
from lightning_elastic_zero.engine.module import unplain
from lightning_elastic_zero.engine.optimizer_state import place_scalar, update_group
from lightning_elastic_zero.engine.places import COMPARE_ELEMENTS, bounded_runs
from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.tensor_state import RestoreTargets, RestoreValues, Scalar, cast_like


@dataclass(frozen=True, slots=True)
class Target:
    """Where one flat buffer's masters are received."""

    buffer: LiveFlatBuffer
    fragments: tuple[Fragment, ...]
    """What this rank holds in it."""
    tensor: torch.Tensor
    """The live masters, or a tensor of their shape on the host."""
    in_place: bool

    def copy_live_masters(self) -> None:
        """Begin with the live masters, where the checkpoint does not hold all of them."""
        if not self.in_place:
            self.tensor.copy_(self.buffer.master.data)


def master_target(buffer: LiveFlatBuffer, fragments: tuple[Fragment, ...]) -> Target:
    """Choose where a flat buffer's masters are received.

    In place, where the low-precision weights can rebuild what is overwritten: that is so in a
    fresh engine, and in one that trains in fp32. It saves one more copy of the masters.
    """
    master = buffer.master.data
    low = buffer.low.data
    if all(
        torch.equal(master[at:end], low[at:end].to(master))
        for _, at, end in bounded_runs(fragments)
    ):
        return Target(buffer, fragments, master, in_place=True)
    return Target(buffer, fragments, torch.empty_like(master, device="cpu"), in_place=False)


def rebuild_masters(targets: Sequence[Target]) -> None:
    """Undo receiving in place."""
    for target in targets:
        if target.in_place:
            target.buffer.master.data.copy_(target.buffer.low.data)


def state_targets(inner: Any, buffer: LiveFlatBuffer, source: Manifest) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Allocate the element-wise states of one flat buffer, zeroed: padding stays zero.

    On the host, where a live state will take the values in its own memory: the device never holds
    it twice. Otherwise on the device, so that one that is full is found out before ``commit``.
    """
    master, live = buffer.master, inner.state.get(buffer.master, {})
    targets: dict[str, torch.Tensor] = {}
    for key in source.groups[buffer.group].state:
        if key.kind == "elementwise":
            dtype = _state_dtype(key.dtype, source, master)
            device = "cpu" if _has_place(live.get(key.name), master, dtype) else master.device
            targets[key.name] = torch.zeros(master.numel(), dtype=dtype, device=device)
    return targets


def _has_place(live: object, master: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a live state can take values of a type for each element of the masters."""
    return (
        isinstance(live, torch.Tensor)
        and live.shape == master.shape
        and live.dtype == dtype
        and live.device == master.device
    )


def _state_dtype(saved: str, source: Manifest, master: torch.Tensor) -> torch.dtype:
    """Return a state's dtype: one kept in the masters' dtype follows the live masters' one."""
    dtype: torch.dtype = master.dtype if saved == source.master_dtype else getattr(torch, saved)
    return dtype


def commit_masters(targets: Sequence[Target], filled: RestoreTargets, *, keep_fp32: bool) -> None:
    """Commit the masters; padding, which is uninitialised memory in a live engine, is zeroed.

    Args:
        targets: where they were received.
        filled: the filled tensors.
        keep_fp32: False is DeepSpeed's ``load_from_fp32_weights: false``: masters without what
            rounding to the low-precision weights takes away.
    """
    for index, target in enumerate(targets):
        master = target.buffer.master.data
        if not target.in_place:
            master.copy_(filled.weights[index])
        if not keep_fp32:
            _round(master, target.buffer.low.dtype)
        reached = 0
        for fragment in target.fragments:
            master[reached : fragment.offset].zero_()
            reached = fragment.offset + fragment.stop - fragment.start
        master[reached:].zero_()


def _round(master: torch.Tensor, dtype: torch.dtype) -> None:
    """Round masters to a narrower type, a bounded part at a time: the device may be full."""
    for start in range(0, master.numel(), COMPARE_ELEMENTS):
        part = master[start : start + COMPARE_ELEMENTS]
        part.copy_(part.to(dtype))


def commit_state(
    inner: Any,  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
    buffer: LiveFlatBuffer,
    elementwise: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Scalar],
) -> None:
    """Commit a flat buffer's states; without any the optimizer starts fresh on it.

    Live states of the same type are overwritten where they are: they may be pinned or linked to,
    and what is allocated now could fail half-way. Scalars are new: each buffer needs its own.
    """
    master = buffer.master
    if not elementwise and not scalars:
        _reset_state(inner, master)
        return
    group, live = inner.param_groups[buffer.group], type(inner).__name__
    kept = inner.state.get(master, {})
    inner.state[master] = {
        **{key: _take(kept.get(key), value, master) for key, value in elementwise.items()},
        **{k: place_scalar(k, v, live, group, master.device) for k, v in scalars.items()},
    }


def _take(live: object, value: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Copy received values into the live state if they fit; else return them on its device."""
    if isinstance(live, torch.Tensor) and _has_place(live, master, value.dtype):
        return live.copy_(value)
    return value.to(master.device)


def _reset_state(inner: Any, flat: torch.Tensor) -> None:  # noqa: ANN401
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


def commit_groups(inner: Any, restore_values: RestoreValues) -> None:  # noqa: ANN401
    """Restore each parameter group's hyperparameters, in place, where they are to be restored."""
    if restore_values.hyperparameters is None:
        return
    same_class = restore_values.optimizer == type(inner).__name__
    for group, saved in zip(inner.param_groups, restore_values.hyperparameters, strict=True):
        update_group(group, saved, same_class=same_class, restore=unplain)


def check_scheduler(live: Any, saved: Mapping[str, object]) -> None:  # noqa: ANN401
    """Refuse the state of another kind of scheduler, which would fail when all else is restored.

    Args:
        live: the scheduler that the engine steps; None where it steps none.
        saved: the state of the one that was saved.

    Raises:
        CheckpointMismatchError: it lacks what the live one keeps.
    """
    if live is None:
        return
    kept = live.state_dict().keys()
    # What begins with "_" and `verbose` come and go with releases of torch; nested states do not.
    public = {key for key in kept if not key.startswith("_")} - {"verbose"}
    lacking = public - saved.keys() | (kept ^ saved.keys()) & {"_schedulers"}
    if lacking:
        msg = (
            f"the learning-rate scheduler that was saved kept {sorted(saved)}; "
            f"{type(live).__name__}, which this run has, keeps {sorted(kept)}: configure the "
            "scheduler that was saved, or pass load_hyperparameters=False to start a new one"
        )
        raise CheckpointMismatchError(msg)


def commit_counters(engine: Any, restore_values: RestoreValues) -> None:  # noqa: ANN401 (untyped library)
    """Restore what DeepSpeed counts, its loss scaler, and the scheduler that it steps itself."""
    progress = restore_values.progress
    engine.global_steps = progress.global_steps
    engine.global_samples = progress.global_samples
    engine.skipped_steps = progress.skipped_steps
    # Whole accumulation windows only: gradients inside a window are in no checkpoint.
    windows = progress.micro_steps // max(progress.gradient_accumulation_steps, 1)
    engine.micro_steps = windows * engine.gradient_accumulation_steps()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and restore_values.loss_scaler.get("class") == type(scaler).__name__:
        for key in vars(scaler).keys() & restore_values.loss_scaler.keys():
            setattr(scaler, key, restore_values.loss_scaler[key])
    if restore_values.lr_scheduler is not None and engine.lr_scheduler is not None:
        scheduler = engine.lr_scheduler
        scheduler.load_state_dict(
            cast_like(dict(restore_values.lr_scheduler), scheduler.state_dict())
        )
