"""Writes one rank's files of this library's format (docs/format.md), from memory in pieces.

File names and entries are those of DeepSpeed's elastic checkpoints (``elastic_checkpoint`` in
ZeRO-1/2, pull request 8031 for ZeRO-3), so DeepSpeed's own loaders can restore them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from lightning_elastic_zero.core.layout import TensorKey
from lightning_elastic_zero.core.manifest import (
    MODULE_WEIGHTS,
    STAGE_WEIGHTS,
    FileEntry,
    Manifest,
)
from lightning_elastic_zero.core.partition import piece_numel
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.core.save_files import (
    CLIENT_OBJECTS,
    FROZEN,
    GROUP_STEP,
    OPTIMIZER,
    OURS,
    STATES,
    fp32_key,
    model_file,
    optimizer_file,
)
from lightning_elastic_zero.core.tensors import FlatState, RankState, dtype_name
from lightning_elastic_zero.formats.client_state import SplitState, store_objects, to_host
from lightning_elastic_zero.formats.elastic_plan import Item, lean_numel, plan_files, writes_weights
from lightning_elastic_zero.formats.torch_write import (
    ChunkedSource,
    Piece,
    TorchFileWriter,
    piecewise,
)
from lightning_elastic_zero.storage.paths import AnyPath


@dataclass(frozen=True, slots=True)
class RankWriter:
    """Writes one rank's files of one save."""

    directory: AnyPath
    """The folder of this save: the staged checkpoint."""
    manifest: Manifest
    """The manifest of the tensor rank's shards, with the id of the save."""
    rank: int
    """The data rank."""
    progress: Progress
    """Receives the number of bytes written."""
    tensor_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of all ranks."""
        return not (self.rank or self.tensor_rank)

    def write(
        self, state: RankState, client: SplitState, rank_state: SplitState
    ) -> list[FileEntry]:
        """Write the rank's files, synced to disk; return their entries for the manifest.

        On ranks other than 0, ``state.module_buffers`` has only buffers that differ from rank 0's,
        and ``client`` has no objects. ``rank_state`` is the state that only this rank restores.
        Raises SaveError if a file cannot be written.
        """
        manifest, rank = self.manifest, self.rank
        optimizer = optimizer_file(rank, manifest.precision, self.tensor_rank)
        trees = {optimizer: self._shard(state, rank_state)}
        if writes_weights(manifest, rank):
            trees[model_file(rank, manifest.stage, self.tensor_rank)] = self._model(state, client)
        if client.objects:
            trees[CLIENT_OBJECTS] = {**store_objects(client.objects), OURS: self._stamp()}
        changed = {index for index, flat in enumerate(state.flats) if flat.weights}
        plan, sources = plan_files(manifest, rank, changed, self.tensor_rank), state.tensors()
        return [
            self._write(name, tree, [item for item in plan if item.file == name], sources)
            for name, tree in trees.items()
        ]

    def _write(
        self,
        name: str,
        tree: dict[str, Any],
        items: Iterable[Item],
        sources: Mapping[TensorKey, torch.Tensor],
    ) -> FileEntry:
        builder = TorchFileWriter()
        for item in items:
            whole = builder.add(_source_of(item, sources))
            *path, last = item.entry
            node: Any = tree
            for key in path:
                node = node[key]
            if item.cuts is not None:
                places = pairwise(accumulate(item.cuts, initial=0))
                node[last] = [whole[start:stop] for start, stop in places]
            else:
                node[last] = whole if item.shape is None else whole.view(item.shape)
        save_id = self.manifest.save_id
        return builder.write(tree, self.directory, name, save_id=save_id, progress=self.progress)

    def _shard(self, state: RankState, rank_state: SplitState) -> dict[str, Any]:
        """Return the tree of the optimizer shard, with None at the entries of the plan."""
        manifest = self.manifest
        zero_3, world_size = manifest.stage == STAGE_WEIGHTS, manifest.world_size
        inner: dict[str, Any] = {
            "zero_stage": manifest.stage,
            "dynamic_loss_scale": bool(state.loss_scaler.get("dynamic")),
            "overflow": False,
            "partition_count": world_size
            if zero_3
            # A number if there are no flat buffers: DeepSpeed's script takes the maximum of a list.
            else [world_size] * len(manifest.buffers) or world_size,
            fp32_key(manifest.stage): [None] * len(manifest.buffers) or [torch.empty(0)],
        }
        if zero_3:
            # As a dictionary: DeepSpeed's class would not load with weights_only=True. The loader
            # of pull request 8031 needs the entry.
            inner["loss_scaler"] = dict(state.loss_scaler)
            is_last = self.rank == world_size - 1
            inner["group_paddings"] = [
                [piece_numel(n, world_size) * world_size - n if is_last else 0 for n in b.numels]
                for b in manifest.buffers
            ]
        else:
            # Without an entry, DeepSpeed's loader keeps its current loss scaler.
            inner["ds_version"] = manifest.writer.deepspeed
            inner["group_paddings"] = [
                b.partition_numel - lean_numel(b, self.rank) for b in manifest.buffers
            ]
            inner["param_alignment_paddings"] = [
                list(b.paddings) or [0] * len(b.names) for b in manifest.buffers
            ]
        if not manifest.weights_only:
            inner[STATES] = [_states(flat) for flat in state.flats]
            if (step := _optimizer_step(manifest)) is not None:
                inner[GROUP_STEP] = step
        stored: dict[str, Any] = {
            "buffers": {} if self.is_first else _copies(state.module_buffers),
            "state": rank_state.plain,
        }
        if rank_state.objects:
            stored["objects"] = store_objects(rank_state.objects)
        # The run of each parameter in each flat buffer.
        fragments = [{f.name: [f.start, f.stop] for f in flat.fragments} for flat in state.flats]
        ours = {**self._stamp(), "fragments": fragments, "own": stored}
        if any(flat.weights for flat in state.flats):
            ours[MODULE_WEIGHTS] = [None] * len(state.flats)
        return {OPTIMIZER: inner, "ds_version": manifest.writer.deepspeed, OURS: ours}

    def _model(self, state: RankState, client: SplitState) -> dict[str, Any]:
        """Return the tree of the model file: buffers, shapes, counters and the trainer's state.

        Frozen weights are None.
        """
        manifest = self.manifest
        buffers = _copies(state.module_buffers) if self.is_first else {}
        weights, flats = _copies(state.module_weights), [b.names for b in manifest.buffers]
        frozen = dict.fromkeys(p.name for p in manifest.frozen)
        return {
            # As DeepSpeed does: converters look for the trainer's keys here. DeepSpeed's own
            # entries take precedence; the complete client state is in OURS below.
            **client.plain,
            **model_entries(manifest, flats, weights, frozen, buffers),
            "lr_scheduler": to_host(state.lr_scheduler),
            OURS: {
                **self._stamp(),
                "client_state": dict(client.plain),
                "loss_scaler": dict(state.loss_scaler),
            },
        }

    def _stamp(self) -> dict[str, Any]:
        return {
            "format_version": self.manifest.format_version,
            "save_id": self.manifest.save_id,
            "rank": self.rank,
            "world_size": self.manifest.world_size,
            "global_steps": self.manifest.progress.global_steps,
        }


def _source_of(item: Item, sources: Mapping[TensorKey, torch.Tensor]) -> ChunkedSource:
    """Return the elements of an item; raise ValueError if a tensor has another dtype."""
    pieces: list[Piece] = []
    for run in item.runs:
        tensor = sources[run.source] if run.source else None
        if tensor is not None and dtype_name(tensor.dtype) != item.dtype:
            msg = f"{run.source} is {tensor.dtype}, the manifest lists {item.dtype}"
            raise ValueError(msg)
        pieces.append(run.stop - run.start if tensor is None else tensor[run.start : run.stop])
    return piecewise(pieces, getattr(torch, item.dtype))


def _states(flat: FlatState) -> dict[str, Any]:
    """Return a flat buffer's optimizer states, in which those of the plan are None."""
    states: dict[str, Any] = dict.fromkeys(flat.elementwise)
    for key, value in flat.scalars.items():
        in_file = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        states[key] = in_file
    return states


