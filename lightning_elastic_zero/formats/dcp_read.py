"""Reads directories of ``torch.distributed.checkpoint`` (FSDP, ModelParallel, plain torch).

``.metadata`` is a pickle. Only its own classes are built, by exact name (``SafeUnpickler``),
because ``FileSystemReader.read_metadata`` would run any code. Model and optimizer are recognised by
content: a subtree with ``param_groups`` is an optimizer, one with tensors directly below it may be
the model, and the live model decides between several.

Chunks are boxes of a tensor: rows under FSDP, also columns with tensor parallelism. torch's reader
loads a chunk as a whole, so chunks are read one at a time and each once. Each entry's checksums,
which ``torch.save`` writes and torch does not verify, are compared first.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import canonical_repr, check_cast, tensors_of
from lightning_elastic_zero.core.text import TreePath, format_tree_path
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.dcp_detect import METADATA_NAME
from lightning_elastic_zero.formats.full_state import AVERAGING, FullState, FullStateReader
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.pickles import (
    DAMAGED,
    PicklePolicy,
    SafeUnpickler,
    load_stream,
    require,
    takes_nothing,
    takes_sizes,
)
from lightning_elastic_zero.formats.reader import FRESH_OPTIMIZER_HINT, file_list_digest
from lightning_elastic_zero.formats.torch_optimizer import (
    MEMBERS,
    Members,
    describe_alone,
    members_of,
)
from lightning_elastic_zero.formats.torch_read import StoredRun, with_copies
from lightning_elastic_zero.storage.files import bounded_stream
from lightning_elastic_zero.storage.paths import read_file

READ_BYTES = 1 << 20
"""What is read, and held, at a time."""

ZIP_MARK = b"PK"


def verify_entries(path: Path, places: Iterable[tuple[int, int]], progress: Progress) -> None:
    """Compare the CRC-32 of each record of entries of a file.

    Args:
        path: the file.
        places: where each entry begins, and its bytes.
        progress: receives the number of bytes read.

    Raises:
        CheckpointCorruptedError: bytes are not those that were written.
    """
    with path.open("rb") as file:
        for start, size_bytes in places:
            try:
                _verify(_FileSection(file, start, size_bytes), progress)
            except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
                msg = (
                    f"{path} is damaged at bytes {start} to {start + size_bytes} ({error}): resume "
                    "from another checkpoint, or copy this file again from where it is whole"
                )
                raise CheckpointCorruptedError(msg) from error


def _verify(part: _FileSection, progress: Progress) -> None:
    """Read an entry's records, whose CRC-32 the standard library compares."""
    if part.read(len(ZIP_MARK)) != ZIP_MARK:
        return  # Saved by an older way, without checksums.
    with zipfile.ZipFile(part) as archive:
        for info in archive.infolist():
            if not info.CRC:
                continue  # Checksums were switched off.
            with archive.open(info) as record:
                while data := record.read(READ_BYTES):
                    progress.advance(len(data))


