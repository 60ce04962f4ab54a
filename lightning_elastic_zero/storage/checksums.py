"""A file and the checksums of its chunks, written in one pass.

Beside each file lies a sidecar, ``<file>.sums``: JSON with the xxh3_64 of every ``CHUNK_BYTES`` of
the file. The sidecar's own digest is part of the file's record, and the record is part of the
manifest; so one small file vouches for every byte of a checkpoint, and any run of bytes can be
verified without reading the rest of its file.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from lightning_elastic_zero.errors import SaveError
from lightning_elastic_zero.manifest import FileEntry
from lightning_elastic_zero.storage.writeback import Writeback

CHUNK_BYTES = 65536
"""What one checksum covers: a run of bytes is read in whole chunks, to be verified."""

SUM_BYTES = 8
"""The size of one checksum."""

ALGORITHM = "xxh3_64"
"""The checksum of a chunk, as its sidecar names it."""

SUMS_SUFFIX = ".sums"
"""What a sidecar's name adds to the name of its file."""

_NO_PLACE = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""What a system says of a path at which nothing can be, however much room there is."""

_WRITE_BYTES = 1 << 20
"""The most that one system call writes: progress is told at least this often."""


def ignore_bytes(size_bytes: int) -> None:
    """Do nothing: the default of every ``on_bytes``."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What lies beside a file."""

    algorithm: str
    chunk_bytes: int
    size_bytes: int
    save_id: str
    sums: str
    """The checksums of all chunks, in hexadecimal."""


def sidecar_bytes(size_bytes: int, save_id: str) -> int:
    """Return the size of the sidecar of a file of so many bytes."""
    chunks = -(-size_bytes // CHUNK_BYTES)
    empty = Sidecar(ALGORITHM, CHUNK_BYTES, size_bytes, save_id, "")
    return len(_sidecar_data(empty)) + 2 * SUM_BYTES * chunks


def _sidecar_data(sidecar: Sidecar) -> bytes:
    return json.dumps(asdict(sidecar)).encode()


class ChecksummedWriter:
    """A binary file that is open for writing, once, and knows the checksums of its chunks.

    What it holds in memory is one checksum per chunk, whatever the size of the file. It has what
    ``torch.save`` asks of a file. Small writes are not gathered: the callers' are large.
    """

    def __init__(
        self, directory: Path, name: str, on_bytes: Callable[[int], None] = ignore_bytes
    ) -> None:
        """Create the file; a folder that its name has is created too.

        Args:
            directory: the checkpoint's directory, as it is being written.
            name: the file's path below it, with forward slashes.
            on_bytes: told the number of bytes that were written since it was last told; 0 where
                bytes that were written before have come to the disk.

        Raises:
            SaveError: the file exists, or cannot be created.
        """
        self.name = name
        self.path = directory / name
        self.size_bytes = 0
        self._on_bytes = on_bytes
        self._sums = bytearray()
        self._open_chunk = xxhash.xxh3_64()
        self._open_bytes = 0
        self._descriptor = -1
        with as_save_error(self.path):
            self.path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        self._writeback = Writeback(self._descriptor, lambda: on_bytes(0))

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of the bytes, and give their number.

        Raises:
            SaveError: the system did not take them: the disk is full, for one.
        """
        whole = memoryview(data)
        if not whole.nbytes:
            return 0
        flat = whole.cast("B")
        for start in range(0, whole.nbytes, _WRITE_BYTES):
            part = flat[start : start + _WRITE_BYTES]
            self._add_sums(part)
            self._write_all(part)
            self.size_bytes += part.nbytes
            self._on_bytes(part.nbytes)
        return whole.nbytes

    def _write_all(self, part: memoryview) -> None:
        with as_save_error(self.path):
            while part.nbytes:
                written_bytes = os.write(self._descriptor, part)
                part = part[written_bytes:]
                self._writeback.wrote(written_bytes)

    def _add_sums(self, part: memoryview) -> None:
        start = 0
        if self._open_bytes:
            start = min(CHUNK_BYTES - self._open_bytes, part.nbytes)
            self._add_to_open_chunk(part[:start])
        while part.nbytes - start >= CHUNK_BYTES:
            self._sums += xxhash.xxh3_64_digest(part[start : start + CHUNK_BYTES])
            start += CHUNK_BYTES
        if start < part.nbytes:
            self._add_to_open_chunk(part[start:])

    def _add_to_open_chunk(self, part: memoryview) -> None:
        self._open_chunk.update(part)
        self._open_bytes += part.nbytes
        if self._open_bytes == CHUNK_BYTES:
            self._close_chunk()

    def _close_chunk(self) -> None:
        self._sums += self._open_chunk.digest()
        self._open_chunk.reset()
        self._open_bytes = 0

    def finish(self, save_id: str) -> FileEntry:
        """Flush the file to the disk, write its sidecar, and return its record.

        Args:
            save_id: the save that the file belongs to.

        Raises:
            SaveError: the system did not take the bytes.
        """
        if self._open_bytes:
            self._close_chunk()
        with as_save_error(self.path):
            self._writeback.finish()
        self.close()
        sidecar = Sidecar(ALGORITHM, CHUNK_BYTES, self.size_bytes, save_id, self._sums.hex())
        data = _sidecar_data(sidecar)
        write_durably(self.path.with_name(self.path.name + SUMS_SUFFIX), data)
        self._on_bytes(0)
        return FileEntry(self.name, self.size_bytes, xxhash.xxh3_128_hexdigest(data))

    def flush(self) -> None:
        """Do nothing: no bytes are held back."""

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ChecksummedWriter:
        """Return the writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file. Without ``finish`` it has no sidecar, and nothing will read it."""
        self.close()


def write_durably(path: Path, data: bytes) -> None:
    """Create a small file that is on the disk when this returns.

    Raises:
        SaveError: the file exists, or cannot be written.
    """
    with as_save_error(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def as_save_error(path: Path) -> Iterator[None]:
    """Raise what the system refused as what it means to a save.

    Raises:
        SaveError: something could not be written, to a file or for a checkpoint.
    """
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and str(error.filename) != str(path)
        at = f" ({error.filename})" if elsewhere else ""
        advice = (
            "Give another path: nothing can be at this one."
            if error.errno in _NO_PLACE
            else "See that the disk has room and that its directory can be written, and try again."
        )
        msg = (
            f"Could not write {path}: {error.strerror or error}{at}. What was published before "
            f"is intact. {advice}"
        )
        raise SaveError(msg) from error
