"""This library's own format, from any kind: as one device would have saved it with ZeRO-3.

It resumes on any number of devices, at any stage. What ranks of the save had of their own (random
numbers, buffers that differ) is theirs, and is not in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointMismatchError
from lightning_elastic_zero.formats import EXTRA_STATES, OPTIMIZER_STATE, WEIGHT
from lightning_elastic_zero.formats.elastic.client_state import split_objects
from lightning_elastic_zero.formats.elastic.writer import ClientPart, RankWriter
from lightning_elastic_zero.formats.torch_file import ChunkedSource
from lightning_elastic_zero.formats.tree_path import format_tree_path
from lightning_elastic_zero.layout import Fragment
from lightning_elastic_zero.manifest import (
    MANIFEST_NAME,
    STAGE_WEIGHTS,
    FileEntry,
    Manifest,
    Progress,
)
from lightning_elastic_zero.partition import FlatBuffer
from lightning_elastic_zero.storage import StagedDirectory, write_durably
from lightning_elastic_zero.storage.exports import check_free
from lightning_elastic_zero.storage.file_ownership import LATEST, TAG
from lightning_elastic_zero.tensor_state import FlatState, RankState, Scalar, dtype_name
from lightning_elastic_zero.tools.checkpoint_view import (
    OpenCheckpoint,
    TensorEntry,
    holds_whole_tensors,
)
from lightning_elastic_zero.tools.conversion.selection import (
    ConvertOptions,
    check_optimizer,
    source_of,
)
from lightning_elastic_zero.tools.progress_line import OnBytes


def write_elastic_directory(
    checkpoint: OpenCheckpoint, target: Path, options: ConvertOptions, on_bytes: OnBytes
) -> None:
    """Write and publish the checkpoint, where nothing was: unlike a save, it replaces nothing.

    Raises:
        SaveError: something is at the target, or has come there meanwhile.
    """
    check_free(target)  # An older checkpoint of ours may be the very source.
    options.check_whole("a checkpoint of this library")
    _check_trained(checkpoint)
    lean = options.optimizer is False or checkpoint.manifest.weights_only
    if not lean:
        check_optimizer(checkpoint, options)
        _check_hyperparameters(checkpoint)
    shared = checkpoint.reader.module_state(0, checkpoint.manifest.world_size)
    extra: dict[str, Any] = {EXTRA_STATES: dict(shared.extra_states)} if shared.extra_states else {}
    if not lean and (of_optimizer := checkpoint.reader.optimizer_state()):
        extra[OPTIMIZER_STATE] = dict(of_optimizer)
    split = split_objects({**shared.client_state, **extra})
    buffers = {**checkpoint.buffers, **_untold_buffers(checkpoint, options)}
    manifest = _manifest(checkpoint, tuple(buffers), weights_only=lean)
    stand_ins = _StandIns(checkpoint)
    state = RankState(
        flats=tuple(stand_ins.flats(manifest)),
        frozen={p.name: stand_ins.add(_frozen(checkpoint, p.name)) for p in manifest.frozen},
        module_buffers=buffers,
        module_weights={},
        loss_scaler=shared.loss_scaler,
        lr_scheduler=shared.lr_scheduler,
    )
    with _staged(target, manifest.save_id) as staged:
        writer = RankWriter(
            staged.path, manifest, rank=0, on_bytes=on_bytes, source_of=stand_ins.source_of
        )
        files = writer.write(state, ClientPart(split.plain, split.objects))
        objects = tuple(format_tree_path(path) for path, _ in split.objects)
        _finish(staged, replace(manifest, client_objects=objects), files)


def _check_hyperparameters(checkpoint: OpenCheckpoint) -> None:
    """Refuse what has states and no rates: a load of our format takes the saved ones.

    Raises:
        CheckpointMismatchError: it has none.
    """
    if not checkpoint.reader.info.hyperparameters:
        msg = (
            f"{checkpoint.path} lacks the hyperparameters of the parameter groups, which a "
            "checkpoint of this library has to hold: resume from it as it is, or convert its "
            "weights alone (--optimizer no)"
        )
        raise CheckpointMismatchError(msg)


def _check_trained(checkpoint: OpenCheckpoint) -> None:
    """Refuse weights alone of which nothing says which are trained.

    Raises:
        CheckpointMismatchError: it is so.
    """
    if not checkpoint.manifest.groups:
        why = checkpoint.reader.info.unmatched or "it has no optimizer's state by names"
        msg = (
            f"{checkpoint.path} does not say which of its weights are trained ({why}), which a "
            "checkpoint of this library has to: resume from it as it is"
        )
        raise CheckpointMismatchError(msg)


def _untold_buffers(checkpoint: OpenCheckpoint, options: ConvertOptions) -> dict[str, torch.Tensor]:
    """Return the buffers of a source that calls them weights."""
    if not holds_whole_tensors(checkpoint.manifest):
        return {}
    entries = [_frozen(checkpoint, p.name) for p in checkpoint.manifest.frozen]
    return {
        entry.name: torch.cat([torch.empty(0, dtype=dtype), *checkpoint.chunks(entry)]).view(
            entry.shape
        )
        for entry in entries
        for dtype in [checkpoint.dtype(entry)]
        if not dtype.is_floating_point or options.name_buffer(checkpoint, entry)
    }


def _manifest(
    checkpoint: OpenCheckpoint, buffers: tuple[str, ...], *, weights_only: bool
) -> Manifest:
    """Describe the same state, on one rank of ZeRO-3: buffers as they were, cut by nobody."""
    source = checkpoint.manifest
    masters = [TensorEntry("trained", p.name, WEIGHT, p.shape) for p in source.optimized]
    first = _first_held(masters)
    dtype = dtype_name(checkpoint.dtype(first)) if first else source.master_dtype
    return replace(
        source,
        save_id=uuid.uuid4().hex,
        progress=_progress(checkpoint),
        stage=STAGE_WEIGHTS,
        world_size=1,
        master_dtype=dtype,
        buffers=tuple(FlatBuffer(b.group, b.names, b.numels) for b in source.buffers),
        groups=tuple(replace(g, state=()) if weights_only else g for g in source.groups),
        parameters=tuple(p for p in source.parameters if p.name not in buffers),
        module_buffers=buffers,
        files=(),
        weights_only=weights_only,
        rank_state=(),
        client_objects=(),
    )


def _progress(checkpoint: OpenCheckpoint) -> Progress:
    """Return how far the run had come; where nothing says, by the steps that its optimizer counts.

    A checkpoint of this library always says it.

    Raises:
        CheckpointFormatError: an optimizer counts steps that are no number.
    """
    found = checkpoint.manifest.progress
    if checkpoint.reader.info.has_counters:
        return found
    counted = [checkpoint.step(p.name) or 0 for p in checkpoint.manifest.optimized]
    return replace(found, global_steps=max(map(int, counted), default=0))


def _first_held(entries: Sequence[TensorEntry]) -> TensorEntry | None:
    """Return the first one with elements, whose type is that of what is stored."""
    return next((entry for entry in entries if entry.numel), next(iter(entries), None))


def _frozen(checkpoint: OpenCheckpoint, name: str) -> TensorEntry:
    return TensorEntry("frozen", name, WEIGHT, checkpoint.parameters[name].shape)


class _StandIns:
    """Tensors without values (on the meta device), and what fetches the runs cut of them."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._entries: dict[tuple[int, int], TensorEntry] = {}
        self._held: list[torch.Tensor] = []

    def add(self, entry: TensorEntry) -> torch.Tensor:
        """Return a stand-in for one tensor, 1-D."""
        return self._join([entry], [0], entry.numel)

    def flats(self, manifest: Manifest) -> Iterator[FlatState]:
        """Yield each flat buffer, with its states."""
        held = manifest.layout().on_rank(0)
        for index, buffer in enumerate(manifest.buffers):
            mine = tuple(f for f in held if f.buffer == index)
            keys = [k.name for k in manifest.groups[buffer.group].state if k.kind == "elementwise"]
            states = {key: self._flat(mine, key) for key in keys}
            yield FlatState(mine, self._flat(mine, WEIGHT), states, self._scalars(manifest, buffer))

    def _scalars(self, manifest: Manifest, buffer: FlatBuffer) -> Mapping[str, Scalar]:
        """Return the states of a buffer that are one value."""
        if manifest.weights_only or not buffer.names:
            return {}
        return self._checkpoint.scalars(buffer.names[0])

    def _flat(self, fragments: Sequence[Fragment], key: str) -> torch.Tensor:
        parameters = self._checkpoint.parameters
        entries = [TensorEntry("trained", f.name, key, parameters[f.name].shape) for f in fragments]
        return self._join(entries, [f.offset for f in fragments], sum(e.numel for e in entries))

    def _join(
        self, entries: Sequence[TensorEntry], offsets: Sequence[int], numel: int
    ) -> torch.Tensor:
        first = _first_held(entries)
        dtype = self._checkpoint.dtype(first) if first else torch.float32
        stand_in = torch.empty(numel, dtype=dtype, device="meta")
        self._held.append(stand_in)  # No other one gets its place.
        for entry, offset in zip(entries, offsets, strict=True):
            self._entries[_place(stand_in[offset:])] = entry
        return stand_in

    def source_of(self, piece: torch.Tensor) -> torch.Tensor | ChunkedSource:
        """Return what fetches a piece: each is one tensor of the checkpoint, whole."""
        if not piece.is_meta or not piece.numel():
            return piece
        return source_of(self._checkpoint, self._entries[_place(piece)])


def _place(piece: torch.Tensor) -> tuple[int, int]:
    return piece.untyped_storage()._cdata, int(piece.storage_offset())  # noqa: SLF001 (which one)


@contextmanager
def _staged(target: Path, save_id: str) -> Iterator[StagedDirectory]:
    staged = StagedDirectory.create(target, save_id)
    try:
        (staged.path / TAG).mkdir()
        with staged.touch_regularly():
            yield staged
    except BaseException:
        staged.abandon()
        raise


def _finish(staged: StagedDirectory, manifest: Manifest, files: Sequence[FileEntry]) -> None:
    write_durably(staged.path / LATEST, TAG.encode())
    text = replace(manifest, files=tuple(files)).to_json()
    write_durably(staged.path / MANIFEST_NAME, text.encode())
    staged.sync()
    check_free(staged.target)
    staged.publish()
