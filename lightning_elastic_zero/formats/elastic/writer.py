"""Writes one rank's files of our own format.

The names and the entries are those of DeepSpeed's elastic checkpoints (``elastic_checkpoint`` of
ZeRO-1/2, and pull request 8031 for ZeRO-3), so that its own loaders restore them. Every tensor is
written from its place in memory, piece by piece: no copy of the state is made.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lightning_elastic_zero.formats.deepspeed.constants import (
    CLIENT_OBJECTS,
    FROZEN,
    OPTIMIZER,
    OURS,
    STATES,
    fp32_key,
    model_file,
    optimizer_file,
)
from lightning_elastic_zero.formats.elastic.client_state import (
    Objects,
    check_pickle,
    host_pickle,
    to_host,
)
from lightning_elastic_zero.formats.torch_file import (
    ChunkedSource,
    PiecewiseSource,
    TorchFileWriter,
)
from lightning_elastic_zero.formats.tree_path import TreePath
from lightning_elastic_zero.manifest import (
    FORMAT_VERSION,
    STAGE_WEIGHTS,
    FileEntry,
    Manifest,
    Parameter,
)
from lightning_elastic_zero.partition import FlatBuffer, piece_numel
from lightning_elastic_zero.tensor_state import FlatState, RankState

SourceOf: TypeAlias = "Callable[[torch.Tensor], torch.Tensor | ChunkedSource]"
"""Returns what a piece of a master, state or frozen weight is written from."""


def as_it_is(piece: torch.Tensor) -> torch.Tensor:
    """Return the piece: it is written from where it is."""
    return piece


@dataclass(frozen=True, slots=True)
class ClientPart:
    """What of the trainer's state a rank writes."""

    plain: Mapping[str, Any]
    """Rank 0: the whole tree of plain data. Other ranks: empty, or all of theirs, for DeepSpeed."""
    objects: Objects = ()
    """Rank 0: what is not plain data, and where it belongs."""
    own: tuple[tuple[TreePath, Any], ...] = ()
    """Other ranks: plain leaves that differ from rank 0's."""
    own_objects: Objects = ()
    """Other ranks: all objects, where they are not rank 0's."""


def writes_weights(manifest: Manifest, rank: int) -> bool:
    """Whether a rank writes frozen and low-precision weights; under ZeRO-3, its part."""
    return rank == 0 or manifest.stage == STAGE_WEIGHTS


