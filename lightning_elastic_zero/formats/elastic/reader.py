"""Reads our own format: each rank just the byte ranges that it needs, verified, into place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
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
from lightning_elastic_zero.formats.elastic.client_state import Objects, join_objects
from lightning_elastic_zero.formats.open_files import OpenFiles
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
from lightning_elastic_zero.formats.safe_pickle.unpickler import load_objects
from lightning_elastic_zero.formats.torch_file import StoredRun, TorchFile
from lightning_elastic_zero.layout import Fragment, Transfer
from lightning_elastic_zero.manifest import FORMAT, STAGE_WEIGHTS, FileEntry, Manifest
from lightning_elastic_zero.partition import piece_start
from lightning_elastic_zero.storage import (
    SUMS_SUFFIX,
    VerifiedFile,
    ignore_progress,
    sidecar_bytes,
)
from lightning_elastic_zero.tensor_state import Scalar


class ElasticReader(CheckpointReader):
    """A published checkpoint of our own format."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        allow_pickle: bool = False,
        on_progress: Callable[[], None] = ignore_progress,
    ) -> None:
        """Keep a checkpoint's directory and its manifest.

        Args:
            directory: where ``manifest.json`` lies.
            manifest: what it says.
            allow_pickle: read client objects of any class.
            on_progress: called after every read, and every look at a file.
        """
        self.info = SourceInfo(f"{FORMAT} checkpoint")
        self.manifest = manifest
        self.files = OpenFiles(directory, self._open, on_progress=on_progress)
        self._allow_pickle = allow_pickle
        self._entries = {entry.name: entry for entry in manifest.files}
        self._optimized = {p.name for p in manifest.optimized}
        self._frozen_numel = {p.name: p.numel for p in manifest.frozen}
        self._positions = {n: i for buffer in manifest.buffers for i, n in enumerate(buffer.names)}
        self._layout = manifest.layout()
        self._read_first: int | None = None

    def verify(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Do nothing: every byte is verified when it is read."""

    def verify_whole(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Read this rank's share of the files, and compare all checksums."""
        verify_files(self.files.folder, self.manifest, rank, world_size, on_bytes)

    def names(self) -> Sequence[str]:
        """Return the files that the manifest names, each with its checksums."""
        return tuple(n for name in self._entries for n in (name, name + SUMS_SUFFIX))

    def recorded_bytes(self, name: str) -> int | None:
        """Return the size of a file as it was written; that of checksums follows from it."""
        entry = self._entries.get(name.removesuffix(SUMS_SUFFIX))
        if entry is None:
            return None
        if entry.name == name:
            return entry.size_bytes
        return sidecar_bytes(entry.size_bytes, self.manifest.save_id)

    # -- checks before the first byte is read ------------------------------------------------

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Check that every file of these source ranks is there, with its size.

        Raises:
            CheckpointCorruptedError: one is missing or has another size; all of them are named.
        """
        self._read_first = min(masters, default=None)
        names = [optimizer_file(rank, self.manifest.precision) for rank in masters]
        models = sorted({0, *frozen})  # rank 0's has what is held once
        names += [model_file(rank, self.manifest.stage) for rank in models]
        self._check_sizes(names)

    def check_files(self) -> None:
        """Check every file that the manifest names.

        Raises:
            CheckpointCorruptedError: as ``check``.
        """
        self._check_sizes(entry.name for entry in self.manifest.files)

    def _check_sizes(self, names: Iterable[str]) -> None:
        sizes = ((name, self._entry(name).size_bytes) for name in names)
        if wrong := differing_sizes(self.files.folder, sizes, self.files.on_progress):
            msg = (
                f"{self.files.folder} is damaged: {'; '.join(wrong)}. "
                "Resume from another checkpoint, or copy these files again from where they are "
                "whole"
            )
            raise CheckpointCorruptedError(msg)

    # -- runs of elements --------------------------------------------------------------------

    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of masters, of a state or of a frozen weight lies."""
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

    def _run(
        self, file: TorchFile, stored: torch.Tensor, base: int, transfer: Transfer
    ) -> StoredRun:
        """Return the part of a stored tensor, whose first element is the parameter's ``base``-th.

        Raises:
            CheckpointFormatError: it has fewer elements than the manifest says.
        """
        start, stop = transfer.start - base, transfer.stop - base
        if not 0 <= start <= stop <= stored.numel():
            msg = (
                f"{file.path} holds {stored.numel()} elements of {transfer.name} from {base} on, "
                f"the manifest wants [{transfer.start}, {transfer.stop}) of it: they are not of "
                "one save"
            )
            raise CheckpointFormatError(msg)
        return StoredRun(stored, start, stop)

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the held flat buffer that holds ``at``.

        They are alike on all ranks of a save, or it would have failed: so a rank takes them from
        the file that it reads first. Else all of them would open one file more, the same one.
        """
        rank = at.rank if self._read_first is None else self._read_first
        file = self.files.get(optimizer_file(rank, self.manifest.precision))
        states = file.tree[OPTIMIZER][STATES][at.buffer]
        group = self.manifest.groups[self.manifest.buffers[at.buffer].group]
        keys = [key.name for key in group.state if key.kind == "scalar"]
        found: dict[str, Scalar] = file.load_tree({key: states[key] for key in keys})
        return found

    # -- what is held once -------------------------------------------------------------------

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once, with what this rank had of its own where ranks match."""
        file = self.files.get(model_file(0, self.manifest.stage))
        ours = file.tree[OURS]
        module = file.load_tree({n: file.tree["module"][n] for n in self.manifest.module_buffers})
        client = file.load_tree(ours["client_state"])
        scheduler = file.tree["lr_scheduler"]
        loss_scaler, lr_scheduler = ours["loss_scaler"], scheduler and file.load_tree(scheduler)
        if self.manifest.client_objects:
            client = join_objects(client, self._objects())
        if rank and world_size == self.manifest.world_size and self.manifest.rank_state:
            file = self.files.get(optimizer_file(rank, self.manifest.precision))
            own = file.load_tree(file.tree[OURS]["own"])
            module.update(own["buffers"])
            client = join_objects(client, tuple((tuple(p), v) for p, v in own["client_state"]))
            if "objects" in own:
                where = f"rank {rank}'s own objects in {self.files.folder}"
                client = join_objects(client, self._build(own["objects"], where))
        extra = client.pop(EXTRA_STATES, {})  # Both are of this call: nobody else sees it.
        client.pop(OPTIMIZER_STATE, None)
        return SharedState(module, client, loss_scaler, lr_scheduler, self._entry_of, extra)

    def optimizer_state(self) -> Mapping[Any, Any]:
        """Return what the optimizer kept under keys that are not parameters."""
        file = self.files.get(model_file(0, self.manifest.stage))
        held = file.tree[OURS]["client_state"].get(OPTIMIZER_STATE, {})
        return file.load_tree(held)  # type: ignore[no-any-return]

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return rank 0's persistent module buffers."""
        file = self.files.get(model_file(0, self.manifest.stage))
        held = {n: file.tree["module"][n] for n in self.manifest.module_buffers}
        return file.load_tree(held)  # type: ignore[no-any-return]

    def recorded_fingerprint(self) -> str:
        """Return what the save recorded of its state, beside it; most saves record nothing."""
        found = self.files.get(model_file(0, self.manifest.stage)).tree[OURS].get("fingerprint")
        return found if isinstance(found, str) else ""

    def trainer_entry(self, name: str) -> object:
        """Return what the manifest records of the data: the epoch."""
        return self.manifest.progress.sampler.get(name)

    def _entry_of(self, rank: int, path: tuple[str, ...]) -> object:
        """Return an entry of the client state as a rank had it; None where it had none."""
        file = self.files.get(model_file(0, self.manifest.stage))
        holder: Any = file.load_tree(_entry(file.tree[OURS]["client_state"], path))
        for key in reversed(path):
            holder = {key: holder}
        if rank and "client_state" in self.manifest.rank_state:
            file = self.files.get(optimizer_file(rank, self.manifest.precision))
            own = [
                (tuple(at), file.load_tree(value))
                for at, value in file.tree[OURS]["own"]["client_state"]
                if tuple(at[: len(path)]) == path[: len(at)]
            ]
            join_objects(holder, tuple(own))
        return _entry(holder, path)

    def _objects(self) -> Objects:
        """Return the client objects, if they are harmless or allowed."""
        file = self.files.get(CLIENT_OBJECTS)
        # What is refused is named by itself; what fails in Python's own unpickler is one of these.
        these = f" ({', '.join(self.manifest.client_objects)})" if self._allow_pickle else ""
        where = f"{file.path}{these}"
        return self._build(file.load_tree(file.tree["pickle"]), where)

    def _build(self, data: torch.Tensor, where: str) -> Objects:
        """Unpickle objects, if they are harmless or allowed."""
        pickled = data.numpy().tobytes()
        objects: Any = load_objects(pickled, where, allow_pickle=self._allow_pickle)
        return tuple(objects)

    # -- files -------------------------------------------------------------------------------

    def _entry(self, name: str) -> FileEntry:
        """Return what the manifest says of a file.

        Raises:
            CheckpointFormatError: it names no such file.
        """
        if name not in self._entries:
            msg = f"{self.files.folder}: the manifest names no {name}: it was not written whole"
            raise CheckpointFormatError(msg)
        return self._entries[name]

    def _open(self, name: str) -> TorchFile:
        """Open a file, if it is of this save.

        Raises:
            CheckpointCorruptedError: it is not what was written, or of another save.
        """
        folder, save_id = self.files.folder, self.manifest.save_id
        file = TorchFile(VerifiedFile(folder, self._entry(name), save_id, self.files.on_progress))
        try:
            self._check_save(file, name)
        except BaseException:
            file.close()
            raise
        return file

    def _check_save(self, file: TorchFile, name: str) -> None:
        """Compare what a file says of itself with the manifest.

        Raises:
            CheckpointCorruptedError: they are of two saves, or one of them was changed.
        """
        stamp = file.tree.get(OURS, {}) if isinstance(file.tree, dict) else {}
        wanted = self.manifest.save_id, self.manifest.progress.global_steps
        # Files from before the first release do not name the step.
        held = stamp.get("save_id"), stamp.get("global_steps", wanted[1])
        if held != wanted:
            msg = (
                f"{self.files.folder / name} belongs to save {held[0]!r} of step {held[1]}, the "
                f"manifest to save {wanted[0]!r} of step {wanted[1]}: files of two checkpoints "
                "were mixed; resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)
        if OPTIMIZER in file.tree:
            self._check_fragments(file, stamp)

    def _check_fragments(self, file: TorchFile, stamp: Mapping[str, Any]) -> None:
        """Compare what a shard says it holds with what the manifest's layout says.

        Raises:
            CheckpointCorruptedError: they differ, so that one of them is not what was written.
        """
        held: list[dict[str, list[int]]] = [{} for _ in self.manifest.buffers]
        for fragment in self._layout.on_rank(stamp["rank"]):
            held[fragment.buffer][fragment.name] = [fragment.start, fragment.stop]
        if stamp["fragments"] != held:
            msg = (
                f"{file.path} holds other elements than the manifest says of rank "
                f"{stamp['rank']}: one of them was changed; resume from another checkpoint"
            )
            raise CheckpointCorruptedError(msg)


def _entry(tree: Any, path: tuple[str, ...]) -> Any:  # noqa: ANN401 (whatever was saved)
    """Return what is at a path of nested dicts; None where nothing is."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def verify_files(
    directory: Path, manifest: Manifest, rank: int, world_size: int, on_bytes: Callable[[int], None]
) -> None:
    """Read this rank's share of the files, and compare all checksums.

    Raises:
        CheckpointCorruptedError: bytes are not those that were written.
    """
    for entry in manifest.files[rank::world_size]:
        with VerifiedFile(directory, entry, manifest.save_id) as file:
            for _, view in file.read_runs([(0, file.size_bytes)]):
                on_bytes(view.nbytes)
