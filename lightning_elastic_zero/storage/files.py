"""Reading runs of bytes from a file, without mapping it and with bounded memory.

Reading runs of bytes from a file whose checksums were written with it, each verified.
"""

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
"""The most that is read, and held, at once; a multiple of ``CHUNK_BYTES``."""

AHEAD_BLOCKS = 8
"""How many blocks the system is told of before they are read, where reads are slow: it fetches them
together, and while those before them are verified. More would only fill memory that others need."""

SLOW_BYTES_PER_S = 256e6
"""Reads that are slower wait for each other's latency, as on a network file system whose readahead
is small. On faster ones telling costs more than it gains: Linux fills its cache by single pages
then, by large ones on its own (a local disk read 1.9 GB/s with it, and 3.4 without)."""

SAMPLE_BYTES = 32 << 20
"""How much is read before it is said to be slow. Less is no measure: on any disk the first bytes
wait for the system's readahead."""

CACHED_BYTES = 1 << 20
"""What is verified as soon as it has been read, while the processor's cache has it; a multiple of
``CHUNK_BYTES``."""

PlacedView: TypeAlias = tuple[int, memoryview]
"""An offset in a file, and writable memory for the bytes from there on."""

_Block: TypeAlias = tuple[int, int, int, int]
"""Whole chunks that are read at once, ``[start, stop)``, and their runs, ``[first, last)``."""

_HELP = "Resume from another checkpoint, or copy this file again from where it is whole."


