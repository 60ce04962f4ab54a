"""An engine without an optimizer (validate, test, predict): weights and buffers, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_elastic_zero.engine.module import (
    drop_second_copies,
    parameter_names,
    parameter_table,
    persistent_buffers,
    precision_of,
    weight_piece,
    write_buffers,
)
from lightning_elastic_zero.engine.support import version_of
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import STAGE_WEIGHTS, Manifest, Writer
from lightning_elastic_zero.state import Incoming, RankState, Receiving


class InferenceEngine:
    """A DeepSpeed engine that only evaluates, as weights to restore.

    With ZeRO-3 each rank holds its piece of each parameter, else the whole module.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 (untyped library)
        """Take a supported engine (``check_supported``)."""
        self._engine = engine
        self._parameters = {names[0]: p for p, names in parameter_names(engine.module).items()}
        self._partitioned = any(hasattr(p, "ds_tensor") for p in self._parameters.values())

    @property
    def rank(self) -> int:
        """This rank among the data-parallel ones."""
        return int(self._engine.global_rank)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return int(self._engine.seq_dp_world_size)

    def describe(self) -> Manifest:
        """Say what the engine is, in the words of a manifest without groups."""
        engine = self._engine
        return Manifest(
            save_id="",
            stage=STAGE_WEIGHTS if self._partitioned else 0,
            world_size=self.world_size,
            precision=precision_of(engine),
            master_dtype="",
            parameters=parameter_table(engine.module, {}),
            groups=(),
            buffers=(),
            module_buffers=tuple(persistent_buffers(engine.module)),
            files=(),
            writer=Writer(torch=torch.__version__, deepspeed=version_of("deepspeed")),
        )

    def rank_state(self, *, exclude_frozen: bool, keep_module_weights: bool) -> RankState:
        """Refuse: there are no masters to save.

        Raises:
            UnsupportedError: always.
        """
        del exclude_frozen, keep_module_weights
        msg = (
            "an engine without an optimizer holds no master weights: save from `trainer.fit`, "
            "or keep the checkpoint that was loaded"
        )
        raise UnsupportedError(msg)

    def module_buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent module buffers, by reference."""
        return persistent_buffers(self._engine.module)

    def check_optimizer(self, source: Manifest) -> None:
        """Accept: no optimizer state is wanted."""

    def check_scheduler(self, saved: Mapping[str, object]) -> None:
        """Accept: nothing steps."""

    def partition(self) -> None:
        """ZeRO-3: partition the parameters that are gathered (collective)."""
        if self._partitioned:
            self._engine.optimizer.partition_all_parameters()

    def receive(self, source: Manifest, *, with_optimizer: bool) -> Receiving:
        """Give buffers, beside the live weights, for this rank's pieces of all weights."""
        del with_optimizer
        self.partition()
        held = {p.name for p in source.parameters} - set(source.excluded)
        fragments: list[Fragment] = []
        weights: list[torch.Tensor] = []
        for name, parameter in self._parameters.items():
            start, piece = weight_piece(parameter)
            if name in held and piece.numel():
                stop = start + piece.numel()
                fragments.append(Fragment(name, start, stop, self.rank, len(weights), 0))
                weights.append(torch.empty_like(piece, device="cpu"))
        return Receiving(tuple(fragments), tuple(weights), states=())

    def abandon(self) -> None:
        """Undo nothing: what was received lies beside the live weights."""

    @torch.no_grad()
    def commit(self, received: Receiving, incoming: Incoming) -> None:
        """Take what was received: collective under ZeRO-3."""
        for fragment in received.fragments:
            _, piece = weight_piece(self._parameters[fragment.name])
            piece.copy_(received.weights[fragment.buffer])
        write_buffers(self._engine.module, incoming.module_buffers)
        drop_second_copies(self._engine.module)
        persistent = getattr(self._engine.optimizer, "persistent_parameters", None)
        if persistent:
            persistent[0].all_gather(persistent)
