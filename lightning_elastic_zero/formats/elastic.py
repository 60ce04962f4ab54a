"""Reader and writer of this library's format (docs/format.md).

``ElasticReader`` reads only the byte ranges that a rank needs, and verifies them. ``RankWriter``
writes one rank's files from memory in pieces, without copying the state. File names and entries are
those of DeepSpeed's elastic checkpoints (``elastic_checkpoint`` in ZeRO-1/2, pull request 8031 for
ZeRO-3), so DeepSpeed's own loaders can restore them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer
from lightning_elastic_zero.core.manifest import (
    BUFFERS,
    FORMAT,
    FORMAT_VERSION,
    MODULE_WEIGHTS,
    OWN_STATE,
    STAGE_WEIGHTS,
    FileEntry,
    Manifest,
    Parameter,
)
from lightning_elastic_zero.core.partition import FlatBuffer, piece_numel, piece_start
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import FlatState, RankState, Scalar
from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.formats.client_state import (
    Objects,
    SplitState,
    join_objects,
    load_objects,
    store_objects,
    to_host,
)
from lightning_elastic_zero.formats.deepspeed_files import (
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
from lightning_elastic_zero.formats.reader import (
    EXTRA_STATES,
    OPTIMIZER_STATE,
    WEIGHT,
    CheckpointReader,
    Location,
    SharedState,
    SourceInfo,
    differing_sizes,
)
from lightning_elastic_zero.formats.torch_read import OpenFiles, StoredRun, TorchFile
from lightning_elastic_zero.formats.torch_write import (
    ChunkedSource,
    Piece,
    TorchFileWriter,
    piecewise,
)
from lightning_elastic_zero.storage.file_read import VerifiedFile
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX, sidecar_bytes
from lightning_elastic_zero.storage.object_store import AnyPath


class ElasticReader(CheckpointReader):
    """A published checkpoint of this library's format."""

    def __init__(
        self,
        directory: AnyPath,
        manifest: Manifest,
        *,
        allow_pickle: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.info = SourceInfo(f"{FORMAT} checkpoint")
        prefix = f"{manifest.save_id}/"
        if manifest.files and all(entry.name.startswith(prefix) for entry in manifest.files):
            # In an object store each save has its own folder, named after its id.
            directory = directory / manifest.save_id
            files = (
                replace(entry, name=entry.name.removeprefix(prefix)) for entry in manifest.files
            )
            manifest = replace(manifest, files=tuple(files))
        if manifest.world_size > len(manifest.files):
            msg = (
                f"{directory} was saved by {manifest.world_size} ranks, but its manifest lists "
                f"{len(manifest.files)} files: it is incomplete. Resume from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        self.manifest = manifest
        self.files = OpenFiles(directory, self._open, progress=progress)
        self._allow_pickle = allow_pickle
        self._entries = {entry.name: entry for entry in manifest.files}
        self._optimized = {p.name for p in manifest.optimized}
        self._frozen_numel = {p.name: p.numel for p in manifest.frozen}
        self._positions = {n: i for buffer in manifest.buffers for i, n in enumerate(buffer.names)}
        self._layout = manifest.layout()
        self._read_first: int | None = None

    def verify(self, rank: int, world_size: int, progress: Progress) -> list[str]:  # noqa: ARG002
        """Do nothing: bytes are verified when they are read."""
        return []

    def verify_whole(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        for entry in self.manifest.files[rank::world_size]:
            with VerifiedFile(self.files.folder, entry, self.manifest.save_id) as file:
                for _, view in file.read_runs([(0, file.size_bytes)]):
                    progress.advance(view.nbytes)
        return []

    def names(self) -> Sequence[str]:
        return tuple(n for name in self._entries for n in (name, name + SUMS_SUFFIX))

    def recorded_bytes(self, name: str) -> int | None:
        entry = self._entries.get(name.removesuffix(SUMS_SUFFIX))
        if entry is None:
            return None
        if entry.name == name:
            return entry.size_bytes
        return sidecar_bytes(entry.size_bytes, self.manifest.save_id)

    # -- checks before the first byte is read ------------------------------------------------

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        self._read_first = min(masters, default=None)
        names = [optimizer_file(rank, self.manifest.precision) for rank in masters]
        models = sorted({0, *frozen})  # rank 0's has the shared state
        names += [model_file(rank, self.manifest.stage) for rank in models]
        self._check_sizes(names)

    def check_files(self) -> None:
        self._check_sizes(entry.name for entry in self.manifest.files)

    def _check_sizes(self, names: Iterable[str]) -> None:
        sizes = ((name, self._entry(name).size_bytes) for name in names)
        if wrong := differing_sizes(self.files.folder, sizes, self.files.progress):
            msg = (
                f"{self.files.folder} is damaged: {'; '.join(wrong)}. "
                "Resume from another checkpoint, or copy these files again from an intact copy"
            )
            raise CheckpointCorruptedError(msg)

    # -- runs of elements --------------------------------------------------------------------

    def locate(self, key: str, transfer: Transfer) -> Location:
        if transfer.name not in self._optimized:
            file = self.files.get(model_file(transfer.source_rank, self.manifest.stage))
            stored = file.tree[FROZEN][transfer.name].view(-1)
            base = 0
            if self.manifest.stage == STAGE_WEIGHTS:
                numel = self._frozen_numel[transfer.name]
                base = piece_start(numel, self.manifest.world_size, transfer.source_rank)
            return file, self._run(file, stored, base, transfer)
        file = self.files.get(optimizer_file(transfer.source_rank, self.manifest.precision))
        entry = fp32_key(self.manifest.stage) if key == WEIGHT else STATES
        stored = file.tree[OPTIMIZER][entry][transfer.source_buffer]
        base = transfer.start - transfer.source_offset
        if key != WEIGHT:
            stored = stored[key]
        if isinstance(stored, list):  # ZeRO-3: a state has a tensor for each parameter
            stored = stored[self._positions[transfer.name]]
            base = file.tree[OURS]["fragments"][transfer.source_buffer][transfer.name][0]
        return file, self._run(file, stored, base, transfer)

    @property
    def weights_differ(self) -> bool:
        return MODULE_WEIGHTS in self.manifest.rank_state

    def locate_module_weights(self, transfer: Transfer) -> Location | None:
        file = self.files.get(optimizer_file(transfer.source_rank, self.manifest.precision))
        of_buffers = file.tree[OURS].get(MODULE_WEIGHTS)
        pieces = of_buffers and of_buffers[transfer.source_buffer]
        if not pieces:
            return None
        stored = pieces[self._positions[transfer.name]]
        base = file.tree[OURS]["fragments"][transfer.source_buffer][transfer.name][0]
        return file, self._run(file, stored, base, transfer)

    def _run(
        self, file: TorchFile, stored: torch.Tensor, base: int, transfer: Transfer
    ) -> StoredRun:
        start, stop = transfer.start - base, transfer.stop - base
        if not 0 <= start <= stop <= stored.numel():
            msg = (
                f"{file.path} contains the elements [{base}, {base + stored.numel()}) of "
                f"{transfer.name}, the manifest expects [{transfer.start}, {transfer.stop}): they "
                "are not of one save. Resume from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        return StoredRun(stored, start, stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the flat buffer that contains ``at``.

        A save checks that counts are equal on all ranks, so each rank takes them from the first
        file that it reads anyway, which on the same number of ranks is its own. Otherwise all ranks
        would open the same additional file.
        """
        rank = at.rank if self._read_first is None else self._read_first
        file = self.files.get(optimizer_file(rank, self.manifest.precision))
        states = file.tree[OPTIMIZER][STATES][at.buffer]
        group = self.manifest.groups[self.manifest.buffers[at.buffer].group]
        keys = [key.name for key in group.state if key.kind == "scalar"]
        return file.load_tree({key: states[key] for key in keys})

    # -- shared state ------------------------------------------------------------------------

    def _model_file(self) -> TorchFile:
        return self.files.get(model_file(0, self.manifest.stage))

    def module_state(self, rank: int, world_size: int) -> SharedState:
        file = self._model_file()
        ours = file.tree[OURS]
        module = dict(self.module_buffers())
        client = file.load_tree(ours["client_state"])
        scheduler = file.tree["lr_scheduler"]
        loss_scaler, lr_scheduler = ours["loss_scaler"], scheduler and file.load_tree(scheduler)
        if self.manifest.client_objects:
            client = join_objects(client, self._objects())
        extra = client.pop(EXTRA_STATES, {})
        client.pop(OPTIMIZER_STATE, None)
        own: dict[str, Any] = {}
        if world_size == self.manifest.world_size:
            buffers, own = self._own_state(rank)
            module.update(buffers)
            extra = own.pop(EXTRA_STATES, extra)
        return SharedState(
            module, client, loss_scaler, lr_scheduler, extra_states=extra, rank_state=own
        )

    def _own_state(self, rank: int) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
        """Return the module buffers and the state that are a rank's own."""
        if not {BUFFERS, OWN_STATE}.intersection(self.manifest.rank_state):
            return {}, {}
        file = self.files.get(optimizer_file(rank, self.manifest.precision))
        stored = file.load_tree(file.tree[OURS]["own"])
        state: dict[str, Any] = stored["state"]
        if "objects" in stored:
            where = f"rank {rank}'s own objects in {self.files.folder}"
            objects = load_objects(stored["objects"], where, allow_pickle=self._allow_pickle)
            state = join_objects(state, objects)
        return stored["buffers"], state

    def optimizer_state(self) -> Mapping[Any, Any]:
        file = self._model_file()
        return file.load_tree(file.tree[OURS]["client_state"].get(OPTIMIZER_STATE, {}))

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        file = self._model_file()
        held = file.tree["module"]
        if missing := [n for n in self.manifest.module_buffers if n not in held]:
            msg = (
                f"{file.path} lacks the buffer {missing[0]}, which the manifest lists: they are "
                "not of one save. Resume from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        return file.load_tree({n: held[n] for n in self.manifest.module_buffers})

    def trainer_entry(self, name: str) -> object:
        """Return an entry of the trainer's state that the manifest records: the epoch."""
        return self.manifest.progress.sampler.get(name)

    def _objects(self) -> Objects:
        file = self.files.get(CLIENT_OBJECTS)
        # Errors of Python's own unpickler do not name the object: list all of them.
        these = f" ({', '.join(self.manifest.client_objects)})" if self._allow_pickle else ""
        stored = file.load_tree({key: v for key, v in file.tree.items() if key != OURS})
        return load_objects(stored, f"{file.path}{these}", allow_pickle=self._allow_pickle)

    # -- files -------------------------------------------------------------------------------

    def _entry(self, name: str) -> FileEntry:
        if name not in self._entries:
            msg = (
                f"{self.files.folder}: the manifest does not list {name}, so it is incomplete. "
                "Resume from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        return self._entries[name]

    def _open(self, name: str) -> TorchFile:
        folder, save_id = self.files.folder, self.manifest.save_id
        file = TorchFile(VerifiedFile(folder, self._entry(name), save_id, self.files.progress))
        try:
            self._check_save(file, name)
        except BaseException:
            file.close()
            raise
        return file

    def _check_save(self, file: TorchFile, name: str) -> None:
        stamp = file.tree.get(OURS, {}) if isinstance(file.tree, dict) else {}
        wanted = self.manifest.save_id, self.manifest.progress.global_steps
        # Files from before the first release do not record the step.
        held = stamp.get("save_id"), stamp.get("global_steps", wanted[1])
        if held != wanted:
            msg = (
                f"{self.files.folder / name} belongs to save {held[0]!r} of step {held[1]}, the "
                f"manifest to save {wanted[0]!r} of step {wanted[1]}: files of two checkpoints "
                "were mixed. Resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)
        if OPTIMIZER in file.tree:
            self._check_fragments(file, stamp)

    def _check_fragments(self, file: TorchFile, stamp: Mapping[str, Any]) -> None:
        held: list[dict[str, list[int]]] = [{} for _ in self.manifest.buffers]
        for fragment in self._layout.on_rank(stamp["rank"]):
            held[fragment.buffer][fragment.name] = [fragment.start, fragment.stop]
        if stamp["fragments"] != held:
            msg = (
                f"{file.path} contains other elements than the manifest lists for rank "
                f"{stamp['rank']}: one of them was modified. Resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)


SourceOf: TypeAlias = "Callable[[torch.Tensor], torch.Tensor | ChunkedSource]"
"""Returns the source from which a piece of a master, state or frozen weight is written."""


def as_it_is(piece: torch.Tensor) -> torch.Tensor:
    """Write a piece from its own memory."""
    return piece


def writes_weights(manifest: Manifest, rank: int) -> bool:
    """Whether a rank writes frozen and low-precision weights; in ZeRO-3 it writes its part."""
    return rank == 0 or manifest.stage == STAGE_WEIGHTS


@dataclass(frozen=True, slots=True)
class RankWriter:
    """Writes one rank's files of one save."""

    directory: AnyPath
    """The folder of this save: the staged checkpoint."""
    manifest: Manifest
    """The engine's manifest, with the id of the save."""
    rank: int
    progress: Progress
    """Receives the number of bytes written."""
    source_of: SourceOf = as_it_is
    """Called for each piece before any is written: masters first, then states, buffer by buffer."""

    def write(self, state: RankState, client: SplitState, own: SplitState) -> list[FileEntry]:
        """Write the rank's files, synced to disk; return their entries for the manifest.

        On ranks other than 0, ``state.module_buffers`` has only buffers that differ from rank 0's,
        and ``client`` has no objects. ``own`` is the state that only this rank restores. Raises
        SaveError if a file cannot be written.
        """
        files = [self.optimizer_shard(state, own)]
        if writes_weights(self.manifest, self.rank):
            files.append(self.model_states(state, client))
        if client.objects:
            files.append(self.client_objects(client))
        return files

    def optimizer_shard(self, state: RankState, own: SplitState) -> FileEntry:
        manifest, builder = self.manifest, TorchFileWriter()
        zero_3 = manifest.stage == STAGE_WEIGHTS
        inner: dict[str, Any] = {
            "zero_stage": manifest.stage,
            "dynamic_loss_scale": bool(state.loss_scaler.get("dynamic")),
            "overflow": False,
            "partition_count": manifest.world_size
            if zero_3
            # A number if there are no flat buffers: DeepSpeed's script takes the maximum of a list.
            else [manifest.world_size] * len(manifest.buffers) or manifest.world_size,
            fp32_key(manifest.stage): [
                self._in_place(builder, index, flat, flat.master)
                for index, flat in enumerate(state.flats)
            ]
            or [torch.empty(0)],
        }
        if zero_3:
            # As a dictionary: DeepSpeed's class would not load with weights_only=True. The loader
            # of pull request 8031 needs the entry.
            inner["loss_scaler"] = dict(state.loss_scaler)
            world_size = manifest.world_size
            is_last = self.rank == world_size - 1
            inner["group_paddings"] = [
                [piece_numel(n, world_size) * world_size - n if is_last else 0 for n in b.numels]
                for b in manifest.buffers
            ]
        else:
            # Without an entry, DeepSpeed's loader keeps its current loss scaler.
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
                inner[GROUP_STEP] = step
        stored: dict[str, Any] = {
            "buffers": _copies(state.module_buffers) if self.rank else {},
            "state": own.plain,
        }
        if own.objects:
            stored["objects"] = store_objects(own.objects)
        # The run of each parameter in each flat buffer.
        fragments = [{f.name: [f.start, f.stop] for f in flat.fragments} for flat in state.flats]
        ours = {**self._stamp(), "fragments": fragments, "own": stored}
        if any(flat.weights for flat in state.flats):
            ours[MODULE_WEIGHTS] = [
                self._pieces(builder, index, flat, flat.weights, flat.weights[0].dtype)
                if flat.weights
                else None
                for index, flat in enumerate(state.flats)
            ]
        tree = {OPTIMIZER: inner, "ds_version": manifest.writer.deepspeed, OURS: ours}
        return self._save(optimizer_file(self.rank, manifest.precision), tree, builder)

    def model_states(self, state: RankState, client: SplitState) -> FileEntry:
        """Write buffers, frozen weights, shapes, counters and the trainer's state."""
        manifest, builder = self.manifest, TorchFileWriter()
        buffers = _copies(state.module_buffers) if self.rank == 0 else {}
        frozen = {p.name: p for p in manifest.frozen}
        pieces = {n: self._frozen(builder, state.frozen[n], p) for n, p in frozen.items()}
        weights, flats = _copies(state.module_weights), [b.names for b in manifest.buffers]
        tree: dict[str, Any] = {
            # As DeepSpeed does: converters look for the trainer's keys here. DeepSpeed's own
            # entries take precedence; the complete client state is in OURS below.
            **client.plain,
            **model_entries(manifest, flats, weights, pieces, buffers),
            "lr_scheduler": to_host(state.lr_scheduler),
            OURS: {
                **self._stamp(),
                "client_state": dict(client.plain),
                "loss_scaler": dict(state.loss_scaler),
            },
        }
        return self._save(model_file(self.rank, manifest.stage), tree, builder)

    def _in_place(
        self, builder: TorchFileWriter, index: int, flat: FlatState, values: torch.Tensor
    ) -> torch.Tensor:
        """Add masters or a state, with each element at its offset in the flat buffer.

        Padding is zero. In ZeRO-1/2, the padding at the end of the whole buffer is omitted.
        """
        pieces: list[Piece] = []
        reached = 0
        for fragment in flat.fragments:
            stop = fragment.offset + fragment.stop - fragment.start
            pieces += [fragment.offset - reached, self.source_of(values[fragment.offset : stop])]
            reached = stop
        zero_3 = self.manifest.stage == STAGE_WEIGHTS
        end = flat.master.numel() if zero_3 else self._lean_numel(self.manifest.buffers[index])
        return builder.add(piecewise([*pieces, end - reached], values.dtype))

    def _lean_states(self, builder: TorchFileWriter, index: int, flat: FlatState) -> dict[str, Any]:
        """Add a flat buffer's optimizer states; return them in DeepSpeed's elastic format.

        In ZeRO-1/2, an element-wise state is one tensor, like the masters. In ZeRO-3 it is a list
        of one tensor per parameter, without padding: views of one storage.
        """
        zero_3 = self.manifest.stage == STAGE_WEIGHTS
        states: dict[str, Any] = {
            key: self._pieces(builder, index, flat, own_runs(flat, values), values.dtype)
            if zero_3
            else self._in_place(builder, index, flat, values)
            for key, values in flat.elementwise.items()
        }
        for key, value in flat.scalars.items():
            in_file = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            states[key] = in_file
        return states

    def _pieces(
        self,
        builder: TorchFileWriter,
        index: int,
        flat: FlatState,
        of_fragments: Iterable[torch.Tensor],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Add a tensor of each fragment; return the rank's piece of each parameter of the buffer.

        The pieces are views of one tensor, in flat order; they may be empty.
        """
        numels = dict.fromkeys(self.manifest.buffers[index].names, 0)
        numels.update((f.name, f.stop - f.start) for f in flat.fragments)
        whole = builder.add(piecewise([*map(self.source_of, of_fragments)], dtype))
        stops = list(accumulate(numels.values()))
        return [
            whole[stop - numel : stop] for numel, stop in zip(numels.values(), stops, strict=True)
        ]

    def _lean_numel(self, buffer: FlatBuffer) -> int:
        """Return the elements of this rank's partition without final padding (ZeRO-1/2)."""
        end = sum((*buffer.numels, *buffer.paddings[:-1]))
        start, stop = buffer.partition_range(self.rank)
        return max(0, min(end, stop) - start)

    def _frozen(
        self, builder: TorchFileWriter, piece: torch.Tensor, parameter: Parameter
    ) -> torch.Tensor:
        """Add a frozen weight: whole with its shape, or in ZeRO-3 a padded 1-D piece."""
        zero_3 = self.manifest.stage == STAGE_WEIGHTS
        numel = piece_numel(parameter.numel, self.manifest.world_size) if zero_3 else piece.numel()
        pieces = [self.source_of(piece), numel - piece.numel()]
        placed = builder.add(piecewise(pieces, piece.dtype))
        return placed if zero_3 else placed.view(parameter.shape)

    def client_objects(self, client: SplitState) -> FileEntry:
        tree = {**store_objects(client.objects), OURS: self._stamp()}
        return self._save(CLIENT_OBJECTS, tree, TorchFileWriter())

    def _stamp(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "save_id": self.manifest.save_id,
            "rank": self.rank,
            "world_size": self.manifest.world_size,
            "global_steps": self.manifest.progress.global_steps,
        }

    def _save(self, name: str, tree: object, builder: TorchFileWriter) -> FileEntry:
        return builder.write(
            tree, self.directory, name, save_id=self.manifest.save_id, progress=self.progress
        )


def own_runs(flat: FlatState, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the elements of each fragment of a flat buffer's masters or states."""
    return [values[f.offset : f.offset + f.stop - f.start] for f in flat.fragments]


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
    frozen: Mapping[str, torch.Tensor],
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
