"""Reads selected elements of files of ``torch.save``, verified, into their target buffers.

The byte range of each tensor is found from the zip directory without reading data. Trees are
unpickled as by ``torch.load(weights_only=True)``, with stand-ins for a few classes; with
``allow_pickle``, by Python's own unpickler.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import re
import struct
import sys
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch import _weights_only_unpickler

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import (
    INTEGER_DTYPES,
    check_cast,
    measure,
    tensors_of,
    with_copies,
)
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.deepspeed_files import CLASS_STUBS, check_saved_name
from lightning_elastic_zero.storage.file_read import READ_BYTES, RangeFile
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES
from lightning_elastic_zero.storage.paths import AnyPath, open_file, raise_unless_damage

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header of a record: a mark, and last the lengths of two fields that follow it."""

_ZIP_MARK = b"PK\x03\x04"
_KEPT_CHUNKS = 8


OLD_FORMAT_MARK = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files of torch before 1.6, which are not zips: a pickled number."""

_UNREADABLE = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
    ImportError,
    OverflowError,
    MemoryError,
)
"""Exceptions that damaged or foreign data raises in unpicklers."""

Policy: TypeAlias = Literal["plain data", "stand-ins", "any class"]
"""The classes that a pickle may contain: those of ``torch.load(weights_only=True)``; also a few of
DeepSpeed, with a stand-in for each; or any class, which can run code."""

PLAIN_DATA: Policy = "plain data"
"""For files of this library."""

_ASKED_FOR = re.compile(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.[\w.]+)")
"""The class that torch's restricted unpickler refuses, in its message."""

# torch keeps the allowed classes per process. Only one file is unpickled at a time, so that no
# thread removes classes that another one still needs.
_allowing = threading.RLock()

MAX_OPEN = 4
"""Files kept open at once: a rank reads most of its runs from the same two or three."""


def unsupported_class(where: object, what: str, more: str = "") -> UnsupportedError:
    """Return the error for a class that is built only with ``allow_pickle``."""
    return UnsupportedError(
        f"{where} contains {what}. Building it can run code. If you trust this checkpoint, pass "
        "allow_pickle=True to ElasticDeepSpeedStrategy, elastic or load_checkpoint, or "
        f"--allow-pickle on the command line{more}"
    )


def foreign_policy(*, allow_pickle: bool) -> Policy:
    """Return the policy for files of other software."""
    return "any class" if allow_pickle else "stand-ins"


