"""Writes files of ``torch.save`` whose tensors are fetched while the file is written.

torch's ``skip_data`` needs a path, but checksums need a stream (torch 2.13 fails with "unexpected
pos"), so each file would have to be read again.
"""

from __future__ import annotations

import bisect
import mmap
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, TypeAlias, cast

import numpy as np
import torch

from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import host_chunk, in_order
from lightning_elastic_zero.storage.file_write import ChecksummedWriter
from lightning_elastic_zero.storage.paths import AnyPath

COPY_BYTES = 16 << 20
"""Bytes that are copied to the host at a time."""

# An untouched mapping takes no memory. With this flag the system reserves none for it either, and
# a shared mapping does not count as data (ulimit -d). Older Pythons lack the name.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_REGION_BYTES = 256 << 20
"""Addresses that are mapped at a time: a mapping for each stand-in of a large model would exceed
``vm.max_map_count``, 65,530 by default."""

_ALIGNMENT = 64
"""The alignment of a stand-in, that of torch's own memory."""

# torch computes the CRC-32 of each record from the stand-ins, so it would be wrong. The setting is
# one of the whole process.
_crc32_lock = threading.Lock()

Piece: TypeAlias = "torch.Tensor | ChunkedSource | int"
"""A contiguous tensor on any device, a source, or a number of zeros."""

Write: TypeAlias = Callable[[memoryview], int]
"""Appends bytes to a file."""

_HEADER_MARK, _DESCRIPTOR_MARK, _DIRECTORY_MARK = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"

_LOCAL_HEADER = struct.Struct("<6xH18xHH")
"""Flags, and the lengths of the name and of the extra field, which follow."""

_DIRECTORY_ENTRY = struct.Struct("<28xHHH12x")
"""The lengths of the three fields that follow."""

_CRC32_AT = 16
"""The offset of the CRC-32 in an entry of the directory."""

_HAS_DESCRIPTOR = 1 << 3
"""The flag of records with data: their sizes and CRC-32 follow the data."""


@dataclass(frozen=True, slots=True)
class ChunkedSource:
    """Elements that are fetched while they are written, for example from another file."""

    numel: int
    dtype: torch.dtype
    fetch: Callable[[], Iterator[torch.Tensor]]
    """Yields 1-D tensors on the host in order, in bounded parts, of any floating-point type."""

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yield the elements as 1-D tensors of ``dtype``."""
        for chunk in self.fetch():
            if chunk.dtype == self.dtype:
                yield chunk
            else:
                yield host_chunk(chunk.numel(), self.dtype).copy_(chunk)

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes of the elements."""
        for chunk in self.chunks():
            if chunk.dim() != 1:
                msg = f"A source of {self.dtype} gave {chunk.dtype} of shape {tuple(chunk.shape)}."
                raise ValueError(msg)
            if chunk.numel():
                yield in_order(chunk).view(torch.uint8).numpy().data


def piecewise(pieces: Sequence[Piece], dtype: torch.dtype) -> ChunkedSource:
    """Return a source of consecutive pieces, cast to ``dtype``; nothing is copied yet.

    Raises:
        ValueError: a tensor is not contiguous, or a number of zeros is negative.
    """
    numel = 0
    for piece in pieces:
        if isinstance(piece, torch.Tensor):
            added = piece.numel() if piece.is_contiguous() else -1
        else:
            added = piece if isinstance(piece, int) else piece.numel
        if added < 0:
            text = (piece.shape, piece.stride()) if isinstance(piece, torch.Tensor) else piece
            msg = f"A piece is {text}, expected a contiguous tensor or a number of zeros."
            raise ValueError(msg)
        numel += added
    return ChunkedSource(numel, dtype, partial(_chunks_of, pieces, dtype))


