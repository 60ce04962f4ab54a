"""Writes a directory of ``torch.distributed.checkpoint`` in one process, a chunk at a time.

torch's own writer writes the files. Each tensor is passed as chunks of rows, which are requested
one after the other, so only one is in memory.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_elastic_zero.core.layout import spans
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import map_pages
from lightning_elastic_zero.core.text import TreePath, format_tree_path
from lightning_elastic_zero.formats.dcp_read import METADATA_NAME
from lightning_elastic_zero.storage.file_write import replace_durably
from lightning_elastic_zero.storage.paths import read_file

CHUNK_ELEMENTS = 1 << 22
"""The most elements of a chunk, unless a row is longer."""

_PROPERTIES = 5
"""Pickled properties of a tensor before torch 2.15."""


@dataclass(frozen=True, slots=True)
class RowsSource:
    """A tensor to be written."""

    path: TreePath
    """The path in the tree."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    """Returns the elements ``[start, stop)`` of the flattened tensor, in its type."""
    same_as: TreePath = ()
    """For another name of a tied weight: the path of its first name, whose bytes it shares."""


def write_directory(
    folder: Path,
    tensors: Sequence[RowsSource],
    objects: Mapping[TreePath, Any],
    progress: Progress = NO_PROGRESS,
) -> None:
    """Write into an empty folder, synced to disk; torch pickles each of the objects."""
    planner = _ChunkPlanner(tensors, objects, progress)
    # Without copying ahead, a chunk is requested after the one before is written, also with GPUs.
    writer = FileSystemWriter(
        folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0
    )
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(SavePlan(planner.items))
    (plan,) = writer.prepare_global_plan([plan])
    results = writer.write_data(plan, planner).wait()
    writer.finish(planner.metadata, [[*results, *planner.second_names(results)]])
    _write_for_old_releases(folder / METADATA_NAME)


class _OldProperties(pickle.Pickler):
    """Stores the five properties of a tensor that every release reads.

    torch 2.15 adds the strides, and older releases refuse metadata with a sixth property.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorProperties):
            return NotImplemented
        reduced: Any = obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        build, arguments, state, *_ = reduced
        return build, arguments, state[:_PROPERTIES]


def _write_for_old_releases(path: Path) -> None:
    metadata = pickle.loads(read_file(path))  # noqa: S301 (torch's writer has just written it)
    data = io.BytesIO()
    _OldProperties(data).dump(metadata)
    replace_durably(path, data.getvalue())


class _ChunkPlanner(DefaultSavePlanner):
    """Lists the entries for torch's writer, and returns one chunk at a time.

    torch's writer calls only ``resolve_data``: one process plans for itself.
    """

    def __init__(
        self, tensors: Sequence[RowsSource], objects: Mapping[TreePath, Any], progress: Progress
    ) -> None:
        self._tensors = {format_tree_path(t.path): t for t in tensors}
        self._objects = {format_tree_path(path): value for path, value in objects.items()}
        super().__init__()
        self._progress = progress
        # torch's writer keeps the last chunk of each tensor, so all chunks share one memory.
        sizes = [math.prod(c.sizes) * t.dtype.itemsize for t in tensors for c in _chunks(t.shape)]
        self._memory = map_pages(max([1, *sizes]))
        entries: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=t.dtype), torch.Size(t.shape), list(_chunks(t.shape))
            )
            for key, t in self._tensors.items()
        }
        entries |= {key: BytesStorageMetadata() for key in self._objects}
        paths = {format_tree_path(path): path for path in (*(t.path for t in tensors), *objects)}
        self.metadata = Metadata(entries, planner_data=paths)
        self.items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        for key, tensor in self._tensors.items():
            entry = entries[key]
            self.items += [
                WriteItem(
                    MetadataIndex(key, chunk.offsets, number),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, entry.properties, entry.size),
                )
                for number, chunk in enumerate(() if tensor.same_as else entry.chunks)
            ]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(self._objects[key], stream)
            return stream
        tensor, chunk = self._tensors[key], write_item.tensor_data.chunk
        row = math.prod(tensor.shape[1:])
        start = chunk.offsets[0] * row if tensor.shape else 0
        numel = math.prod(chunk.sizes)
        found = tensor.read(start, start + numel) if numel else torch.empty(0, dtype=tensor.dtype)
        self._progress.advance(found.nbytes)
        if not numel:
            return found.reshape(chunk.sizes)
        # Copied to the shared memory, as a storage of its size: torch saves whole storages.
        place = torch.frombuffer(self._memory.numpy(), dtype=found.dtype, count=numel)
        return place.copy_(found).reshape(chunk.sizes)

    def second_names(self, results: Sequence[WriteResult]) -> Iterator[WriteResult]:
        """Yield the places of tied weights' other names, which are those of the first name."""
        written: dict[str, list[WriteResult]] = {}
        for result in results:
            written.setdefault(result.index.fqn, []).append(result)
        for key, tensor in self._tensors.items():
            for result in written[format_tree_path(tensor.same_as)] if tensor.same_as else ():
                yield replace(result, index=MetadataIndex(key, result.index.offset))


def _chunks(shape: tuple[int, ...]) -> Iterator[ChunkStorageMetadata]:
    """Yield chunks of rows, or one chunk for a scalar or an empty tensor."""
    if not math.prod(shape) or not shape:
        yield ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        return
    rows = max(CHUNK_ELEMENTS // math.prod(shape[1:]), 1)
    for start, stop in spans(0, shape[0], rows):
        offsets = torch.Size([start, *[0] * (len(shape) - 1)])
        yield ChunkStorageMetadata(offsets, torch.Size([stop - start, *shape[1:]]))
