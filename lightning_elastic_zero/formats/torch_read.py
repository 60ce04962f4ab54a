"""Reads selected elements of files of ``torch.save``, verified, into their target buffers.

The byte range of each tensor is found from the zip directory without reading data. Files from
before torch wrote zips have no index and are read as a whole.

Tensors without gaps in another memory order (``channels_last``, transposed) are read in blocks:
elements ``[k * block, (k + 1) * block)`` are the same set in logical order and in the file. In
``channels_last`` a block is one output channel; in a transposed matrix it is the whole tensor.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import INTEGER_DTYPES, check_cast, host_chunk, tensors_of
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    ElasticZeroError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.pickles import (
    DAMAGED,
    LEGACY_MARK,
    PLAIN_DATA,
    PicklePolicy,
    load_stream,
    refuse_class,
    unpickle,
)
from lightning_elastic_zero.storage.checksums import CHUNK_BYTES
from lightning_elastic_zero.storage.files import PlacedView, bounded_stream
from lightning_elastic_zero.storage.paths import open_file
from lightning_elastic_zero.storage.stores import AnyPath

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What comes before a record's data: a mark, and last the lengths of two fields that follow."""

_KEPT_CHUNKS = 8

_UNREADABLE = (*DAMAGED, MemoryError)
"""What damaged or foreign data can raise in a pickle reader."""


