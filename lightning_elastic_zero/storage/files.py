"""Reading ranges of bytes from a file without mapping it, verified and with bounded memory."""

from __future__ import annotations

import io
import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, TypeAlias

import xxhash
from typing_extensions import Self

from lightning_elastic_zero.core.manifest import FileEntry, from_json, load_json
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.storage.checksums import (
    ALGORITHM,
    CHUNK_BYTES,
    SUM_BYTES,
    SUMS_SUFFIX,
    Sidecar,
)
from lightning_elastic_zero.storage.paths import open_file, read_file

READ_BYTES = 8 << 20
"""Largest read, and buffer; a multiple of ``CHUNK_BYTES``."""

AHEAD_BLOCKS = 8
"""Blocks announced to the system before they are read, if reads are slow. It fetches them together,
while earlier ones are verified. More blocks would only use memory."""

SLOW_BYTES_PER_S = 256e6
"""Slower reads are limited by latency, as on a network file system with a small readahead. Above
this speed announcements cost more than they gain, because Linux then fills its cache by single
pages (a local disk read 1.9 GB/s with them, and 3.4 GB/s without)."""

SAMPLE_BYTES = 32 << 20
"""Bytes read before the speed counts: the first bytes wait for the readahead on any disk."""

CACHED_BYTES = 1 << 20
"""Bytes that are verified immediately after reading, from the processor's cache; a multiple of
``CHUNK_BYTES``."""

PlacedView: TypeAlias = tuple[int, memoryview]
"""An offset in a file, and writable memory for the bytes from there."""

_Block: TypeAlias = tuple[int, int, int, int]
"""Whole chunks that are read together, ``[start, stop)``, and their runs, ``[first, last)``."""


