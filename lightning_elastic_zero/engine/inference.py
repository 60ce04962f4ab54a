"""An engine without an optimizer (validate, test, predict): weights and buffers, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

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
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, Manifest, Writer
from lightning_elastic_zero.requirements import version_of
from lightning_elastic_zero.tensor_state import RankState, RestoreTargets, RestoreValues


class InferenceEngine:
    """A DeepSpeed engine that only evaluates, as weights to restore.

    With ZeRO-3 each rank holds its piece of each parameter, else the whole module.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 (untyped library)
        """Read from a supported engine (``check_supported``)."""
        self._engine = engine
        self._parameters = {names[0]: p for p, names in parameter_names(engine.module).items()}
        self._partitioned = any(hasattr(p, "ds_tensor") for p in self._parameters.values())

    def describe(self) -> Manifest:
        """Return a description of the engine: a manifest without groups."""
        engine = self._engine
        return Manifest(
            save_id="",
            stage=STAGE_WEIGHTS if self._partitioned else 0,
            world_size=self._engine.seq_dp_world_size,
            precision=engine_precision(engine),
            master_dtype="",
            parameters=parameter_table(engine.module, {}),
            groups=(),
            buffers=(),
            module_buffers=tuple(persistent_buffers(engine.module)),
            files=(),
            writer=Writer(torch=torch.__version__, deepspeed=version_of("deepspeed")),
        )

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Return the weights as the module has them, by reference; there are no masters.

        Args:
            exclude_frozen: not used: without an optimizer nobody knows which weights are frozen.
            keep_module_weights: add the weights once more, under all their names.
        """
        del exclude_frozen
        module = self._engine.module
        return RankState(
            flats=(),
            frozen={name: weight_piece(p)[1] for name, p in self._parameters.items()},
            module_buffers=persistent_buffers(module),
            module_weights=module_weights(module) if keep_module_weights else {},
            loss_scaler={},
        )

    def module_buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent module buffers, by reference."""
        return persistent_buffers(self._engine.module)

    def check_optimizer(
        self, source: Manifest, *, state: bool, hyperparameters: bool, stepped: bool
    ) -> None:
        """Accept: no optimizer state is wanted."""

    def check_scheduler(self, saved: Mapping[str, object]) -> None:
        """Accept: nothing steps."""

    def _partition(self) -> None:
        """ZeRO-3: partition the parameters that are gathered (collective)."""
        if self._partitioned:
            self._engine.optimizer.partition_all_parameters()

    def allocate_targets(self, source: Manifest, *, with_optimizer: bool) -> RestoreTargets:
        """Allocate buffers, beside the live weights, for this rank's pieces of all weights."""
        del with_optimizer
        self._partition()
        held = {p.name for p in source.parameters} - set(source.excluded)
        pieces = allocate_pieces(self._parameters, held, self._engine.global_rank)
        return RestoreTargets(
            fragments=tuple(pieces),
            weights=tuple(pieces.values()),
            states=tuple({} for _ in pieces),
            commit=partial(self._commit, pieces),
            rollback=lambda: None,
        )

    @torch.no_grad()
    def _commit(self, pieces: Mapping[Fragment, torch.Tensor], values: RestoreValues) -> None:
        """Commit what was received: collective under ZeRO-3."""
        commit_pieces(self._parameters, pieces)
        self._after_weights_changed(values.module_buffers)

    @torch.no_grad()
    def copy_full_weights(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Write whole weights and buffers, by name: collective under ZeRO-3.

        Args:
            weights: by the module's names; those of another shape, and others, are not taken.

        Returns:
            The names of the parameters that were taken.
        """
        self._partition()
        taken = []
        for name, parameter in self._parameters.items():
            if name in weights and weights[name].shape == full_shape(parameter):
                start, piece = weight_piece(parameter)
                piece.copy_(weights[name].reshape(-1)[start : start + piece.numel()])
                taken.append(name)
        buffers = persistent_buffers(self._engine.module)
        self._after_weights_changed(
            {
                n: weights[n]
                for n, b in buffers.items()
                if n in weights and weights[n].shape == b.shape
            }
        )
        return taken

    def _after_weights_changed(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Write buffers, and refresh what forward reads of the weights: collective under ZeRO-3."""
        write_buffers(self._engine.module, buffers)
        drop_secondary_tensors(self._engine.module)
        persistent = getattr(self._engine.optimizer, "persistent_parameters", None)
        if persistent:
            persistent[0].all_gather(persistent)