@dataclass(frozen=True, slots=True)
class RankWriter:
    """One rank's writing of one save."""

    directory: Path
    """The staged checkpoint; its ``checkpoint`` folder is there."""
    manifest: Manifest
    """What the engine said of itself, with the save's id."""
    rank: int
    on_bytes: Callable[[int], None]
    """Told of every stretch of bytes written."""
    fingerprint: str = ""
    """The number of the whole state, to be recorded beside it; empty: none is."""
    source_of: SourceOf = as_it_is
    """Asked for each piece before any is written: masters first, then states, flat by flat."""

    def write(self, state: RankState, client: ClientPart) -> list[FileEntry]:
        """Write the rank's files, synced to disk; return what the manifest says of each.

        Args:
            state: what the rank holds. On ranks other than 0, ``module_buffers`` are those that
                differ.
            client: its part of the trainer's state.

        Raises:
            SaveError: a file could not be written.
        """
        files = [self.optimizer_shard(state, client)]
        if writes_weights(self.manifest, self.rank):
            files.append(self.model_states(state, client))
        if client.objects:
            files.append(self.client_objects(client))
        return files

    def optimizer_shard(self, state: RankState, client: ClientPart) -> FileEntry:
        """Write masters and lean optimizer states."""
        manifest, builder = self.manifest, TorchFileWriter()
        zero_3 = manifest.stage == STAGE_WEIGHTS
        inner: dict[str, Any] = {
            "zero_stage": manifest.stage,
            "dynamic_loss_scale": bool(state.loss_scaler.get("dynamic")),
            "overflow": False,
            "partition_count": manifest.world_size
            if zero_3
            # A number where there are no flat buffers: DeepSpeed's script takes the largest one.
            else [manifest.world_size] * len(manifest.buffers) or manifest.world_size,
            fp32_key(manifest.stage): [
                self._in_place(builder, index, flat, flat.master)
                for index, flat in enumerate(state.flats)
            ]
            or [torch.empty(0)],
        }
        if zero_3:
            # As a dictionary: DeepSpeed's class would not load with weights_only=True. The entry
            # is there because the loader of pull request 8031 fails without it.
            inner["loss_scaler"] = dict(state.loss_scaler)
            inner["group_paddings"] = [
                [self._piece_padding(numel) for numel in b.numels] for b in manifest.buffers
            ]
        else:
            # No loss scaler: DeepSpeed's loader then keeps the one that it has.
            inner["ds_version"] = manifest.writer.deepspeed
            inner["group_paddings"] = [
                b.partition_numel - self._lean_numel(b) for b in manifest.buffers
            ]
            inner["param_alignment_paddings"] = [
                list(b.paddings) or [0] * len(b.names) for b in manifest.buffers
            ]
        if not manifest.weights_only:
            inner[STATES] = [
                self._lean_states(builder, index, flat) for index, flat in enumerate(state.flats)
            ]
            if (step := _optimizer_step(manifest)) is not None:
                inner["base_optimizer_state_step"] = step
        own: dict[str, Any] = {"client_state": [list(item) for item in client.own]}
        if client.own_objects:
            own["objects"] = _as_tensor(client.own_objects)
        if self.rank != 0:
            own["buffers"] = _copies(state.module_buffers)
        # Which run of each parameter a flat buffer holds.
        fragments = [{f.name: [f.start, f.stop] for f in flat.fragments} for flat in state.flats]
        tree = {
            OPTIMIZER: inner,
            "ds_version": manifest.writer.deepspeed,
            OURS: {**self._stamp(), "fragments": fragments, "own": own},
        }
        return self._save(optimizer_file(self.rank, manifest.precision), tree, builder)

    def model_states(self, state: RankState, client: ClientPart) -> FileEntry:
        """Write buffers, frozen weights, shapes, counters and the trainer's state."""
        manifest, builder = self.manifest, TorchFileWriter()
        buffers = _copies(state.module_buffers) if self.rank == 0 else {}
        frozen = {p.name: p for p in manifest.frozen}
        shapes = {name: torch.Size(p.shape) for name, p in frozen.items()}
        tree: dict[str, Any] = {
            # The trainer's keys stand beside DeepSpeed's own, as DeepSpeed has it: converters
            # look for them there. DeepSpeed's entries win; ours below holds all of them.
            **client.plain,
            "module": OrderedDict({**_copies(state.module_weights), **buffers}),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [_shapes(manifest, b.names) for b in manifest.buffers],
            # None where there are none: DeepSpeed's loaders then leave the module's as they are.
            "frozen_param_shapes": shapes or None,
            FROZEN: {n: self._frozen(builder, state.frozen[n], p) for n, p in frozen.items()}
            or None,
            "shared_params": {alias: p.name for p in manifest.parameters for alias in p.aliases},
            "lr_scheduler": to_host(state.lr_scheduler),
            "global_steps": manifest.progress.global_steps,
            "global_samples": manifest.progress.global_samples,
            "skipped_steps": manifest.progress.skipped_steps,
            "dp_world_size": manifest.world_size,
            "mp_world_size": 1,
            "ds_version": manifest.writer.deepspeed,
            OURS: {
                **self._stamp(),
                "client_state": dict(client.plain),
                "loss_scaler": dict(state.loss_scaler),
                **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
            },
        }
        return self._save(model_file(self.rank, manifest.stage), tree, builder)

    def _in_place(
        self, builder: TorchFileWriter, index: int, flat: FlatState, values: torch.Tensor
    ) -> torch.Tensor:
        """Add masters or a state with each element at its offset in the flat buffer.

        Padding is zero. In ZeRO-1/2, the padding at the end of the whole buffer is left out.
        """
        pieces: list[torch.Tensor | ChunkedSource | int] = []
        reached = 0
        for fragment in flat.fragments:
            stop = fragment.offset + fragment.stop - fragment.start
            pieces += [fragment.offset - reached, self.source_of(values[fragment.offset : stop])]
            reached = stop
        zero_3 = self.manifest.stage == STAGE_WEIGHTS
        end = flat.master.numel() if zero_3 else self._lean_numel(self.manifest.buffers[index])
        return builder.add(PiecewiseSource([*pieces, end - reached], values.dtype))

    def _lean_states(self, builder: TorchFileWriter, index: int, flat: FlatState) -> dict[str, Any]:
        """Add a flat buffer's optimizer states; return them as DeepSpeed's elastic code has them.

        An element-wise state is one tensor like the masters in ZeRO-1/2. In ZeRO-3 it is a list
        with one tensor for each parameter, without padding: views of one storage.
        """
        zero_3 = self.manifest.stage == STAGE_WEIGHTS
        add = self._pieces if zero_3 else self._in_place
        states: dict[str, Any] = {
            key: add(builder, index, flat, values) for key, values in flat.elementwise.items()
        }
        for key, value in flat.scalars.items():
            in_file = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            states[key] = in_file
        return states

    def _pieces(
        self, builder: TorchFileWriter, index: int, flat: FlatState, values: torch.Tensor
    ) -> list[torch.Tensor]:
        """Add a state of ZeRO-3; return this rank's piece of each parameter, in flat order."""
        numels = dict.fromkeys(self.manifest.buffers[index].names, 0)
        runs: list[torch.Tensor | ChunkedSource | int] = []
        for fragment in flat.fragments:
            numels[fragment.name] = numel = fragment.stop - fragment.start
            runs.append(self.source_of(values[fragment.offset : fragment.offset + numel]))
        whole = builder.add(PiecewiseSource(runs, values.dtype))
        stops = list(accumulate(numels.values()))
        return [
            whole[stop - numel : stop] for numel, stop in zip(numels.values(), stops, strict=True)
        ]

    def _lean_numel(self, buffer: FlatBuffer) -> int:
        """ZeRO-1/2: elements of this rank's partition, without the padding at the buffer's end."""
        end = sum((*buffer.numels, *buffer.paddings[:-1]))
        start, stop = buffer.partition_range(self.rank)
        return max(0, min(end, stop) - start)

    def _piece_padding(self, numel: int) -> int:
        """ZeRO-3: elements of padding after this rank's piece of a parameter, as DeepSpeed says."""
        world_size = self.manifest.world_size
        is_last = self.rank == world_size - 1
        return piece_numel(numel, world_size) * world_size - numel if is_last else 0

    def _frozen(
        self, builder: TorchFileWriter, piece: torch.Tensor, parameter: Parameter
    ) -> torch.Tensor:
        """Add a frozen weight: whole with its shape, or ZeRO-3's 1-D piece of it, padded."""
        zero_3 = self.manifest.stage == STAGE_WEIGHTS
        numel = piece_numel(parameter.numel, self.manifest.world_size) if zero_3 else piece.numel()
        pieces = [self.source_of(piece), numel - piece.numel()]
        placed = builder.add(PiecewiseSource(pieces, piece.dtype))
        return placed if zero_3 else placed.view(parameter.shape)

    def client_objects(self, client: ClientPart) -> FileEntry:
        """Write what is no plain data: a pickle, itself as plain bytes."""
        tree = {"pickle": _as_tensor(client.objects), OURS: self._stamp()}
        return self._save(CLIENT_OBJECTS, tree, TorchFileWriter())

    def _stamp(self) -> dict[str, Any]:
        """Describe of which save and step a file is: those of two saves never pass for one."""
        return {
            "format_version": FORMAT_VERSION,
            "save_id": self.manifest.save_id,
            "rank": self.rank,
            "world_size": self.manifest.world_size,
            "global_steps": self.manifest.progress.global_steps,
        }

    def _save(self, name: str, tree: object, builder: TorchFileWriter) -> FileEntry:
        return builder.write(
            tree,
            self.directory,
            name,
            save_id=self.manifest.save_id,
            on_bytes=self.on_bytes,
        )