class RangeSource(Protocol):
    """Bytes that are read by ranges: a ``RangeFile``, or a part of a file."""

    size_bytes: int
    bytes_read: int

    @property
    def path(self) -> AnyPath:
        """The path, for messages."""
        ...

    def read(self, start: int, stop: int) -> bytearray:
        """Return the bytes ``[start, stop)``."""
        ...

    def read_runs(
        self, runs: Sequence[tuple[int, int]], places: Sequence[PlacedView] = ()
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the bytes of runs in pieces that cut no element, as ``RangeFile`` does."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class TorchIndex:
    """The tree of a file of ``torch.save``, with tensors that have a place but no values.

    All that is read for it goes through a ``VerifiedFile`` (foreign files: a ``RangeFile``): the
    zip's directory at the end, the pickle and the small records at the start. Its tensors are on
    the meta device, so nobody can take bytes from them that were never read.

    ``torch.load`` itself is not used: to leave the data alone, it would have to map the whole file,
    which a host may have too little memory to allow, and read parts of it unverified. The pickle is
    read by the same restricted unpickler, with the classes that ``torch.serialization`` allows.
    """

    def __init__(self, file: RangeSource, policy: PicklePolicy = PLAIN_DATA) -> None:
        """Read the index of a file.

        Args:
            file: the open file.
            policy: what its pickle may ask for.

        Raises:
            CheckpointCorruptedError: bytes of it are not what was written.
            CheckpointFormatError: the file is not of ``torch.save``, or is damaged.
            UnsupportedError: it holds objects of a class that the policy does not allow.
        """
        self._path = file.path
        self._policy = policy
        self._stream = _RangeStream(file)
        self._size_bytes = file.size_bytes
        self._typed: dict[str, torch.storage.TypedStorage] = {}
        self._record_of: dict[torch.UntypedStorage, str] = {}
        self._starts: dict[str, int] = {}
        self._prefix, self._records = self._read_directory()
        self._check_byte_order()
        self.tree = self._read_tree()

    def byte_range(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` of a tensor's elements; gaps between them count.

        Args:
            tensor: one of the tree's, or a view of one.

        Raises:
            CheckpointFormatError: it is not of this file, or reaches beyond its storage.
        """
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            self._refuse(f"holds a tensor that is not plain ({tensor.layout})")
        name = self._record_of.get(tensor.untyped_storage())
        if name is None:
            self._refuse(f"does not hold the tensor that is asked for ({tensor.shape})")
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in reach) if tensor.numel() else 0
        itemsize = tensor.dtype.itemsize
        start = self._start_of(name) + int(tensor.storage_offset()) * itemsize
        stop = self._start_of(name) + self._records[name].file_size
        if span and (start % itemsize or start + span * itemsize > stop):
            self._refuse(f"holds a tensor that does not fit into its record {name}")
        return start, start + span * itemsize

    @property
    def saved_as(self) -> str:
        """What ``torch.save`` was told to call the file, without its suffix; or ``archive``."""
        return self._prefix

    def _read_directory(self) -> tuple[str, dict[str, zipfile.ZipInfo]]:
        reader = io.BufferedReader(self._stream, CHUNK_BYTES)
        try:
            with zipfile.ZipFile(reader) as archive:
                records = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError, *_UNREADABLE) as error:
            reader.seek(0)
            if reader.read(2) == b"PK":
                self._refuse(
                    f"begins as a file of torch.save, and is cut short or damaged: its index, at "
                    f"the end, cannot be read ({str(error) or repr(error)})"
                )
            self._refuse(f"is not a file of torch.save: {str(error) or repr(error)}")
        finally:
            # Else the stream would be closed together with its reader.
            reader.detach()
        prefixes = [name.partition("/")[0] for name in records if name.endswith("/data.pkl")]
        if len(prefixes) != 1:
            self._refuse("is a zip, but not of torch.save: it has no data.pkl of its own")
        return prefixes[0], records

    def _check_byte_order(self) -> None:
        name = f"{self._prefix}/byteorder"
        order = self._record_bytes(name).decode("ascii", "replace") if name in self._records else ""
        if order not in {"", sys.byteorder}:
            self._refuse(f"has the byte order {order!r}, this machine has {sys.byteorder!r}")

    def _read_tree(self) -> Any:
        data = self._record_bytes(f"{self._prefix}/data.pkl")
        try:
            return unpickle(data, self._storage_of, self._policy)
        except _UNREADABLE as error:
            if self._policy is not PLAIN_DATA:
                refuse_class(error, self._path)
            reason = str(error).partition(" Please use")[0]
            self._refuse(f"cannot be read as plain data: {reason or repr(error)}")

    def _storage_of(self, saved_id: Any) -> torch.storage.TypedStorage:
        """Make the storage that a pickle names, without values."""
        _, kind, key, _, numel = saved_id
        if key not in self._typed:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            name, size_bytes = f"{self._prefix}/data/{key}", numel * dtype.itemsize
            found = self._records[name].file_size
            if found != size_bytes:
                msg = f"its record {name} has {found} bytes, expected {size_bytes}"
                raise ValueError(msg)
            storage = torch.UntypedStorage(  # type: ignore[no-untyped-call]
                size_bytes, device="meta"
            )
            self._record_of[storage] = name
            self._typed[key] = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=storage, dtype=dtype, _internal=True
            )
        return self._typed[key]

    def records(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield each record's name, its bytes ``[start, stop)``, and its CRC-32; 0 is none."""
        for name, info in self._records.items():
            start = self._start_of(name)
            yield name, start, start + info.file_size, info.CRC

    def _record_bytes(self, name: str) -> bytes:
        start = self._start_of(name)
        return self._stream.bytes_at(start, start + self._records[name].file_size)

    def _start_of(self, name: str) -> int:
        """Find where a record's data begin: behind a header whose size only itself tells."""
        if name not in self._starts:
            info = self._records[name]
            start = info.header_offset + _LOCAL_HEADER.size
            header = self._stream.bytes_at(info.header_offset, start)
            if len(header) < _LOCAL_HEADER.size or info.compress_type != zipfile.ZIP_STORED:
                self._refuse(f"has no plain record {name}")
            mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start += name_bytes + extra_bytes
            if mark != b"PK\x03\x04" or start + info.file_size > self._size_bytes:
                self._refuse(f"has no sound record {name}")
            self._starts[name] = start
        return self._starts[name]

    def _refuse(self, what: str) -> NoReturn:
        msg = f"{self._path} {what}. Resume from another checkpoint."
        raise CheckpointFormatError(msg)


class _RangeStream(io.RawIOBase):
    """A binary stream over a source, which keeps the last few chunks."""

    def __init__(self, file: RangeSource) -> None:
        super().__init__()
        self._file = file
        self._chunk = lru_cache(_KEPT_CHUNKS)(partial(_read_chunk, file))
        self._position = 0

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``, as far as the file has them."""
        start, stop = max(start, 0), min(stop, self._file.size_bytes)
        parts = []
        while start < stop:
            low = start // CHUNK_BYTES * CHUNK_BYTES
            part = self._chunk(low)[start - low : stop - low]
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.bytes_at(self._position, self._position + len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}
        position = base[whence] + offset
        if position < 0:
            raise OSError(position)
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def as_stream(file: RangeSource) -> io.BufferedReader:
    """Return a binary stream over a source, for readers of the standard library."""
    return io.BufferedReader(_RangeStream(file), CHUNK_BYTES)


def _read_chunk(file: RangeSource, low: int) -> bytearray:
    return file.read(low, min(low + CHUNK_BYTES, file.size_bytes))


MOST_ELEMENTS = 1 << 22
"""The most elements that are read at a time, where a block is no larger."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element lies beside another one, in whatever order, and in no other's place."""
    if tensor.layout != torch.strided:
        return False
    reached = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != reached:
            return tensor.numel() == 0
        reached *= size
    return True


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some blocks of a tensor, one after the other."""

    tensor: torch.Tensor
    """It is dense."""
    start: int
    """The first element, counted in the file and in logical order."""
    stop: int
    """The element after the last one, likewise."""

    def in_logical_order(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements ``(stop - start,)``, as the file has them, in logical order."""
        outer, block = _split(self.tensor)
        inner = (self.tensor.shape[outer:], self.tensor.stride()[outer:])
        count = elements.numel() // block
        return elements.as_strided((count, *inner[0]), (block, *inner[1])).reshape(-1)


def blocks_of(
    tensor: torch.Tensor, start: int, stop: int, most_elements: int = MOST_ELEMENTS
) -> Iterator[Blocks]:
    """Yield the blocks that hold the elements ``[start, stop)`` of a dense tensor, some at a time.

    Args:
        tensor: its values are not looked at.
        start: the first element, in logical order.
        stop: the element after the last one.
        most_elements: of the blocks that are given at once, where one has no more.
    """
    _, block = _split(tensor)
    step = max(most_elements // block, 1) * block
    for first in range(start // block * block, stop, step):
        yield Blocks(tensor, first, min(first + step, -(-stop // block) * block))


def _split(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many dimensions are outermost in the file too, and the elements of the others."""
    block = tensor.numel()
    for index, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != block // size:
            return index, block
        block //= size
    return tensor.dim(), block


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Elements ``[start, stop)`` of a stored tensor."""

    tensor: torch.Tensor
    """One of the file's tree, without gaps, or such a view of one; its elements are counted flat,
    in logical order."""

    start: int
    """The first element."""

    stop: int
    """The element after the last one."""

    def check_fills(self, target: torch.Tensor, where: AnyPath) -> None:
        """Refuse a target that the run does not fill.

        Raises:
            CheckpointMismatchError: elements would be cast from or to integers.
            ValueError: the run reaches beyond its tensor, or has more or fewer elements.
        """
        numel = self.stop - self.start
        if not 0 <= self.start <= self.stop <= self.tensor.numel():
            msg = f"[{self.start}, {self.stop}) is not within {tuple(self.tensor.shape)}."
            raise ValueError(msg)
        if target.shape != (numel,):
            msg = f"A tensor of shape {tuple(target.shape)} is not filled by {numel} elements."
            raise ValueError(msg)
        check_cast(self.tensor.dtype, target.dtype, str(where))


class TorchFile:
    """A file of ``torch.save`` that is read by ranges.

    No byte of a file that a manifest names is used unverified; foreign files keep a CRC-32 of each
    record at most, which ``verify`` compares.

    Attributes:
        path: where the file is.
        tree: what was saved. Its tensors have shape and dtype, but no values (they are on the meta
            device): those are fetched by ``read_into`` and ``load_tree``.
        saved_as: what ``torch.save`` called it, without suffix: ``archive`` where it was not told.
    """

    def __init__(self, file: RangeSource, policy: PicklePolicy = PLAIN_DATA) -> None:
        """Read the index of an open file, which is closed where that fails.

        Args:
            file: a ``VerifiedFile``, which a manifest names, or one that nobody has recorded
                anything of.
            policy: what its pickle may ask for.

        Raises:
            CheckpointCorruptedError: its bytes are not what was written, or it is cut short.
            CheckpointFormatError: it is not of ``torch.save``, or is damaged.
            UnsupportedError: it holds objects of a class that the policy does not allow.
        """
        self.path = file.path
        self._file = file
        try:
            self._index = TorchIndex(file, policy)
        except BaseException:
            file.close()
            raise
        self.tree: Any = self._index.tree
        self.saved_as = self._index.saved_as

    def verify(self, progress: Progress = NO_PROGRESS) -> None:
        """Read the whole file, and compare the CRC-32 of each record where one was written.

        Raises:
            CheckpointCorruptedError: bytes of a record are not what was written.
        """
        for name, start, stop, wanted in self._index.records():
            found = 0
            for _, view in self._file.read_runs([(start, stop)] if wanted else []):
                found = zlib.crc32(view, found)
                progress.advance(view.nbytes)
            if found != wanted:
                msg = (
                    f"{self.path} is damaged: its record {name} has the CRC-32 {found:#010x}, "
                    f"expected {wanted:#010x}. Resume from another checkpoint, or copy this "
                    "file again from where it is whole."
                )
                raise CheckpointCorruptedError(msg)

    @property
    def bytes_read(self) -> int:
        """How many bytes of the file and its checksums were read so far."""
        return self._file.bytes_read

    def byte_range(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` in which the elements of a contiguous tensor lie.

        Raises:
            CheckpointFormatError: it is not of this file, or reaches beyond its storage.
            ValueError: it is not contiguous.
        """
        if not tensor.is_contiguous():
            msg = f"A tensor of strides {tensor.stride()} has no one place in {self.path}."
            raise ValueError(msg)
        return self._index.byte_range(tensor)

    def read_into(
        self,
        wanted: Iterable[tuple[torch.Tensor, StoredRun]],
        progress: Progress = NO_PROGRESS,
    ) -> int:
        """Fill tensors with runs of stored ones, in one pass over the file.

        Args:
            wanted: a 1-D tensor on any device, and the run that fills it, in any order. Elements
                of another type are cast; all others are copied bit for bit.
            progress: receives the number of bytes read.

        Returns:
            The bytes that were read from disk.

        Raises:
            CheckpointCorruptedError: bytes of the file are not what was written; the targets may
                hold some of them.
            CheckpointMismatchError: elements would be cast from or to integers.
            UnsupportedError: there are gaps between a tensor's elements.
            ValueError: a run reaches beyond its tensor, or does not fill its target.
        """
        before, jobs, reordered = self.bytes_read, [], []
        for target, run in wanted:
            if run.tensor.is_contiguous():
                jobs.append(self._job(target, run))
            else:
                reordered.append((target, run))
        self._fill(jobs, progress)
        for target, run in reordered:
            self._fill_reordered(target, run, progress)
        return self.bytes_read - before

    def _fill_reordered(self, target: torch.Tensor, run: StoredRun, progress: Progress) -> None:
        """Fill a target with a run of a tensor whose elements lie in another order."""
        run.check_fills(target, self.path)
        if not is_dense(run.tensor):
            msg = (
                f"{self.path} holds a tensor of shape {tuple(run.tensor.shape)} with gaps between "
                f"its elements (strides {run.tensor.stride()}): save it again after .contiguous()"
            )
            raise UnsupportedError(msg)
        dtype = run.tensor.dtype
        start_byte = self._index.byte_range(run.tensor)[0]
        for blocks in blocks_of(run.tensor, run.start, run.stop):
            held = host_chunk(blocks.stop - blocks.start, dtype)
            place = start_byte + blocks.start * dtype.itemsize
            self._fill([_RangeCopy(place, dtype, held)], progress)
            low, high = max(blocks.start, run.start), min(blocks.stop, run.stop)
            found = blocks.in_logical_order(held)[low - blocks.start : high - blocks.start]
            target.detach()[low - run.start : high - run.start].copy_(found)

    def _job(self, target: torch.Tensor, run: StoredRun) -> _RangeCopy:
        run.check_fills(target, self.path)
        dtype = run.tensor.dtype
        start_byte = self.byte_range(run.tensor)[0] + run.start * dtype.itemsize
        return _RangeCopy(start_byte, dtype, target.detach())

    def load_tree(self, subtree: Any) -> Any:
        """Return a part of the tree with ordinary copies in the place of its tensors.

        Dicts, lists and tuples are new, and of the types that they were; all else is shared.

        Raises:
            CheckpointCorruptedError: bytes of the file are not what was written.
        """
        copies, jobs = {}, []
        for tensor in tensors_of(subtree):
            if id(tensor) not in copies:
                start, stop = self._index.byte_range(tensor)
                flat = torch.empty((stop - start) // tensor.dtype.itemsize, dtype=tensor.dtype)
                jobs.append(_RangeCopy(start, tensor.dtype, flat))
                copies[id(tensor)] = flat.as_strided(tensor.shape, tensor.stride())
        self._fill(jobs, NO_PROGRESS)
        return with_copies(subtree, copies)

    def _fill(self, jobs: list[_RangeCopy], progress: Progress) -> None:
        waiting = sorted(jobs, key=lambda job: job.start_byte, reverse=True)
        in_order = waiting[::-1]
        runs = _union(in_order)
        open_jobs: list[_RangeCopy] = []
        for offset, view in self._file.read_runs(runs, _places(in_order)):
            stop = offset + view.nbytes
            while waiting and waiting[-1].start_byte < stop:
                open_jobs.append(waiting.pop())
            for job in open_jobs:
                job.take(offset, view)
            open_jobs = [job for job in open_jobs if job.stop_byte > stop]
            progress.advance(view.nbytes)

    def close(self) -> None:
        """Close the file; a second time does nothing. The tree stays, but nothing can be read."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class _RangeCopy:
    """Bytes that follow one another in the file, and the 1-D tensor that their elements fill."""

    start_byte: int
    dtype: torch.dtype
    """Of the elements in the file."""
    slot: torch.Tensor

    @property
    def stop_byte(self) -> int:
        """Where the last one ends in the file."""
        return self.start_byte + self.slot.numel() * self.dtype.itemsize

    def memory(self) -> memoryview | None:
        """Return the slot's memory, if the file's bytes can be read right there."""
        slot = self.slot
        there = slot.device.type == "cpu" and slot.is_contiguous() and not slot.is_neg()
        # What holds no whole chunk is never read in place.
        if slot.nbytes < CHUNK_BYTES or slot.dtype != self.dtype or not there or slot.is_conj():
            return None
        return slot.view(torch.uint8).numpy().data

    def take(self, offset: int, view: memoryview) -> None:
        """Copy what a piece of the file has for this job, if it was not read into its slot.

        Neither end of the piece cuts an element: it is where a run begins or ends, or a border of
        chunks, and both chunks and places are multiples of the element's size in the file.
        """
        itemsize = self.dtype.itemsize
        low = max(self.start_byte, offset)
        high = min(self.stop_byte, offset + view.nbytes)
        numel = (high - low) // itemsize
        if numel <= 0:
            return
        elements = torch.frombuffer(view, dtype=self.dtype, count=numel, offset=low - offset)
        first = (low - self.start_byte) // itemsize
        slot = self.slot[first : first + numel]
        if elements.data_ptr() == slot.data_ptr():
            return
        if slot.dtype != elements.dtype or itemsize not in INTEGER_DTYPES:
            slot.copy_(elements)
            return
        slot, elements = (
            slot.view(INTEGER_DTYPES[itemsize]),
            elements.view(INTEGER_DTYPES[itemsize]),
        )
        if slot.device.type == "cpu":
            # torch would share out the copy among threads, which wait for each other: on a busy
            # host that was ten times slower than one thread alone.
            slot.numpy()[:] = elements.numpy()
        else:
            slot.copy_(elements)


def _places(jobs: Sequence[_RangeCopy]) -> list[tuple[int, memoryview]]:
    """Return the memory of the jobs, sorted by their start, that share no byte with another one."""
    places, reached = [], 0
    for job, following in itertools.zip_longest(jobs, jobs[1:]):
        alone = following is None or job.stop_byte <= following.start_byte
        if reached <= job.start_byte and alone and (memory := job.memory()) is not None:
            places.append((job.start_byte, memory))
        reached = max(reached, job.stop_byte)
    return places


def _union(jobs: Iterable[_RangeCopy]) -> list[tuple[int, int]]:
    """Join the bytes of jobs, sorted by their start, that overlap or touch."""
    runs: list[tuple[int, int]] = []
    for job in jobs:
        if runs and job.start_byte <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], job.stop_byte))
        elif job.slot.numel():
            runs.append((job.start_byte, job.stop_byte))
    return runs


