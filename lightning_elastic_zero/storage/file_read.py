"""Reading ranges of bytes from a file without mapping it, verified and with bounded memory."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeAlias

import xxhash
from typing_extensions import Self

from lightning_elastic_zero.core.manifest import FileEntry, from_json, load_json
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.storage.file_write import (
    ALGORITHM,
    CHUNK_BYTES,
    SUM_BYTES,
    SUMS_SUFFIX,
    Sidecar,
)
from lightning_elastic_zero.storage.paths import (
    AnyPath,
    StorePath,
    open_file,
    raise_unless_damage,
    read_file,
)
from lightning_elastic_zero.storage.store import Read

_log = logging.getLogger(__name__)

READ_BYTES = 8 << 20
"""Largest read, and buffer; a multiple of ``CHUNK_BYTES``."""

CACHED_BYTES = 1 << 20
"""Bytes that are verified immediately after reading, from the processor's cache; a multiple of
``CHUNK_BYTES``."""

READERS = READ_BYTES // CACHED_BYTES
"""Reads of a file under way at once if they wait for a disk; the same threads verify the bytes.

One thread read 0.24 GB/s from a local disk (median of 6), two to eight 0.55 to 0.60, and one that
announced the next blocks to the system (``posix_fadvise``) 0.23."""

MOST_REQUESTS = 32
"""Requests to an object store under way at once for one file."""

AHEAD_BYTES = 8 * READ_BYTES
"""Bytes that these requests may have together."""

GAP_BYTES = 4 * CHUNK_BYTES
"""Largest gap between runs that one request to a store reads too. With ``MOST_REQUESTS`` under way
it costs what another request costs."""

SMALL_RUN_BYTES = 20 * CHUNK_BYTES
"""Longer runs are read without the gaps around them, so that ranks read at most 5 % too much."""

PlacedView: TypeAlias = tuple[int, memoryview]
"""An offset in a file, and writable memory for the bytes from there."""

_Block: TypeAlias = tuple[int, int, int, int]
"""Whole chunks that are read together, ``[start, stop)``, and their runs, ``[first, last)``."""


class _LocalSource:
    is_remote = False
    holder: object = None

    def __init__(self, path: Path) -> None:
        self._descriptor, status = open_file(path)
        self.size_bytes = status.st_size

    def announce(self, blocks: Iterable[_Block]) -> None: ...

    def read_cached(self, memory: memoryview, start: int) -> int:
        """Read the bytes that need no wait for a disk; 0 if none, or if that is unknown."""
        try:
            return os.preadv(self._descriptor, [memory], start, os.RWF_NOWAIT)
        # Python or the file system (NFS) does not know; errors of the disk recur in read_into.
        except (AttributeError, OSError):
            return 0

    def read_into(self, memory: memoryview, start: int) -> int:
        return os.preadv(self._descriptor, [memory], start)

    def forget(self, blocks: Iterable[_Block]) -> None: ...
    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _StoreSource:
    """The bytes of an object. Announced reads are requests under way."""

    is_remote = True

    def __init__(self, path: StorePath, size_bytes: int | None, progress: Progress) -> None:
        self._path, self._progress = path, progress
        self.holder: object = None  # Of the bytes that were read last.
        self.size_bytes = path.store.size(path.key, progress) if size_bytes is None else size_bytes
        self._reads: dict[int, Read] = {}
        # The index of a file of torch.save is at its end, the pickle at its beginning.
        tail = max(self.size_bytes - CHUNK_BYTES, 0) // CHUNK_BYTES * CHUNK_BYTES
        ends = [(0, CHUNK_BYTES), (tail, self.size_bytes)]
        if self.size_bytes <= GAP_BYTES:
            ends = [(0, self.size_bytes)] if self.size_bytes else []
        self._ends = [self._request(start, stop) for start, stop in ends]

    def announce(self, blocks: Iterable[_Block]) -> None:
        for start, stop, *_ in blocks:
            if start not in self._reads and self._under_way(start, stop) is None:
                self._reads[start] = self._request(start, stop)

    def read_into(self, memory: memoryview, start: int) -> int:
        read = self._under_way(start, start + 1)
        if read is None:
            read = self._reads[start] = self._request(start, start + memory.nbytes)
        # Fewer bytes if the object is shorter than recorded, then none.
        self.holder = None
        data = read.result(self._progress)[start - read.start :][: memory.nbytes]
        self.holder = read.holder
        memory[: data.nbytes] = data
        if start + data.nbytes >= read.stop and self._reads.get(read.start) is read:
            del self._reads[read.start]  # And not a block that starts where one of the ends does.
        return data.nbytes

    def _under_way(self, start: int, stop: int) -> Read | None:
        reads = (*self._ends, *self._reads.values())
        return next((read for read in reads if read.start <= start and stop <= read.stop), None)

    def _request(self, start: int, stop: int) -> Read:
        return self._path.store.begin_read(self._path.key, start, stop)

    def forget(self, blocks: Iterable[_Block]) -> None:
        for start, *_ in blocks:
            if read := self._reads.pop(start, None):
                read.cancel()

    def close(self) -> None:
        for read in (*self._ends, *self._reads.values()):
            read.cancel()
        self._ends, self._reads = [], {}


class RangeFile:
    """A file without recorded checksums, open for reading by ranges.

    Pages are never mapped, so a damaged disk or a shrinking file causes an exception, not a signal.
    """

    def __init__(
        self, path: AnyPath, progress: Progress = NO_PROGRESS, size_bytes: int | None = None
    ) -> None:
        self.path = path
        self.bytes_read = 0
        self._progress = progress
        self._buffer: mmap.mmap | None = None
        self._source = self._open(size_bytes)
        self._file_bytes = self._source.size_bytes
        self._start, self.size_bytes = 0, self._file_bytes
        self._section: memoryview | None = None
        self._readers: ThreadPoolExecutor | None = None

    def _open(self, size_bytes: int | None) -> _LocalSource | _StoreSource:
        try:
            path = self.path
            if isinstance(path, StorePath):
                local = path.store.local_file(path.key)
                if local is None:
                    return _StoreSource(path, size_bytes, self._progress)
                path = local
            return _LocalSource(path)
        except FileNotFoundError:
            self._refuse(f"it is missing{_why_missing(self.path)}")
        except OSError as error:
            raise_unless_damage(error, self.path)
            self._refuse(f"it cannot be opened ({error.strerror})")

    def select(self, start: int, size_bytes: int) -> None:
        """Read only a section of the file from now on, as if it were the file.

        A section of at most one chunk is read at once: its index and its data share the chunk.
        ``bytes_read`` begins at 0.
        """
        self._start, self.size_bytes, self.bytes_read, self._section = start, size_bytes, 0, None
        if size_bytes <= CHUNK_BYTES:
            self._section = memoryview(self.read(0, size_bytes))

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
        """
        wanted = self._check_runs(runs)
        if self._section is not None:
            for start, stop in wanted:
                yield start, self._section[start:stop]
            return
        inner = _whole_chunks(places)
        # Two concurrent readers must not share a buffer.
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            # A mapping keeps the alignment of the file, and only used pages take up memory.
            buffer = mmap.mmap(-1, READ_BYTES)
        gap_bytes = GAP_BYTES if self._source.is_remote else 0
        blocks = list(_blocks(wanted, self.size_bytes, gap_bytes))
        base = self._start
        in_file = [(base + low, base + high, first, last) for low, high, first, last in blocks]
        announced = 0
        try:
            for number, (block_start, block_stop, first, last) in enumerate(blocks):
                ahead = number + _ahead(blocks[number:])
                self._source.announce(in_file[max(number, announced) : ahead])
                announced = ahead
                while inner and _stop(inner[0]) <= block_start:
                    inner.popleft()
                block = memoryview(buffer)[: block_stop - block_start]
                parts = _parts((block_start, block), inner)
                self._read_parts(parts)
                yield from _pieces(wanted[first:last], parts)
        finally:
            self._buffer = buffer
            self._source.forget(in_file)

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
        pieces = deque(
            (at + low, part[low : low + CACHED_BYTES])
            for at, part in parts
            for low in range(0, part.nbytes, CACHED_BYTES)
        )
        cached = 0
        while pieces:
            start, memory = pieces[0]
            cached = 0
            if isinstance(self._source, _LocalSource):
                cached = self._source.read_cached(memory, self._start + start)
                if cached != memory.nbytes and len(pieces) > 1:
                    break
            self._fill(start, memory, cached)
            pieces.popleft()
        self._fill_together(pieces, cached)
        self.bytes_read += sum(part.nbytes for _, part in parts)
        self._progress.check()

    def _fill_together(self, pieces: Collection[PlacedView], cached: int) -> None:
        """Fill memory with verified bytes of a local file, with several reads under way.

        The first ``cached`` bytes are there, not verified.
        """
        if not pieces:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, "elastic-zero-read")
        reads: list[Future[None]] = []
        try:
            there = itertools.chain([cached], itertools.repeat(0))
            jobs = zip(pieces, there, strict=False)
            reads.extend(self._readers.submit(self._fill_once, *p, count) for p, count in jobs)
            wait(reads)
        finally:  # Also if a signal's handler raised: the caller may restore the memory.
            wait(reads)
        for read, piece in zip(reads, pieces, strict=True):
            try:
                read.result()
            except CheckpointCorruptedError:  # Another node may have the file.
                self._fill(*piece)

    def _fill(self, start: int, memory: memoryview, cached: int = 0) -> None:
        """Fill memory with verified bytes; the first ``cached`` ones are there, not verified."""
        while True:
            try:
                self._fill_once(start, memory, cached)
            except CheckpointCorruptedError as error:
                if not self._read_elsewhere(error):
                    raise
                cached = 0
            else:
                return

    def _read_elsewhere(self, damage: CheckpointCorruptedError) -> bool:
        """After damage, read from another node that has the file; return whether there is one."""
        holder = self._source.holder
        all_failed = self._source.is_remote and holder is None
        if all_failed or not _is_elsewhere(self.path, holder):
            return False
        _log.warning("%s Another node has a copy of this file, which is read instead.", damage)
        self._source.close()
        self._source = self._open(self._file_bytes)
        return True

    def _fill_once(self, start: int, memory: memoryview, cached: int = 0) -> None:
        checked, filled, stop = start, start + cached, start + memory.nbytes
        while filled < stop:
            with self._disk_errors(start, stop):
                count = self._source.read_into(memory[filled - start :], self._start + filled)
            if not count:
                self._refuse(f"it ends at byte {filled}, expected {self.size_bytes} bytes")
            filled += count
            if filled < stop:  # The next bytes may come from another node.
                whole = filled // CHUNK_BYTES * CHUNK_BYTES
                self._check_block(memory[checked - start : whole - start], checked)
                checked = whole
        self._check_block(memory[checked - start :], checked)

    @contextmanager
    def _disk_errors(self, start: int, stop: int) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            self._refuse(f"it is missing{_why_missing(self.path)}")
        except OSError as error:
            raise_unless_damage(error, self.path)
            self._refuse(f"its bytes [{start}, {stop}) cannot be read ({error.strerror})")

    def read(self, start: int, stop: int) -> bytearray:
        """Read the bytes ``[start, stop)`` into new memory."""
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
        if self._readers is not None:
            self._readers.shutdown()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_elsewhere(path: AnyPath, holder: object = None) -> bool:
    """Whether another node has a file that was found to be damaged where it was read."""
    return isinstance(path, StorePath) and path.store.distrust(path.key, holder)