class _FileSection(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._size_bytes = size_bytes
        self._position = 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read on, to the end of the part at most."""
        self._file.seek(self._start + self._position)
        count = max(min(len(buffer), self._size_bytes - self._position), 0)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = max(base[whence] + offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the place in the part."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


_MODULE = "torch.distributed.checkpoint.metadata"


def _strided(name: object) -> torch.layout:
    """Return the one layout whose chunks are plain."""
    require(name == "torch.strided", f"a tensor of layout {name!r}")
    return torch.strided


def _set_state(instance: Any, state: object) -> None:
    """Set the fields of an instance, as its own class would."""
    if "__setstate__" in vars(type(instance)):
        instance.__setstate__(state)
    else:
        require(type(state) is dict and all(type(key) is str for key in state), "no fields")
        vars(instance).update(state)


def _unknown(where: str, what: str, _: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where} holds {what}, which is no metadata of a checkpoint: it was written by a "
        "storage or planner that is not known here, or by someone who means harm"
    )


_CLASSES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    filesystem._StorageInfo,  # noqa: SLF001 (what metadata holds)
)

_FORMATS = metadata._MEM_FORMAT_ENCODING  # noqa: SLF001 (what metadata holds)

_POLICY = PicklePolicy(
    {
        **{f"{cls.__module__}.{cls.__name__}": (cls, takes_nothing) for cls in _CLASSES},
        f"{_MODULE}._MEM_FORMAT_ENCODING": (_FORMATS, lambda args: [*map(type, args)] == [int]),
        "collections.OrderedDict": (dict, takes_nothing),
        "torch.Size": (torch.Size, takes_sizes),
        "torch.serialization._get_layout": (_strided, lambda args: len(args) == 1),
        # Where it was saved: of no use to a reader.
        **{
            f"pathlib.{name}": (PurePosixPath, lambda args: all(type(part) is str for part in args))
            for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        },
    },
    dict.fromkeys(_CLASSES, _set_state),
    hashed=(metadata.MetadataIndex,),
    refuse=_unknown,
)
"""What metadata is made of."""


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read what a directory says of itself.

    Raises:
        CheckpointCorruptedError: it cannot be read, or is damaged.
        CheckpointFormatError: it is not of ``torch.distributed.checkpoint``, or points elsewhere.
        UnsupportedError: it asks for classes that are no metadata.
    """
    path = folder / METADATA_NAME
    try:
        found = SafeUnpickler(read_file(path), _POLICY, str(path)).load()
    except UnsupportedError:
        raise
    except Exception as error:
        msg = f"{path} is damaged ({error!r}): resume from another checkpoint"
        raise CheckpointCorruptedError(msg) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        msg = f"{path} is no metadata of torch.distributed.checkpoint's file system storage"
        raise CheckpointFormatError(msg)
    for info in found.storage_data.values():
        _check_place(info, path)
    return found


def _check_place(info: Any, path: Path) -> None:
    """Refuse a place that is outside of the directory."""
    name = PurePosixPath(info.relative_path)
    if name.is_absolute() or ".." in name.parts or info.offset < 0 or info.length < 0:
        msg = f"{path} places data at {info.relative_path!r}: outside of its own directory"
        raise CheckpointFormatError(msg)


GROUPS, STATE = "param_groups", "state"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry of a directory."""

    key: str
    """Its name in the metadata."""
    path: TreePath
    """Where it was in the tree that was saved."""
    tensor: torch.Tensor | None
    """Shape and type, without values; None: it is an object."""


@dataclass(frozen=True, slots=True)
class OptimizerLeaves:
    """An optimizer's leaves, by their paths below ``state`` and ``param_groups``."""

    state: list[tuple[TreePath, Leaf]] = field(default_factory=list)
    groups: list[tuple[TreePath, Leaf]] = field(default_factory=list)
    flattened: bool = False
    """Paths are strings with dots, and hyperparameters are kept by parameter
    (``flatten_optimizer_state_dict``)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory's leaves, sorted."""

    models: Mapping[TreePath, Mapping[str, torch.Tensor]]
    """Subtrees with tensors right below them, by their names."""
    optimizers: Mapping[TreePath, OptimizerLeaves]
    rest: tuple[Leaf, ...]
    """All that is in no optimizer: the models' leaves too."""


def leaves_of(metadata: Metadata, tensors: Mapping[str, torch.Tensor]) -> list[Leaf]:
    """List the leaves, in the order in which they were saved where that is known.

    The entries themselves are in the order of writing, which ranks share out by load. What the
    planner noted is in the order of the tree.
    """
    paths: Mapping[str, Any] = metadata.planner_data or {}
    entries = metadata.state_dict_metadata
    keys = [key for key in paths if key in entries]
    keys += [key for key in entries if key not in paths]
    return [Leaf(key, tuple(paths.get(key, (key,))), tensors.get(key)) for key in keys]


def knows_order(metadata: Metadata) -> bool:
    """Whether the order in which the leaves were saved is known."""
    return set(metadata.state_dict_metadata) <= set(metadata.planner_data or {})


def sort_leaves(leaves: Iterable[Leaf]) -> Tree:
    """Find the optimizers, and what may be models."""
    leaves = list(leaves)
    optimizers: dict[TreePath, OptimizerLeaves] = {}
    for leaf in leaves:
        if (found := _groups_prefix(leaf.path)) is not None:
            prefix, flattened = found
            optimizers.setdefault(prefix, OptimizerLeaves(flattened=flattened))
    models: dict[TreePath, dict[str, torch.Tensor]] = {}
    rest = []
    for leaf in leaves:
        if not _put_into(optimizers, leaf):
            rest.append(leaf)
            if leaf.tensor is not None and isinstance(leaf.path[-1], str):
                models.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = leaf.tensor
    return Tree(models, optimizers, tuple(rest))


def _groups_prefix(path: TreePath) -> tuple[TreePath, bool] | None:
    """Return the optimizer's place, if a leaf is one of its hyperparameters, and its manner."""
    for index, part in enumerate(path[:-1]):
        if part == GROUPS and isinstance(path[index + 1], int):
            return path[:index], False
    if str(path[-1]).startswith(f"{GROUPS}."):
        return path[:-1], True
    return None


def _put_into(optimizers: Mapping[TreePath, OptimizerLeaves], leaf: Leaf) -> bool:
    """Add a leaf to its optimizer's, if it has one."""
    for length in range(len(leaf.path)):
        prefix, below = leaf.path[:length], leaf.path[length:]
        if (optimizer := optimizers.get(prefix)) is None:
            continue
        if optimizer.flattened:
            kind, _, name = str(below[0]).partition(".")
            below = (kind, name)
        if below[0] in (STATE, GROUPS):
            into = optimizer.state if below[0] == STATE else optimizer.groups
            into.append((below[1:], leaf))
            return True
    return False


def choose_model(tree: Tree, live: Manifest, where: Path) -> TreePath:
    """Return the subtree that holds the live model's parameters.

    Raises:
        CheckpointFormatError: there are no tensors.
        CheckpointMismatchError: several subtrees hold them all; or none does, and there are
            several.
    """
    if not tree.models:
        msg = f"{where} holds no tensors: it is no checkpoint of a model"
        raise CheckpointFormatError(msg)
    wanted = [{p.name, *p.aliases} for p in live.parameters]
    held = {
        path: sum(not names.isdisjoint(leaves) for names in wanted)
        for path, leaves in tree.models.items()
    }
    fitting = [path for path, count in held.items() if count == len(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    if len(held) == 1:
        return next(iter(held))
    listed = ", ".join(
        f"{format_tree_path(path)} ({count} of {len(wanted)})" for path, count in held.items()
    )
    what = "several of them hold" if fitting else "none of them holds"
    msg = (
        f"{where} has tensors in {listed}, and {what} all parameters of this model: resume from a "
        "checkpoint of one model"
    )
    raise CheckpointMismatchError(msg)


def largest_model(tree: Tree) -> TreePath:
    """Return the subtree with the most tensors; the top where there is none."""
    return max(tree.models, key=lambda path: len(tree.models[path]), default=())


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
        progress: Progress = NO_PROGRESS,
    ) -> None:
        """Prepare reading by what ``read_metadata`` returned; every read calls ``progress``."""
        self.path = path
        self.tensors = _tensors_in(metadata)
        self._key_of = {id(tensor): key for key, tensor in self.tensors.items()}
        self._progress = progress
        self._metadata = metadata
        self._policy = policy
        self._reader = FileSystemReader(path)
        self._reader.fs = _BoundedReadFileSystem(progress)
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
            self._progress.check()
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
        progress: Progress = NO_PROGRESS,
    ) -> int:
        """Fill 1-D tensors with runs of ``tensors``; return the bytes of the chunks read for it.

        Raises:
            CheckpointCorruptedError: chunks are damaged, or do not hold each element once.
            CheckpointMismatchError: elements would be cast from or to integers.
        """
        jobs = self._plan(wanted)
        self._read([job.item() for job in jobs.values()], jobs, progress)
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

    def load_tree(self, subtree: Any) -> Any:
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
        progress: Progress = NO_PROGRESS,
    ) -> dict[str, Any]:
        """Fill what jobs want, and return the objects."""
        planner = _Planner(self.path, self._policy, jobs, progress)
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

    def verify(self, part: int, parts: int, progress: Progress) -> None:
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
            verify_entries(self.path / name, [place[1:] for place in of_file], progress)


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

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for reading."""
        del mode
        with bounded_stream(Path(path), self._progress) as stream:
            yield stream


class _Planner(DefaultLoadPlanner):
    """What torch's reader asks while it reads; what is read is planned elsewhere."""

    def __init__(
        self,
        path: Path,
        policy: PicklePolicy,
        jobs: Mapping[MetadataIndex, _ChunkRead],
        progress: Progress,
    ) -> None:
        super().__init__()
        self._path = path
        self._policy = policy
        self._jobs = jobs
        self._progress = progress
        self.objects: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return an empty box to be read into."""
        return torch.empty(read_item.lengths, dtype=self._jobs[read_item.storage_index].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copy a box's runs to where they are wanted."""
        self._progress.advance(self._jobs[read_item.storage_index].take(tensor))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object by the policy."""
        key = read_item.storage_index.fqn
        self.objects[key] = load_stream(value, self._policy, f"{self._path}: {key}")


StateDict = dict[str, Any]


def state_dict_of(
    leaves: OptimizerLeaves, chunks: Chunks, live: Manifest, names: Iterable[str]
) -> StateDict:
    """Return the state dict that was saved.

    Args:
        leaves: the optimizer's.
        chunks: the directory's data; objects, which are small, are read.
        live: what it is to be loaded into.
        names: the saved model's.

    Raises:
        CheckpointMismatchError: hyperparameters were kept by parameter, and differ within a group.
    """
    values = chunks.values_of(leaf for _, leaf in leaves.groups)
    states = chunks.values_of(leaf for _, leaf in leaves.state if leaf.tensor is None)
    if leaves.flattened:
        named = _by_name(leaves.state, states, names)
        groups = _groups_by_name(_by_name(leaves.groups, values, names), named, live)
        return {"state": named, "param_groups": groups}
    state: dict[Any, StateDict] = {}
    for path, leaf in leaves.state:
        if len(path) > 1:
            key = ".".join(map(str, path[1:]))
            state.setdefault(path[0], {})[key] = states.get(leaf.key, leaf.tensor)
    numbered: dict[Any, StateDict] = {}
    for path, leaf in leaves.groups:
        numbered.setdefault(path[0], {})[".".join(map(str, path[1:]))] = values[leaf.key]
    groups = [{"params": [], **numbered[index]} for index in sorted(numbered)]
    return {"state": _as_the_groups_say(state, groups), "param_groups": groups}


def members_alone(
    leaves: OptimizerLeaves, chunks: Chunks, weights: Mapping[str, torch.Tensor]
) -> Members:
    """Return the members of the groups, where no live model has them.

    Where hyperparameters are kept by parameter, those that have the same ones make a group.

    Raises:
        CheckpointMismatchError: positions, or names, could mean several parameters, or none.
    """
    if not leaves.flattened:
        nobody = describe_alone({}, ())
        return members_of(state_dict_of(leaves, chunks, nobody, weights), weights)
    values = chunks.values_of(leaf for _, leaf in leaves.groups)
    alike: dict[str, list[str]] = {}
    for name, its_fields in _by_name(leaves.groups, values, weights).items():
        fields = {key: value for key, value in its_fields.items() if key not in MEMBERS}
        alike.setdefault(canonical_repr(fields, name), []).append(name)
    return tuple(map(tuple, alike.values()))


def _as_the_groups_say(state: Mapping[Any, Any], groups: list[StateDict]) -> dict[Any, Any]:
    """Return positions as the numbers that they were: torch writes each key of a dict as text."""
    numbers = {str(key): key for g in groups for key in g["params"] if isinstance(key, int)}
    return {numbers.get(key, key): value for key, value in state.items()}


def _by_name(
    leaves: list[tuple[TreePath, Leaf]], values: Mapping[str, Any], names: Iterable[str]
) -> dict[str, StateDict]:
    """Split ``<parameter>.<key>``: no parameter's name, with a dot, begins another one's."""
    known = set(names)
    found: dict[str, StateDict] = {}
    for path, leaf in leaves:
        parts = str(path[0]).split(".")
        for length in range(1, len(parts)):
            name, key = ".".join(parts[:length]), ".".join(parts[length:])
            if name in known:
                break
        else:
            name, _, key = str(path[0]).rpartition(".")
        found.setdefault(name, {})[key] = values.get(leaf.key, leaf.tensor)
    return found


def _groups_by_name(
    held: Mapping[str, StateDict], state: Mapping[str, StateDict], live: Manifest
) -> list[StateDict]:
    """Return the live groups, with the hyperparameters that all their members were saved with.

    Raises:
        CheckpointMismatchError: members of a group were saved with different ones.
    """
    canonical = {n: p.name for p in live.parameters for n in (p.name, *p.aliases)}
    index_of = {name: index for index, g in enumerate(live.groups) for name in g.names}
    groups: list[StateDict] = [{"params": []} for _ in live.groups]
    for name, its_fields in held.items():
        index = index_of.get(canonical.get(name, name))
        if index is None:
            if name in state:  # trained when it was saved: it has to be told of as such
                groups[0]["params"].append(name)
            continue
        fields = {key: value for key, value in its_fields.items() if key not in MEMBERS}
        group = groups[index]
        have = {key: value for key, value in group.items() if key != "params"}
        if group["params"] and canonical_repr(have, name) != canonical_repr(fields, name):
            msg = (
                f"{name} and {group['params'][0]} are in one parameter group here, and were saved "
                f"with the hyperparameters {fields} and {have}: configure the groups of the run "
                f"that was saved, or {FRESH_OPTIMIZER_HINT}"
            )
            raise CheckpointMismatchError(msg)
        group.update(fields)
        group["params"].append(name)
    return groups


TRAINER_STATE = "meta.pt"
"""Where Lightning's FSDP and ModelParallel strategies keep all that is no tensor."""

