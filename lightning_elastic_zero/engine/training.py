"""An engine that trains: what it holds, and how it is given other state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_elastic_zero.engine.module import (
    dtype_name,
    full_shape,
    module_weights,
    parameter_names,
    parameter_table,
    persistent_buffers,
    plain,
    precision_of,
    unplain,
    weight_piece,
    write_buffers,
)
from lightning_elastic_zero.engine.optimizer_state import (
    check_groups_alike,
    check_same_optimizer,
    place_scalar,
    split_state,
    state_keys,
    update_group,
)
from lightning_elastic_zero.engine.support import optimizer_wrapper, version_of
from lightning_elastic_zero.engine.wrappers import (
    LiveBuffer,
    live_buffers,
    refresh_low_precision,
)
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import (
    STAGE_WEIGHTS,
    Group,
    Manifest,
    Plain,
    Progress,
    StateKey,
    Writer,
)
from lightning_elastic_zero.partition import FlatBuffer
from lightning_elastic_zero.state import FlatState, Incoming, RankState, Receiving

COMPARE_ELEMENTS = 1 << 20
"""Elements compared at a time: bounds the memory of comparing masters with weights."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one flat buffer's masters are received."""

    buffer: LiveBuffer
    tensor: torch.Tensor
    in_place: bool


class TrainingEngine:
    """A DeepSpeed engine with a ZeRO optimizer, as state to save and to restore.

    It is made anew for each save and load: DeepSpeed may replace its buffers in between.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 (untyped library)
        """Take a supported engine (``check_supported``)."""
        self._engine = engine
        self._wrapper = optimizer_wrapper(engine) or ""
        self._optimizer = engine.optimizer
        self._stage: int = int(engine.zero_optimization_stage())
        self._names = {p: names[0] for p, names in parameter_names(engine.module).items()}
        if offloaded := getattr(self._optimizer, "offloaded_states", None):
            msg = f"states are offloaded ({offloaded}): call engine.reload_states() first"
            raise UnsupportedError(msg)

    # -- what it holds ---------------------------------------------------------------------

    @cached_property
    def _buffers(self) -> list[LiveBuffer]:
        return live_buffers(self._optimizer, self._wrapper)

    @property
    def _inner(self) -> Any:  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
        return self._optimizer.optimizer

    @property
    def rank(self) -> int:
        """This rank among the data-parallel ones."""
        return int(self._engine.global_rank)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return int(self._engine.seq_dp_world_size)

    def _flat_names(self, buffer: LiveBuffer) -> tuple[str, ...]:
        return tuple(self._names[p] for p in buffer.parameters)

    def describe(self) -> Manifest:
        """Say what the engine is, in the words of a manifest that has no files yet.

        Raises:
            UnsupportedError: an optimizer state or a hyperparameter has no rule.
        """
        groups_of = {p: b.group for b in self._buffers for p in b.parameters}
        engine = self._engine
        return Manifest(
            save_id="",
            stage=self._stage,
            world_size=self.world_size,
            precision=precision_of(engine),
            master_dtype=dtype_name(self._buffers[0].master.dtype),
            parameters=parameter_table(engine.module, groups_of),
            groups=self._groups(),
            buffers=tuple(self._flat_buffer(buffer) for buffer in self._buffers),
            module_buffers=tuple(persistent_buffers(engine.module)),
            files=(),
            progress=Progress(
                global_steps=engine.global_steps,
                global_samples=engine.global_samples,
                skipped_steps=engine.skipped_steps,
                micro_steps=engine.micro_steps,
                gradient_accumulation_steps=engine.gradient_accumulation_steps(),
                global_batch_size=engine.train_batch_size(),
            ),
            writer=Writer(
                torch=torch.__version__,
                deepspeed=version_of("deepspeed"),
                lightning=version_of("lightning"),
                library=version_of("lightning-elastic-zero"),
                engine=self._wrapper,
                optimizer=type(self._inner).__name__,
            ),
        )

    def _flat_buffer(self, buffer: LiveBuffer) -> FlatBuffer:
        """Say how a flat buffer is laid out over all ranks."""
        zero_3 = self._stage == STAGE_WEIGHTS
        numels = tuple(_numel(full_shape(p)) for p in buffer.parameters)
        return FlatBuffer(
            group=buffer.group,
            names=self._flat_names(buffer),
            numels=numels,
            paddings=buffer.paddings if any(buffer.paddings) else (),
            partition_numel=0 if zero_3 else buffer.master.numel(),
        )

    def _groups(self) -> tuple[Group, ...]:
        """Describe the optimizer's parameter groups; a group's buffers must hold like states."""
        keys = [(buffer.group, state_keys(*self._split(buffer))) for buffer in self._buffers]
        first: dict[int, tuple[StateKey, ...]] = {}
        for group, table in keys:
            first.setdefault(group, table)
        groups = tuple(
            Group(
                names=self._group_names(index),
                hyperparameters={
                    key: plain(value, f"{key!r} of parameter group {index}")
                    for key, value in group.items()
                    if key != "params"
                },
                state=first.get(index, ()),
            )
            for index, group in enumerate(self._inner.param_groups)
        )
        check_groups_alike(groups, keys)
        return groups

    def _group_names(self, group: int) -> tuple[str, ...]:
        """Names in the optimizer's own order, which ``round_robin_gradients`` does not change."""
        members = {p for b in self._buffers if b.group == group for p in b.parameters}
        return tuple(name for p, name in self._names.items() if p in members)

    def _split(self, buffer: LiveBuffer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        state = self._inner.state.get(buffer.master, {})
        return split_state(state, buffer.master, type(self._inner).__name__)

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Give all that this rank holds, by reference; no collective, nothing is changed.

        Args:
            exclude_frozen: leave out the weights that the optimizer does not own.
            keep_module_weights: add the low-precision weights, as the module has them.
        """
        module = self._engine.module
        scheduler = self._engine.lr_scheduler
        return RankState(
            flats=tuple(self._flat_state(i, buffer) for i, buffer in enumerate(self._buffers)),
            frozen={} if exclude_frozen else self._frozen_pieces(),
            module_buffers=persistent_buffers(module),
            module_weights=module_weights(module) if keep_module_weights else {},
            loss_scaler=self._loss_scaler(),
            lr_scheduler=scheduler.state_dict() if scheduler is not None else None,
        )

    def _flat_state(self, index: int, buffer: LiveBuffer) -> FlatState:
        elementwise, scalars = self._split(buffer)
        return FlatState(
            fragments=buffer.fragments(self._flat_names(buffer), self.rank, index),
            master=buffer.master.detach(),
            elementwise=elementwise,
            scalars=scalars,
        )

    def _frozen(self) -> dict[str, torch.nn.Parameter]:
        owned = {p for b in self._buffers for p in b.parameters}
        return {name: p for p, name in self._names.items() if p not in owned}

    def _frozen_pieces(self) -> dict[str, torch.Tensor]:
        return {name: weight_piece(p)[1] for name, p in self._frozen().items()}

    def _loss_scaler(self) -> dict[str, Plain]:
        """Give the scaler's class and its plain fields."""
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if scaler is None:
            return {}
        fields = {k: v for k, v in vars(scaler).items() if isinstance(v, (bool, int, float))}
        return {"class": type(scaler).__name__, **fields}

    # -- how it is given other state ---------------------------------------------------------

    def partition(self) -> None:
        """ZeRO-3: partition the parameters that are gathered (collective)."""
        if self._stage == STAGE_WEIGHTS:
            self._optimizer.checkpoint_event_prologue()

    def gather_persistent(self) -> None:
        """ZeRO-3: gather the parameters that stay gathered between steps (collective)."""
        if self._stage == STAGE_WEIGHTS:
            self._optimizer.checkpoint_event_epilogue()

    def check_optimizer(self, source: Manifest) -> None:
        """Refuse state of another optimizer.

        Raises:
            CheckpointMismatchError: the saved state belongs to another class.
        """
        check_same_optimizer(source.writer.optimizer, type(self._inner).__name__)

    def receive(self, source: Manifest, *, with_optimizer: bool) -> Receiving:
        """Give buffers to fill with what this rank wants of a checkpoint.

        Nothing live is lost before ``commit``: optimizer states and frozen weights are received
        beside the live ones. Masters are received in place where the low-precision weights can
        rebuild them (a fresh engine, or one that trains in fp32), else beside them too.
        """
        self.partition()
        self._targets = [self._target(buffer) for buffer in self._buffers]
        fragments = [
            fragment
            for index, buffer in enumerate(self._buffers)
            for fragment in buffer.fragments(self._flat_names(buffer), self.rank, index)
        ]
        weights = [target.tensor for target in self._targets]
        held = {p.name for p in source.parameters} - set(source.excluded)
        for name, parameter in self._frozen().items():
            start, piece = weight_piece(parameter)
            if name in held and piece.numel():
                stop = start + piece.numel()
                fragments.append(Fragment(name, start, stop, self.rank, len(weights), 0))
                weights.append(torch.empty_like(piece, device="cpu"))
        return Receiving(
            fragments=tuple(fragments),
            weights=tuple(weights),
            states=tuple(
                self._state_targets(target.buffer, source) if with_optimizer else {}
                for target in self._targets
            ),
        )

    def _target(self, buffer: LiveBuffer) -> _Target:
        in_place = _masters_are_weights(buffer)
        master = buffer.master.data
        return _Target(buffer, master if in_place else torch.empty_like(master, device="cpu"), in_place)

    def _state_targets(self, buffer: LiveBuffer, source: Manifest) -> dict[str, torch.Tensor]:
        """Allocate the element-wise states of one buffer, zeroed: padding stays zero."""
        master = buffer.master
        # A live state means that its memory is taken already: receive beside it, on the host.
        device = "cpu" if self._inner.state.get(master) else master.device
        return {
            key.name: torch.zeros(
                master.numel(),
                # States kept in the masters' dtype follow the live masters' one.
                dtype=master.dtype if key.dtype == source.master_dtype else getattr(torch, key.dtype),
                device=device,
            )
            for key in source.groups[buffer.group].state
            if key.kind == "elementwise"
        }

    def abandon(self) -> None:
        """Undo ``receive`` after a failure: masters that were received in place are rebuilt.

        No collective: a rank may be lost. ZeRO-3 gathers what it needs at the next forward.
        """
        for target in self._targets:
            if target.in_place:
                target.buffer.master.data.copy_(target.buffer.low.data)

    @torch.no_grad()
    def commit(self, received: Receiving, incoming: Incoming) -> None:
        """Take what was received: collective, after all ranks have agreed that all is well."""
        for index, target in enumerate(self._targets):
            master = target.buffer.master.data
            if not target.in_place:
                master.copy_(received.weights[index])
            if not self._engine.zero_load_from_fp32_weights():
                # What the user's config asks for: masters without what rounding takes away.
                master.copy_(master.to(target.buffer.low.dtype))
            _zero_padding(master, target.buffer)
            self._commit_state(target.buffer, received.states[index], incoming.scalars[index])
        if incoming.hyperparameters is not None:
            self._commit_groups(incoming)
        has_state = any(received.states) or any(incoming.scalars)
        refresh_low_precision(self._optimizer, self._wrapper, has_state=has_state)
        self._commit_frozen(received)
        write_buffers(self._engine.module, incoming.module_buffers)
        self._commit_counters(incoming)
        self.gather_persistent()

    def _commit_state(
        self, buffer: LiveBuffer, elementwise: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]
    ) -> None:
        """Hang new states onto a flat buffer; none of them: the optimizer makes fresh ones."""
        master, inner = buffer.master, self._inner
        if not elementwise and not scalars:
            _forget_state(inner, master)
            return
        group, live = inner.param_groups[buffer.group], type(inner).__name__
        inner.state[master] = {
            **{k: v.to(master.device) for k, v in elementwise.items()},
            **{k: place_scalar(k, v, live, group, master.device) for k, v in scalars.items()},
        }

    def _commit_groups(self, incoming: Incoming) -> None:
        same_class = incoming.optimizer == type(self._inner).__name__
        for group, saved in zip(
            self._inner.param_groups, incoming.hyperparameters or (), strict=True
        ):
            update_group(group, saved, same_class=same_class, restore=unplain)

    def _commit_frozen(self, received: Receiving) -> None:
        frozen = self._frozen()
        for fragment in received.fragments:
            if fragment.buffer >= len(self._targets):
                _, piece = weight_piece(frozen[fragment.name])
                piece.copy_(received.weights[fragment.buffer])

    def _commit_counters(self, incoming: Incoming) -> None:
        engine, progress = self._engine, incoming.progress
        engine.global_steps = progress.global_steps
        engine.global_samples = progress.global_samples
        engine.skipped_steps = progress.skipped_steps
        # Whole accumulation windows only: gradients inside a window are in no checkpoint.
        windows = progress.micro_steps // max(progress.gradient_accumulation_steps, 1)
        engine.micro_steps = windows * engine.gradient_accumulation_steps()
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if scaler is not None and incoming.loss_scaler.get("class") == type(scaler).__name__:
            for key in vars(scaler).keys() & incoming.loss_scaler.keys():
                setattr(scaler, key, incoming.loss_scaler[key])
        if incoming.lr_scheduler is not None and engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(dict(incoming.lr_scheduler))


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _masters_are_weights(buffer: LiveBuffer) -> bool:
    """Tell whether a flat buffer's masters are exactly its low-precision weights, widened."""
    for _, start, stop, offset in buffer.places:
        for at in range(offset, offset + stop - start, COMPARE_ELEMENTS):
            end = min(at + COMPARE_ELEMENTS, offset + stop - start)
            master = buffer.master.data[at:end]
            if not torch.equal(master, buffer.low.data[at:end].to(master)):
                return False
    return True


def _zero_padding(flat: torch.Tensor, buffer: LiveBuffer) -> None:
    """Zero what no piece covers: live padding is uninitialised memory."""
    reached = 0
    for _, start, stop, offset in buffer.places:
        flat[reached:offset].zero_()
        reached = offset + stop - start
    flat[reached:].zero_()


def _forget_state(optimizer: Any, flat: torch.Tensor) -> None:  # noqa: ANN401
    """Drop a flat buffer's states, so that the optimizer starts fresh on it.

    Optimizers that make their state when they are constructed (torch's Adagrad) cannot make it
    again: theirs is set back to its start in place.
    """
    state = optimizer.state.get(flat)
    if state and type(optimizer).__name__ == "Adagrad":
        state["step"].zero_()
        state["sum"].fill_(optimizer.defaults.get("initial_accumulator_value", 0.0))
    else:
        optimizer.state.pop(flat, None)