class _BoundedFile(io.FileIO):
    """A file with short reads: at most ``READ_BYTES`` at once."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path)
        self._progress = progress

    def readinto(self, buffer: Any, /) -> int:
        """Read at most ``READ_BYTES``."""
        count = super().readinto(memoryview(buffer).cast("B")[:READ_BYTES])
        self._progress.check()
        return count

    def fileno(self) -> int:
        """Refuse: reads through the descriptor would not be bounded."""
        raise io.UnsupportedOperation


def bounded_stream(path: Path, progress: Progress) -> io.BufferedReader:
    """Open a file that is read in bounded parts, with ``progress`` called after each.

    Raises:
        OSError: it cannot be opened.
    """
    return io.BufferedReader(_BoundedFile(path, progress), CHUNK_BYTES)


class RangeFile:
    """A file without recorded checksums, open for reading by ranges.

    Pages are never mapped, so a damaged disk or a shrinking file causes an exception, not a signal.

    Attributes:
        path: the path of the file.
        size_bytes: its size.
        bytes_read: the number of bytes read so far.
    """

    def __init__(self, path: Path, progress: Progress = NO_PROGRESS) -> None:
        """Open a file.

        Args:
            path: the path of a regular file.
            progress: checked after every read.

        Raises:
            CheckpointCorruptedError: it is missing, cannot be read, or is not a regular file.
        """
        self.path = path
        self.bytes_read = 0
        self._progress = progress
        self._buffer: mmap.mmap | None = None
        self._speed = _Speed()
        self._descriptor = -1
        self._descriptor, self.size_bytes = self._open()

    def _open(self) -> tuple[int, int]:
        try:
            descriptor, status = open_file(self.path)
        except FileNotFoundError:
            self._refuse("it is missing")
        except OSError as error:
            self._refuse(f"it cannot be opened ({error.strerror})")
        return descriptor, status.st_size

    def _check_block(self, block: memoryview, start: int) -> None:
        """Accept the bytes: this file has no checksums."""

    def read_runs(
        self, runs: Sequence[tuple[int, int]], places: Sequence[PlacedView] = ()
    ) -> Iterator[tuple[int, memoryview]]:
        """Read runs of bytes, in pieces of at most ``READ_BYTES``.

        Only whole chunks with a requested byte are read, each once.

        Args:
            runs: half-open, sorted by start, without overlap; empty runs yield nothing.
            places: sorted by offset, without overlap, and within the runs. Chunks that are entirely
                within a place are read and verified there. The caller must not use this memory
                before the piece is yielded.

        Yields:
            The offset in the file, and the bytes from there: writable, and valid until the next
            piece. A piece never crosses the border of a run. For bytes that were read into a place
            it is a view of that place.

        Raises:
            CheckpointCorruptedError: the file is truncated, or its bytes differ from the written
                ones.
            ValueError: the runs are not sorted, overlap, or exceed the file.
        """
        wanted = self._check_runs(runs)
        inner = _whole_chunks(places)
        # Two concurrent readers must not share a buffer.
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            # A mapping keeps the alignment of the file, and only used pages take up memory.
            buffer = mmap.mmap(-1, READ_BYTES)
        try:
            blocks, announced = list(_blocks(wanted, self.size_bytes)), 0
            for number, (block_start, block_stop, first, last) in enumerate(blocks):
                if self._speed.is_slow:
                    ahead = number + 1 + AHEAD_BLOCKS
                    self._announce(blocks[max(number, announced) : ahead])
                    announced = ahead
                while inner and _stop(inner[0]) <= block_start:
                    inner.popleft()
                block = memoryview(buffer)[: block_stop - block_start]
                parts = _parts((block_start, block), inner)
                self._read_parts(parts)
                yield from _pieces(wanted[first:last], parts)
        finally:
            self._buffer = buffer

    def _announce(self, blocks: Iterable[_Block]) -> None:
        for start, stop, *_ in blocks:
            with suppress(OSError, AttributeError):  # It is only an optimization.
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)

    def _check_runs(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        previous = 0
        for start, stop in runs:
            if not previous <= start <= stop <= self.size_bytes:
                msg = (
                    f"{self.path}: run [{start}, {stop}), expected a sorted run that starts at or "
                    f"after byte {previous} and stops at or before byte {self.size_bytes}"
                )
                raise ValueError(msg)
            previous = stop
        return [run for run in runs if run[0] < run[1]]

    def _read_parts(self, parts: Sequence[PlacedView]) -> None:
        """Fill and verify parts that follow one another in the file."""
        for at, part in parts:
            for low in range(0, part.nbytes, CACHED_BYTES):
                cached = part[low : low + CACHED_BYTES]
                with self._speed.of(cached.nbytes):
                    self._fill(cached, at + low)
                self._check_block(cached, at + low)
        self._progress.check()

    def _fill(self, memory: memoryview, start: int) -> None:
        filled, stop = start, start + memory.nbytes
        while filled < stop:
            try:
                count = os.preadv(self._descriptor, [memory[filled - start :]], filled)
            except OSError as error:
                self._refuse(f"its bytes [{start}, {stop}) cannot be read ({error.strerror})")
            if not count:
                self._refuse(f"it ends at byte {filled}, expected {self.size_bytes} bytes")
            filled += count
        self.bytes_read += filled - start

    def read(self, start: int, stop: int) -> bytearray:
        """Read the bytes ``[start, stop)`` into new memory.

        Raises:
            CheckpointCorruptedError: the file is truncated, or its bytes differ from the written
                ones.
            ValueError: they are not within the file.
        """
        data = bytearray(max(stop - start, 0))
        for offset, view in self.read_runs([(start, stop)]):
            data[offset - start : offset - start + view.nbytes] = view
        return data

    def _refuse(self, reason: str) -> NoReturn:
        msg = (
            f"{self.path} is damaged: {reason}. Resume from another checkpoint, or restore this "
            "file from an intact copy."
        )
        raise CheckpointCorruptedError(msg)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._buffer = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


class _Speed:
    """The speed of the reads of a file.

    Attributes:
        is_slow: whether to announce the following reads. It stays set, because announced reads are
            fast.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self._size_bytes = 0
        self._seconds = 0.0

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[None]:
        """Measure a read."""
        began = perf_counter()
        yield
        self._seconds += perf_counter() - began
        self._size_bytes += size_bytes
        if self._size_bytes >= SAMPLE_BYTES:
            self.is_slow |= self._size_bytes < self._seconds * SLOW_BYTES_PER_S


