"""Reads runs of elements from saved chunks, by torch's own reader: each once, one at a time.

A chunk is a box of a tensor: rows, where FSDP has cut it; columns too, with tensor parallelism.
torch's reader loads a chunk whole; of it the rows are kept that hold a wanted run.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from lightning_elastic_zero.errors import CheckpointCorruptedError, ElasticZeroError
from lightning_elastic_zero.formats.dcp.entry_checksums import verify_entries
from lightning_elastic_zero.formats.dcp.tree import Leaf
from lightning_elastic_zero.formats.safe_pickle.policy import DAMAGED, PicklePolicy
from lightning_elastic_zero.formats.safe_pickle.torch_unpickler import load_stream
from lightning_elastic_zero.formats.torch_file import StoredRun, tensors_of, with_copies
from lightning_elastic_zero.storage import bounded_stream, ignore_bytes, ignore_progress
from lightning_elastic_zero.tensor_state import check_cast

_UNREADABLE = (*DAMAGED, OSError, zipfile.BadZipFile)
"""What damaged data can raise in torch's reader."""


@dataclass(slots=True)
class _ChunkRead:
    """What is wanted of one chunk."""

    index: MetadataIndex
    chunk: ChunkStorageMetadata
    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: list[tuple[torch.Tensor, StoredRun]] = field(default_factory=list)
    """Each with the 1-D tensor that it fills."""

    def rows(self) -> tuple[int, int]:
        """Return the first and the last row of the chunk that runs touch, half-open."""
        row = math.prod(self.shape[1:])
        first = min(run.start for _, run in self.runs) // row - self.chunk.offsets[0]
        last = -(-max(run.stop for _, run in self.runs) // row) - self.chunk.offsets[0]
        return max(first, 0), min(last, self.chunk.sizes[0])

    def item(self) -> ReadItem:
        """Return the box to be read."""
        first, last = self.rows() if self.shape else (0, 0)
        starts = [first, *[0] * (len(self.shape) - 1)] if self.shape else []
        sizes = [last - first, *self.chunk.sizes[1:]] if self.shape else []
        return _item(self.index, LoadItemType.TENSOR, starts, sizes)

    def take(self, box: torch.Tensor) -> int:
        """Copy what runs want of a box; return the bytes."""
        offsets = list(self.chunk.offsets)
        if self.shape:
            offsets[0] += self.rows()[0]
        flat, copied = box.reshape(-1), 0
        for slot, run in self.runs:
            for at, start, stop in overlaps(run, self.shape, offsets, tuple(box.shape)):
                slot[start - run.start : stop - run.start].copy_(flat[at : at + stop - start])
                copied += (stop - start) * box.element_size()
        return copied


def _item(
    index: MetadataIndex, kind: LoadItemType, starts: Sequence[int], sizes: Sequence[int]
) -> ReadItem:
    offsets = torch.Size(starts)
    return ReadItem(kind, index, offsets, index, offsets, torch.Size(sizes))


def overlaps(
    run: StoredRun, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield what a box has of a run: where in the flat box, and ``[start, stop)`` of the tensor.

    Args:
        run: what is wanted.
        shape: the tensor's.
        offsets: the box's first element, in each dimension.
        sizes: the box's.
    """
    cut = len(shape)
    while cut and sizes[cut - 1] == shape[cut - 1]:
        cut -= 1
    # From dimension `cut` on the box is as wide as the tensor: what it has of one more follows.
    outer = max(cut - 1, 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = math.prod(sizes[outer:])
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    places = itertools.product(*(range(n) for n in sizes[:outer]))
    for number, place in enumerate(places):
        start = base + sum(p * s for p, s in zip(place, strides[:outer], strict=True))
        low, high = max(start, run.start), min(start + length, run.stop)
        if low < high:
            yield number * length + low - start, low, high


class Chunks:
    """The data of a directory.

    Attributes:
        tensors: each tensor by its name in the metadata: shape and type, without values. Names that
            share their bytes, as those of a tied weight do where ``convert`` wrote it, have one.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        policy: PicklePolicy,
        on_progress: Callable[[], None] = ignore_progress,
    ) -> None:
        """Prepare reading by what ``read_metadata`` returned; every read calls ``on_progress``."""
        self.path = path
        self.tensors = _tensors_in(metadata)
        self._key_of = {id(tensor): key for key, tensor in self.tensors.items()}
        self._on_work = on_progress
        self._metadata = metadata
        self._policy = policy
        self._reader = FileSystemReader(path)
        self._reader.fs = _BoundedReadFileSystem(on_progress)
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            end = max(self._ends.get(info.relative_path, 0), info.offset + info.length)
            self._ends[info.relative_path] = end

    @property
    def names(self) -> list[str]:
        """The files that hold data."""
        return sorted(self._ends)

    def check_files(self) -> None:
        """Check that every file is there, as long as what is said to be in it, and tensors tiled.

        Raises:
            CheckpointCorruptedError: some files are not, and all of them are named; or elements of
                a tensor are in two chunks, or in none.
        """
        wrong = []
        for name, end in sorted(self._ends.items()):
            path = self.path / name
            size = path.stat().st_size if path.is_file() else None
            self._on_work()
            if size is None or size < end:
                wrong.append(f"{name} ({'missing' if size is None else f'{size} of {end} bytes'})")
        if wrong:
            msg = (
                f"{self.path} is incomplete: {', '.join(wrong)}. Copy all files of this "
                "checkpoint again, or resume from another one"
            )
            raise CheckpointCorruptedError(msg)
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and not _is_tiled(entry):
                msg = (
                    f"{self.path}: the chunks of {key} do not hold each of its elements once: the "
                    "checkpoint is damaged, or of ranks that overlap. Resume from another one"
                )
                raise CheckpointCorruptedError(msg)

    # -- tensors ---------------------------------------------------------------------------------

    def read_into(
        self,
        wanted: Iterable[tuple[torch.Tensor, StoredRun]],
        on_bytes: Callable[[int], None] = ignore_bytes,
    ) -> int:
        """Fill 1-D tensors with runs of ``tensors``; return the bytes of the chunks read for it.

        Raises:
            CheckpointCorruptedError: chunks are damaged, or do not hold each element once.
            CheckpointMismatchError: elements would be cast from or to integers.
        """
        jobs = self._plan(wanted)
        self._read([job.item() for job in jobs.values()], jobs, on_bytes)
        return sum(int(self._metadata.storage_data[index].length) for index in jobs)

    def _plan(
        self, wanted: Iterable[tuple[torch.Tensor, StoredRun]]
    ) -> dict[MetadataIndex, _ChunkRead]:
        """Find the chunks that hold the runs, in the order in which they lie in the files."""
        jobs: dict[MetadataIndex, _ChunkRead] = {}
        for slot, run in wanted:
            key = self._key_of[id(run.tensor)]
            entry = self._metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata)  # noqa: S101 (for the type checker)
            dtype = entry.properties.dtype
            check_cast(dtype, slot.dtype, f"{self.path}: {key}")
            shape, held = tuple(entry.size), 0
            for chunk in entry.chunks:
                found = overlaps(run, shape, chunk.offsets, chunk.sizes)
                count = sum(stop - start for _, start, stop in found)
                if count:
                    index = MetadataIndex(key, chunk.offsets)
                    job = _ChunkRead(index, chunk, shape, dtype)
                    jobs.setdefault(index, job).runs.append((slot, run))
                held += count
            if held != run.stop - run.start:
                msg = (
                    f"{self.path}: the chunks of {key} hold {held} of the elements "
                    f"[{run.start}, {run.stop}): the checkpoint is damaged, or of ranks that "
                    "overlap. Resume from another one"
                )
                raise CheckpointCorruptedError(msg)
        if lost := [index for index in jobs if index not in self._metadata.storage_data]:
            msg = f"{self.path}: no file holds {lost[0].fqn} at {tuple(lost[0].offset or ())}"
            raise CheckpointCorruptedError(msg)
        return dict(sorted(jobs.items(), key=lambda job: self._place(job[0])))

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        info = self._metadata.storage_data[index]
        return info.relative_path, info.offset

    def load_tree(self, subtree: Any) -> Any:  # noqa: ANN401 (whatever is asked for)
        """Return a tree with values in the place of ``tensors``; all else stays what it is."""
        copies = {
            id(tensor): torch.empty_like(tensor, device="cpu")
            for tensor in tensors_of(subtree)
            if id(tensor) in self._key_of
        }
        self.read_into(
            (copy.view(-1), StoredRun(self.tensors[self._key_of[held]], 0, copy.numel()))
            for held, copy in copies.items()
            if copy.numel()
        )
        return with_copies(subtree, copies)

    def values_of(self, leaves: Iterable[Leaf]) -> dict[str, Any]:
        """Return what leaves hold, by their names.

        Raises:
            CheckpointCorruptedError: it is damaged.
            UnsupportedError: it needs a class that is not allowed.
        """
        tensors = {leaf.key: leaf.tensor for leaf in leaves}
        items = [
            _item(MetadataIndex(key), LoadItemType.BYTE_IO, [0], [0])
            for key, tensor in tensors.items()
            if tensor is None
        ]
        objects = self._read(sorted(items, key=lambda item: self._place(item.storage_index)))
        return {**self.load_tree(tensors), **objects}

    def _read(
        self,
        items: list[ReadItem],
        jobs: Mapping[MetadataIndex, _ChunkRead] = MappingProxyType({}),
        on_bytes: Callable[[int], None] = ignore_bytes,
    ) -> dict[str, Any]:
        """Fill what jobs want, and return the objects."""
        planner = _Planner(self.path, self._policy, jobs, on_bytes)
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except ElasticZeroError:
            raise
        except _UNREADABLE as error:
            msg = (
                f"{self.path} is damaged: its files cannot be read ({error!r}). Resume from "
                "another checkpoint, or copy this one again from where it is whole"
            )
            raise CheckpointCorruptedError(msg) from error
        return planner.objects

    # -- checksums -------------------------------------------------------------------------------

    def verify(self, part: int, parts: int, on_bytes: Callable[[int], None]) -> None:
        """Compare the CRC-32 in every ``parts``-th entry.

        Raises:
            CheckpointCorruptedError: bytes are not those that were written.
        """
        # What is compressed or otherwise transformed checks itself.
        places = sorted(
            {
                (info.relative_path, info.offset, info.length)
                for info in self._metadata.storage_data.values()
                if not getattr(info, "transform_descriptors", None)
            }
        )
        for name, of_file in itertools.groupby(places[part::parts], key=lambda place: place[0]):
            verify_entries(self.path / name, [place[1:] for place in of_file], on_bytes)