class _BoundedFile(io.FileIO):
    """A file of which no read is long; whoever wants more goes on reading."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path)
        self._progress = progress

    def readinto(self, buffer: Any, /) -> int:
        """Read, at most ``READ_BYTES``."""
        count = super().readinto(memoryview(buffer).cast("B")[:READ_BYTES])
        self._progress.check()
        return count

    def fileno(self) -> int:
        """Refuse: who reads by the descriptor passes this by."""
        raise io.UnsupportedOperation


def bounded_stream(path: Path, progress: Progress) -> io.BufferedReader:
    """Open a file that is read in bounded parts; ``progress`` is called after each.

    Raises:
        OSError: it cannot be opened.
    """
    return io.BufferedReader(_BoundedFile(path, progress), CHUNK_BYTES)


class RangeFile:
    """A file open for reading by ranges, whose bytes nobody has recorded checksums of.

    Pages are never mapped, so a damaged disk or a file that shrinks is an exception, not a signal.

    Attributes:
        path: where the file is.
        size_bytes: its size.
        bytes_read: how many bytes were read so far.
    """

    def __init__(self, path: Path, progress: Progress = NO_PROGRESS) -> None:
        """Open a file.

        Args:
            path: where it is.
            progress: checked after every read.

        Raises:
            CheckpointCorruptedError: it is missing, cannot be read, or is no file.
        """
        self.path = path
        self.bytes_read = 0
        self._progress = progress
        self._buffer: mmap.mmap | None = None
        self._speed = _Speed()
        self._descriptor = -1
        self._descriptor, self.size_bytes = self._open()

    def _open(self) -> tuple[int, int]:
        """Open the file; give its descriptor and its size."""
        try:
            descriptor, status = open_file(self.path)
        except FileNotFoundError:
            self._refuse("it is missing")
        except OSError as error:
            self._refuse(f"it cannot be opened ({error.strerror})")
        return descriptor, status.st_size

    def _check_block(self, block: memoryview, start: int) -> None:
        """Accept what was read: there is nothing to compare it with."""

    def read_runs(
        self, runs: Sequence[tuple[int, int]], places: Sequence[PlacedView] = ()
    ) -> Iterator[tuple[int, memoryview]]:
        """Read runs of bytes, in pieces of at most ``READ_BYTES``.

        Whole chunks are read, none twice, and none without a wanted byte.

        Args:
            runs: half-open, sorted by their start, without overlap; empty ones give nothing.
            places: sorted by their offsets, without overlap, and within the runs. Chunks that lie
                within one as a whole are read right there, and verified there: whoever gives it
                must not use it before their piece has come.

        Yields:
            The offset in the file, and the bytes from there on: writable, and valid until the next
            piece is asked for. A piece never reaches across a run's border. Of what was read into
            a place it is that memory itself.

        Raises:
            CheckpointCorruptedError: the file is cut short, or not what was written.
            ValueError: the runs are not sorted, overlap, or leave the file.
        """
        wanted = self._check_runs(runs)
        inner = _whole_chunks(places)
        # Two readers at once, each in the midst of a piece, must not share a buffer.
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            # A mapping begins on a page, so what is aligned in the file is so in memory;
            # and it takes up only the pages that are used.
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
        """Announce to the system what is going to be read."""
        for start, stop, *_ in blocks:
            with suppress(OSError, AttributeError):  # Then it reads as it always does.
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)

    def _check_runs(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        previous = 0
        for start, stop in runs:
            if not previous <= start <= stop <= self.size_bytes:
                msg = (
                    f"The run [{start}, {stop}) overlaps the one before, is not sorted, or leaves "
                    f"{self.path} with its {self.size_bytes} bytes."
                )
                raise ValueError(msg)
            previous = stop
        return [run for run in runs if run[0] < run[1]]

    def _read_parts(self, parts: Sequence[PlacedView]) -> None:
        """Fill parts that follow one another in the file, and refuse what was not written."""
        for at, part in parts:
            for low in range(0, part.nbytes, CACHED_BYTES):
                cached = part[low : low + CACHED_BYTES]
                with self._speed.of(cached.nbytes):
                    self._fill(cached, at + low)
                self._check_block(cached, at + low)
        self._progress.check()

    def _fill(self, memory: memoryview, start: int) -> None:
        """Fill memory with the file's bytes from ``start`` on."""
        filled, stop = start, start + memory.nbytes
        while filled < stop:
            try:
                count = os.preadv(self._descriptor, [memory[filled - start :]], filled)
            except OSError as error:
                self._refuse(f"its bytes [{start}, {stop}) cannot be read ({error.strerror})")
            if not count:
                self._refuse(f"it ends at byte {filled}, recorded are {self.size_bytes} bytes")
            filled += count
        self.bytes_read += filled - start

    def read(self, start: int, stop: int) -> bytearray:
        """Read the bytes ``[start, stop)`` into memory of their own.

        Raises:
            CheckpointCorruptedError: they are not what was written, or are cut short.
            ValueError: they lie outside of the file.
        """
        data = bytearray(max(stop - start, 0))
        for offset, view in self.read_runs([(start, stop)]):
            data[offset - start : offset - start + view.nbytes] = view
        return data

    def _refuse(self, reason: str) -> NoReturn:
        msg = f"{self.path} is damaged: {reason}. {_HELP}"
        raise CheckpointCorruptedError(msg)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
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
    """How fast the reads of a file have been.

    Attributes:
        is_slow: whether to announce those that follow; once and for all, for those come fast.
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
    """Cut the chunks that runs touch into blocks.

    Runs whose chunks are the same or neighbours are read together.
    """
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
        # A run that reaches beyond this block goes on in the next one.
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
    """Cut a block where its bytes go to a place of their own; the rest stays in its own memory."""
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
    """Yield what parts, one after the other in the file, have of each run."""
    first = 0
    for start, stop in runs:
        while first < len(parts) and _stop(parts[first]) <= start:
            first += 1
        for at, memory in itertools.islice(parts, first, None):
            if at >= stop:
                break
            yield max(start, at), memory[max(start - at, 0) : stop - at]


class VerifiedFile(RangeFile):
    """A file that a manifest names, open for reading; it gives no byte that was not verified.

    Opening it proves that the file has the recorded size and that its checksums are the recorded
    ones. Each chunk is proved when it is read. Pages are never mapped, so a damaged disk or a file
    that shrinks is an exception, not a signal.

    Attributes:
        path: where the file is.
        size_bytes: its size.
        bytes_read: how many bytes were read so far, the sidecar's among them.
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
            record: what the manifest says of the file.
            save_id: the save that the file must belong to; None for any.
            progress: checked after every read.

        Raises:
            CheckpointCorruptedError: the file or its sidecar is missing, or is another one.
        """
        super().__init__(directory / record.name, progress)
        try:
            if self.size_bytes != record.size_bytes:
                self._refuse(f"it has {self.size_bytes} bytes, recorded are {record.size_bytes}")
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
                f"its checksums, {path.name}, are not those that were written "
                f"(their digest is {digest}, recorded is {record.sums_digest})"
            )
        return self._check_sums(data, save_id)

    def _check_sums(self, data: bytes, save_id: str | None) -> bytes:
        try:
            sidecar = from_json(Sidecar, load_json(data))
            sums = bytes.fromhex(sidecar.sums)
        except (ValueError, TypeError) as error:
            self._refuse(f"its checksums cannot be understood ({error!r})")
        expected = {
            "algorithm": ALGORITHM,
            "chunk_bytes": CHUNK_BYTES,
            "size_bytes": self.size_bytes,
        }
        for key, value in expected.items():
            if (found := getattr(sidecar, key)) != value:
                self._refuse(f"its checksums have {key} {found!r}, expected is {value!r}")
        if save_id is not None and save_id != sidecar.save_id:
            self._refuse(
                f"it belongs to save {sidecar.save_id!r}, the checkpoint to save {save_id!r}"
            )
        count = -(-self.size_bytes // CHUNK_BYTES)
        if len(sums) != count * SUM_BYTES:
            self._refuse(f"it has {len(sums) // SUM_BYTES} checksums, expected {count}")
        return sums

    def _check_block(self, block: memoryview, start: int) -> None:
        """Refuse bytes that are not what was written."""
        for low in range(0, block.nbytes, CHUNK_BYTES):
            position = (start + low) // CHUNK_BYTES * SUM_BYTES
            expected = self._sums[position : position + SUM_BYTES]
            if xxhash.xxh3_64_digest(block[low : low + CHUNK_BYTES]) != expected:
                stop = min(start + low + CHUNK_BYTES, self.size_bytes)
                self._refuse(f"its bytes [{start + low}, {stop}) are not those that were written")