def _blocks(runs: Sequence[tuple[int, int]], size_bytes: int) -> Iterator[_Block]:
    """Cut the chunks of runs into blocks. Runs in equal or adjacent chunks are read together."""
    first = 0
    done = 0
    while first < len(runs):
        start = max(runs[first][0] // CHUNK_BYTES * CHUNK_BYTES, done)
        limit = start + READ_BYTES
        stop, last = start, first
        while last < len(runs) and runs[last][0] < min(stop + CHUNK_BYTES, limit):
            stop = min(max(stop, -(-runs[last][1] // CHUNK_BYTES) * CHUNK_BYTES), limit)
            last += 1
        yield start, min(stop, size_bytes), first, last
        # A run that exceeds this block continues in the next one.
        first = last if runs[last - 1][1] <= stop else last - 1
        done = stop


def _stop(place: PlacedView) -> int:
    return place[0] + place[1].nbytes


def _whole_chunks(places: Iterable[PlacedView]) -> deque[PlacedView]:
    """Return the parts of places that are whole chunks."""
    found: deque[PlacedView] = deque()
    for start, memory in places:
        low = -(-start // CHUNK_BYTES) * CHUNK_BYTES
        high = (start + memory.nbytes) // CHUNK_BYTES * CHUNK_BYTES
        if low < high:
            found.append((low, memory[low - start : high - start]))
    return found


def _parts(block: PlacedView, inner: Iterable[PlacedView]) -> list[PlacedView]:
    """Cut a block into parts that are read into a place, and parts that stay in its memory."""
    reached, (start, own), stop = block[0], block, _stop(block)
    parts: list[PlacedView] = []
    for at, memory in inner:
        if at >= stop:
            break
        low, high = max(at, start), min(at + memory.nbytes, stop)
        if reached < low:
            parts.append((reached, own[reached - start : low - start]))
        parts.append((low, memory[low - at : high - at]))
        reached = high
    if reached < stop:
        parts.append((reached, own[reached - start :]))
    return parts


def _pieces(runs: Iterable[tuple[int, int]], parts: Sequence[PlacedView]) -> Iterator[PlacedView]:
    """Yield the bytes of each run from consecutive parts of the file."""
    first = 0
    for start, stop in runs:
        while first < len(parts) and _stop(parts[first]) <= start:
            first += 1
        for at, memory in itertools.islice(parts, first, None):
            if at >= stop:
                break
            yield max(start, at), memory[max(start - at, 0) : stop - at]


class VerifiedFile(RangeFile):
    """A file that a manifest names, open for reading; it returns verified bytes only.

    Opening it verifies the recorded size and the digest of the sidecar. Each chunk is verified when
    it is read.

    Attributes:
        path: the path of the file.
        size_bytes: its size.
        bytes_read: the number of bytes read so far, including the sidecar.
    """

    def __init__(
        self,
        directory: Path,
        record: FileEntry,
        save_id: str | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        """Open the file and check it against its record and its sidecar.

        Args:
            directory: the checkpoint's directory.
            record: the file's record in the manifest.
            save_id: the save that the file must belong to; None: any.
            progress: checked after every read.

        Raises:
            CheckpointCorruptedError: the file or its sidecar is missing, or does not match.
        """
        super().__init__(directory / record.name, progress)
        try:
            if self.size_bytes != record.size_bytes:
                self._refuse(f"it has {self.size_bytes} bytes, expected {record.size_bytes}")
            self._sums = self._read_sums(record, save_id)
        except BaseException:
            self.close()
            raise

    def _read_sums(self, record: FileEntry, save_id: str | None) -> bytes:
        path = self.path.with_name(self.path.name + SUMS_SUFFIX)
        try:
            data = read_file(path)
        except FileNotFoundError:
            self._refuse(f"its checksums, {path.name}, are missing")
        except OSError as error:
            self._refuse(f"its checksums, {path.name}, cannot be read ({error.strerror})")
        self.bytes_read += len(data)
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != record.sums_digest:
            self._refuse(
                f"its checksums, {path.name}, have digest {digest}, expected {record.sums_digest}"
            )
        return self._check_sums(data, save_id)

    def _check_sums(self, data: bytes, save_id: str | None) -> bytes:
        try:
            sidecar = from_json(Sidecar, load_json(data))
            sums = bytes.fromhex(sidecar.sums)
        except (ValueError, TypeError) as error:
            self._refuse(f"its checksums are invalid ({error!r})")
        expected = {
            "algorithm": ALGORITHM,
            "chunk_bytes": CHUNK_BYTES,
            "size_bytes": self.size_bytes,
        }
        for key, value in expected.items():
            if (found := getattr(sidecar, key)) != value:
                self._refuse(f"its checksums have {key} {found!r}, expected {value!r}")
        if save_id is not None and save_id != sidecar.save_id:
            self._refuse(f"it belongs to save {sidecar.save_id!r}, expected {save_id!r}")
        count = -(-self.size_bytes // CHUNK_BYTES)
        if len(sums) != count * SUM_BYTES:
            self._refuse(f"it has {len(sums) // SUM_BYTES} checksums, expected {count}")
        return sums

    def _check_block(self, block: memoryview, start: int) -> None:
        for low in range(0, block.nbytes, CHUNK_BYTES):
            position = (start + low) // CHUNK_BYTES * SUM_BYTES
            expected = self._sums[position : position + SUM_BYTES]
            if xxhash.xxh3_64_digest(block[low : low + CHUNK_BYTES]) != expected:
                stop = min(start + low + CHUNK_BYTES, self.size_bytes)
                self._refuse(f"its bytes [{start + low}, {stop}) do not match their checksum")