def _chunks_of(pieces: Sequence[Piece], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the elements of pieces, at most ``COPY_BYTES`` at a time."""
    numel = COPY_BYTES // dtype.itemsize
    for piece in pieces:
        if isinstance(piece, int):
            zeros = torch.zeros(min(piece, numel), dtype=dtype)
            for start in range(0, piece, numel):
                yield zeros[: piece - start]
        elif isinstance(piece, ChunkedSource):
            yield from piece.chunks()
        else:
            # A tensor on the host is not copied here.
            flat = piece.detach().view(-1)
            for start in range(0, flat.numel(), numel):
                yield flat[start : start + numel].to(device="cpu", dtype=dtype)


class TorchFileWriter:
    """Writes one file: ``add`` each large tensor, put the stand-ins into a tree, and ``write``."""

    def __init__(self) -> None:
        self._feeds: list[_SourceBytes] = []
        self._region: mmap.mmap | bytes = b""
        """The addresses of the next stand-ins; empty before the first."""
        self._taken = 0
        """Bytes of the region that have stand-ins."""

    def add(self, source: ChunkedSource) -> torch.Tensor:
        """Return a 1-D stand-in for a tensor, which may be sliced and viewed, but has no values.

        Its views share one storage in the file. It uses addresses, but no memory.
        """
        size_bytes = source.numel * source.dtype.itemsize
        if not size_bytes:
            return torch.empty(0, dtype=source.dtype)
        if self._taken + size_bytes > len(self._region):
            flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._region = mmap.mmap(-1, max(size_bytes, _REGION_BYTES), flags=flags)
            self._taken = 0
        # Not torch.empty, which fills its memory if deterministic algorithms are on.
        placeholder = torch.frombuffer(
            self._region, dtype=source.dtype, count=source.numel, offset=self._taken
        )
        self._taken += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        self._feeds.append(_SourceBytes(source, placeholder))
        return placeholder

    def write(
        self,
        tree: object,
        directory: AnyPath,
        name: str,
        *,
        save_id: str,
        progress: Progress = NO_PROGRESS,
        crc32: bool = False,
    ) -> FileEntry:
        """Write the file ``name`` of a staged directory and its checksums, synced to disk.

        ``crc32`` stores the CRC-32 of each record, for files whose other checksums are not kept: it
        halves the speed of writing.

        Tensors in the tree that are not stand-ins are written as ``torch.save`` does: with their
        whole storage and their device.

        Raises:
            SaveError: writing failed.
            ValueError: a source yielded other elements, or its stand-in is not in the tree.
        """
        size_bytes = sum(feed.stop - feed.start for feed in self._feeds)
        with ChecksummedWriter(directory, name, progress, size_bytes) as file:
            no_crc32 = ExitStack()
            # torch.save reads the setting before it writes. It is restored at the first byte, as
            # writing a file in the background may take minutes.
            sums = _Crc32Writer(file.write) if crc32 else None
            write = sums or file.write
            stream = _SubstitutingStream(write, self._feeds, on_first=no_crc32.close)
            try:
                with no_crc32:
                    no_crc32.enter_context(_without_crc32())
                    # torch.save only calls write and flush.
                    torch.save(tree, cast("IO[bytes]", stream))
            finally:
                if stream.error is not None:
                    raise stream.error
            for feed in self._feeds:
                feed.check_complete()
            if sums:
                sums.check_complete()
            return file.finish(save_id)


@contextmanager
def _without_crc32() -> Iterator[None]:
    with _crc32_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(compute_crc32=False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(compute_crc32=before)


class _Crc32Writer:
    """Fills in the CRC-32 of each record, which torch's zip writer left at zero.

    torch passes each header, name, extra field, descriptor and the whole directory in one call.
    """

    def __init__(self, write: Write) -> None:
        self._write_on = write
        self._found: list[int] = []
        """The CRC-32 of each record, in the order of the directory."""
        self._to_skip = 0
        """Bytes of the name and extra field that precede the data."""
        self._data_bytes: int | None = None
        """Bytes of the open record so far; None: no record is open."""
        self._complete = False

    def __call__(self, data: memoryview) -> int:
        part = data.cast("B")
        if self._to_skip:
            self._to_skip -= part.nbytes
        elif self._data_bytes is None:
            if part[:4] == _HEADER_MARK:
                self._open_record(part)
            elif part[:4] == _DIRECTORY_MARK:
                part = self._filled_directory(part)
        elif self._is_descriptor(part):
            changed = bytearray(part)
            struct.pack_into("<I", changed, len(_DESCRIPTOR_MARK), self._found[-1])
            part, self._data_bytes = memoryview(changed), None
        else:
            self._found[-1] = zlib.crc32(part, self._found[-1])
            self._data_bytes += part.nbytes
        return self._write_on(part)

    def _open_record(self, header: memoryview) -> None:
        flags, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        self._to_skip = name_bytes + extra_bytes
        self._data_bytes = 0 if flags & _HAS_DESCRIPTOR else None
        self._found.append(0)

    def _is_descriptor(self, part: memoryview) -> bool:
        """Whether a call ends the open record: a mark, no CRC-32, and twice its size."""
        sizes = {16: "<II", 24: "<QQ"}.get(part.nbytes)
        if sizes is None or not self._data_bytes or part[:8] != _DESCRIPTOR_MARK + bytes(4):
            return False
        return struct.unpack_from(sizes, part, 8) == (self._data_bytes, self._data_bytes)

    def _filled_directory(self, part: memoryview) -> memoryview:
        changed, at = bytearray(part), 0
        for crc32 in self._found:
            name_bytes, extra_bytes, comment_bytes = _DIRECTORY_ENTRY.unpack_from(changed, at)
            struct.pack_into("<I", changed, at + _CRC32_AT, crc32)
            at += _DIRECTORY_ENTRY.size + name_bytes + extra_bytes + comment_bytes
        self._complete = at == part.nbytes
        return memoryview(changed)

    def check_complete(self) -> None:
        if not self._complete:
            msg = "torch.save wrote an unknown kind of zip. Use another release of torch."
            raise RuntimeError(msg)


class _SubstitutingStream:
    """A file for ``torch.save`` that writes the bytes of sources instead of their stand-ins.

    ``write`` never raises: torch's zip writer, which calls it from C++, would try to finish the
    file and report that instead. The first error is kept, and nothing is written after it.
    """

    def __init__(
        self, write: Write, feeds: list[_SourceBytes], on_first: Callable[[], None]
    ) -> None:
        self._write_on = write
        self._on_first = on_first
        self._feeds = sorted(feeds, key=lambda feed: feed.start)
        self._starts = [feed.start for feed in self._feeds]
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        self._on_first()
        view = memoryview(data)
        if self.error is None and view.nbytes:
            try:
                self._write(view)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                self.error = error
        return view.nbytes

    def _write(self, view: memoryview) -> None:
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._feeds[index].stop:
            self._write_on(view)
            return
        for part in self._feeds[index].take(address, view.nbytes):
            self._write_on(part)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


class _SourceBytes:
    """The bytes of one source, and the addresses of its stand-in."""

    def __init__(self, source: ChunkedSource, placeholder: torch.Tensor) -> None:
        self._placeholder = placeholder  # Kept, so that no other memory gets these addresses.
        self._next = self.start = placeholder.data_ptr()
        self.stop = self.start + placeholder.nbytes
        self._source = source
        self._parts = source.parts()
        self._rest = memoryview(b"")

    def take(self, address: int, size_bytes: int) -> Iterator[memoryview]:
        """Return the bytes of an address; calls must be in the order of the addresses."""
        if address != self._next:
            msg = (
                "torch.save wrote parts of one storage out of order. Use another release of torch."
            )
            raise RuntimeError(msg)
        self._next += size_bytes
        while size_bytes:
            if not self._rest.nbytes:
                self._rest = next(self._parts, self._rest)
                if not self._rest.nbytes:
                    self._fail(f"{size_bytes} bytes too few")
            part, rest = self._rest[:size_bytes], self._rest[size_bytes:]
            # Even an empty view would keep the chunk alive.
            self._rest = rest if rest.nbytes else memoryview(b"")
            size_bytes -= part.nbytes
            yield part
        if self._next == self.stop and (self._rest.nbytes or next(self._parts, None) is not None):
            self._fail("more elements than it declares")

    def check_complete(self) -> None:
        if self._next != self.stop:
            self._fail("no place in the tree")

    def _fail(self, what: str) -> None:
        msg = f"A source of {self._source.numel} elements of {self._source.dtype} has {what}."
        raise ValueError(msg)