def pickle_objects(objects: Objects) -> tuple[bytes, Objects]:
    """Pickle objects, and read them again as a load would; what they share stays shared.

    Raises:
        SaveError: one cannot be pickled, or not be made of its pickle; the message names it.
    """
    try:
        data = host_pickle(list(objects))
        return data, tuple(pickle.loads(data))  # noqa: S301 - just pickled
    except Exception:
        for path, value in objects:
            check_pickle(value, path)
        raise


def _as_tensor(objects: Objects) -> torch.Tensor:
    """Pickle objects into plain bytes."""
    return torch.frombuffer(bytearray(pickle_objects(objects)[0]), dtype=torch.uint8)


def _optimizer_step(manifest: Manifest) -> int | float | None:
    """Return the entry ``step`` of the parameter groups, where all have the same one.

    DeepSpeed's loader for ZeRO-1/2 fails without it, also for optimizers whose groups have none and
    that never read it: it is then the number of their steps.
    """
    steps = [group.hyperparameters.get("step") for group in manifest.groups]
    for step in steps[:1]:
        if isinstance(step, int | float) and all(step == other for other in steps):
            return step
    if manifest.stage == STAGE_WEIGHTS:
        return None
    return manifest.progress.global_steps - manifest.progress.skipped_steps


def _shapes(manifest: Manifest, names: tuple[str, ...]) -> OrderedDict[str, torch.Size]:
    shape_of = {p.name: torch.Size(p.shape) for p in manifest.parameters}
    return OrderedDict((name, shape_of[name]) for name in names)


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy small tensors to the host, each into a storage of its own size."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
