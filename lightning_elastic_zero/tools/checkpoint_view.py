"""An open checkpoint and the tensors in it, without a model: what every tool begins with."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointNotFoundError
from lightning_elastic_zero.formats import (
    WEIGHT,
    CheckpointReader,
    RenamedReader,
    open_checkpoint,
)
from lightning_elastic_zero.key_mapping import KeyMapping
from lightning_elastic_zero.large_pages import host_chunk
from lightning_elastic_zero.layout import Fragment, Layout, Transfer, TransferPlan, spans
from lightning_elastic_zero.manifest import Manifest, Parameter
from lightning_elastic_zero.state_fingerprint import STEP
from lightning_elastic_zero.storage import check_local_path, existing_path, ignore_bytes
from lightning_elastic_zero.tensor_state import Scalar
from lightning_elastic_zero.tools.progress_line import OnBytes

CHUNK_ELEMENTS = 1 << 22
"""The most elements of a tensor that a tool holds at once: 16 MiB of fp32."""

OPEN_FILES = 64
"""Files kept open where a tool goes parameter by parameter, through the files of all ranks."""

Role: TypeAlias = Literal["trained", "frozen", "buffer"]
"""What a tensor of the model is. Where a file does not tell buffers from frozen weights: frozen."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint: a weight, a buffer, or an element-wise optimizer state."""

    role: Role
    name: str
    """Of the parameter or buffer."""
    key: str
    """The optimizer state's name; ``WEIGHT`` for weights and buffers."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StateRun:
    """A run of elements of one tensor, read."""

    entry: TensorEntry
    start: int
    """Its first element, counted in the flattened tensor."""
    values: torch.Tensor
    """1-D, in the type in which they are stored."""


class OpenCheckpoint:
    """An open checkpoint of any kind, bound to itself.

    Attributes:
        path: where it is, behind links.
        reader: the open files.
        manifest: what it says of itself.
    """

    def __init__(
        self, path: Path, reader: CheckpointReader, on_bytes: OnBytes = ignore_bytes
    ) -> None:
        """Keep an open reader; ``on_bytes`` is told of what is read."""
        self.path = path
        self.reader = reader
        self._on_bytes = on_bytes

    @property
    def manifest(self) -> Manifest:
        """What it says of itself."""
        return self.reader.manifest

    @cached_property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The module buffers: small, and held in memory."""
        return self.reader.module_buffers()

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters that it holds, by name."""
        manifest = self.manifest
        return {p.name: p for p in (*manifest.optimized, *manifest.frozen)}

    # -- what there is ---------------------------------------------------------------------------

    def weights(self) -> Iterator[TensorEntry]:
        """Yield masters and frozen weights in the model's order, and buffers."""
        left_out = set(self.manifest.excluded)
        for p in self.manifest.parameters:
            if p.name not in left_out:
                yield _entry(p, WEIGHT)
        for name, tensor in self.buffers.items():
            yield TensorEntry("buffer", name, WEIGHT, tuple(tensor.shape))

    def aliases(self, entry: TensorEntry) -> tuple[str, ...]:
        """Return the other names of a tied weight."""
        parameter = self.parameters.get(entry.name)
        return parameter.aliases if parameter and not entry.key else ()

    def states(self) -> Iterator[TensorEntry]:
        """Yield the element-wise states of all parameters."""
        for p in self.manifest.optimized:
            for key in self.state_keys(p.name, "elementwise"):
                yield _entry(p, key)

    def state_keys(self, name: str, kind: str) -> Sequence[str]:
        """Return the names of the states of a kind that a parameter has."""
        group = self.parameters[name].group
        state = () if group is None else self.manifest.groups[group].state
        return [key.name for key in state if key.kind == kind]

    def scalars(self, name: str) -> Mapping[str, Scalar]:
        """Return the states of a parameter that are one value.

        An empty one is nowhere, and has none of its own: what others of its flat buffer have, or
        else of its group.
        """
        if not self.state_keys(name, "scalar"):
            return {}
        holders = itertools.chain((name,), self._neighbours(name))
        held = (at for holder in holders for at in self._layout.covering(holder, 0, 1))
        at = next(held, None)
        if at is None:
            return {}
        if at.buffer not in self._scalars:
            self._scalars[at.buffer] = self.reader.scalars(at)
        return self._scalars[at.buffer]

    def step(self, name: str) -> Scalar:
        """Return the steps that a parameter's state counts; some optimizers count in the group.

        Raises:
            CheckpointFormatError: it is no number, but NaN or infinite.
        """
        group = self.manifest.groups[self.parameters[name].group or 0]
        of_group = group.hyperparameters.get(STEP)
        if isinstance(of_group, dict):
            of_group = of_group.get("tensor")
        counted = of_group if isinstance(of_group, (int, float)) else None
        found = self.scalars(name).get(STEP, counted)
        if found is not None and not math.isfinite(found):
            msg = (
                f"{self.path}: the optimizer's {STEP!r} of {name} is {float(found)}, which counts "
                "no steps: the state is damaged. Take another checkpoint, or its weights alone "
                "(safetensors, fp32)"
            )
            raise CheckpointFormatError(msg)
        return found

    def _neighbours(self, name: str) -> Iterator[str]:
        """Yield the others of a parameter's flat buffer, and then those of its group."""
        for buffer in self.manifest.buffers:
            if name in buffer.names:
                yield from buffer.names
        yield from self.manifest.groups[self.parameters[name].group or 0].names

    @cached_property
    def _scalars(self) -> dict[int, Mapping[str, Scalar]]:
        return {}

    # -- elements --------------------------------------------------------------------------------

    @cached_property
    def _layout(self) -> Layout:
        return self.reader.layout()

    @cached_property
    def _frozen_layout(self) -> Layout:
        return self.reader.frozen_layout()

    def _layout_of(self, entry: TensorEntry) -> Layout:
        return self._layout if entry.role == "trained" else self._frozen_layout

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        """Return the type in which a tensor is stored."""
        if entry.role == "buffer":
            return self.buffers[entry.name].dtype
        if not entry.numel:
            found: torch.dtype = getattr(torch, self._dtype_of_empty(entry))
            return found
        return self._stored_dtype(entry.key, self._transfers(entry, 0, 1)[0])

    def _dtype_of_empty(self, entry: TensorEntry) -> str:
        """Return the type of what has no elements, which is stored nowhere: that of the others."""
        parameter = self.parameters[entry.name]
        if entry.role != "trained":
            return parameter.dtype
        if entry.key != WEIGHT:
            table = self.manifest.groups[parameter.group or 0].state
            return next(key.dtype for key in table if key.name == entry.key)
        whole = holds_whole_tensors(self.manifest)
        return parameter.dtype if whole else self.manifest.master_dtype

    def _stored_dtype(self, key: str, transfer: Transfer) -> torch.dtype:
        return self.reader.locate(key, transfer)[1].tensor.dtype

    def _transfers(self, entry: TensorEntry, start: int, stop: int) -> list[Transfer]:
        wanted = Fragment(entry.name, start, stop, rank=0, buffer=0, offset=0)
        by_rank = TransferPlan([wanted], self._layout_of(entry)).by_rank()
        return [transfer for _, transfers in by_rank for transfer in transfers]

    def chunks(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield all elements of a tensor in order, each chunk a tensor of its own.

        Raises:
            CheckpointCorruptedError: bytes are not those that were written.
            CheckpointFormatError: an element is held nowhere, or twice.
        """
        if entry.role == "buffer":
            flat = self.buffers[entry.name].reshape(-1)
            for start, stop in spans(0, entry.numel, CHUNK_ELEMENTS):
                yield flat[start:stop]
            return
        for start, stop in spans(0, entry.numel, CHUNK_ELEMENTS):
            yield self.elements(entry, start, stop)

    def elements(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Return a run of a parameter's elements, in the type in which they are stored."""
        transfers = self._transfers(entry, start, stop)
        target = host_chunk(stop - start, self._stored_dtype(entry.key, transfers[0]))
        self.reader.read(transfers, [{entry.key: target}], self._on_bytes)
        return target

    def runs(
        self, part: int = 0, parts: int = 1, *, masters_only: bool = False
    ) -> Iterator[StateRun]:
        """Yield every element of weights and states once, in the order in which files hold them.

        What a load compares while it reads is compared: masters with low-precision weights.

        Args:
            part: which share of them; the shares of all parts are everything.
            parts: how many shares there are. Buffers belong to the first.
            masters_only: leave out states, frozen weights and buffers.
        """
        if part == 0 and not masters_only:
            for name, tensor in self.buffers.items():
                entry = TensorEntry("buffer", name, WEIGHT, tuple(tensor.shape))
                if entry.numel:
                    yield StateRun(entry, 0, tensor.reshape(-1))
        batch: list[StateRun] = []
        transfers: list[Transfer] = []
        held = 0
        for entry, transfer in self._share(part, parts, masters_only=masters_only):
            numel = transfer.stop - transfer.start
            if held + numel > CHUNK_ELEMENTS:
                yield from self._read(batch, transfers)
                batch, transfers, held = [], [], 0
            target = host_chunk(numel, self._stored_dtype(entry.key, transfer))
            transfers.append(replace(transfer, target_buffer=len(batch)))
            batch.append(StateRun(entry, transfer.start, target))
            held += numel
        yield from self._read(batch, transfers)

    def _read(self, batch: list[StateRun], transfers: Sequence[Transfer]) -> list[StateRun]:
        """Fill a batch of runs, in which transfers count their targets."""
        targets = [{run.entry.key: run.values} for run in batch]
        self.reader.read(transfers, targets, self._on_bytes)
        return batch

    def _share(
        self, part: int, parts: int, *, masters_only: bool
    ) -> Iterator[tuple[TensorEntry, Transfer]]:
        """Yield a share of what the ranks of the save hold, in runs of at most one chunk."""
        ranks = self.manifest.world_size
        by_rank = ranks >= parts
        for rank in range(part, ranks, parts) if by_rank else range(ranks):
            layouts = (self._layout,) if masters_only else (self._layout, self._frozen_layout)
            for layout in layouts:
                fragments = layout.on_rank(rank)
                mine = fragments if by_rank else fragments[part::parts]
                yield from self._of(mine, masters_only=masters_only)

    def _of(
        self, fragments: Sequence[Fragment], *, masters_only: bool
    ) -> Iterator[tuple[TensorEntry, Transfer]]:
        # A key at a time: in most files the same state of all parameters lies in one place.
        table = [(f, WEIGHT) for f in fragments]
        stateful = () if masters_only else fragments
        keys = {f.name: self.state_keys(f.name, "elementwise") for f in stateful}
        for key in sorted({key for names in keys.values() for key in names}):
            table += [(f, key) for f in stateful if key in keys[f.name]]
        for fragment, key in table:
            entry = _entry(self.parameters[fragment.name], key)
            for start, stop in spans(fragment.start, fragment.stop, CHUNK_ELEMENTS):
                yield entry, _held_run(fragment, start, stop)

    def has_rounded_weights(self) -> bool:
        """Whether low-precision weights lie beside masters, which have to round to them."""
        trained = (_entry(p, WEIGHT) for p in self.manifest.optimized if p.numel)
        return any(self.reader.locate_rounded(self._transfers(e, 0, 1)[0]) for e in trained)

    def check_tiling(self) -> None:
        """Check that every element of every tensor is held once, and by a tensor of that size.

        Raises:
            CheckpointFormatError: one is held nowhere, or twice, or a tensor is too short.
        """
        for entry in itertools.chain(self.weights(), self.states()):
            if entry.role != "buffer" and entry.numel:
                for transfer in self._transfers(entry, 0, entry.numel):
                    self._stored_dtype(entry.key, transfer)


def holds_whole_tensors(manifest: Manifest) -> bool:
    """Whether weights lie there whole, in their own types, and buffers are not told from them.

    A run of stage 0 has neither, and says which of DeepSpeed's wrappers it was of.
    """
    return manifest.stage == 0 and not manifest.writer.engine


def _entry(parameter: Parameter, key: str) -> TensorEntry:
    role: Role = "frozen" if parameter.group is None else "trained"
    return TensorEntry(role, parameter.name, key, parameter.shape)


def _held_run(fragment: Fragment, start: int, stop: int) -> Transfer:
    return Transfer(
        name=fragment.name,
        start=start,
        stop=stop,
        source_rank=fragment.rank,
        source_buffer=fragment.buffer,
        source_offset=fragment.offset + start - fragment.start,
        target_buffer=0,
        target_offset=0,
    )


@contextmanager
def open_view(
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    renamed: Mapping[str, str] | None = None,
    on_bytes: OnBytes = ignore_bytes,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint of any kind, to be looked into.

    Args:
        path: its directory, or file.
        allow_pickle: read objects of any class from it; that can run code.
        renamed: beginnings or patterns of its names, and what they are to be.
        on_bytes: told of what is read.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
        CheckpointCorruptedError: a checkpoint is there that is not whole.
        UnsupportedError: a checkpoint is there of a run that cannot be resumed.
    """
    if not os.fspath(path):
        msg = "the path is empty, as of a variable that is not set: give a checkpoint"
        raise CheckpointNotFoundError(msg)
    real = existing_path(check_local_path(path))
    with closing(open_checkpoint(real, allow_pickle=allow_pickle)) as source:
        reader = RenamedReader(source, KeyMapping(renamed), str(real)) if renamed else source
        reader.bind_alone()
        reader.files.keep_open(OPEN_FILES)
        yield OpenCheckpoint(real, reader, on_bytes)