def with_copies(tree: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """Return a tree with other tensors in the place of those, by their ids.

    Dicts, lists and tuples are new, and of the types that they were; all else is shared. A tensor
    that stays the same object in the tree is one object in the result, with the kind (parameter or
    tensor), ``requires_grad`` and attributes of the original.
    """
    return _with_copies(tree, dict(copies), set())


def _with_copies(tree: Any, copies: dict[int, torch.Tensor], complete: set[int]) -> Any:
    if isinstance(tree, torch.Tensor):
        if id(tree) in copies and id(tree) not in complete:
            complete.add(id(tree))
            copies[id(tree)] = copied = _of_same_kind(copies[id(tree)], tree)
            vars(copied).update(_with_copies(vars(tree), copies, complete))
        return copies.get(id(tree), tree)
    if isinstance(tree, dict):
        # A copy keeps what a dict's own kind has besides its items.
        result = copy.copy(tree)
        for key, value in tree.items():
            # Not update(): a Counter would count.
            result[key] = _with_copies(value, copies, complete)
        if fields := getattr(tree, "__dict__", None):
            vars(result).update(_with_copies(fields, copies, complete))
        return result
    if type(tree) in {list, tuple}:
        return type(tree)(_with_copies(value, copies, complete) for value in tree)
    return tree


def _of_same_kind(values: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=original.requires_grad)
    return values.requires_grad_(original.requires_grad)


ZIP_MARK = b"PK\x03\x04"


def is_legacy(path: Path) -> bool:
    """Whether a file is no zip, so that it cannot be read by ranges.

    Raises:
        CheckpointCorruptedError: it is missing, or cannot be read.
    """
    try:
        with os.fdopen(open_file(path)[0], "rb") as file:
            return file.read(len(ZIP_MARK)) != ZIP_MARK
    except OSError as error:
        msg = f"{path} cannot be read ({error.strerror}): resume from another checkpoint"
        raise CheckpointCorruptedError(msg) from error


def _check_beginning(first: bytes, path: Path) -> None:
    """Refuse what does not begin as such a file does.

    Raises:
        CheckpointFormatError: it is empty, or something else.
    """
    if first == LEGACY_MARK:
        return
    what = f"is no file of torch.save (it begins with {first!r})"
    if not first:
        what = "is empty: what wrote it was interrupted, or had no room on the disk"
    msg = f"{path} {what}. Resume from another checkpoint"
    raise CheckpointFormatError(msg)


class LegacyFile:
    """A file that is held in memory whole (``TorchFile``'s interface).

    Attributes:
        path: where the file is.
        tree: what was saved, with its tensors' values.
        bytes_read: the file's size.
        saved_as: nothing: these files do not say what they were called.
    """

    saved_as = ""

    def __init__(self, path: Path, policy: PicklePolicy, progress: Progress = NO_PROGRESS) -> None:
        """Load a file.

        Args:
            path: where it is.
            policy: what its pickle may ask for.
            progress: checked after every read.

        Raises:
            CheckpointFormatError: it is not of ``torch.save``, or damaged.
            UnsupportedError: it needs a class that the policy does not allow.
        """
        self.path: AnyPath = path
        self.bytes_read = path.stat().st_size
        try:
            with bounded_stream(path, progress) as stream:
                _check_beginning(stream.peek()[: len(LEGACY_MARK)], path)
                self.tree: Any = load_stream(stream, policy, path)
        except ElasticZeroError:
            raise  # a class that is refused, or another rank's failure meanwhile
        except Exception as error:
            # torch's own advice, to trust the file, is none here.
            why = f"{type(error).__name__}: {str(error).partition('Weights only load')[0]}"
            msg = (
                f"{path} cannot be read ({why}): it is no file of torch.save, or damaged. Resume "
                "from another checkpoint"
            )
            raise CheckpointFormatError(msg) from error

    def read_into(
        self,
        wanted: Iterable[tuple[torch.Tensor, StoredRun]],
        progress: Progress = NO_PROGRESS,
    ) -> int:
        """Fill tensors with runs of the tree's ones; nothing more is read from disk."""
        for target, run in wanted:
            run.check_fills(target, self.path)
            found = run.tensor.detach().reshape(-1)[run.start : run.stop]
            target.detach().copy_(found)
            progress.advance(found.numel() * found.element_size())
        return 0

    def load_tree(self, subtree: Any) -> Any:
        """Return a part of the tree."""
        return subtree

    def verify(self, progress: Progress = NO_PROGRESS) -> None:
        """Do nothing: such files keep no checksums."""

    def close(self) -> None:
        """Discard the tree."""
        self.tree = None