class _AnyClassUnpickler(pickle.Unpickler):
    """Builds objects of any class, except those with a stub."""

    def __init__(self, data: bytes, storage_of: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._storage_of = storage_of

    def persistent_load(self, pid: Any) -> Any:
        return self._storage_of(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if stub := CLASS_STUBS.get(f"{module_name}.{global_name}"):
            return stub
        if module_name == "torch" and global_name.endswith("Storage"):
            # As in torch.load: the storage classes themselves are deprecated, and warn.
            return torch.serialization.StorageType(global_name)
        return super().find_class(module_name, global_name)


class _TensorPickler(pickle.Pickler):
    """Collects the tensors of a tree, and pickles their numbers instead."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._number_of:
            self._number_of[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._number_of[id(value)]


@contextmanager
def _allowed(policy: Policy) -> Iterator[None]:
    """Allow the policy's stand-ins to torch's restricted unpickler, within this context."""
    stubs = {} if policy == PLAIN_DATA else CLASS_STUBS
    pairs: Any = [(stub, name) for name, stub in stubs.items()]
    with _allowing, torch.serialization.safe_globals(pairs):
        yield


def unpickle(data: bytes, storage_of: Callable[[Any], Any], policy: Policy) -> Any:
    """Unpickle a tree, with storages from ``storage_of``."""
    if policy == "any class":
        return _AnyClassUnpickler(data, storage_of).load()
    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = storage_of  # type: ignore[method-assign]
    with _allowed(policy):
        return unpickler.load()


def check_size(tree: object, pickle_bytes: int, file_bytes: int) -> None:
    """Raise ValueError for a tree that takes much more time or memory than its file has bytes."""
    values, tensor_bytes = measure(tree)
    if values > (most := 1_000_000 + 20 * pickle_bytes):
        msg = f"its {pickle_bytes} bytes repeat objects to {values} values, expected at most {most}"
        raise ValueError(msg)
    if tensor_bytes > (most := (64 << 20) + 16 * file_bytes):
        msg = (
            f"its tensors have {tensor_bytes} bytes, expected at most {most} in a file of "
            f"{file_bytes} bytes"
        )
        raise ValueError(msg)


def refuse_class(error: Exception, where: object) -> None:
    """Raise an error with the remedy if an unpickler refused a class; else return."""
    asked_for = _ASKED_FOR.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if asked_for:
        what = f"a Python object of {asked_for[1]}, which is not plain data"
        more = ", or allow this one class with torch.serialization.add_safe_globals"
        raise unsupported_class(where, what, more) from error


class _RangeStream(io.RawIOBase):
    """A binary stream over a file, with reads of bounded size; it keeps the last few chunks."""

    def __init__(self, file: RangeFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0

        @lru_cache(_KEPT_CHUNKS)
        def chunk(low: int) -> bytearray:
            return file.read(low, min(low + CHUNK_BYTES, file.size_bytes))

        self._chunk = chunk

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)`` that the file has."""
        start, stop = max(start, 0), min(stop, self._file.size_bytes)
        parts = []
        while start < stop:
            low = start // CHUNK_BYTES * CHUNK_BYTES
            part = self._chunk(low)[start - low : stop - low]
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        start = self._position
        if len(buffer) > CHUNK_BYTES:  # the values of a tensor, which nothing reads again
            stop = min(start + min(len(buffer), READ_BYTES), self._file.size_bytes)
            for at, view in self._file.read_runs([(start, stop)] if start < stop else []):
                buffer[at - start : at - start + view.nbytes] = view
        else:
            data = self.bytes_at(start, start + len(buffer))
            stop = start + len(data)
            buffer[: len(data)] = data
        self._position = max(start, stop)
        return self._position - start

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


def raise_disk_error(error: Exception, handled: BaseException | None) -> None:
    """Raise the error of the disk that ``zipfile`` has replaced, if any.

    It names the path and a remedy. ``handled`` is the context of later errors: the exception that
    the caller of ``zipfile`` was handling.
    """
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.errno is not None and cause is not handled:
        raise cause from None


def as_stream(file: RangeFile) -> io.BufferedReader:
    """Return a binary stream over a file, for readers of the standard library."""
    return io.BufferedReader(_RangeStream(file), CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Elements ``[start, stop)`` of a stored tensor."""

    tensor: torch.Tensor
    """One of the file's tree, or a view of one; its elements are counted flat, in logical order. If
    it is not contiguous, as in ``channels_last``, every read of a run reads all of it."""

    start: int
    """The first element."""

    stop: int
    """The element after the last one."""

    def check_fills(self, target: torch.Tensor, where: AnyPath) -> None:
        """Refuse a target that the run does not fill."""
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

    No byte of a file that a manifest names is used unverified; foreign files have at most a CRC-32
    of each record, which ``verify`` compares. Opening reads the zip's directory, the pickle and the
    small records. ``torch.load(mmap=True)`` is not used: it would map the whole file, for which a
    host may lack memory, and read it unverified.

    Attributes:
        path: the path of the file.
        tree: the saved object. Its tensors have no values (they are on the meta device, so that
            no bytes are used that were not read): ``read_into`` and ``load_tree`` read them.
        saved_as: the file's name when it was saved, without suffix; else ``archive``.
    """

    def __init__(self, file: RangeFile, policy: Policy = PLAIN_DATA) -> None:
        """Read the index of an open file; close the file if that fails."""
        self.path = file.path
        self._file = file
        self._policy = policy
        self._stream = _RangeStream(file)
        self._typed: dict[str, torch.storage.TypedStorage] = {}
        self._record_of: dict[torch.UntypedStorage, str] = {}
        self._starts: dict[str, int] = {}
        try:
            self.saved_as, self._records = self._read_directory()
            self._check_byte_order()
            self.tree: Any = self._read_tree()
        except BaseException:
            file.close()
            raise

    # -- the index -------------------------------------------------------------------------------

    def _read_directory(self) -> tuple[str, dict[str, zipfile.ZipInfo]]:
        reader = io.BufferedReader(self._stream, CHUNK_BYTES)
        handled = sys.exc_info()[1]  # by the caller, so it is the context of later errors
        try:
            with zipfile.ZipFile(reader) as archive:
                records = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError, *_UNREADABLE) as error:
            raise_disk_error(error, handled)
            self._refuse(f"is damaged, truncated or not a file of torch.save: {error!r}")
        finally:
            # Else the stream would be closed together with its reader.
            reader.detach()
        prefixes = [name.partition("/")[0] for name in records if name.endswith("/data.pkl")]
        if len(prefixes) != 1:
            self._refuse("is a zip, but not of torch.save: expected one data.pkl")
        return prefixes[0], records

    def _check_byte_order(self) -> None:
        name = f"{self.saved_as}/byteorder"
        order = self._record_bytes(name).decode("ascii", "replace") if name in self._records else ""
        if order not in {"", sys.byteorder}:
            self._refuse(f"has the byte order {order!r}, this machine has {sys.byteorder!r}")

    def _read_tree(self) -> Any:
        data = self._record_bytes(f"{self.saved_as}/data.pkl")
        try:
            tree = unpickle(data, self._storage_of, self._policy)
            check_size(tree, len(data), self._file.size_bytes)
            return tree  # noqa: TRY300 (both may raise)
        except _UNREADABLE as error:
            if self._policy != PLAIN_DATA:
                refuse_class(error, self.path)
            reason = str(error).partition(" Please use")[0]
            self._refuse(f"cannot be read as plain data: {reason or repr(error)}")

    def _storage_of(self, saved_id: Any) -> torch.storage.TypedStorage:
        """Return a storage without values for an id in the pickle."""
        _, kind, key, _, numel = saved_id
        if key not in self._typed:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            name, size_bytes = f"{self.saved_as}/data/{key}", numel * dtype.itemsize
            found = self._records[name].file_size
            if found != size_bytes:
                msg = f"its record {name} has {found} bytes, expected {size_bytes}"
                raise ValueError(msg)
            storage = torch.UntypedStorage(size_bytes, device="meta")
            self._record_of[storage] = name
            self._typed[key] = torch.storage.TypedStorage(
                wrap_storage=storage, dtype=dtype, _internal=True
            )
        return self._typed[key]

    def _record_bytes(self, name: str) -> bytes:
        start, wanted = self._start_of(name), self._records[name].CRC
        data = self._stream.bytes_at(start, start + self._records[name].file_size)
        # A damaged class name must not look like an object that needs allow_pickle.
        self._check_crc32(name, wanted and zlib.crc32(data))
        return data

    def _check_crc32(self, name: str, found: int) -> None:
        wanted = self._records[name].CRC
        if found != wanted:
            msg = (
                f"{self.path} is damaged: its record {name} has the CRC-32 {found:#010x}, "
                f"expected {wanted:#010x}. Resume from another checkpoint, or copy this "
                "file again from an intact copy."
            )
            raise CheckpointCorruptedError(msg)

    def _start_of(self, name: str) -> int:
        """Return the start of a record's data, after a header of variable size."""
        if name not in self._starts:
            info = self._records[name]
            start = info.header_offset + _LOCAL_HEADER.size
            header = self._stream.bytes_at(info.header_offset, start)
            if len(header) < _LOCAL_HEADER.size or info.compress_type != zipfile.ZIP_STORED:
                self._refuse(f"has a compressed or truncated record {name}")
            mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start += name_bytes + extra_bytes
            if mark != _ZIP_MARK or start + info.file_size > self._file.size_bytes:
                self._refuse(f"has a damaged record {name}")
            self._starts[name] = start
        return self._starts[name]

    def _refuse(self, what: str) -> NoReturn:
        msg = f"{self.path} {what}. Resume from another checkpoint."
        raise CheckpointFormatError(msg)

    def _byte_range(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` of a tensor, including gaps between its elements."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            self._refuse(f"has a tensor that is not plain ({tensor.layout})")
        name = self._record_of.get(tensor.untyped_storage())
        if name is None:
            self._refuse(f"lacks the requested tensor ({tensor.shape})")
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in reach) if tensor.numel() else 0
        itemsize = tensor.dtype.itemsize
        start = self._start_of(name) + int(tensor.storage_offset()) * itemsize
        stop = self._start_of(name) + self._records[name].file_size
        if span and (start % itemsize or start + span * itemsize > stop):
            self._refuse(f"has a tensor that exceeds its record {name}")
        return start, start + span * itemsize

    # -- data ------------------------------------------------------------------------------------

    def verify(self, progress: Progress = NO_PROGRESS) -> bool:
        """Compare the CRC-32 of each record; return whether the file has them."""
        if not any(info.CRC for info in self._records.values()):
            return False  # They were switched off.
        for name, info in self._records.items():
            start, found = self._start_of(name), 0
            stop = start + info.file_size
            for _, view in self._file.read_runs([(start, stop)]):
                found = zlib.crc32(view, found)
                progress.advance(view.nbytes)
            self._check_crc32(name, found)
        return True

    @property
    def bytes_read(self) -> int:
        return self._file.bytes_read

    def read_into(
        self, wanted: Iterable[tuple[torch.Tensor, StoredRun]], progress: Progress = NO_PROGRESS
    ) -> int:
        """Fill 1-D tensors on any device with runs of stored ones; return the bytes read from disk.

        Elements of another type are cast; all others are copied bit for bit.

        Raises:
            CheckpointCorruptedError: bytes of the file are not what was written; the targets may
                hold some of them.
            CheckpointMismatchError: elements would be cast from or to integers.
            ValueError: a run reaches beyond its tensor, or does not fill its target.
        """
        before, jobs, strided = self.bytes_read, [], []
        for target, run in wanted:
            run.check_fills(target, self.path)
            if run.tensor.is_contiguous():
                dtype = run.tensor.dtype
                start_byte = self._byte_range(run.tensor)[0] + run.start * dtype.itemsize
                jobs.append(_RangeCopy(start_byte, dtype, target.detach()))
            else:
                strided.append((target, run))
        self._fill(jobs, progress)
        for target, run in strided:
            whole = self.load_tree(run.tensor)
            target.detach().copy_(whole.reshape(-1)[run.start : run.stop])
        return self.bytes_read - before

    def load_tree(self, subtree: Any) -> Any:
        """Return a copy of a part of the tree, with the values of its tensors (``with_copies``)."""
        if self._policy != "any class":
            return self._load_plain(subtree)
        # Objects of any class may contain tensors.
        pickled = io.BytesIO()
        without_tensors = _TensorPickler(pickled)
        without_tensors.dump(subtree)
        loaded = self._load_plain(without_tensors.tensors)
        return _AnyClassUnpickler(pickled.getvalue(), loaded.__getitem__).load()

    def _load_plain(self, subtree: Any) -> Any:
        copies, jobs = {}, []
        for tensor in tensors_of(subtree):
            if tensor not in copies:
                start, stop = self._byte_range(tensor)
                flat = torch.empty((stop - start) // tensor.dtype.itemsize, dtype=tensor.dtype)
                jobs.append(_RangeCopy(start, tensor.dtype, flat))
                copies[tensor] = flat.as_strided(tensor.shape, tensor.stride())
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
        self._file.close()


@dataclass(frozen=True, slots=True)
class _RangeCopy:
    """Consecutive bytes of the file, and the 1-D tensor that their elements fill."""

    start_byte: int
    dtype: torch.dtype
    """Of the elements in the file."""
    slot: torch.Tensor

    @property
    def stop_byte(self) -> int:
        return self.start_byte + self.slot.numel() * self.dtype.itemsize

    def memory(self) -> memoryview | None:
        """Return the slot's memory if bytes can be read into it directly."""
        slot = self.slot
        there = slot.device.type == "cpu" and slot.is_contiguous() and not slot.is_neg()
        # Only whole chunks are read in place.
        if slot.nbytes < CHUNK_BYTES or slot.dtype != self.dtype or not there or slot.is_conj():
            return None
        return slot.view(torch.uint8).numpy().data

    def take(self, offset: int, view: memoryview) -> None:
        """Copy the elements in a piece of the file, unless they were read into the slot directly.

        A piece cuts no element: it ends at the border of a run or of a chunk, and elements are
        aligned.
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
            # torch would copy with several threads, which was ten times slower on a busy host.
            slot.numpy()[:] = elements.numpy()
        else:
            slot.copy_(elements)


def _places(jobs: Sequence[_RangeCopy]) -> list[tuple[int, memoryview]]:
    """Return the memory of those jobs, sorted by start, that share no byte with another one."""
    places, reached = [], 0
    for job, following in itertools.zip_longest(jobs, jobs[1:]):
        alone = following is None or job.stop_byte <= following.start_byte
        if reached <= job.start_byte and alone and (memory := job.memory()) is not None:
            places.append((job.start_byte, memory))
        reached = max(reached, job.stop_byte)
    return places


def _union(jobs: Iterable[_RangeCopy]) -> list[tuple[int, int]]:
    """Join overlapping or adjacent byte ranges of jobs, which are sorted by start."""
    runs: list[tuple[int, int]] = []
    for job in jobs:
        if runs and job.start_byte <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], job.stop_byte))
        elif job.slot.numel():
            runs.append((job.start_byte, job.stop_byte))
    return runs


def is_cut(path: Path) -> bool:
    """Whether a file is empty, or begins as a zip and lacks the end; reads its two ends only."""
    with suppress(OSError), os.fdopen(open_file(path)[0], "rb") as file:
        first = file.read(len(_ZIP_MARK))
        return not first or (first == _ZIP_MARK and not zipfile.is_zipfile(file))
    return False


P = TypeVar("P", bound=AnyPath)


class OpenFiles(Generic[P]):
    """Files by their names, relative to ``folder``. The least recently used ones are closed.

    ``progress`` is checked after every read: opening thousands of files takes minutes.
    """

    def __init__(
        self,
        folder: P,
        open_file: Callable[[str], TorchFile],
        *,
        limit: int = MAX_OPEN,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.folder: P = folder
        self.progress = progress
        self._open_file = open_file
        self.limit = limit
        self._open: OrderedDict[str, TorchFile] = OrderedDict()

    def get(self, name: str) -> TorchFile:
        if name not in self._open:
            self._open[name] = self._open_file(name)
            while len(self._open) > self.limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def tree(self, name: str) -> Any:
        """Return the content of a file; its tensors are on the meta device."""
        return self.get(name).tree

    def load(self, name: str, subtree: Any) -> Any:
        """Return a part of a file's tree with its values."""
        return self.get(name).load_tree(subtree)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


ForeignFiles = OpenFiles[Path]
"""Files of ``torch.save`` that other software wrote."""


def foreign_files(
    folder: Path,
    *,
    allow_pickle: bool = False,
    limit: int = MAX_OPEN,
    progress: Progress = NO_PROGRESS,
    check_names: bool = False,
) -> ForeignFiles:
    """Return the files of ``torch.save`` in a folder.

    ``allow_pickle`` builds objects of any class. ``check_names`` refuses files that were saved
    under DeepSpeed's name of another file.
    """
    policy = foreign_policy(allow_pickle=allow_pickle)

    def open_file(name: str) -> TorchFile:
        path = folder / name
        _check_is_archive(path)
        progress.check()
        file = TorchFile(RangeFile(path, progress), policy)
        try:
            if check_names:
                check_saved_name(path, file.saved_as)
        except BaseException:
            file.close()
            raise
        return file

    return OpenFiles(folder, open_file, limit=limit, progress=progress)


def _check_is_archive(path: Path) -> None:
    """Refuse a file that is not a zip, with the reason."""
    try:
        with os.fdopen(open_file(path)[0], "rb") as file:
            first = file.read(len(OLD_FORMAT_MARK))
    except OSError as error:
        raise_unless_damage(error, path)
        msg = f"{path} cannot be read ({error.strerror}): resume from another checkpoint"
        raise CheckpointCorruptedError(msg) from error
    if first == OLD_FORMAT_MARK:
        msg = (
            f"{path} has the file format of torch before 1.6, which is not supported. Open and "
            "save it again with torch: torch.save(torch.load(path), path). DeepSpeed writes this "
            "format with checkpoint_serialization: false"
        )
        raise UnsupportedError(msg)
    if not first.startswith(_ZIP_MARK):
        what = f"is not a file of torch.save (it begins with {first!r})"
        what = what if first else "is empty: its save was interrupted, or the disk full"
        msg = f"{path} {what}. Resume from another checkpoint"
        raise CheckpointFormatError(msg)
