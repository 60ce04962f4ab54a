"""An engine that trains: what it holds, and how it is given other state."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import starmap
from typing import Any

import torch

from lightning_elastic_zero.engine.flat_buffers import (
    LiveFlatBuffer,
    group_parameters,
    live_flat_buffers,
    refresh_low_precision,
)
from lightning_elastic_zero.engine.gradients import drop_gradients
from lightning_elastic_zero.engine.infer_optimizer import (
    check_unnamed_hyperparameters,
    check_unnamed_state,
)
from lightning_elastic_zero.engine.module import (
    allocate_pieces,
    commit_pieces,
    drop_secondary_tensors,
    engine_precision,
    full_shape,
    module_weights,
    parameter_names,
    parameter_table,
    persistent_buffers,
    weight_piece,
    write_buffers,
)
from lightning_elastic_zero.engine.muon import restore_muon_momentum
from lightning_elastic_zero.engine.optimizer_state import (
    check_groups_alike,
    check_same_optimizer,
    split_state,
    state_keys,
)
from lightning_elastic_zero.engine.places import (
    rank_fragments,
    verify_pieces,
    verify_places,
    weights_match,
)
from lightning_elastic_zero.engine.restore import (
    FlatTarget,
    allocate_states,
    check_scheduler,
    commit_counters,
    commit_groups,
    commit_masters,
    commit_state,
    flat_target,
    rebuild_masters,
)
from lightning_elastic_zero.engine.support import optimizer_wrapper
from lightning_elastic_zero.engine.weight_decay import weight_decay_change
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
from lightning_elastic_zero.requirements import version_of
from lightning_elastic_zero.tensor_state import (
    FlatState,
    RankState,
    RestoreTargets,
    RestoreValues,
    Scalar,
    dtype_name,
    numpy_to_python,
    plain,
)

log = logging.getLogger(__name__)


class TrainingEngine:
    """A DeepSpeed engine with a ZeRO optimizer, as state to save and to restore.

    It is made anew for each save and load: DeepSpeed may replace its buffers in between.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 (untyped library)
        """Read from a supported engine (``check_supported``)."""
        self._engine = engine
        self._wrapper = optimizer_wrapper(engine) or ""
        self._optimizer = engine.optimizer
        self._stage: int = int(engine.zero_optimization_stage())
        self._names = {p: names[0] for p, names in parameter_names(engine.module).items()}
        self._rank: int = engine.global_rank
        self._world_size: int = engine.seq_dp_world_size
        if offloaded := getattr(self._optimizer, "offloaded_states", None):
            msg = f"states are offloaded ({offloaded}): call engine.reload_states() first"
            raise UnsupportedError(msg)

    # -- what it holds ---------------------------------------------------------------------

    @cached_property
    def _buffers(self) -> list[LiveFlatBuffer]:
        return live_flat_buffers(self._optimizer, self._wrapper)

    @property
    def _inner(self) -> Any:  # noqa: ANN401 (a torch optimizer, or one of DeepSpeed's)
        return self._optimizer.optimizer

    @cached_property
    def _rows(self) -> tuple[FlatBuffer, ...]:
        """How each flat buffer is laid out over all ranks."""
        zero_3 = self._stage == STAGE_WEIGHTS
        return tuple(
            FlatBuffer(
                group=buffer.group,
                names=tuple(self._names[p] for p in buffer.parameters),
                numels=tuple(math.prod(full_shape(p)) for p in buffer.parameters),
                paddings=buffer.paddings,
                partition_numel=0 if zero_3 else buffer.master.numel(),
            )
            for buffer in self._buffers
        )

    @cached_property
    def _fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """What this rank holds, by flat buffer."""
        return rank_fragments(self._stage, self._rows, self._world_size, self._rank)

    def _placed(self) -> Iterator[tuple[LiveFlatBuffer, FlatBuffer, tuple[Fragment, ...]]]:
        """Yield each flat buffer, how it is laid out over all ranks, and what this one holds."""
        yield from zip(self._buffers, self._rows, self._fragments, strict=True)

    def verify_places(self, *, fresh: bool) -> None:
        """Compare what is computed of the flat buffers with where DeepSpeed's own weights lie.

        Raises:
            UnsupportedError: they lie elsewhere; see ``places.verify_places``.
        """
        verify_pieces(self._names, self._rank, self._world_size)
        for placed in self._placed():
            verify_places(*placed, fresh=fresh)

    def weights_match_masters(self) -> bool:
        """Whether this rank's part of the module's trained weights is its masters, rounded.

        After a fit, ``module.load_state_dict`` or an edit in place changes the module and not the
        masters.
        """
        return all(starmap(weights_match, self._placed()))

    def describe(self) -> Manifest:
        """Return a description of the engine: a manifest that has no files yet.

        Raises:
            UnsupportedError: an optimizer state or a hyperparameter has no rule.
        """
        groups_of = {p: b.group for b in self._buffers for p in b.parameters}
        engine = self._engine
        return Manifest(
            save_id="",
            stage=self._stage,
            world_size=self._world_size,
            precision=engine_precision(engine),
            master_dtype=dtype_name(self._buffers[0].master.dtype),
            parameters=parameter_table(engine.module, groups_of),
            groups=self._groups(),
            buffers=self._rows,
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

    def _groups(self) -> tuple[Group, ...]:
        """Describe the optimizer's parameter groups; a group's buffers must hold like states."""
        keys = [
            (buffer.group, state_keys(*states))
            for buffer, states in zip(self._buffers, self._states, strict=True)
        ]
        members = group_parameters(self._optimizer, self._wrapper)
        first: dict[int, tuple[StateKey, ...]] = {}
        for group, table in keys:
            first.setdefault(group, table)
        groups = tuple(
            Group(
                names=tuple(self._names[p] for p in members[index]),
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

    @cached_property
    def _states(self) -> tuple[tuple[dict[str, torch.Tensor], dict[str, Scalar]], ...]:
        """The optimizer's states of each flat buffer: element-wise ones, and scalars."""
        name = type(self._inner).__name__
        return tuple(
            split_state(self._inner.state.get(buffer.master, {}), buffer.master, name)
            for buffer in self._buffers
        )

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Return all that this rank holds, by reference; no collective, nothing is changed.

        Args:
            exclude_frozen: leave out the weights that the optimizer does not own.
            keep_module_weights: add the low-precision weights, as the module has them.
        """
        module = self._engine.module
        scheduler = self._engine.lr_scheduler
        return RankState(
            flats=tuple(
                FlatState(fragments, buffer.master.detach(), *states)
                for buffer, fragments, states in zip(
                    self._buffers, self._fragments, self._states, strict=True
                )
            ),
            frozen={} if exclude_frozen else self._frozen_pieces(),
            module_buffers=persistent_buffers(module),
            module_weights=module_weights(module) if keep_module_weights else {},
            loss_scaler=self._loss_scaler(),
            lr_scheduler=numpy_to_python(scheduler.state_dict()) if scheduler is not None else None,
        )

    def _frozen(self) -> dict[str, torch.nn.Parameter]:
        owned = {p for b in self._buffers for p in b.parameters}
        return {name: p for p, name in self._names.items() if p not in owned}

    def _frozen_pieces(self) -> dict[str, torch.Tensor]:
        return {name: weight_piece(p)[1] for name, p in self._frozen().items()}

    def _loss_scaler(self) -> dict[str, Plain]:
        """Return the scaler's class and its plain fields."""
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if scaler is None:
            return {}
        held = numpy_to_python(vars(scaler))
        fields = {k: v for k, v in held.items() if isinstance(v, (bool, int, float))}
        return {"class": type(scaler).__name__, **fields}

    # -- how it is given other state ---------------------------------------------------------

    def module_buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent module buffers, by reference."""
        return persistent_buffers(self._engine.module)

    def check_optimizer(
        self, source: Manifest, *, state: bool, hyperparameters: bool, stepped: bool
    ) -> None:
        """Refuse state and hyperparameters of another optimizer; see ``LiveState``.

        Raises:
            CheckpointMismatchError: they belong to another class, or a group lacks its state.
        """
        if saved := source.writer.optimizer:
            check_same_optimizer(saved, type(self._inner).__name__)
        else:
            check_unnamed_hyperparameters(source.groups, self._groups(), self._inner)
            if state:
                check_unnamed_state(source.groups, self._inner, stepped=stepped)
        changed = weight_decay_change(source, self._inner) if hyperparameters else ""
        if changed and self._rank == 0:
            log.warning("%s", changed)

    def check_scheduler(self, saved: Mapping[str, object]) -> None:
        """Refuse state of another kind of scheduler.

        Raises:
            CheckpointMismatchError: it lacks what the live one keeps.
        """
        check_scheduler(self._engine.lr_scheduler, saved)

    def allocate_targets(self, source: Manifest, *, with_optimizer: bool) -> RestoreTargets:
        """Allocate buffers to fill with what this rank wants of a checkpoint.

        Nothing live is lost before ``commit``: optimizer states and frozen weights are received
        beside the live ones. Masters are received in place where the low-precision weights can
        rebuild them (a fresh engine, or one that trains in fp32), else beside them too.
        """
        if self._stage == STAGE_WEIGHTS:  # What is gathered is partitioned.
            self._optimizer.checkpoint_event_prologue()
        held = {p.name for p in source.parameters} - set(source.excluded)
        flats = [
            flat_target(
                buffer,
                fragments,
                allocate_states(self._inner, buffer, source) if with_optimizer else {},
                whole=held.issuperset(row.names),
            )
            for buffer, row, fragments in self._placed()
        ]
        frozen = allocate_pieces(self._frozen(), held, self._rank, first=len(flats))
        wanted = (f for flat in flats for f in flat.fragments if f.name in held)
        return RestoreTargets(
            fragments=(*wanted, *frozen),
            weights=(*(flat.master for flat in flats), *frozen.values()),
            states=(*(flat.states for flat in flats), *({} for _ in frozen)),
            commit=partial(self._commit, flats, frozen),
            # ZeRO-3 gathers what it needs at the next forward.
            rollback=partial(rebuild_masters, flats),
        )

    @torch.no_grad()
    def _commit(
        self,
        flats: Sequence[FlatTarget],
        frozen: Mapping[Fragment, torch.Tensor],
        values: RestoreValues,
    ) -> None:
        """Commit what was received: collective, after all ranks have agreed that all is well."""
        vars(self).pop("_states", None)  # the old states go with each buffer, not all at the end
        keep_fp32 = bool(self._engine.zero_load_from_fp32_weights())
        for flat, scalars in zip(flats, values.scalars, strict=True):
            commit_masters(flat, keep_fp32=keep_fp32)
            commit_state(self._inner, flat, scalars)
        if self._stage == STAGE_WEIGHTS:
            restore_muon_momentum(self._optimizer)
        commit_groups(self._inner, values)
        has_state = any(flat.states for flat in flats) or any(values.scalars)
        refresh_low_precision(self._optimizer, self._wrapper, has_state=has_state)
        commit_pieces(self._frozen(), frozen)
        write_buffers(self._engine.module, values.module_buffers)
        commit_counters(self._engine, values)
        drop_gradients(self._engine, self._wrapper)
        drop_secondary_tensors(self._engine.module)
        if self._stage == STAGE_WEIGHTS:  # What stays gathered between steps is gathered.
            self._optimizer.checkpoint_event_epilogue()