_LIGHTNINGS_OPTIMIZER = ("optimizer_0",)
"""Where those put the state of a run's optimizer; plain torch's code calls it ``optimizer``."""


class DcpReader(FullStateReader):
    """A directory of chunks, with the trainer's state beside them where Lightning wrote it."""

    def __init__(self, files: ForeignFiles, policy: PicklePolicy) -> None:
        """Parse the metadata of a directory.

        Args:
            files: the directory's.
            policy: what the objects beside the tensors may be.

        Raises:
            CheckpointCorruptedError: that is damaged, or files are missing.
            CheckpointFormatError: it is not of ``torch.distributed.checkpoint``.
            UnsupportedError: it needs a class that is not allowed.
        """
        path = files.folder
        metadata = read_metadata(path)
        self._chunks = Chunks(path, metadata, policy, files.progress)
        self._chunks.check_files()
        super().__init__(path, files, self._chunks)
        self._tree = sort_leaves(leaves_of(metadata, self._chunks.tensors))
        trainer = self._trainer_state()
        self._names = [METADATA_NAME, *self._chunks.names, *([TRAINER_STATE] if trainer else [])]
        self._full_state = FullState(
            weights={},
            optimizers=(),
            save_id=file_list_digest(path, self._names, files.progress),
            trainer=trainer,
            ordered=knows_order(metadata),
            kind="directory of torch.distributed.checkpoint",
            incomplete="" if trainer else self._without_trainer_state(),
        )
        self._models: list[Mapping[str, Any]] = []
        self._choose(largest_model(self._tree))
        self._take(self._full_state)

    def _trainer_state(self) -> Mapping[str, Any]:
        """Return the tree of the trainer's state; its tensors have no values yet."""
        if not (self._path / TRAINER_STATE).is_file():
            return {}
        tree = self.files.tree(TRAINER_STATE)
        if not isinstance(tree, Mapping):
            msg = f"{self._path / TRAINER_STATE} holds a {type(tree).__name__}, not a dict"
            raise CheckpointFormatError(msg)
        return tree

    def _without_trainer_state(self) -> str:
        """Describe the lack of a file that Lightning writes last; nothing of others' directories.

        One of weights alone is as plain torch's code may write it.
        """
        if _LIGHTNINGS_OPTIMIZER not in self._tree.optimizers:
            return ""
        return (
            f"{self._path} is incomplete: {TRAINER_STATE} is missing, which Lightning writes last, "
            f"and it has {_LIGHTNINGS_OPTIMIZER[0]}, as Lightning's checkpoints have: counters, "
            "loops, schedulers and callbacks would begin anew. Resume from another checkpoint, or "
            "copy that file too"
        )

    def _choose(self, model: TreePath) -> None:
        """Take the tensors of a subtree for the model's."""
        self._model = model
        left = [format_tree_path(path) for path in self._tree.models if path != model]
        left = [f"the tensors of {', '.join(left)}"] if left else []
        if self._full_state.incomplete:
            left.append(f"the trainer's state (Lightning's {TRAINER_STATE})")
        self._full_state = replace(
            self._full_state,
            weights=self._tree.models.get(model, {}),
            lacks=tuple(left),
        )
        self._models.append(self._full_state.weights)

    def bind(self, live: Manifest) -> None:
        """Find the model and the optimizer, and whose each state is.

        Raises:
            CheckpointMismatchError: several subtrees may be the model; or a weight that is tied
                here has two values.
            UnsupportedError: a hyperparameter is no plain data.
        """
        self._bind_to(choose_model(self._tree, live, self._path), live)

    def bind_alone(self) -> None:
        """Match the directory with its own weights: of several models, those of the largest."""
        members, why = self._members_alone()
        self._bind_to(self._model, describe_alone(self._full_state.weights, members))
        if why:
            self.info = replace(self.info, unmatched=why)

    def _members_alone(self) -> tuple[Members, str]:
        """Return the members of the optimizer's groups: by names, by shapes, or by rates."""
        found, weights = list(self._tree.optimizers.values()), self._full_state.weights
        if len(found) != 1:
            return (), f"it holds the states of {len(found)} optimizers" if found else ""
        try:
            return members_alone(found[0], self._chunks, weights), ""
        except CheckpointMismatchError as error:
            return (), str(error)

    def names(self) -> Sequence[str]:
        """Return the files."""
        return self._names

    def trainer_entry(self, name: str) -> object:
        """Return an entry at the top of what Lightning keeps beside the tensors."""
        return self._full_state.trainer.get(name)

    def _bind_to(self, model: TreePath, live: Manifest) -> None:
        """Take a subtree for the model, and the optimizer's state as a live model has it."""
        self._choose(model)
        optimizers, why = self._optimizers(live)
        self._full_state = replace(self._full_state, optimizers=optimizers, unmatched=why)
        self._take(self._full_state, live)

    def _optimizers(self, live: Manifest) -> tuple[list[dict[str, Any]], str]:
        """Return the optimizer's state dict, or why there is none that can be told apart."""
        found = self._tree.optimizers
        if AVERAGING in self._full_state.trainer and found:
            why = (
                "its model is the average that WeightAveraging kept, and its optimizer's state "
                f"belongs to the weights that were trained, which are not in it; "
                f"{FRESH_OPTIMIZER_HINT}"
            )
            return [{}], why
        if len(found) > 1:
            listed = ", ".join(map(format_tree_path, found))
            why = f"it holds the states of {len(found)} optimizers ({listed})"
            return [{}], f"{why}; {FRESH_OPTIMIZER_HINT}"
        if not found or not live.groups:
            return [{} for _ in found], ""
        leaves = next(iter(found.values()))
        try:
            return [state_dict_of(leaves, self._chunks, live, self._full_state.weights)], ""
        except CheckpointMismatchError as error:
            return [{}], str(error)

    def verify(self, rank: int, world_size: int, progress: Progress) -> None:
        """Compare the CRC-32 that this rank's share of entries was written with."""
        self._chunks.verify(rank, world_size, progress)
        if rank == 0 and self._full_state.trainer:
            self.files.get(TRAINER_STATE).verify(progress)

    def _is_weight(self, leaf: Leaf) -> bool:
        """Whether it is a tensor of what was taken for the model, at first or in the end."""
        name = str(leaf.path[-1])
        return any(weights.get(name) is leaf.tensor for weights in self._models)

    def load_client_state(self) -> dict[str, Any]:
        """Return the trainer's state, and what is beside model and optimizer and small.

        Raises:
            UnsupportedError: the model itself has entries that are no tensors.
        """
        rest = [
            leaf
            for leaf in self._tree.rest
            if leaf.tensor is None or (not leaf.tensor.ndim and not self._is_weight(leaf))
        ]
        inside = [leaf for leaf in rest if self._model and leaf.path[:-1] == self._model]
        if strange := [leaf.key for leaf in inside if leaf.tensor is None]:
            msg = (
                f"{self._path}: {strange[0]!r} of the model is no tensor, and no engine takes it: "
                "save the model again without it"
            )
            raise UnsupportedError(msg)
        values = self._chunks.values_of(rest)
        found: dict[str, Any] = {}
        for leaf in rest:
            node = found
            for part in leaf.path[:-1]:
                node = node.setdefault(str(part), {})
            node[str(leaf.path[-1])] = values[leaf.key]
        trainer = self._full_state.trainer
        return {**found, **(self.files.load(TRAINER_STATE, dict(trainer)) if trainer else {})}