def _optimizer_step(manifest: Manifest) -> int | float | None:
    """Return the ``step`` of the parameter groups if all have the same one.

    DeepSpeed's loader for ZeRO-1/2 requires it, also for optimizers that do not use it: these get
    the number of optimizer steps.
    """
    steps = [group.hyperparameters.get("step") for group in manifest.groups]
    for step in steps[:1]:
        if isinstance(step, int | float) and all(step == other for other in steps):
            return step
    if manifest.stage == STAGE_WEIGHTS:
        return None
    return manifest.progress.global_steps - manifest.progress.skipped_steps


def model_entries(
    manifest: Manifest,
    flats: Iterable[Sequence[str]],
    weights: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor | None],
    buffers: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return DeepSpeed's entries of a model file; ``flats`` are the names in each flat buffer."""
    shape_of = {p.name: torch.Size(p.shape) for p in manifest.parameters}
    return {
        "module": OrderedDict({**weights, **buffers}),
        "buffer_names": list(buffers),
        "optimizer": None,
        "lr_scheduler": None,
        "param_shapes": [OrderedDict((n, shape_of[n]) for n in names) for names in flats],
        # None if there are none: DeepSpeed's loaders then leave the module unchanged.
        "frozen_param_shapes": {name: shape_of[name] for name in frozen} or None,
        FROZEN: dict(frozen) or None,
        "shared_params": {alias: p.name for p in manifest.parameters for alias in p.aliases},
        "global_steps": manifest.progress.global_steps,
        "global_samples": manifest.progress.global_samples,
        "skipped_steps": manifest.progress.skipped_steps,
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "ds_version": manifest.writer.deepspeed,
    }


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy small tensors to the host, each into a storage of its own size."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
