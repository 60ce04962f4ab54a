"""Writes one rank's files of our own format.

The names, the entries, and the flat masters are DeepSpeed's, so that its tools recover the
weights. Under ``base_optimizer_state`` lie lean shards: per flat buffer a dict of parameters, each
with its states' runs of elements, without padding, and its scalars. Every tensor is written from
where it lives, piece by piece: no copy of the state is made.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from lightning_elastic_zero.manifest import FORMAT_VERSION, STAGE_WEIGHTS, FileEntry, Manifest
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
    """Rank 0: the whole tree of plain data. Other ranks: empty."""
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
            "partition_count": manifest.world_size
            if zero_3
            # A number where there are no flat buffers: DeepSpeed's script takes the largest one.
            else [manifest.world_size] * len(manifest.buffers) or manifest.world_size,
            fp32_key(manifest.stage): [
                self._masters(builder, flat, padded=zero_3) for flat in state.flats
            ]
            or [torch.empty(0)],
            "loss_scaler": dict(state.loss_scaler),
        }
        if not zero_3:
            inner["param_alignment_paddings"] = [
                list(b.paddings) or [0] * len(b.names) for b in manifest.buffers
            ]
        if not manifest.weights_only:
            inner[STATES] = [self._lean_states(builder, flat) for flat in state.flats]
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
        zero_3 = manifest.stage == STAGE_WEIGHTS
        shapes = {name: torch.Size(p.shape) for name, p in frozen.items()}
        tree: dict[str, Any] = {
            # The trainer's keys stand beside DeepSpeed's own, as DeepSpeed has it: converters
            # look for them there. DeepSpeed's entries win; ours below holds all of them.
            **client.plain,
            "module": OrderedDict({**_copies(state.module_weights), **buffers}),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [_shapes(manifest, b.names) for b in manifest.buffers],
            "frozen_param_shapes": shapes,
            FROZEN: {
                name: self._frozen(builder, state.frozen[name], None if zero_3 else shapes[name])
                for name in frozen
            },
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

    def _masters(self, builder: TorchFileWriter, flat: FlatState, *, padded: bool) -> torch.Tensor:
        """Add a flat buffer's masters, its padding zeroed; the tail cut where DeepSpeed cuts it."""
        pieces: list[torch.Tensor | ChunkedSource | int] = []
        reached = 0
        for fragment in flat.fragments:
            stop = fragment.offset + fragment.stop - fragment.start
            pieces += [
                fragment.offset - reached,
                self.source_of(flat.master[fragment.offset : stop]),
            ]
            reached = stop
        if padded:
            pieces.append(flat.master.numel() - reached)
        return builder.add(PiecewiseSource(pieces, flat.master.dtype))

    def _lean_states(self, builder: TorchFileWriter, flat: FlatState) -> dict[str, dict[str, Any]]:
        """Add a flat buffer's states: one storage for each key, a view of it for each parameter."""
        shards: dict[str, dict[str, Any]] = {f.name: {} for f in flat.fragments}
        for key, values in flat.elementwise.items():
            parts = (values[f.offset : f.offset + f.stop - f.start] for f in flat.fragments)
            runs = [self.source_of(part) for part in parts]
            whole = builder.add(PiecewiseSource(runs, values.dtype))
            at = 0
            for fragment in flat.fragments:
                numel = fragment.stop - fragment.start
                shards[fragment.name][key] = whole[at : at + numel]
                at += numel
        for shard in shards.values():
            shard.update(
                (k, v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v)
                for k, v in flat.scalars.items()
            )
        return shards

    def _frozen(
        self, builder: TorchFileWriter, piece: torch.Tensor, shape: torch.Size | None
    ) -> torch.Tensor:
        """Add a frozen weight: whole with its shape, or ZeRO-3's 1-D piece of it."""
        placed = builder.add(PiecewiseSource([self.source_of(piece)], piece.dtype))
        return placed if shape is None else placed.view(shape)

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


def _shapes(manifest: Manifest, names: tuple[str, ...]) -> OrderedDict[str, torch.Size]:
    shape_of = {p.name: torch.Size(p.shape) for p in manifest.parameters}
    return OrderedDict((name, shape_of[name]) for name in names)


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy small tensors to the host, each into a storage of its own size."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