def _tensors_in(metadata: Metadata) -> dict[str, torch.Tensor]:
    """Return the tensors by name, on the meta device; names of the same bytes have the same one."""
    known: dict[object, torch.Tensor] = {}
    return {
        key: known.setdefault(
            _place_of(key, entry, metadata),
            torch.empty(entry.size, dtype=entry.properties.dtype, device="meta"),
        )
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _place_of(key: str, entry: TensorStorageMetadata, metadata: Metadata) -> object:
    """Return what two names have in common that mean the same bytes; no two others have it."""
    held = [metadata.storage_data.get(MetadataIndex(key, chunk.offsets)) for chunk in entry.chunks]
    if not held or None in held:
        return key
    places = [(info.relative_path, info.offset, info.length) for info in held]
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    return tuple(entry.size), entry.properties.dtype, tuple(boxes), tuple(places)


def _is_tiled(entry: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor hold each element once: none overlap, and they are as many."""
    shape = tuple(entry.size)
    boxes = [
        tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in entry.chunks
        if math.prod(chunk.sizes)
    ]
    if any(stop > size for box in boxes for (_, stop), size in zip(box, shape, strict=True)):
        return False
    if sum(math.prod(stop - start for start, stop in box) for box in boxes) != math.prod(shape):
        return False
    reached: list[tuple[tuple[int, int], ...]] = []
    for box in sorted(boxes):
        # Only those that reach into its rows can overlap it: of chunks of rows, none.
        reached = [other for other in reached if not box or other[0][1] > box[0][0]]
        if any(_overlap(box, other) for other in reached):
            return False
        reached.append(box)
    return True


def _overlap(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


class _BoundedReadFileSystem(FileSystem):
    """Opens files so that a chunk, which torch reads at once, is read in parts."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        super().__init__()
        self._on_work = on_progress

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for reading."""
        del mode
        with bounded_stream(Path(path), self._on_work) as stream:
            yield stream


class _Planner(DefaultLoadPlanner):
    """What torch's reader asks while it reads; what is read is planned elsewhere."""

    def __init__(
        self,
        path: Path,
        policy: PicklePolicy,
        jobs: Mapping[MetadataIndex, _ChunkRead],
        on_bytes: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._path = path
        self._policy = policy
        self._jobs = jobs
        self._on_bytes = on_bytes
        self.objects: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return an empty box to be read into."""
        return torch.empty(read_item.lengths, dtype=self._jobs[read_item.storage_index].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copy a box's runs to where they are wanted."""
        self._on_bytes(self._jobs[read_item.storage_index].take(tensor))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object by the policy."""
        key = read_item.storage_index.fqn
        self.objects[key] = load_stream(value, self._policy, f"{self._path}: {key}")