def _why_missing(path: AnyPath) -> str:
    why = path.store.why_missing() if isinstance(path, StorePath) else ""
    return f" ({why})" if why else ""


def _blocks(runs: Sequence[tuple[int, int]], size_bytes: int, gap_bytes: int) -> Iterator[_Block]:
    """Cut the chunks of sorted runs into blocks; runs in equal or adjacent chunks share one.

    ``gap_bytes`` is the largest gap between short runs that a block may contain.
    """
    first = 0
    done = 0
    while first < len(runs):
        start = max(runs[first][0] // CHUNK_BYTES * CHUNK_BYTES, done)
        limit = start + READ_BYTES
        stop, last, gap = start, first, 0
        while last < len(runs) and runs[last][0] < min(stop + gap + CHUNK_BYTES, limit):
            stop = min(max(stop, -(-runs[last][1] // CHUNK_BYTES) * CHUNK_BYTES), limit)
            last += 1
            gap = gap_bytes if all(map(_is_short, runs[last - 1 : last + 1])) else 0
        yield start, min(stop, size_bytes), first, last
        # A run that exceeds this block continues in the next one.
        first = last if runs[last - 1][1] <= stop else last - 1
        done = stop


def _ahead(blocks: Sequence[_Block]) -> int:
    """Return how many of the next blocks a store sends at once, the current one included."""
    sizes = (stop - start for start, stop, *_ in blocks[:MOST_REQUESTS])
    return max(sum(size <= AHEAD_BYTES for size in itertools.accumulate(sizes)), 1)


def _is_short(run: tuple[int, int]) -> bool:
    return run[1] - run[0] < SMALL_RUN_BYTES


def _stop(place: PlacedView) -> int:
    return place[0] + place[1].nbytes


def _whole_chunks(places: Iterable[PlacedView]) -> deque[PlacedView]:
    """Return the parts of places that are whole chunks."""
    whole: deque[PlacedView] = deque()
    for start, memory in places:
        low = -(-start // CHUNK_BYTES) * CHUNK_BYTES
        high = (start + memory.nbytes) // CHUNK_BYTES * CHUNK_BYTES
        if low < high:
            whole.append((low, memory[low - start : high - start]))
    return whole


def _parts(block: PlacedView, inner: Iterable[PlacedView]) -> list[PlacedView]:
    """Cut a block into parts that are read into a place, and parts that stay in its memory."""
    reached, (start, scratch), stop = block[0], block, _stop(block)
    parts: list[PlacedView] = []
    for at, memory in inner:
        if at >= stop:
            break
        low, high = max(at, start), min(at + memory.nbytes, stop)
        if reached < low:
            parts.append((reached, scratch[reached - start : low - start]))
        parts.append((low, memory[low - at : high - at]))
        reached = high
    if reached < stop:
        parts.append((reached, scratch[reached - start :]))
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

    Opening it verifies the recorded size, the digest of the sidecar and, unless it is None, the
    ``save_id``. Each chunk is verified when it is read; ``bytes_read`` includes the sidecar.
    """

    def __init__(
        self,
        directory: AnyPath,
        record: FileEntry,
        save_id: str | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        super().__init__(directory / record.name, progress, record.size_bytes)
        try:
            self._check_size(record.size_bytes)
            self._sums = self._read_sums(record, save_id)
        except BaseException:
            self.close()
            raise

    def _check_size(self, expected_bytes: int) -> None:
        self._file_bytes = expected_bytes
        while self._source.size_bytes != expected_bytes:
            try:
                found_bytes = self._source.size_bytes
                self._refuse(f"it has {found_bytes} bytes, expected {expected_bytes}")
            except CheckpointCorruptedError as error:
                if not self._read_elsewhere(error):
                    raise
        self.size_bytes = expected_bytes

    def _read_sums(self, record: FileEntry, save_id: str | None) -> bytes:
        path = self.path.with_name(self.path.name + SUMS_SUFFIX)
        while True:
            try:
                data = read_file(path)
            except FileNotFoundError:
                self._refuse(f"its checksums, {path.name}, are missing{_why_missing(path)}")
            except OSError as error:
                raise_unless_damage(error, path)
                self._refuse(f"its checksums, {path.name}, cannot be read ({error.strerror})")
            self.bytes_read += len(data)
            digest = xxhash.xxh3_128_hexdigest(data)
            if digest == record.sums_digest or not _is_elsewhere(path):
                break
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
            if (saved := getattr(sidecar, key)) != value:
                self._refuse(f"its checksums have {key} {saved!r}, expected {value!r}")
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
