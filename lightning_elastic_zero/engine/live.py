"""A live DeepSpeed engine as state to save and to restore (``LiveEngine``).

``support`` refuses unsupported engines, ``buffers`` finds each wrapper's flat buffers,
``addresses`` computes and verifies the fragments in them, and ``restore`` commits received state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from lightning_elastic_zero.core.cuts import Cut
from lightning_elastic_zero.core.layout import Fragment
from lightning_elastic_zero.core.manifest import (
    STAGE_WEIGHTS,
    Group,
    Manifest,
    Parameter,
    TensorParallel,
    TrainingProgress,
    Writer,
)
from lightning_elastic_zero.core.partition import FlatBuffer
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.core.tensors import (
    FlatState,
    RankState,
    RestoreTargets,
    RestoreValues,
    Scalar,
    bit_sums,
    dtype_name,
    is_on_device,
    numpy_to_python,
)
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.addresses import (
    allocate_pieces,
    check_not_inference,
    drop_secondary_tensors,
    flat_buffer_row,
    forward_piece,
    full_shape,
    module_weights,
    own_slices,
    parameter_names,
    persistent_buffers,
    rank_fragments,
    verify_addresses,
    verify_pieces,
    weight_piece,
    weight_pieces,
    without_equal_weights,
    write_buffers,
    write_piece,
)
from lightning_elastic_zero.engine.buffers import (
    REPLICATED,
    LiveFlatBuffer,
    group_parameters,
    inner_optimizer,
    live_flat_buffers,
    optimizer_wrapper,
    refuse_offloaded,
    weights_are_offloaded,
    without_copies,
)
from lightning_elastic_zero.engine.deepspeed import PLAIN, micro_batches_since_step
from lightning_elastic_zero.engine.loss_scale import loss_scaler_fields
from lightning_elastic_zero.engine.muon import (
    keeps_whole_momenta,
    momentum_dtype,
    partitioned_momentum,
)
from lightning_elastic_zero.engine.optimizer import (
    MODE_KEY,
    describe_groups,
    is_stepped_on_device,
    keys_of_state,
    shared_state,
    split_state,
    stepping_optimizer,
    with_group_steps,
)
from lightning_elastic_zero.engine.optimizer_checks import (
    check_configured_state,
    check_lacking_hyperparameters,
    check_same_optimizer,
    check_unnamed_hyperparameters,
    check_unnamed_state,
    weight_decay_change,
)
from lightning_elastic_zero.engine.restore import (
    FlatTarget,
    allocate_states,
    check_scheduler,
    commit_optimizer,
    flat_target,
    rebuild_masters,
    round_masters,
)
from lightning_elastic_zero.engine.support import check_supported
from lightning_elastic_zero.engine.tensor_parallel import (
    cuts_of,
    global_batch,
    samples_overcount,
    tensor_ranks,
)
from lightning_elastic_zero.errors import UnsupportedError

log = logging.getLogger(__name__)


class LiveEngine:
    """A DeepSpeed engine as state to save and to restore.

    Create a new one for each save and load, since DeepSpeed may replace its buffers in between.
    Nothing is read before ``check``, which a step of all ranks calls. The weights of an engine that
    only evaluates are treated as frozen.

    ``places_checked``: ``verify_addresses`` has already passed. Later, only a user can have
    replaced weights, which does not affect the masters.
    """

    def __init__(self, engine: Any, *, places_checked: bool = False) -> None:
        self._engine = engine
        self._places_checked = places_checked

    def check(self) -> None:
        check_supported(self._engine)
        if not self._places_checked:
            self.verify_addresses(fresh=False)

    # -- steps -------------------------------------------------------------------------------

    def at_step(self) -> str:
        """Return the position of the run, which identifies a call across ranks."""
        return f"at step {getattr(self._engine, 'global_steps', 0)}"

    def add_step_pre_hook(self, call: Callable[[], None]) -> Callable[[], None]:
        """Run a callback right before the optimizer changes its state.

        DeepSpeed's wrappers call ``step`` of the wrapped optimizer only at the end of a window of
        micro-batches and without a gradient overflow; ZeRO-3 calls it once per sub-group. Returns a
        function that removes the hook. Raises UnsupportedError if an optimizer calls no hooks.
        """
        if not self._wrapper:  # nothing steps
            return lambda: None
        inner = self._inner
        # With partial offload, a second optimizer steps the first sub-groups.
        stepping = [inner, *filter(None, [getattr(self._optimizer, "backup_optimizer", None)])]
        for each in stepping:
            # torch marks it so when a constructor of torch.optim.Optimizer wraps it.
            if not getattr(type(each).step, "hooked", False):
                msg = (
                    f"{type(each).__name__} does not call the hooks of torch.optim.Optimizer in "
                    "step(): call super().__init__() in its constructor, or save without async_save"
                )
                raise UnsupportedError(msg)
        handles = [each.register_step_pre_hook(lambda *_: call()) for each in stepping]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def updates_state_before_step(self) -> bool:
        """Whether optimizer state or masters change before the optimizer's step is called.

        With Muon, DeepSpeed updates the momentum when gradients are complete and passes the result
        to the optimizer as the gradient: in ``step`` in ZeRO-3 and BF16_Optimizer since 0.19.8,
        otherwise in backward. No other supported wrapper changes state itself. ``train()`` of a
        schedule-free optimizer, which a trainer calls after an evaluation, moves the masters.
        """
        groups = self._inner.param_groups if self._wrapper else []
        return any(group.get("use_muon") or MODE_KEY in group for group in groups)

    def keeps_state_in_files(self) -> bool:
        """Whether masters and optimizer states are offloaded to NVMe."""
        return any(buffer.swapped for buffer in self._buffers)

    # -- state to save -----------------------------------------------------------------------

    @cached_property
    def _wrapper(self) -> str:
        return optimizer_wrapper(self._engine)

    @property
    def _optimizer(self) -> Any:
        return self._engine.optimizer

    @cached_property
    def _names(self) -> dict[torch.nn.Parameter, str]:
        return {p: names[0] for p, names in parameter_names(self._engine.module).items()}

    @cached_property
    def _partitioned(self) -> bool:
        return any(hasattr(p, "ds_tensor") for p in self._names)

    @property
    def _rank(self) -> int:
        """The data rank."""
        return int(self._engine.global_rank) // self._tensor_ranks

    @property
    def _world_size(self) -> int:
        """The number of data ranks."""
        return int(self._engine.seq_dp_world_size)

    @property
    def _tensor_ranks(self) -> int:
        return tensor_ranks(self._engine)

    @property
    def tensor_rank(self) -> int:
        """The tensor rank, whose shards this rank has."""
        return int(self._engine.global_rank) % self._tensor_ranks

    @property
    def _is_first(self) -> bool:
        """Whether this is the rank that logs."""
        return not int(self._engine.global_rank)

    @cached_property
    def _cuts(self) -> dict[torch.nn.Parameter, tuple[Cut, tuple[int, ...]]]:
        size = self._tensor_ranks
        return cuts_of(parameter_names(self._engine.module), size) if size > 1 else {}

    @cached_property
    def _buffers(self) -> list[LiveFlatBuffer]:
        return live_flat_buffers(self._optimizer, self._wrapper) if self._wrapper else []

    @property
    def _inner(self) -> Any:
        return inner_optimizer(self._optimizer)

    @property
    def _stage(self) -> int:
        if not self._wrapper:
            return STAGE_WEIGHTS if self._partitioned else 0
        if self._wrapper in REPLICATED:
            # Independent of the engine's stage: for ZeRO-1 in bf16 with fp32 gradients, DeepSpeed
            # 0.18.4 uses a wrapper of stage 0, which keeps all state on every rank.
            return 0
        # Before DeepSpeed 0.18, stage 0 in bf16 uses BF16_Optimizer, which partitions as ZeRO-1.
        return int(self._engine.zero_optimization_stage()) or 1

    @cached_property
    def _rows(self) -> tuple[FlatBuffer, ...]:
        """The layout of each flat buffer over all ranks."""
        of_all = self._names, self._stage, self._world_size
        return tuple(flat_buffer_row(b, *of_all) for b in self._buffers)

    @cached_property
    def _placed(self) -> list[tuple[LiveFlatBuffer, FlatBuffer, tuple[Fragment, ...]]]:
        """Each flat buffer, its layout over all ranks, and its fragments on this rank."""
        fragments = rank_fragments(self._stage, self._rows, self._world_size, self._rank)
        return list(zip(self._buffers, self._rows, fragments, strict=True))

    def verify_addresses(self, *, fresh: bool) -> None:
        """Raise UnsupportedError if DeepSpeed's weights have other offsets than computed.

        The result may differ between ranks: call it within a step of all ranks.
        """
        if not self._wrapper or weights_are_offloaded(self._optimizer):
            return
        verify_pieces(self._names, self._rank, self._world_size)
        for placed in self._placed:
            verify_addresses(*placed, fresh=fresh)

    def weights_match_masters(self) -> bool:
        """Whether this rank's trained weights equal its rounded masters; True without masters.

        After a fit, ``module.load_state_dict`` or an edit in place changes only the module.
        """
        flats = (
            FlatState(fragments, buffer.values, {}, {}) for buffer, _, fragments in self._placed
        )
        return not any(without_equal_weights(flat).weights for flat in self._with_weights(flats))

    def _with_weights(self, flats: Iterable[FlatState]) -> Iterator[FlatState]:
        """Add the module's weights, by reference, to flat buffers with masters.

        A device compares them with the masters faster than it copies them. On the host, comparing
        takes twice as long as copying, and is left to the thread that writes.
        """
        offloaded = weights_are_offloaded(self._optimizer)
        for (buffer, row, _), flat in zip(self._placed, flats, strict=True):
            pieces: tuple[torch.Tensor, ...] = ()
            if buffer.has_masters:
                pieces = weight_pieces(buffer, row, flat.fragments, offloaded=offloaded)
            added = replace(flat, weights=pieces)
            on_device = any(map(is_on_device, (flat.master, *pieces)))
            yield without_equal_weights(added) if on_device else added

    def keeps_masters(self) -> bool:
        """Whether a load restores masters exactly instead of rounded to the low-precision type."""
        return not self._wrapper or bool(self._engine.zero_load_from_fp32_weights())

    def describe(self) -> Manifest:
        """Return a manifest without files.

        Raises UnsupportedError if an optimizer state or a hyperparameter cannot be saved.
        """
        engine = self._engine
        groups_of = {p: b.group for b in self._buffers for p in b.parameters}
        other = "fp16" if engine.fp16_enabled() else "fp32"
        manifest = Manifest(
            save_id="",
            stage=self._stage,
            world_size=self._world_size,
            precision="bf16" if engine.bfloat16_enabled() else other,
            master_dtype="",
            parameters=tuple(
                Parameter(
                    name=names[0],
                    shape=self._cuts[parameter][1]
                    if parameter in self._cuts
                    else full_shape(parameter),
                    dtype=dtype_name(parameter.dtype),
                    group=groups_of.get(parameter),
                    aliases=tuple(names[1:]),
                )
                for parameter, names in parameter_names(engine.module).items()
            ),
            groups=(),
            buffers=self._rows,
            module_buffers=tuple(persistent_buffers(engine.module)),
            files=(),
            writer=Writer(torch=torch.__version__, deepspeed=version_of("deepspeed")),
            tensor_parallel=TensorParallel(
                self._tensor_ranks, tuple(cut for cut, _ in self._cuts.values())
            ),
        )
        if not self._wrapper:
            return manifest
        return replace(
            manifest,
            master_dtype=dtype_name(self._buffers[0].values.dtype),
            groups=self._groups(),
            progress=TrainingProgress(
                global_steps=engine.global_steps,
                # DeepSpeed divides by the sequence ranks: a float with an integer value.
                global_samples=int(engine.global_samples) // samples_overcount(engine),
                skipped_steps=engine.skipped_steps,
                micro_steps=engine.micro_steps,
                gradient_accumulation_steps=engine.gradient_accumulation_steps(),
                global_batch_size=global_batch(engine),
            ),
            writer=replace(
                manifest.writer,
                lightning=version_of("lightning"),
                library=version_of("lightning-elastic-zero"),
                engine=self._wrapper,
                optimizer=type(self._inner).__name__,
            ),
        )

    def _groups(self) -> tuple[Group, ...]:
        states = zip((b.group for b in self._buffers), self._states, strict=True)
        return describe_groups(self._optimizer, self._wrapper, self._names, states)

    @cached_property
    def _states(self) -> tuple[tuple[dict[str, torch.Tensor], dict[str, Scalar]], ...]:
        """The element-wise and scalar optimizer states of each flat buffer."""
        states = tuple(
            # The key of a swapped buffer is empty: its masters have the shape of the states.
            split_state(
                self._inner,
                placed[0].values if placed[0].swapped else placed[0].state_key,
                self._buffer_state(*placed),
            )
            for placed in self._placed
        )
        if self._stage or not states:  # An evaluation has no optimizer.
            return states
        groups = [buffer.group for buffer in self._buffers]
        trained = [any(p.requires_grad for p in buffer.parameters) for buffer in self._buffers]
        return with_group_steps(self._inner, states, groups, trained)

    def _buffer_state(
        self, buffer: LiveFlatBuffer, row: FlatBuffer, fragments: Sequence[Fragment]
    ) -> Mapping[str, Any]:
        """Return the states of a flat buffer by name, in the layout of the masters."""
        optimizer = self._optimizer
        if keeps_whole_momenta(optimizer, self._wrapper, buffer.group):
            stepped = self._engine.global_steps > self._engine.skipped_steps
            return partitioned_momentum(optimizer, buffer, row, fragments, stepped=stepped)
        state: Mapping[str, Any]
        state = stepping_optimizer(optimizer, buffer.sub_group).state.get(buffer.state_key, {})
        if buffer.swapped:
            return buffer.swapped.states(state)
        if state and is_stepped_on_device(optimizer, buffer.sub_group):
            return {**state, "step": int(state["step"])}  # As the offloaded optimizer counts.
        return without_copies(state)

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Return this rank's state by reference, without collectives or changes.

        Module weights on the host are not compared with masters yet (``without_equal_weights``).
        ``exclude_frozen`` omits the weights that an optimizer does not own, ``keep_module_weights``
        adds the module's low-precision weights.
        """
        module, scheduler = self._engine.module, self._engine.lr_scheduler
        trained_only = exclude_frozen and bool(self._wrapper)
        kept = {} if trained_only else self.frozen()
        # With torch_autocast and ZeRO++, the gathered weights may be rounded, so the partition is
        # saved, without changes that user code has made in the gathered ones.
        is_rounded = any(hasattr(parameter, "comm_dtype") for parameter in kept.values())
        is_rounded = is_rounded or self._engine.zero_quantized_weights()
        piece = weight_piece if is_rounded else forward_piece
        frozen = {name: piece(parameter)[1] for name, parameter in kept.items()}
        flats = tuple(
            FlatState(
                fragments, buffer.values.detach(), *states, in_module=buffer.low is buffer.master
            )
            for (buffer, _, fragments), states in zip(self._placed, self._states, strict=True)
        )
        sums: tuple[int, ...] = ()
        if not self._stage:  # Each rank writes a part of the replicated state.
            sums = bit_sums([flat.master for flat in flats]) if self._world_size > 1 else ()
            flats = own_slices(flats, self._rows, self._world_size, self._rank)
        state = RankState(
            flats=tuple(self._with_weights(flats)),
            replica_sums=sums,
            frozen=frozen,
            frozen_sums=dict(zip(frozen, bit_sums([*frozen.values()]), strict=True))
            if self._stage < STAGE_WEIGHTS and self._world_size > 1
            else {},
            module_buffers=persistent_buffers(module),
            module_weights=module_weights(module) if keep_module_weights else {},
            loss_scaler={},
            tensor_rank=self.tensor_rank,
        )
        if self._tensor_ranks > 1:
            state = replace(state, copy_sums=self._copy_sums(state))
        if not self._wrapper:
            return state
        return replace(
            state,
            loss_scaler=loss_scaler_fields(self._engine),
            lr_scheduler=numpy_to_python(scheduler.state_dict()) if scheduler is not None else None,
            optimizer_state=shared_state(
                self._inner, [buffer.state_key for buffer in self._buffers], self._names
            ),
        )

    def _copy_sums(self, state: RankState) -> dict[str, int]:
        """Return a sum over the bits of this rank's part of each weight that is not cut."""
        cut = {cut.name for cut, _ in self._cuts.values()}
        parts = {
            f.name: flat.master[f.offset : f.offset + f.stop - f.start]
            for flat in state.flats
            for f in flat.fragments
        }
        if self._stage == STAGE_WEIGHTS or not self._rank:  # Otherwise each has all of them.
            parts |= state.frozen
        copies = {name: part for name, part in parts.items() if name not in cut}
        return dict(zip(copies, bit_sums([*copies.values()]), strict=True))

    def micro_batches_since_step(self) -> int:
        """Return the micro-batches of an unfinished optimizer step, whose gradients are not saved.

        0 if the caller sets the engine's boundaries, as Lightning, accelerate and Megatron do.
        """
        return micro_batches_since_step(self._engine) if self._wrapper else 0

    def frozen(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that no optimizer owns, by name."""
        owned = {p for b in self._buffers for p in b.parameters}
        return {name: p for p, name in self._names.items() if p not in owned}

    # -- restore -----------------------------------------------------------------------------

    def module_buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent module buffers, by reference."""
        return persistent_buffers(self._engine.module)

    def module(self) -> torch.nn.Module:
        """Return the module; its weights may be partitioned."""
        return self._engine.module

    def counter_keys(self) -> frozenset[str]:
        """Return the keys of parameter groups that belong to the optimizer's state."""
        return keys_of_state(self._inner)

    def check_optimizer(
        self, source: Manifest, *, state: bool, hyperparameters: bool, stepped: bool
    ) -> None:
        """Raise CheckpointMismatchError for another optimizer's state or hyperparameters."""
        if saved := source.writer.optimizer:
            states = {key.name for group in source.groups for key in group.state if state}
            check_same_optimizer(saved, self._inner, states)
        else:
            check_unnamed_hyperparameters(source.groups, self._groups(), self._inner)
            if state:
                check_unnamed_state(source.groups, self._inner, stepped=stepped)
        warnings = []
        if hyperparameters:
            warnings.append(check_lacking_hyperparameters(source, self._inner))
            warnings.append(weight_decay_change(source, self._inner))
        if state and not (hyperparameters and saved == type(self._inner).__name__):
            warnings.append(
                check_configured_state(source.groups, self._inner, hyperparameters=hyperparameters)
            )
        for warning in filter(None, warnings):
            if self._is_first:
                log.warning("%s", warning)

    def check_scheduler(self, saved: Mapping[str, object] | None) -> str:
        """Return a warning if only one side has a scheduler; refuse another one."""
        return check_scheduler(self._engine.lr_scheduler, saved)

    def _partition(self) -> None:
        """Partition ZeRO-3's gathered parameters. Collective."""
        if self._partitioned and self._wrapper:
            self._optimizer.checkpoint_event_prologue()
        elif self._partitioned:
            self._optimizer.partition_all_parameters()

    def allocate_targets(self, source: Manifest, *, with_optimizer: bool) -> RestoreTargets:
        """Allocate the buffers that receive this rank's part of a checkpoint.

        No live state is lost before ``commit``: only masters that the low-precision weights can
        rebuild are received in place (``flat_target``).
        """
        refuse_offloaded(self._optimizer)
        self._partition()
        held = {p.name for p in source.parameters} - set(source.excluded)
        check_not_inference({name: b.low for b, row, _ in self._placed for name in row.names})
        flats = []
        for buffer, row, fragments in self._placed:
            inner = stepping_optimizer(self._optimizer, buffer.sub_group)
            momentum = momentum_dtype(self._optimizer, self._wrapper, buffer)
            states = (
                allocate_states(inner, buffer, fragments, source, momentum)
                if with_optimizer
                else {}
            )
            whole = held.issuperset(row.names)
            flats.append(flat_target(buffer, fragments, states, whole=whole))
        frozen = allocate_pieces(self.frozen(), held, self._rank, first=len(flats))
        wanted = (f for flat in flats for f in flat.fragments if f.name in held)
        return RestoreTargets(
            fragments=(*wanted, *frozen),
            weights=(*(flat.master for flat in flats), *frozen.values()),
            states=(*(flat.states for flat in flats), *({} for _ in frozen)),
            commit=partial(self._commit, flats, frozen),
            # ZeRO-3 gathers the weights at the next forward.
            rollback=partial(rebuild_masters, flats),
            round_masters=partial(round_masters, flats),
        )

    @torch.no_grad()
    def _commit(
        self,
        flats: Sequence[FlatTarget],
        frozen: Mapping[Fragment, torch.Tensor],
        values: RestoreValues,
    ) -> None:
        try:
            if self._wrapper:
                vars(self).pop("_states", None)  # Frees the old states with each buffer.
                commit_optimizer(self._engine, self._wrapper, flats, values)
            parameters = self.frozen()
            for fragment, piece in frozen.items():
                write_piece(parameters[fragment.name], piece)
        finally:  # Collective: other ranks wait here even if this one failed.
            self._after_weights_changed(values.module_buffers)

    @torch.no_grad()
    def copy_full_weights(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Write whole weights and buffers to an engine without optimizer. Collective (ZeRO-3).

        Warns of unknown names and other shapes, which are ignored. Returns the names of the written
        parameters.
        """
        if not weights:
            return []
        self._partition()
        live = self.module_buffers()
        fit = {n: w for n, w in weights.items() if n in live and w.shape == live[n].shape}
        taken = []
        try:
            for name, parameter in self.frozen().items():
                if name in weights and weights[name].shape == full_shape(parameter):
                    start, piece = weight_piece(parameter)
                    write_piece(parameter, weights[name].reshape(-1)[start : start + piece.numel()])
                    taken.append(name)
        finally:  # Collective: other ranks wait here even if this one failed.
            self._after_weights_changed(fit)
        aliases = {alias for p in self.describe().parameters for alias in p.aliases}
        if self._is_first and (ignored := weights.keys() - fit.keys() - {*taken} - aliases):
            names = format_names([name for name in weights if name in ignored])
            log.warning(
                "weights ignored, because the model lacks them or has other shapes: %s", names
            )
        return taken

    def _after_weights_changed(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Write buffers and refresh the weights that forward reads. Collective (ZeRO-3)."""
        try:
            write_buffers(self._engine.module, buffers)
            drop_secondary_tensors(self._engine.module)
        finally:
            # The parameters that ZeRO-3 keeps gathered between steps.
            if persistent := getattr(self._optimizer, "persistent_parameters", None):
                persistent[0].all_gather(persistent)


def trained_parameters(engine: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that an engine's optimizer owns; none without one."""
    wrapper = optimizer_wrapper(engine)
    members = group_parameters(engine.optimizer, wrapper) if wrapper else []
    return [parameter for group in members for parameter in group]


def follows_requires_grad(engine: Any) -> bool:
    """Whether freezing or unfreezing a parameter takes effect immediately.

    DeepSpeed's wrappers check ``requires_grad`` once, torch's optimizers at each step.
    """
    return optimizer_wrapper(engine) == PLAIN
