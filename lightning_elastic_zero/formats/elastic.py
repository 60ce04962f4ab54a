"""Reader of this library's format (docs/format.md): only the byte ranges that a rank needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_elastic_zero.core.layout import Fragment, Transfer
from lightning_elastic_zero.core.manifest import (
    BUFFERS,
    FORMAT,
    MODULE_WEIGHTS,
    OWN_STATE,
    STAGE_WEIGHTS,
    FileEntry,
    Manifest,
)
from lightning_elastic_zero.core.partition import piece_start
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.save_files import (
    CLIENT_OBJECTS,
    FROZEN,
    OPTIMIZER,
    OURS,
    STATES,
    fp32_key,
    model_file,
    optimizer_file,
    tensor_rank_of,
)
from lightning_elastic_zero.core.tensors import Scalar
from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.formats.client_state import (
    Objects,
    join_objects,
    load_objects,
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
from lightning_elastic_zero.formats.sharded import ShardedReader
from lightning_elastic_zero.formats.torch_read import OpenFiles, StoredRun, TorchFile
from lightning_elastic_zero.storage.file_read import VerifiedFile
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX, sidecar_bytes
from lightning_elastic_zero.storage.paths import AnyPath


def open_elastic(
    directory: AnyPath,
    manifest: Manifest,
    *,
    allow_pickle: bool = False,
    progress: Progress = NO_PROGRESS,
) -> CheckpointReader:
    """Open a published checkpoint of this library's format."""
    open_shard = partial(ElasticReader, directory, allow_pickle=allow_pickle, progress=progress)
    if manifest.tensor_parallel.size == 1:
        return open_shard(manifest)
    shards = []
    for tensor_rank, shard in enumerate(manifest.shards()):
        files = [f for f in shard.files if tensor_rank_of(f.name) == tensor_rank]
        shards.append(open_shard(replace(shard, files=tuple(files)), tensor_rank=tensor_rank))
    return ShardedReader(manifest, shards)


class ElasticReader(CheckpointReader):
    """The files of one tensor rank of a published checkpoint of this library's format."""

    def __init__(
        self,
        directory: AnyPath,
        manifest: Manifest,
        *,
        allow_pickle: bool = False,
        progress: Progress = NO_PROGRESS,
        tensor_rank: int = 0,
    ) -> None:
        """Open it; ``manifest`` is that of the shards of ``tensor_rank``, as are all ranks."""
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
        self._tensor_rank = tensor_rank
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
        names = [self._optimizer_name(rank) for rank in masters]
        models = sorted({0, *frozen})  # rank 0's has the shared state
        names += [self._model_name(rank) for rank in models]
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
            file = self.files.get(self._model_name(transfer.source_rank))
            stored = file.tree[FROZEN][transfer.name].view(-1)
            base = 0
            if self.manifest.stage == STAGE_WEIGHTS:
                numel = self._frozen_numel[transfer.name]
                base = piece_start(numel, self.manifest.world_size, transfer.source_rank)
            return file, self._run(file, stored, base, transfer)
        file = self.files.get(self._optimizer_name(transfer.source_rank))
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
        file = self.files.get(self._optimizer_name(transfer.source_rank))
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
        file = self.files.get(self._optimizer_name(rank))
        states = file.tree[OPTIMIZER][STATES][at.buffer]
        group = self.manifest.groups[self.manifest.buffers[at.buffer].group]
        return file.load_tree({key.name: states[key.name] for key in group.scalars})

    # -- shared state ------------------------------------------------------------------------

    def _model_file(self) -> TorchFile:
        return self.files.get(self._model_name(0))

    def engine_state(self) -> SharedState:
        file = self._model_file()
        ours = file.tree[OURS]
        scheduler, client = file.tree["lr_scheduler"], ours["client_state"]
        objects = [f"{path}." for path in self.manifest.client_objects]
        return SharedState(
            buffers=dict(self.module_buffers()),
            client_state=dict.fromkeys(client.keys() - {EXTRA_STATES, OPTIMIZER_STATE}),
            loss_scaler=ours["loss_scaler"],
            lr_scheduler=scheduler and file.load_tree(scheduler),
            extra_states={
                name: None
                if any(path.startswith(f"{EXTRA_STATES}.{name}.") for path in objects)
                else file.load_tree(state)
                for name, state in client.get(EXTRA_STATES, {}).items()
            },
        )

    def module_state(self, rank: int, world_size: int) -> SharedState:
        file = self._model_file()
        client = file.load_tree(file.tree[OURS]["client_state"])
        if self.manifest.client_objects:
            client = join_objects(client, self._objects())
        extra = client.pop(EXTRA_STATES, {})
        client.pop(OPTIMIZER_STATE, None)
        shared = replace(self.engine_state(), client_state=client, extra_states=extra)
        return (
            self.with_own_state(shared, rank) if world_size == self.manifest.world_size else shared
        )

    def with_own_state(self, shared: SharedState, rank: int) -> SharedState:
        buffers, rank_state = self._own_state(rank)
        return replace(
            shared,
            buffers={**shared.buffers, **buffers},
            extra_states=rank_state.pop(EXTRA_STATES, shared.extra_states),
            rank_state=rank_state,
        )

    def _own_state(self, rank: int) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
        """Return the module buffers and the state that are a rank's own."""
        if not {BUFFERS, OWN_STATE}.intersection(self.manifest.rank_state):
            return {}, {}
        file = self.files.get(self._optimizer_name(rank))
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
        module = file.tree["module"]
        if missing := [n for n in self.manifest.module_buffers if n not in module]:
            msg = (
                f"{file.path} lacks the buffer {missing[0]}, which the manifest lists: they are "
                "not of one save. Resume from another checkpoint"
            )
            raise CheckpointFormatError(msg)
        return file.load_tree({n: module[n] for n in self.manifest.module_buffers})

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

    def _optimizer_name(self, rank: int) -> str:
        return optimizer_file(rank, self.manifest.precision, self._tensor_rank)

    def _model_name(self, rank: int) -> str:
        return model_file(rank, self.manifest.stage, self._tensor_rank)

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
        stamped = stamp.get("save_id"), stamp.get("global_steps", wanted[1])
        if stamped != wanted:
            msg = (
                f"{self.files.folder / name} belongs to save {stamped[0]!r} of step {stamped[1]}, "
                f"the manifest to save {wanted[0]!r} of step {wanted[1]}: files of two checkpoints "
                "were mixed. Resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)
        if OPTIMIZER in file.tree:
            self._check_fragments(file, stamp)

    def _check_fragments(self, file: TorchFile, stamp: Mapping[str, Any]) -> None:
        fragments: list[dict[str, list[int]]] = [{} for _ in self.manifest.buffers]
        for fragment in self._layout.on_rank(stamp["rank"]):
            fragments[fragment.buffer][fragment.name] = [fragment.start, fragment.stop]
        if stamp["fragments"] != fragments:
            msg = (
                f"{file.path} contains other elements than the manifest lists for rank "
                f"{stamp['rank']}: one of them was modified. Resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)
